"""PyTorch's compiler as a step uses it, and as a rehearsal does: all of it but the kernels.

NOTE [ Compiled without kernels ]
Inductor turns a graph into Python that allocates buffers, reuses and drops them, calls matmuls and attention, and runs
kernels that it wrote in C++. A rehearsal compiles for real, with the same partition of forward and backward, and runs
that very Python on fake tensors. Only three things differ: no C++ is compiled, a kernel is an operator that does
nothing and says what it would read and write (trainfit::fused_kernel), and the two functions that make tensors past the
dispatcher make fake ones. So each buffer is born and dies where a real run's does.
The compiled Python of a real run and of a rehearsal must not be mixed up: neither PyTorch's caches nor its table of
modules see a rehearsal's.
Source: torch/_inductor/codegen/wrapper.py (write_header), torch/_inductor/codecache.py (PyCodeCache).

NOTE [ Compiled once in a process ]
What is compiled for fake tensors knows nothing of a model: parameters are inputs of the graph. So a search compiles a
block of one size once, whatever it is traced, rehearsed and asked for later, also for another plan. Two graphs are the
same where their code is, what their inputs look like and share, and what of the compiler's surroundings is in neither:
what the partitioner was told, autocast, global switches, the compiler's settings. Graphs with tensors of their own are
not kept.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

# What g++ takes for one of Inductor's kernels: an assumption, until benchmarks/compile.py has run on a quiet machine.
KERNEL_SECONDS = 2.0

_LIBRARY = torch.library.Library("trainfit", "FRAGMENT")
_LIBRARY.define("fused_kernel(Tensor[] read, *, Tensor(a!)[] out) -> ()")
_PARAMETER = re.compile(r"(?:extern \"C\"[^(]*?\bkernel\s*\()([^)]*)\)", re.DOTALL)


def _does_nothing(read: Sequence[Tensor], *, out: Sequence[Tensor]) -> None: ...


for _key in ("CPU", "Meta"):
    _LIBRARY.impl("fused_kernel", _does_nothing, _key)


@dataclass
class Compiled:
    """What was compiled so far.

    graphs: of forward with its backward. kernels: only counted in a rehearsal. seconds: that it took here.
    eager_bytes: what the largest graph saves for backward where it is run operator by operator.
    """

    graphs: int = 0
    kernels: int = 0
    seconds: float = 0.0
    eager_bytes: int = 0

    @property
    def seconds_with_kernels(self) -> float:
        """What a real run should take where a rehearsal took so long, which left the kernels out."""
        return self.seconds + self.kernels * KERNEL_SECONDS


@dataclass(frozen=True)
class _Lowered:
    """A graph that was compiled without kernels, how many it would have, and what that took."""

    function: Callable[..., Any]
    kernels: int
    seconds: float


_MOST_KNOWN = 128
_KNOWN: OrderedDict[Hashable, _Lowered] = OrderedDict()


class SavedBytes(saved_tensors_hooks):
    """Counts what autograd saves inside, each storage once, without what is given anyway."""

    def __init__(self, given: Iterable[Any]) -> None:
        super().__init__(self._pack, lambda tensor: tensor)
        self._seen = {storage_of(tensor) for tensor in given if isinstance(tensor, Tensor)}
        self.num_bytes = 0

    def __enter__(self) -> SavedBytes:  # type: ignore[override]
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> Tensor:
        if (storage := storage_of(tensor)) not in self._seen:
            self._seen.add(storage)
            self.num_bytes += tensor.untyped_storage().nbytes()
        return tensor


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def eager_bytes(graph: Any) -> int:
    """What a graph of Dynamo's would save for backward, operator by operator."""
    inputs = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]  # fake tensors
    mode = next((each.fake_mode for each in inputs if isinstance(each, FakeTensor)), None)
    with mode or nullcontext(), torch.enable_grad(), SavedBytes(inputs) as saved:
        output = graph(*inputs)
    del output
    return int(saved.num_bytes)


def lower(graph: Any, inputs: Sequence[Any], partition: Mapping[str, Any]) -> Callable[..., Any]:
    """Forward and backward of a graph, compiled. partition: settings that decide what forward saves."""
    from torch._functorch import config as functorch
    from torch._inductor.compile_fx import compile_fx

    # Backward at once too, instead of when it is first run: errors come from one place, and seconds are all counted.
    # PyTorch's cache of partitions does not know of a pass that marks nodes; its cache of kernels is enough.
    settings = {**partition, "force_non_lazy_backward_lowering": True, "enable_autograd_cache": False}
    with functorch.patch(settings):
        lowered: Any = compile_fx(graph, inputs)
    return cast(Callable[..., Any], lowered)


