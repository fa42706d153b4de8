"""What operators give on fake tensors, remembered by the shapes that they are given.

NOTE [ Known results ]
A fake kernel computes shapes, which for equal shapes are equal: layers of a model, micro batches and whole rehearsals
ask the same thousands of times. PyTorch remembers as well (FakeTensorMode.cache), with keys so general that they cost
more than most kernels; here there are neither symbolic shapes nor other devices. Remembered is where each output's
memory comes from: its own, an argument's, or it is an argument itself. Anything else (numbers, constants, operators
that change shapes in place or write to out=, outputs that share memory of their own, sparse ones, conjugates, other
devices, and all in inference mode, whose tensors are not made like this) is asked for each time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

_MOST = 200_000  # entries, a few hundred bytes each
_CHANGES_SHAPE = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_"})
_CPU = torch.device("cpu")

# Of an output: the argument that it is; or the one whose memory it sees (None: its own) and its shape, strides, offset
# and dtype.
_Known = int | tuple[int | None, tuple[int, ...], tuple[int, ...], int, torch.dtype]
_results: dict[Any, tuple[_Known, ...] | None] = {}
_kinds: dict[Any, bool] = {}


def known_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Any) -> Any:
    """compute(func, args, kwargs), or what it would give: known of FakeTensors on the CPU."""
    if not _may_be_known(func) or torch.is_inference_mode_enabled():
        return compute(func, args, kwargs)
    tensors: list[FakeTensor] = []
    key = (func, _key(args, tensors), _key(tuple(kwargs.items()), tensors)) if kwargs else (func, _key(args, tensors))
    if not tensors or not all(map(_is_plain, tensors)):
        return compute(func, args, kwargs)
    if key in _results:
        if (known := _results[key]) is None:
            return compute(func, args, kwargs)
        made = _made(known, tensors)
        return made[0] if len(known) == 1 and not _gives_several(func) else _several(func, made)
    output = compute(func, args, kwargs)
    if len(_results) >= _MOST:
        _results.clear()
    _results[key] = _description(output, tensors)
    return output


def _may_be_known(func: Any) -> bool:
    if (known := _kinds.get(func)) is None:
        schema = func._schema
        writes = [argument for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
        in_place = len(writes) == 1 and writes[0] is not None and schema.name.endswith("_")
        known = _kinds[func] = (
            func.namespace == "aten"
            and bool(schema.returns)
            and all(str(result.type) in ("Tensor", "List[Tensor]") for result in schema.returns)
            and (not writes or in_place)
            and torch.Tag.inplace_view not in func.tags
            and torch.Tag.dynamic_output_shape not in func.tags
            and torch.Tag.data_dependent_output not in func.tags
            and schema.name not in _CHANGES_SHAPE
        )
    return known


def _is_plain(tensor: Tensor) -> bool:
    """Whether shape, strides, offset and dtype say all about it."""
    return (
        type(tensor) is FakeTensor
        and tensor.constant is None
        and tensor.fake_device == _CPU
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _key(value: Any, tensors: list[Any]) -> Any:
    """Equal for arguments that give the same shapes; collects the tensors in order."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.stride(), value.storage_offset(), value.dtype
    if isinstance(value, list | tuple):
        return tuple([_key(each, tensors) for each in value])
    return type(value), value


def _gives_several(func: Any) -> bool:
    return len(func._schema.returns) > 1 or str(func._schema.returns[0].type) == "List[Tensor]"


def _several(func: Any, made: list[Tensor]) -> Any:
    return made if len(func._schema.returns) == 1 else tuple(made)


def _description(output: Any, tensors: list[FakeTensor]) -> tuple[_Known, ...] | None:
    """None where it cannot be remembered."""
    outputs = list(output) if isinstance(output, list | tuple) else [output]
    places = {tensor.untyped_storage()._cdata: number for number, tensor in reversed(list(enumerate(tensors)))}
    own: set[int] = set()
    found: list[_Known] = []
    for each in outputs:
        if not isinstance(each, Tensor) or each.layout != torch.strided or not _is_plain(each):
            return None
        if (same := next((number for number, tensor in enumerate(tensors) if tensor is each), None)) is not None:
            found.append(same)
            continue
        storage = each.untyped_storage()
        base = places.get(storage._cdata)
        if base is None:
            fresh = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
            if storage._cdata in own or each.storage_offset() or fresh.untyped_storage().nbytes() != storage.nbytes():
                return None
            own.add(storage._cdata)
        found.append((base, tuple(each.shape), tuple(each.stride()), int(each.storage_offset()), each.dtype))
    return tuple(found)


def _made(known: tuple[_Known, ...], tensors: list[FakeTensor]) -> list[Tensor]:
    mode = tensors[0].fake_mode
    made: list[Tensor] = []
    for each in known:
        if isinstance(each, int):
            made.append(tensors[each])
            continue
        base, shape, stride, offset, dtype = each
        with in_kernel_invocation_manager(mode):
            if base is None:
                empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            else:
                empty = torch.empty(0, dtype=dtype, device="meta")
                empty.set_(tensors[base].untyped_storage(), offset, shape, stride)
        made.append(FakeTensor(mode, empty, _CPU))
    return made
