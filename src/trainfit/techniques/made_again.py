"""Saved outputs of norms and activation functions, made again by their own operator from what is saved anyway.

NOTE [ Made again by the graph ]
A matmul saves its input, which is the output of a norm or of an activation function. The autograd node that made it has
saved its own inputs: x and 1 / its norm, gate and up. So the matmul is given no tensor but that node, and when backward
asks, the node's operator runs once more on what the node has saved: the same kernel on the same numbers, the same bits.
Nothing is looked at while forward runs but what autograd saves, so there is no cost for each operator.
The node is there when it is asked: backward runs the matmul before it, and it is upstream, so nobody holds himself.
What is saved may itself be made again: a norm's output by its weight and x / norm, this by x and 1 / norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from trainfit.errors import RecomputeError

Eps = Mapping[tuple[int, int], float]  # by where the weight is that a layer norm has


class Source:
    """What a storage's numbers are made of when backward asks: one, in the order of memory."""

    def value(self, name: str) -> Tensor:
        raise NotImplementedError


class MadeAgain(Source):
    """A storage whose numbers an operator makes again.

    original: keeps the storage's address from being given to another one.
    """

    def __init__(self, made: Tensor, run: Callable[[], Tensor]) -> None:
        self.original, self.run = storage_of(made), run
        self.like = made.shape, made.stride(), made.dtype
        self._value: Tensor | None = None

    @classmethod
    def of(cls, tensor: Tensor, eps: Eps) -> MadeAgain | None:
        """None where what made it cannot be run again from what it has saved, or where it was written since."""
        if tensor._version:
            return None  # by an operator in place, or behind autograd's back: which, the graph does not say
        made = tensor if tensor._base is None else tensor._base
        if made.grad_fn is None or made.numel() != numbers_of(made) or not made.is_contiguous():
            return None
        run = _again(made.grad_fn, made.dtype, eps)
        return None if run is None else cls(made, run)

    def value(self, name: str) -> Tensor:
        if self._value is None:
            with torch.no_grad():
                made = self.run()
            if (made.shape, made.stride(), made.dtype) != self.like:
                raise RecomputeError(
                    f"{name}: made {tuple(made.shape)} {made.dtype} again where forward had {tuple(self.like[0])} "
                    f"{self.like[2]}; set this block's activation tier to keep"
                )
            self._value = made.view(-1)
        return self._value


def _again(node: Any, dtype: torch.dtype, eps: Eps) -> Callable[[], Tensor] | None:
    """Runs a node's operator on what the node has saved; None for others. Reading what is saved may make that again."""
    kind = node.name()
    if kind == "MulBackward0":
        # Each factor is saved where the other one has a gradient.
        both = all(edge is not None for edge, _ in node.next_functions)
        return (lambda: node._saved_self * node._saved_other) if both else None
    if kind == "SiluBackward0":
        return lambda: F.silu(node._saved_self)
    if kind == "GeluBackward0":
        return lambda: F.gelu(node._saved_self, approximate=node._saved_approximate)
    if kind == "NativeLayerNormBackward0":
        return _layer_norm(node, eps)
    if kind == "ToCopyBackward0":
        inner = node.next_functions[0][0]
        # In what dtype the operator ran is known where it is no cast itself.
        first = None if inner is None or inner.name() == "ToCopyBackward0" else _again(inner, dtype, eps)
        return None if first is None else (lambda: first().to(dtype))
    return None


def _layer_norm(node: Any, eps: Eps) -> Callable[[], Tensor] | None:
    """The graph knows all but eps, which is the module's."""
    weight = node._saved_weight
    if weight is None or (epsilon := eps.get(_place(weight))) is None:
        return None
    return lambda: F.layer_norm(
        node._saved_input, node._saved_normalized_shape, node._saved_weight, node._saved_bias, epsilon
    )


def eps_of(block: nn.Module) -> Eps:
    """Of a block's layer norms, as they are in this forward: sharded weights move."""
    norms = (module for module in block.modules() if isinstance(module, nn.LayerNorm))
    return {_place(norm.weight): norm.eps for norm in norms if norm.weight is not None}


def _place(weight: Tensor) -> tuple[int, int]:
    """Autograd gives a parameter that it has saved as another object."""
    return weight.untyped_storage()._cdata, int(weight.storage_offset())


def storage_of(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def numbers_of(tensor: Tensor) -> int:
    """How many its storage has room for."""
    return tensor.untyped_storage().nbytes() // tensor.itemsize
