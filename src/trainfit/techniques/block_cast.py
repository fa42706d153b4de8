"""cast "block": a block's weights in the compute dtype only while it runs.

NOTE [ Casts that come back ]
Under autocast a matmul saves the low-precision copy of its weight for backward: two bytes a parameter, of all blocks
that keep what they save. Here a block's weights are cast at its entry, and the copies' memory is given back when its
forward has ended. Autograd still holds the copies, now empty; the gradient of the block's output fills them again with
the same bits, and each goes when its weight's gradient is there. Which weights: those that autocast would cast.

A block that is recomputed needs none of this in forward, and casts again as it recomputes.
With sharded weights FSDP does the same: it gathers them in the compute dtype.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_leaves

from trainfit.errors import RecipeError
from trainfit.profile import Cast
from trainfit.techniques.activation import Patched, forget_recompute, unbound_forward
from trainfit.techniques.base import Asked, Build, Draft, Stage
from trainfit.techniques.surroundings import mark_emptied


class BlockCasts:
    """Casts weights block by block."""

    stage: ClassVar[Stage] = Stage.BLOCK
    setting: ClassVar[str] = "cast"

    def choices(self, so_far: Draft, asked: Asked) -> Iterable[Cast]:
        """Half weights need no cast, parts of weights can have none."""
        casts = so_far["precision"] != "fp32" and so_far["optimizer"].weights == "fp32"
        cast: Cast = asked.settings["cast"] if casts else "operator"
        if cast == "operator" or so_far["mesh"].tensor == 1:
            yield cast

    def apply(self, build: Build, setting: Cast) -> None:
        for block in build.blocks:
            forget_recompute(block)
            forget_cast(block)
        if setting == "block" and build.ranks.mesh.tensor > 1:
            raise RecipeError(
                f"cast block does not work with mesh.tensor {build.ranks.mesh.tensor}: parts of weights cannot be "
                "freed that way; use cast: operator, or optimizer.weights: bf16_residual"
            )
        # FSDP casts in its gathers; the stage is not known to be one that shards until then.
        if setting == "block" and build.ranks.mesh.shard == 1:
            for block in build.blocks:
                block.forward = CastForward(block, unbound_forward(block))


def forget_cast(block: nn.Module) -> None:
    """Undo BlockCasts: a model may be built again under another strategy."""
    cast = vars(block).get("forward")
    if isinstance(cast, CastForward):
        del block.forward
        cast.give_back(block)


class CastForward:
    """In the place of a block's forward. forward: the block's own, unbound."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        # Weak: the block has this in its own attributes.
        self._block = weakref.ref(block)
        self._forward = forward

    def give_back(self, block: nn.Module) -> None:
        """Sets what was set on the block itself before."""
        if isinstance(self._forward, Patched):
            block.forward = self._forward.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self._block()
        assert block is not None
        weights = cast_weights(block)
        device_type = next((p.device.type for _, _, p in weights), "cpu")
        if not torch.is_autocast_enabled(device_type):
            return self._forward(block, *args, **kwargs)
        dtype = torch.get_autocast_dtype(device_type)
        copies = [_ToLow.apply(parameter, dtype) for _, _, parameter in weights]  # type: ignore[no-untyped-call]
        in_backward = torch._C._current_graph_task_id() != -1  # a recompute: what it casts is needed at once
        gives_up = torch.is_grad_enabled() and not in_backward
        for (module, name, _), copy in zip(weights, copies):
            module._parameters[name] = copy
            if gives_up:
                mark_emptied(copy)
        try:
            output = self._forward(block, *args, **kwargs)
        finally:
            for module, name, parameter in weights:
                module._parameters[name] = parameter
        if gives_up:
            parameters = [parameter for _, _, parameter in weights]
            for copy in copies:
                copy.untyped_storage().resize_(0)
            # Weak: what a recompute casts again, or a frozen weight's backward has used, nobody holds.
            kept = [weakref.ref(copy) for copy in copies]
            # Of several outputs any may be the first whose backward comes. None has a gradient where nothing trains in
            # the block or before it, and then nothing was saved.
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(partial(_refill, parameters, kept))
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> CastForward:
        # A copied block comes here while it is copied, so memo has it already.
        block = self._block()
        assert block is not None
        return CastForward(deepcopy(block, memo), deepcopy(self._forward, memo))


class _ToLow(torch.autograd.Function):
    """A cast whose result gives its memory back when its gradient is there."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        copy = parameter.detach().to(dtype)
        ctx.copy = weakref.ref(copy.untyped_storage())
        ctx.dtype = parameter.dtype
        return copy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if (storage := ctx.copy()) is not None:
            storage.resize_(0)
        return gradients[0].to(ctx.dtype), None


@torch.no_grad()
def _refill(parameters: list[nn.Parameter], copies: list[weakref.ref[Tensor]], _: Tensor) -> None:
    for parameter, reference in zip(parameters, copies):
        copy = reference()
        if copy is not None and (storage := copy.untyped_storage()).size() == 0:
            storage.resize_(copy.numel() * copy.element_size())
            # The same bits come back, so to autograd nothing has changed.
            with _unsafe_preserve_version_counter(copy):
                copy.copy_(parameter)


def cast_weights(block: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Parameters that matmuls read: matrices, and biases beside them; no embeddings, no norms.

    Experts in one tensor of three dimensions stay as they are: what picks rows of them would add up gradients in the
    low precision.
    """
    found: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in block.modules():
        own = {name: p for name, p in module._parameters.items() if isinstance(p, nn.Parameter)}
        if isinstance(module, nn.Embedding) or {p.dim() for p in own.values()} - {1} != {2}:
            continue
        found += [(module, name, p) for name, p in own.items() if p.dtype == torch.float32]
    return found
