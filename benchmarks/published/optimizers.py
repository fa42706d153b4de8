"""How runs keep optimizer states, and what their updates take beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from published.records import Run

_SUB_GROUP = 10**9  # DeepSpeed's sub_group_size: elements whose gradients are widened at once
_QUANT_BLOCK = 256


class Optimizer(Protocol):
    def states(self, parameter: nn.Parameter) -> list[Tensor]:
        """All that is kept for a parameter beside itself."""

    def prepare(self) -> None:
        """Make what the first update makes."""

    def step(self) -> None: ...


class TorchAdamW:
    """PyTorch's own, with its kernels: foreach makes the root of the second moment for all parameters at once."""

    def __init__(self, trained: Sequence[nn.Parameter], run: Run) -> None:
        self.trained = trained
        kinds: dict[str, Any] = {"foreach": run.optimizer == "foreach", "fused": run.optimizer == "fused"}
        groups = [[p] for p in trained] if run.update_in_backward else [list(trained)]
        self.parts = [torch.optim.AdamW(group, **kinds) for group in groups if group]

    def states(self, parameter: nn.Parameter) -> list[Tensor]:
        states = (part.state[parameter] for part in self.parts if parameter in part.state)
        return [v for state in states for v in state.values() if isinstance(v, Tensor) and v.dim()]

    def prepare(self) -> None:
        for parameter in self.trained:
            parameter.grad = torch.zeros_like(parameter)
        self.step()
        for parameter in self.trained:
            parameter.grad = None

    def step(self) -> None:
        for part in self.parts:
            part.step()


class EightBitAdamW:
    """bitsandbytes: two bytes a parameter and two fp32 for each block of 256, updated in one kernel."""

    def __init__(self, trained: Sequence[nn.Parameter], run: Run) -> None:
        self._states = {id(p): _codes(p) for p in trained}

    def states(self, parameter: nn.Parameter) -> list[Tensor]:
        return self._states[id(parameter)]

    def prepare(self) -> None: ...

    def step(self) -> None: ...


def _codes(parameter: nn.Parameter) -> list[Tensor]:
    blocks = -(-parameter.numel() // _QUANT_BLOCK)
    codes = [torch.empty(parameter.numel(), dtype=torch.uint8) for _ in range(2)]
    return codes + [torch.empty(blocks, dtype=torch.float32) for _ in range(2)]


class MasterAdam:
    """Megatron's and DeepSpeed's: masters and states of another dtype than the parameters, over `ranks`.

    gradients: Megatron adds them up in fp32 buffers of all parameters; DeepSpeed keeps a rank's part in the
    parameters' dtype and widens one sub-group at a time in the update.
    """

    def __init__(self, trained: Sequence[nn.Parameter], run: Run, *, ranks: int) -> None:
        self.run, self.trained = run, trained
        self.master = torch.float32 if run.master_dtype == "fp32" else torch.bfloat16
        state = torch.float32 if run.state_bytes == 4 else torch.bfloat16
        self._states: dict[int, list[Tensor]] = {}
        for parameter in trained:
            part = -(-parameter.numel() // ranks)
            kept = [torch.empty(part, dtype=self.master)] if run.master_dtype else []
            kept += [torch.empty(part, dtype=state) for _ in range(2)]
            if run.framework == "megatron":
                kept.append(torch.empty(parameter.numel(), dtype=torch.float32))
            self._states[id(parameter)] = kept

    def states(self, parameter: nn.Parameter) -> list[Tensor]:
        return self._states[id(parameter)]

    def prepare(self) -> None: ...

    def step(self) -> None:
        if self.run.framework == "megatron":
            return
        group: list[Tensor] = []
        size = 0
        for parameter in self.trained:
            if self.master != parameter.dtype:
                group.append(torch.empty(parameter.numel(), dtype=self.master))
            size += parameter.numel()
            if size >= _SUB_GROUP:
                group, size = [], 0


def optimizer_of(run: Run, trained: Sequence[nn.Parameter]) -> Optimizer:
    """By what the run says of its masters and its kernel."""
    if run.optimizer == "8bit":
        return EightBitAdamW(trained, run)
    if run.framework in ("megatron", "deepspeed"):
        return MasterAdam(trained, run, ranks=run.replicate if run.wrap == "dist_optimizer" else 1)
    return TorchAdamW(trained, run)


def after_gradient(run: Run, trained: Sequence[nn.Parameter], optimizer: Optimizer) -> None:
    """What happens to a gradient as soon as it is there: an update, or a sum in Megatron's buffer."""
    if run.framework == "megatron":
        hooks: list[Callable[[Any], None]] = [_drop for _ in trained]
    elif run.update_in_backward:
        parts: Any = getattr(optimizer, "parts", None)
        steps: list[Callable[[], Any]] = [part.step for part in parts] if parts else [_nothing for _ in trained]
        hooks = [_then_drop(step) for step in steps]
    else:
        return
    for parameter, hook in zip(trained, hooks):
        parameter.register_post_accumulate_grad_hook(hook)


def _drop(parameter: Any) -> None:
    parameter.grad = None


def _nothing() -> None: ...


def _then_drop(step: Callable[[], Any]) -> Callable[[Any], None]:
    def hook(parameter: Any) -> None:
        step()
        parameter.grad = None

    return hook
