"""find_overflow: which module is the first whose values or gradients fp16 cannot hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from trainfit.hardware.ranks import local_part
from trainfit.step.left_alone import left_alone
from trainfit.step.train_step import TrainStep
from trainfit.workload.batch import MicroBatch


@dataclass(frozen=True)
class Overflow:
    """The first tensor of a window that is not finite.

    place: the module or parameter. phase: whether its values are not finite, or gradients.
    largest: of its finite elements, by magnitude. non_finite, elements: of the tensor.
    """

    place: str
    phase: Literal["forward", "backward"]
    largest: float
    non_finite: int
    elements: int

    def __str__(self) -> str:
        what = "values" if self.phase == "forward" else "gradients"
        return (
            f"{what} of {self.place} are the first that are not finite, in {self.phase} ({self.non_finite} of "
            f"{self.elements}; the largest other one is {self.largest:.3g})"
        )


def find_overflow(step: TrainStep, micro_batches: Sequence[MicroBatch]) -> Overflow | None:
    """Run a window again at the scale as it is now, watched; None where all is finite. The run is left as it was.

    With a mesh all ranks call it; each looks at what it has itself.
    """
    finder = _Finder()
    with left_alone(step), ExitStack() as hooks:
        for name, module in step.model.named_modules():
            label = name or "the model"
            hooks.callback(module.register_forward_pre_hook(partial(finder.enter, label), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(partial(finder.leave, label)).remove)
        for name, parameter in step.model.named_parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                hooks.callback(parameter.register_hook(partial(finder.look_back, name, True)).remove)
        try:
            loss, _ = step._scaled_gradients(micro_batches)
        except BaseException:
            step._sync.abandon()
            raise
        finally:
            finder.is_open = False
            left = [(name, p.grad) for name, p in step.model.named_parameters() if p.grad is not None]
    if finder.found is not None:
        return finder.found
    found = (_judge(name, "backward", local_part(gradient)) for name, gradient in left)
    return next((each for each in (_judge("the loss", "forward", loss), *found) if each is not None), None)


class _Finder:
    """Hooks on modules and tensors that keep the first tensor which is not finite."""

    def __init__(self) -> None:
        self.found: Overflow | None = None
        self.is_open = True
        self._seen: Tensor | None = None  # its gradient, kept so that no other takes its place

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in _tensors((args, kwargs)):
            # Between two modules: an operator of the one around them. What has no gradient may be a mask of infs.
            if (
                self.found is None
                and tensor.requires_grad
                and (bad := _judge(f"{_parent(name)}, before {name},", "forward", tensor))
            ):
                self.found = bad
            self._watch(name, tensor, is_input=True)

    def leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in _tensors(output):
            if self.found is None:
                self.found = _judge(name, "forward", tensor)
            self._watch(f"what follows {name}", tensor, is_input=False)

    def _watch(self, name: str, tensor: Tensor, *, is_input: bool) -> None:
        if self.is_open and torch.is_grad_enabled() and tensor.requires_grad:
            tensor.register_hook(partial(self.look_back, name, is_input))

    def look_back(self, name: str, is_input: bool, gradient: Tensor) -> None:
        """A tensor may be one module's output and the input of others: these say more, the innermost most."""
        gradient = local_part(gradient)
        if not self.is_open or (self.found is not None and not (is_input and self._is_seen(gradient))):
            return
        if (bad := _judge(name, "backward", gradient)) is not None:
            self.found, self._seen = bad, gradient

    def _is_seen(self, gradient: Tensor) -> bool:
        return self._seen is not None and self._seen.data_ptr() == gradient.data_ptr()


def _tensors(tree: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield leaf


def _parent(name: str) -> str:
    return name.rpartition(".")[0] or "the model"


def _judge(place: str, phase: Literal["forward", "backward"], tensor: Tensor) -> Overflow | None:
    values = local_part(tensor.detach())
    finite = values.isfinite()
    if finite.all():
        return None
    rest = values[finite].abs()
    largest = float(rest.max()) if rest.numel() else 0.0
    return Overflow(place, phase, largest, int(values.numel() - rest.numel()), values.numel())