def lower_without_kernels(
    graph: Any, inputs: Sequence[Any], partition: Mapping[str, Any], done: Compiled, told: Hashable
) -> Callable[..., Any]:
    """The same for fake tensors. told: what the partition follows from.

    See NOTE [ Compiled without kernels ] and NOTE [ Compiled once in a process ].
    """
    key = _key_of(graph, inputs, told)
    if key is not None and (known := _KNOWN.get(key)) is not None:
        _KNOWN.move_to_end(key)
        done.kernels += known.kernels
        done.seconds += known.seconds
        return known.function
    begin, kernels = time.perf_counter(), done.kernels
    function = _lower_without_kernels(graph, inputs, partition, done)
    if key is not None:
        _KNOWN[key] = _Lowered(function, done.kernels - kernels, time.perf_counter() - begin)
        if len(_KNOWN) > _MOST_KNOWN:
            _KNOWN.popitem(last=False)
    return function


def _key_of(graph: Any, inputs: Sequence[Any], told: Hashable) -> Hashable:
    """What two graphs have in common that are compiled to the same; None for one that has tensors of its own."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    if any(node.op in ("get_attr", "call_module") for node in graph.graph.nodes):
        return None
    storages: dict[int, int] = {}
    described: list[Hashable] = []
    for each in inputs:
        if not isinstance(each, Tensor):
            described.append(each)
            continue
        number = storages.setdefault(storage_of(each), len(storages))
        looks = tuple(each.shape), each.stride(), each.storage_offset(), each.dtype, each.device, each.requires_grad
        described.append((*looks, isinstance(each, torch.nn.Parameter), number))
    kinds = sorted({each.device.type for each in inputs if isinstance(each, Tensor)})
    casts = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    cuda = torch.backends.cuda  # whose switches are those of attention on all devices
    attention = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    arithmetic = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    exact = torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
    configs = functorch.get_hash(), inductor.get_hash()
    targets = tuple(node.target for node in graph.graph.nodes)  # functions of one name are told apart
    return graph.code, targets, tuple(described), told, casts, attention, arithmetic, exact, configs


def _lower_without_kernels(
    graph: Any, inputs: Sequence[Any], partition: Mapping[str, Any], done: Compiled
) -> Callable[..., Any]:
    from torch._inductor import config as inductor
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    def kernel(_: Any, types: Sequence[str], source: str) -> Callable[..., None]:
        done.kernels += 1
        return _named_kernel(source)

    def load(key: str, path: str, *_: Any, attrs: dict[str, Any] | None = None, **__: Any) -> ModuleType:
        module = ModuleType(f"trainfit_rehearsed_{key}")
        module.__file__ = path
        exec(compile(Path(path).read_text(), path, "exec"), vars(module))
        vars(module).update({**_FAKE_MAKERS, **(attrs or {})})
        return module

    with ExitStack() as stack:
        stack.enter_context(inductor.patch(fx_graph_cache=False, compile_threads=1))
        stack.enter_context(_replaced(AsyncCompile, "cpp_pybinding", kernel))
        stack.enter_context(_replaced(PyCodeCache, "load_by_key_path", load))
        return lower(graph, inputs, partition)


def _named_kernel(source: str) -> Callable[..., None]:
    """What a kernel reads and writes, by the names that Inductor gives its parameters."""
    match = _PARAMETER.search(source)
    assert match is not None, "a kernel without a signature"
    names = [part.split()[-1].lstrip("*&") for part in match[1].split(",")]

    def kernel(*args: Any) -> None:
        tensors = [(name, arg) for name, arg in zip(names, args) if isinstance(arg, Tensor)]
        read = [tensor for name, tensor in tensors if name.startswith("in")]
        written = [tensor for name, tensor in tensors if "out" in name]
        torch.ops.trainfit.fused_kernel(read, out=written)

    return kernel


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


def _reinterpret(tensor: Tensor, size: Sequence[int], stride: Sequence[int], more_offset: int) -> Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + more_offset)


def _trusts(*_: Any) -> None:
    """In place of assertions on strides and addresses, which fake tensors have none of."""


_FAKE_MAKERS = {
    "empty_strided_cpu": _empty_strided,
    "reinterpret_tensor": _reinterpret,
    "assert_size_stride": _trusts,
    "assert_alignment": _trusts,
}


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
