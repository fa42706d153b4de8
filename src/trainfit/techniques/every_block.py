"""Every block in every backward, in one order on all ranks.

NOTE [ A block whose output leads nowhere ]
Where a rank's loss does not depend on a block that ran, autograd would leave the block out. fully_shard would then
neither gather it in backward nor reduce it in its turn, but at the end of backward: against the other ranks' gathers,
that hangs; against their reductions, the gradients of one block are added to those of another of its shape. So the
loss gets an edge to each block's output that carries no gradient. The engine then runs the block's part of the graph
in its turn (later nodes come first) with undefined gradients, which costs no memory and computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class EveryBlock:
    """Edges from a loss to the outputs of blocks. See NOTE [ A block whose output leads nowhere ]."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        """Call it after fully_shard: its hooks belong inside of these."""
        self._taps: list[Tensor] = []
        for block in blocks:
            block.register_forward_hook(self._tap)

    def begin(self) -> None:
        """A forward begins; what one that failed has left is dropped."""
        self._taps = []

    def join(self, loss: Tensor) -> Tensor:
        """The loss, with the edges."""
        taps, self._taps = self._taps, []
        joined: Tensor = _Join.apply(loss, *taps) if taps else loss  # type: ignore[no-untyped-call]
        return joined

    def _tap(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.is_grad_enabled():
            for leaf in (output,) if isinstance(output, Tensor) else tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    self._taps.append(_Tap.apply(leaf))  # type: ignore[no-untyped-call]


class _Tap(torch.autograd.Function):
    """No elements, so that keeping it does not keep the output; its node has the edge."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=output.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> None:
        return None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, *taps: Tensor) -> Tensor:
        ctx.num_taps = len(taps)
        return loss.clone()  # fully_shard warns of views

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *(None for _ in range(ctx.num_taps))
