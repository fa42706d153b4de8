"""What PyTorch's fake kernels get wrong about single operators, and what real ones allocate inside."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PythonCallbackWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from trainfit.rehearsal.flops import GROUPED_MM
from trainfit.rehearsal.host_scratch import scratch_bytes
from trainfit.rehearsal.known_results import known_result

# Collectives without a fake kernel; they return nothing but the handle to wait for.
_WITHOUT_FAKE_KERNEL = frozenset(
    {
        "c10d::allreduce_coalesced_",
        "c10d::allgather_coalesced_",
        "c10d::allgather_into_tensor_coalesced_",
        "c10d::reduce_scatter_tensor_coalesced_",
    }
)
DEVICE_OF = torch.ops.prim.device.default
_READ = torch.ops.aten._local_scalar_dense.default
# gloo copies these arguments, all of them, into a buffer of its own: flattened to gather, cloned to reduce.
_GLOO_COPIES: Mapping[str, int] = {
    "c10d::_allgather_base_": 0,
    "c10d::allgather_": 0,
    "c10d::_reduce_scatter_base_": 1,
    "c10d::allreduce_coalesced_": 0,
    "_c10d_functional::reduce_scatter_tensor": 0,
}
_GLOO_GATHER = "_c10d_functional::all_gather_into_tensor"
# Of two tensors, and whether the result goes into the first.
_BINARY: Mapping[Any, bool] = {
    getattr(torch.ops.aten, f"{name}{'_' * in_place}").Tensor: in_place
    for name in ("add", "sub", "mul", "div")
    for in_place in (False, True)
}


def fake_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """func(*args), also where only its fake kernel refuses what the real one runs."""
    return known_result(func, args, kwargs, _computed)


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is GROUPED_MM and args[0].dtype != torch.bfloat16:
        return _grouped_mm(*args, **kwargs)
    if func.namespace == "c10d" and any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(args)):
        return _fake_collective(func, args, kwargs)
    return func(*args, **kwargs)


def _fake_collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is waited for holds its tensors until it is dropped, as with gloo and NCCL."""
    held = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    work = PythonCallbackWork(lambda _: bool(held) or True).boxed()
    if func._schema.name in _WITHOUT_FAKE_KERNEL:
        return work
    output = func(*args, **kwargs)
    if isinstance(output, torch.ScriptObject):
        return work
    return (*output[:-1], work) if isinstance(output, tuple) else output


class FakeKernels(TorchDispatchMode):
    """fake_result for everything that runs inside.

    reads: whether a number that is read off a fake tensor is made up. A model is made without: a size may depend on it.
    """

    def __init__(self, *, reads: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reads = reads

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as the tracker

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # as the tracker

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for more often than anything is computed
        if any(map(leaves_to_its_handler, types)):
            return NotImplemented
        if self._reads and is_unknown_number(func, args):
            return 1.0
        return fake_result(func, args, kwargs or {})


def is_unknown_number(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a number is read off a fake tensor that has none, as Adafactor's update does: no size depends on it."""
    return func is _READ and getattr(args[0], "constant", None) is None and args[0].is_floating_point()


@cache
def leaves_to_its_handler(kind: type) -> bool:
    """Whether modes let a class of tensors go first: its handler computes on tensors inside, as DTensor's does."""
    return is_traceable_wrapper_subclass_type(kind)


@cache
def is_composite(func: Any) -> bool:
    """Whether autograd takes an operator apart before a mode sees it."""
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def _grouped_mm(first: Tensor, second: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """The fake kernel wants bf16; on a CPU the real one takes fp32 as well.

    (tokens, in) x (groups, in, out) gives (tokens, out); (in, tokens) x (tokens, out) with offsets (groups,) gives
    (groups, in, out); two batched operands multiply as bmm does.
    """
    if first.dim() == 2 and second.dim() == 3:
        return first.new_empty(first.shape[0], second.shape[2])
    if first.dim() == 2 and second.dim() == 2:
        assert offsets is not None
        return first.new_empty(offsets.shape[0], first.shape[0], second.shape[1])
    if first.dim() == 3 and second.dim() == 3:
        return first.new_empty(first.shape[0], first.shape[1], second.shape[2])
    return first.new_empty(first.shape[1], second.shape[1])


def temporary_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """What an operator allocates inside and frees before it returns, on a CPU, where that is known.

    A CPU's collectives are gloo's.
    """
    name = func._schema.name
    if name in _GLOO_COPIES:
        copied = (leaf for leaf in tree_leaves(args[_GLOO_COPIES[name]]) if isinstance(leaf, Tensor))
        return sum(tensor.numel() * tensor.element_size() for tensor in copied)
    if name == _GLOO_GATHER:
        return int(args[0].numel() * args[0].element_size() * args[1])
    if func in _BINARY:
        return _cast_bytes(args[0], args[1], in_place=_BINARY[func])
    return scratch_bytes(func, args)


def _cast_bytes(first: Any, second: Any, *, in_place: bool) -> int:
    """Operands of two dtypes are cast to one first, and a result that is not of it last.

    TensorIterator does so on CPUs, device kernels do not (ATen/TensorIterator.cpp, compute_types).
    """
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or first.dtype == second.dtype:
        return 0
    common = torch.result_type(first, second)
    cast = [tensor for tensor in (first, second, *([first] * in_place)) if tensor.dtype != common]
    return sum(tensor.numel() for tensor in cast) * common.itemsize
