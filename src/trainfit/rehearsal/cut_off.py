"""A block or a shell cut off from the model around it: its inputs, and where its backward begins."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from trainfit.techniques import Build


def put_back(block: nn.Module, forward: Any) -> None:
    """forward: what was set on the block itself; None for its class's."""
    block.__dict__.pop("forward", None)
    if forward is not None:
        block.forward = forward


class AllCaptured(Exception):  # noqa: N818
    """Every structure has been seen; the rest of the forward need not run."""


class GradientSource(torch.autograd.Function):
    """Ends a graph without holding its output, and starts backward with a gradient of the output's size."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.like = output.shape, output.dtype
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        shape, dtype = ctx.like
        return torch.empty(shape, dtype=dtype)


def carries_gradients(build: Build) -> bool:
    """Whether hidden states carry a gradient between blocks: something in them or before them trains."""
    embedding = build.anatomy.embedding
    modules = [*build.blocks, *([build.model.get_submodule(embedding)] if embedding else [])]
    return embedding is None or any(p.requires_grad for module in modules for p in module.parameters())


def leaves_of(inputs: Any, *, carries: bool) -> Any:
    """Inputs cut off from what made them. The first is the hidden states, which carry a gradient in all blocks but the
    first of a frozen embedding, if in any; rotary tables and masks among the others do not."""
    hidden = hidden_of(inputs)

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_((carries and tensor is hidden) or tensor.requires_grad)

    return tree_map_only(Tensor, leaf, inputs)


def hidden_of(inputs: Any) -> Tensor | None:
    """The first floating point tensor that a block is given."""
    return next((tensor for tensor in tensors_in(inputs) if tensor.is_floating_point()), None)


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
