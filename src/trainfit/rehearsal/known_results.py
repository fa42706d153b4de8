"""What operators give on fake tensors, remembered by the shapes that they are given.

NOTE [ Known results ]
A fake kernel computes shapes, which for equal shapes are equal: layers of a model, micro batches and whole rehearsals
ask the same thousands of times, and so does the making of a model. All of it runs under FakeKernels or a tracker, which
look here first. PyTorch remembers as well (FakeTensorMode.cache), with keys so general that they cost more than most
kernels; here there are neither symbolic shapes nor other devices. Remembered is where each output's memory comes from:
its own, an argument's, or it is an argument itself. Anything else (numbers, constants, operators that change shapes in
place or write to out=, outputs that share memory of their own, sparse ones, conjugates, other devices, and all in
inference mode, whose tensors are not made like this) is asked for each time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_MOST = 200_000  # entries, a few hundred bytes each
_CHANGES_SHAPE = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_"})
_CPU = torch.device("cpu")
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_ATTRIBUTES = "trainfit_attributes_of_new_tensors"

# Of an output: the argument that it is; or the one whose memory it sees (None: its own) and its shape, strides, offset
# and dtype.
_Known = int | tuple[int | None, tuple[int, ...], tuple[int, ...], int, torch.dtype]
_results: dict[Any, tuple[_Known, ...] | None] = {}


class _Kind(NamedTuple):
    """Of an operator: itself, whether its results may be remembered, and how it gives them."""

    func: Any  # held, so that its id stays its own
    may_be_known: bool
    gives: type[Any]  # Tensor, or a list or tuple of them


_kinds: dict[int, _Kind] = {}  # by id: an operator's hash is computed in Python


def known_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Any) -> Any:
    """compute(func, args, kwargs), or what it would give: known of FakeTensors on the CPU."""
    kind = _kinds.get(id(func)) or _kind_of(func)
    if not kind.may_be_known or torch.is_inference_mode_enabled():
        return compute(func, args, kwargs)
    tensors: list[FakeTensor] = []
    given = _key(args, tensors), _key(kwargs.items(), tensors) if kwargs else None
    key = id(func), torch.get_default_dtype(), given
    mode = tensors[0].fake_mode if tensors and type(tensors[0]) is FakeTensor else torch._C._get_dispatch_mode(_FAKE)
    if mode is None or not all(map(_is_plain, tensors)):
        return compute(func, args, kwargs)
    if key in _results:
        if (known := _results[key]) is None:
            return compute(func, args, kwargs)
        made = _made(known, tensors, mode)
        return made[0] if kind.gives is Tensor else kind.gives(made)
    output = compute(func, args, kwargs)
    if len(_results) >= _MOST:
        _results.clear()
    _results[key] = _description(output, tensors)
    return output


def _kind_of(func: Any) -> _Kind:
    schema = func._schema
    results = [str(result.type) for result in schema.returns]
    writes = [argument for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    in_place = len(writes) == 1 and writes[0] is not None and schema.name.endswith("_")
    may_be_known = (
        func.namespace == "aten"
        and bool(results)
        and all(result in ("Tensor", "List[Tensor]") for result in results)
        and (not writes or in_place)
        and torch.Tag.inplace_view not in func.tags
        and torch.Tag.dynamic_output_shape not in func.tags
        and torch.Tag.data_dependent_output not in func.tags
        and schema.name not in _CHANGES_SHAPE
    )
    gives: type[Any] = tuple if len(results) > 1 else list if results == ["List[Tensor]"] else Tensor
    kind = _kinds[id(func)] = _Kind(func, may_be_known, gives)
    return kind


def _is_plain(tensor: Tensor) -> bool:
    """Whether shape, strides, offset and dtype say all about it."""
    return (
        type(tensor) is FakeTensor
        and tensor.constant is None
        and tensor.fake_device == _CPU
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _key(values: Iterable[Any], tensors: list[Any]) -> tuple[Any, ...]:
    """Equal for arguments that give the same shapes; collects the tensors in order."""
    parts: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
            parts.append((value.shape, value.stride(), value.storage_offset(), value.dtype))
        elif isinstance(value, (list, tuple)):
            parts.append(_key(value, tensors))
        else:
            parts.append((type(value), value))
    return tuple(parts)


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


def _made(known: tuple[_Known, ...], tensors: list[FakeTensor], mode: FakeTensorMode) -> list[Tensor]:
    attributes = _attributes(mode)
    made: list[Tensor] = []
    with torch._C._DisableTorchDispatch():
        for each in known:
            if isinstance(each, int):
                made.append(tensors[each])
                continue
            base, shape, stride, offset, dtype = each
            if base is None:
                plain = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            else:
                plain = torch.empty(0, dtype=dtype, device="meta")
                plain.set_(tensors[base].untyped_storage(), offset, shape, stride)
            # As FakeTensor(mode, plain, _CPU), which looks at its arguments and sets attributes one by one for longer
            # than all the rest takes.
            fake = Tensor._make_subclass(FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=_CPU)
            torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
            vars(fake).update(attributes)
            made.append(fake)
    return made


def _attributes(mode: FakeTensorMode) -> dict[str, Any]:
    """What a new FakeTensor of the mode on the CPU has."""
    if (found := vars(mode).get(_ATTRIBUTES)) is None:
        with in_kernel_invocation_manager(mode):
            found = vars(FakeTensor(mode, torch.empty(0, device="meta"), _CPU))
        setattr(mode, _ATTRIBUTES, found)
    return found
