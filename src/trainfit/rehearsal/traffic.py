"""Bytes that an operator reads and writes, and how its elements lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

# What these write they do not read first.
_OVERWRITES = frozenset({"copy_", "fill_", "zero_", "set_", "normal_", "uniform_"})
# Its schema says that it changes the gradients, which it does only where it unscales them.
_ONLY_READS = frozenset({("_fused_adamw_", "grads")})
# Of the argument at this position only as many elements are read as the output has: rows picked by an index.
_PICKS: Mapping[str, int] = {"embedding": 0, "index": 0, "index_select": 0, "gather": 0}

# FSDP's copy of a rank's shards into the place that they have in the buffer of all, the rest of which it leaves alone.
_GATHER_COPY_IN = "all_gather_copy_in"


def traffic_bytes(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> int:
    """What goes between the device's memory and its cores, each element once for each time that it is read or written.

    An argument that is changed in place is read and written. Elements that stand for many, of an expanded tensor, are
    read once. Of a table only the rows that are picked are read.
    """
    name = base_name(func)
    if name == _GATHER_COPY_IN:
        return 2 * sum(map(num_bytes, args[0]))
    total, written = 0, set()
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_of(value):
            if writes:
                written.add(id(tensor))
            if _PICKS.get(name) == position:
                continue
            overwritten = writes and (name in _OVERWRITES or argument.is_out)
            once = overwritten or not writes or (name, argument.name) in _ONLY_READS
            total += num_bytes(tensor) * (1 if once else 2)
    made = [tensor for tensor in tensors_of(output) if id(tensor) not in written]
    return total + sum(num_bytes(tensor) * (2 if name in _PICKS else 1) for tensor in made)


def num_bytes(tensor: Tensor) -> int:
    """Of its elements, those of an expanded dimension once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride()):
        count *= size if stride or size == 0 else 1
    return int(count)


def base_name(func: Any) -> str:
    """Without namespace: "add_" of aten::add_."""
    return str(func._schema.name).rpartition("::")[2]


def tensors_of(tree: Any) -> list[Tensor]:
    """In order, of an operator's arguments or output: of lists, tuples and dicts only, which spares a search."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    for each in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ():
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple, dict)):
            found += tensors_of(each)
    return found


def inner_loops(shape: Sequence[int], operands: Iterable[Tensor]) -> int:
    """How many loops an element-wise kernel makes over operands broadcast to a shape.

    Dimensions that lie beside each other in every operand are one; the innermost is the loop.
    """
    strides = [_broadcast(tensor, shape) for tensor in operands]
    dims = [dim for dim, size in enumerate(shape) if size != 1]
    if not dims or not strides:
        return 1
    # The output's order: that of the first operand, largest stride first.
    dims.sort(key=lambda dim: -strides[0][dim])
    inner = dims.pop()
    length, steps = shape[inner], [each[inner] for each in strides]
    while dims and all(each[dims[-1]] == step * length for each, step in zip(strides, steps)):
        length *= shape[dims.pop()]
    total = 1
    for size in shape:
        total *= size
    return max(1, total // max(1, length))


def _broadcast(tensor: Tensor, shape: Sequence[int]) -> list[int]:
    """Strides of the tensor as if it had the shape; 0 where it is repeated."""
    missing = len(shape) - tensor.dim()
    strides = [0] * missing
    for size, stride, wanted in zip(tensor.shape, tensor.stride(), shape[missing:]):
        strides.append(stride if size == wanted or wanted == 1 else 0)
    return strides
