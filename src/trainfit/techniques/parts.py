"""Recompute of a part of a block: its attention, its mlp, or the core of its attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from trainfit.errors import RecipeError
from trainfit.profile import Tier
from trainfit.techniques.recompute import RecomputePlan

# A part is found by what its attribute is called, or else its class: self_attn, attention; mlp, feed_forward, ffn.
_CALLED: dict[Tier, tuple[str, ...]] = {
    "recompute_attention": ("attn", "attention"),
    "recompute_mlp": ("mlp", "feed_forward", "feedforward", "ffn", "moe", "densereludense"),
}
_CLASSES: dict[Tier, tuple[str, ...]] = {
    "recompute_attention": ("attention",),
    "recompute_mlp": ("mlp", "feedforward", "ffn", "sparsemoe"),
}


def parts_of(block: nn.Module, tier: Tier, name: str) -> list[tuple[str, nn.Module]]:
    """The outermost parts of a block that a tier names, with their names. Raises RecipeError where there are none."""
    for words, of_class in ((_CALLED[tier], False), (_CLASSES[tier], True)):
        if found := list(_outermost(block, words, of_class=of_class)):
            return found
    has = ", ".join(child for child, _ in block.named_children()) or "none"
    raise RecipeError(
        f"activation {tier}: {name} has no part called {' or '.join(_CALLED[tier][:2])}; its parts are {has}; "
        "use pointwise, which goes by operators"
    )


def _outermost(
    module: nn.Module, words: tuple[str, ...], *, of_class: bool, prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        called = (type(child).__name__ if of_class else name).lower()
        composite = any(True for part in child.children() for _ in part.parameters())
        if composite and "norm" not in called and any(word in called for word in words):
            yield prefix + name, child
        else:
            yield from _outermost(child, words, of_class=of_class, prefix=f"{prefix}{name}.")


def run_attention(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a plan whose region is one call of attention."""
    return F.scaled_dot_product_attention(*args, **kwargs)


class CoreForward:
    """In the place of a block's forward: runs it, and recomputes each F.scaled_dot_product_attention in it.

    core: the plan of those calls. forward: the block's own, unbound.
    """

    def __init__(self, core: RecomputePlan, forward: Any) -> None:
        self.core, self.forward = core, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.core.block()
        assert block is not None
        if not torch.is_grad_enabled():
            return self.forward(block, *args, **kwargs)
        with _InsteadOfAttention(self.core) as mode:
            output = self.forward(block, *args, **kwargs)
        if not mode.calls:
            raise RecipeError(
                f"activation recompute_core: {self.core.name} never calls F.scaled_dot_product_attention; use "
                "recompute_attention, which recomputes the whole part"
            )
        return output


class _InsteadOfAttention(TorchFunctionMode):
    """Calls of attention become regions of their own."""

    def __init__(self, plan: RecomputePlan) -> None:
        super().__init__()
        self.plan = plan
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs) if kwargs else func(*args)
        self.calls += 1
        return self.plan(*args, **(kwargs or {}))
