"""HostAdamW: masters and moments in host memory, updated there by the host's fused AdamW.

NOTE [ Two buffers ]
Gradients come to the host piece by piece through two pinned buffers: while the host updates one piece, the next one is
on its way, and updated weights go back on the same stream. The host waits for the copy of a piece before it reads it,
and a buffer is filled again only when the update that read it is over. Weights of half precision leave through two
buffers as well; one is written again when the copy of two pieces ago has been made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainfit.hardware import Accelerator
from trainfit.hardware.host_scope import on_host
from trainfit.hardware.ranks import local_part
from trainfit.profile import OptimizerVariant
from trainfit.techniques.stored_adamw import StoredAdamW, first_step, flat_states, named_states, rows_of
from trainfit.techniques.stored_weights import nearest_bf16

# Parameter, its group, the rows of the piece, and their gradient on the device
_Job = tuple[nn.Parameter, dict[str, Any], slice, Tensor]


class HostAdamW(StoredAdamW):
    """A variant with place "host": the device holds weights and gradients only.

    State names: step, master, exp_avg, exp_avg_sq, all on the host.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], variant: OptimizerVariant, device: Accelerator, **defaults: Any
    ) -> None:
        super().__init__(groups, variant, **defaults)
        self._device = device
        self._stream = device.new_stream()

    @torch.no_grad()
    def begin(self, beside: dict[nn.Parameter, dict[str, Tensor]]) -> None:
        with on_host():
            for parameter in self._number:
                local = local_part(parameter)
                master = self._device.pinned(local.shape, torch.float32)
                master.copy_(beside[parameter]["master"] if parameter in beside else local)
                state = {"step": first_step(), "master": master}
                for moment in self._moments_of(parameter):
                    state |= moment.first(master)
                self.state[parameter] = named_states(state, parameter)
            largest = max((self._most(parameter) for parameter in self._number), default=0)
            dtypes = {parameter.dtype for parameter in self._number}
            gradient = torch.float32 if self.variant.gradients == "fp32" else next(iter(dtypes), torch.float32)
            self._gradients = [self._device.pinned((largest,), gradient) for _ in range(2)]
            halves = [dtype for dtype in dtypes if dtype != torch.float32]
            self._halves = [self._device.pinned((largest,), dtype) for dtype in halves for _ in range(2)]
        beside.clear()

    def _most(self, parameter: nn.Parameter) -> int:
        local = local_part(parameter)
        columns = local.shape[-1] if local.dim() > 1 else local.numel()
        return min(local.numel(), max(1, self._piece // max(1, columns)) * columns)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """See NOTE [ Two buffers ]."""
        device, jobs = self._device, list(self._jobs())
        device.stream_waits(self._stream)
        try:
            with on_host():
                self._update_all(jobs)
        finally:
            device.wait_for(self._stream)  # also where an update failed: gradients that are being copied would be freed

    def _update_all(self, jobs: list[_Job]) -> None:
        arrived = self._fetch(jobs, 0)
        left: list[Callable[[], None]] = [_nothing, _nothing]
        for number, (parameter, group, rows, _) in enumerate(jobs):
            coming = self._fetch(jobs, number + 1)
            arrived()
            left[number % 2]()
            left[number % 2] = self._update_on_host(number, parameter, group, rows)
            arrived = coming
        for parameter in dict.fromkeys(job[0] for job in jobs):
            self.state[parameter]["step"] += 1

    def _jobs(self) -> Iterator[_Job]:
        """Pieces of all parameters, with their gradients on the device."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = rows_of(local_part(parameter.grad))
                for rows in self._pieces(gradient.numel(), gradient.shape[1]):
                    yield parameter, group, rows, gradient[rows]

    def _fetch(self, jobs: list[_Job], number: int) -> Callable[[], None]:
        """Begins to copy a piece's gradient. Returns what waits until it is there."""
        if number >= len(jobs):
            return _nothing
        gradient = jobs[number][3]
        with self._device.stream(self._stream):
            self._buffer(self._gradients[number % 2], gradient).copy_(gradient, non_blocking=True)
        return self._device.mark(self._stream)

    def _update_on_host(
        self, number: int, parameter: nn.Parameter, group: dict[str, Any], rows: slice
    ) -> Callable[[], None]:
        """Updates a piece and begins to copy it back. Returns what waits until its buffer is free again."""
        weight = rows_of(local_part(parameter.detach()))[rows]
        state = self.state[parameter]
        states = {name: value[rows] for name, value in flat_states(state).items()}
        master = states["master"]
        gradient = self._buffer(self._gradients[number % 2], master)
        self._adamw(parameter, master, gradient, states, state["step"], group)
        outgoing = master
        if weight.dtype != torch.float32:
            outgoing = self._buffer(self._halves[number % 2], master)
            outgoing.copy_(nearest_bf16(master) if weight.dtype == torch.bfloat16 else master)
        with self._device.stream(self._stream):
            weight.copy_(outgoing, non_blocking=True)
        return self._device.mark(self._stream)

    @staticmethod
    def _buffer(buffer: Tensor, like: Tensor) -> Tensor:
        return buffer[: like.numel()].view(like.shape)


def _nothing() -> None: ...
