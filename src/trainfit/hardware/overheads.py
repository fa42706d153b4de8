"""What an operator takes around its kernel: Python, modules, dispatch, autograd, memory taken and given back.

NOTE [ What is left beside the kernels ]
Blocks are run as a step runs them, forward and backward, and once more operator by operator in the order of the step,
with the clock read around each kernel. What the step takes beyond its kernels is shared among its operators, views
included. A kernel is what a call takes longer than the same one on a single token, which does next to nothing.
Kernels displace what Python, the dispatcher and malloc had in the caches. So a CPU runs blocks of one token, after
which everything is still there, and of more and more; how many bytes an operator touched in the mean is the size.

NOTE [ Overheads by part ]
forward, backward    of plain training
no_grad              without autograd, as optimizers run
forward.TIER         of a block that is recomputed: what autograd saves goes through hooks, and what the tier keeps is
                     looked for
recompute.TIER       of that block when it runs again; what hooks do in backward is in it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainfit.hardware.calibration import Table
from trainfit.hardware.runtime import Accelerator

_HEADS, _HEAD_DIM, _BLOCKS, _SEQ_LEN = 2, 64, 2, 32
_DIM = _HEADS * _HEAD_DIM
_ROUNDS = 4
SEQUENCES = (0, 1, 4, 16, 64)  # of _SEQ_LEN tokens; 0 is a single token

Clock = Callable[[], float]  # seconds, after all that was launched has ended
Recompute = Callable[[nn.Module], None]  # puts a block under a tier


class _Norm(nn.Module):
    """As models write it: root mean square, in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_DIM))

    def forward(self, hidden: Tensor) -> Tensor:
        dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * hidden.to(dtype)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(_DIM, _DIM, bias=False) for _ in range(4))

    def forward(self, hidden: Tensor, **tables: Tensor) -> Tensor:
        shape = (*hidden.shape[:-1], _HEADS, _HEAD_DIM)
        query, key, value = (linear(hidden).view(shape).transpose(1, 2) for linear in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(
            _rotated(query, **tables), _rotated(key, **tables), value, is_causal=True
        )
        return torch.as_tensor(self.o(attended.transpose(1, 2).reshape(hidden.shape)))


def _rotated(tensor: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    half = tensor.shape[-1] // 2
    turned = torch.cat((-tensor[..., half:], tensor[..., :half]), dim=-1)
    return tensor * cosine + turned * sine


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(_DIM, _DIM, bias=False) for _ in range(3))
        self.activation = nn.SiLU()

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.as_tensor(self.down(self.activation(self.gate(hidden)) * self.up(hidden)))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Norm(), _Norm()
        self.attention, self.mlp = _Attention(), _Mlp()

    def forward(self, hidden: Tensor, **tables: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.first(hidden), **tables)
        return torch.as_tensor(hidden + self.mlp(self.second(hidden)))


def part_of_step() -> str:
    """What an operator that is dispatched now belongs to: forward, no_grad, backward, or a recompute within it."""
    in_engine = torch._C._current_graph_task_id() != -1
    if torch.is_grad_enabled():
        return "recompute" if in_engine else "forward"
    return "backward" if in_engine else "no_grad"


def touched_bytes(func: Any, args: Any, kwargs: Any, output: Any) -> int:
    """Of all that an operator is given and makes; a view touches nothing."""
    if func.is_view:
        return 0
    return sum(leaf.nbytes for leaf in tree_leaves((args, kwargs, output)) if isinstance(leaf, Tensor))


class _Kernels(TorchDispatchMode):
    """Operators in their order: part of the step, seconds, bytes touched."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clock = clock
        self.parts: list[str] = []
        self.seconds: list[float] = []
        self.touched: int = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        begin = self.clock()
        output = func(*args, **(kwargs or {}))
        self.seconds.append(self.clock() - begin)
        self.parts.append(part_of_step())
        self.touched += touched_bytes(func, args, kwargs, output)
        return output


@dataclass
class _Run:
    """Least seconds of the two halves of a step, and of each of its kernels."""

    halves: list[float]
    kernels: list[float]
    parts: list[str]
    touched: float  # bytes an operator

    def sum(self, half: int, shortest: _Run) -> float:
        """Seconds of a half beyond its kernels."""
        first = ("forward", "no_grad")
        kernels = sum(
            max(0.0, mine - least)
            for mine, least, part in zip(self.kernels, shortest.kernels, self.parts, strict=True)
            if (part in first) == (half == 0)
        )
        return self.halves[half] - kernels

    def count(self, *parts: str) -> int:
        return sum(part in parts for part in self.parts)


@dataclass
class _Probe:
    """Some blocks, and how they are run."""

    device: Accelerator
    clock: Clock
    recompute: Recompute | None = None
    blocks: nn.ModuleList = field(init=False)

    def __post_init__(self) -> None:
        with torch.device(self.device.device):
            self.blocks = nn.ModuleList(_Block() for _ in range(_BLOCKS))
        for block in self.blocks if self.recompute is not None else ():
            assert self.recompute is not None
            self.recompute(block)

    def runs(self, *, learns: bool = True) -> list[_Run]:
        """One for each number of sequences."""
        numbers = SEQUENCES if self.device.kind == "cpu" else SEQUENCES[:1]
        with torch.set_grad_enabled(learns):
            return [self._run(number, learns) for number in numbers]

    def _run(self, sequences: int, learns: bool) -> _Run:
        shape = (sequences, _SEQ_LEN) if sequences else (1, 1)
        hidden = torch.full((*shape, _DIM), 0.5, device=self.device.device)
        table = torch.full((shape[1], _HEAD_DIM), 0.5, device=self.device.device)
        gradient, parameters = torch.ones_like(hidden), list(self.blocks.parameters())

        def step() -> tuple[float, float]:
            begin, output = self.clock(), hidden
            for block in self.blocks:
                output = block(output, cosine=table, sine=table)
            middle = self.clock()
            if learns:
                torch.autograd.grad(output, parameters, gradient)
            return middle - begin, self.clock() - middle

        step()  # the first call of a recomputed block is not like the others
        rounds, kernels, modes = [], [], []
        for _ in range(_ROUNDS):
            rounds.append(step())
            modes.append(_Kernels(self.clock))
            with modes[-1]:
                step()
            kernels.append(modes[-1].seconds)
        least = [min(each) for each in zip(*kernels, strict=True)]
        halves = [min(each) for each in zip(*rounds, strict=True)]
        return _Run(halves, least, modes[-1].parts, modes[-1].touched / len(least))


def operator_overheads(
    clock: Clock, device: Accelerator, tiers: Mapping[str, Recompute] | None = None
) -> dict[str, Table]:
    """Seconds for each operator by bytes touched. See NOTE [ What is left beside the kernels ].

    tiers: how a block is put under each tier that recomputes.
    """
    plain = _Probe(device, clock).runs()
    axis = tuple(max(1.0, run.touched) for run in plain)
    found = {
        "forward": [run.sum(0, plain[0]) / run.count("forward") for run in plain],
        "backward": [run.sum(1, plain[0]) / run.count("backward") for run in plain],
    }
    alone = _Probe(device, clock).runs(learns=False)
    found["no_grad"] = [run.sum(0, alone[0]) / run.count("no_grad") for run in alone]
    for name, recompute in (tiers or {}).items():
        runs = _Probe(device, clock, recompute).runs()
        found[f"forward.{name}"] = [run.sum(0, runs[0]) / run.count("forward") for run in runs]
        found[f"recompute.{name}"] = [
            (run.sum(1, runs[0]) - run.count("backward") * backward) / run.count("recompute")
            for run, backward in zip(runs, found["backward"])
        ]
    return {
        name: Table.grown((axis,), {(at,): max(_NOTHING, each) for at, each in enumerate(seconds)})
        for name, seconds in found.items()
    }


_NOTHING = 1e-9
