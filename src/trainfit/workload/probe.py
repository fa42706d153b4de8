"""Trying a head out: does the model's output come from this layer and nothing else?"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from trainfit.workload.forward import configs_of, run_model
from trainfit.workload.huggingface import training_call, without_cache


class HeadWatch:
    """Sees what a head is given and what it returns.

    It makes the head return bf16: code after the head that only casts to fp32 would otherwise not show until autocast
    is on.
    """

    def __init__(self, head: nn.Module) -> None:
        self._head = head
        self.calls = 0
        self.input: Tensor | None = None
        self.output: Tensor | None = None
        self.seen_ambient: tuple[bool, bool] | None = None

    def __enter__(self) -> HeadWatch:
        self._handle = self._head.register_forward_hook(self._see)
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.remove()

    def _see(self, module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        self.calls += 1
        self.input = arguments[0]
        self.output = output.to(torch.bfloat16)
        self.seen_ambient = ambient(module)
        return self.output

    def was_all(self, hidden: Tensor, logits: Tensor) -> bool:
        """Whether the head got these very hidden states, once, and these logits are its output as it is."""
        return self.calls == 1 and logits is self.output and self.input is not None and same_memory(self.input, hidden)


def plain_linear(head: nn.Module) -> nn.Linear | None:
    """The head if its forward is x @ weight.T + bias and no more: no subclass's own forward, no patch, no hooks."""
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        return None
    return None if head._forward_hooks or head._forward_pre_hooks else head


def same_memory(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    layout = (a.shape, a.stride(), a.storage_offset(), a._version)
    same_storage = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return same_storage and layout == (b.shape, b.stride(), b.storage_offset(), b._version)


def ambient(module: nn.Module) -> tuple[bool, bool]:
    device = next(module.parameters()).device.type
    return torch.is_grad_enabled(), device != "meta" and torch.is_autocast_enabled(device)


@contextmanager
def evaluating(modules: list[nn.Module]) -> Iterator[None]:
    """Dropout off, so that trying a head out draws no random number."""
    before = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, training in zip(modules, before):
            module.training = training


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """An operator that fails on fake tensors logs a traceback before it raises; the reason we give says enough."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@quiet_fake_tensors()
def run_fake(model: nn.Module, seq_len: int) -> Tensor:
    """The output for one row of seq_len tokens, on fake tensors: nothing is computed, drawn at random or written."""
    parameter = next(model.parameters())
    if isinstance(parameter, FakeTensor):
        with parameter.fake_mode:
            return run_model(model, torch.zeros(1, seq_len, dtype=torch.long, device=parameter.device))
    # Plain tensors that a module keeps as attributes are real: fake mode must take them as they are.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # Each module once, each of its own tensors once, tied or not: functional_call would swap what has two names twice,
    # and put the first swap back last.
    tensors = {
        f"{prefix}.{name}".removeprefix("."): tensor
        for prefix, module in model.named_modules()
        for name, tensor in (module._parameters | module._buffers).items()
        if tensor is not None
    }
    fakes: dict[str, Tensor] = {name: mode.from_tensor(tensor) for name, tensor in tensors.items()}
    with mode:
        inputs = torch.zeros(1, seq_len, dtype=torch.long, device=parameter.device)
        with training_call(), without_cache(configs_of(model)):
            output = torch.func.functional_call(model, fakes, (inputs,), tie_weights=False)
    return output if isinstance(output, Tensor) else output.logits
