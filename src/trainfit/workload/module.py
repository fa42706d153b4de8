"""A user's own module as a Workload."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from trainfit.errors import ModelError
from trainfit.workload.workload import Workload


def workload_from_module(
    module_or_factory: nn.Module | Callable[[], nn.Module],
    *,
    seq_len: int,
    vocab_size: int,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Workload:
    """Any module with one tensor argument and a tensor output.

    A module instance is copied by every make_model and itself left alone; a factory must make a new module on the
    current default device at each call.
    loss(output, labels) must be the SUM over valid labels; None is token cross entropy on (batch, seq, vocab) logits.
    Raises ModelError if there is nothing to train, RecipeError if seq_len < 1.
    """
    if not isinstance(module_or_factory, nn.Module) and not callable(module_or_factory):
        raise ModelError(
            f"a {type(module_or_factory).__name__} is no module; give an nn.Module or a function that makes one"
        )
    if isinstance(module_or_factory, nn.Module):
        make_model: Callable[[], nn.Module] = partial(copy_module, module_or_factory)
        name = type(module_or_factory).__name__
    else:
        make_model = partial(_call, module_or_factory)
        name = getattr(module_or_factory, "__name__", type(module_or_factory).__name__)
    return Workload(name, make_model, vocab_size, None, seq_len, loss=loss)


def copy_module(module: nn.Module) -> nn.Module:
    """A deep copy on the default device; fake under FakeTensorMode, without memory on meta.

    Ties, requires_grad and everything that is no tensor survive. Tensors are made here and handed to deepcopy as
    already copied: by itself it fails on real tensors in fake mode, and would first copy a whole model bound for meta.
    """
    memo: dict[int, object] = {}
    for tensor in _tensors(module):
        if id(tensor) not in memo:
            memo[id(tensor)] = _copy_tensor(tensor)
    return copy.deepcopy(module, memo)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for part in module.modules():
        yield from _leaves(vars(part))


def _leaves(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)


def _copy_tensor(tensor: Tensor) -> Tensor:
    device = torch.get_default_device()
    copied = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if device.type != "meta" and not isinstance(copied, FakeTensor):
        copied.copy_(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


def _call(factory: Callable[[], nn.Module]) -> nn.Module:
    module = factory()
    if not isinstance(module, nn.Module):
        raise ModelError(f"the factory returned a {type(module).__name__}; it must return an nn.Module")
    return module
