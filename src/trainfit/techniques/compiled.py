"""Compiled blocks: torch.compile of each block, told by its tier, or a budget, what to save.

NOTE [ One compilation ]
Dynamo keeps what it compiled with the code of the function that was called, so all models of a process would share its
eight compilations of one. Each build has a copy of that code: its blocks of one structure share one compilation, and
nobody else's count. Each shape has a graph of its own: what Dynamo has seen of shapes it tells by file and line of the
code, so the next model's graph would have sizes left open, which the graph of a run in its own process has not. A whole
block must become one graph; one that cannot, or that is called in too many ways, is an error, and does not run as it
was.

NOTE [ Recompute around a graph ]
A compiled block's operators run inside of its kernels, where no dispatch mode sees them. So what lies between `keep`
and `full`, whose region runs the compiled forward again, is told to the partitioner that cuts the graph into forward
and backward; see graph_partition.py.
"""

from __future__ import annotations

import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import _pop_mode_temporarily
from torch.utils._pytree import tree_leaves

from trainfit.errors import CompileError, DeviceError, TrainfitError
from trainfit.profile import Compile, Tier
from trainfit.techniques.activation import Patched, unbound_forward
from trainfit.techniques.base import Asked, Build, Draft, Stage
from trainfit.techniques.graph_partition import partition_for
from trainfit.techniques.inductor import Compiled, SavedBytes, eager_bytes, lower, lower_without_kernels
from trainfit.techniques.recompute import RecomputePlan
from trainfit.units import format_bytes


class CompiledBlocks:
    """Compiles blocks; after tiers, which decide whether a graph is recomputed, and before FSDP wraps them."""

    stage: ClassVar[Stage] = Stage.BLOCK
    setting: ClassVar[str] = "compile"

    def choices(self, so_far: Draft, asked: Asked) -> Iterable[Compile]:
        """What was asked for; with leave to change it blocks as they are written, and a graph of each."""
        wanted: Compile = asked.settings["compile"]
        yield wanted
        if "compile" in asked.may_change and wanted.blocks == 0 and asked.hardware.count == 1:
            yield Compile(1)

    def apply(self, build: Build, setting: Compile) -> None:
        """Raises DeviceError where there is no compiler for the device."""
        if setting.blocks == 0:
            return
        is_fake = any(isinstance(parameter, FakeTensor) for parameter in build.model.parameters())
        if not is_fake:
            check_compiler(build.accelerator.device.type)
        build.compiled = Compiled()
        graphs: dict[Tier, Graphs] = {}
        for name, block in zip(build.anatomy.blocks, build.blocks):
            tier = build.graph_tiers[name]
            if tier not in graphs:
                graphs[tier] = Graphs(tier, setting.budget, build.compiled, is_fake=is_fake)
            compile_block(block, graphs[tier], name)


def compile_block(block: nn.Module, graphs: Graphs, name: str = "block") -> None:
    """Put a block's forward under the compiler, in place, inside of its recomputation if it has one."""
    plan = vars(block).get("forward")
    if isinstance(plan, RecomputePlan):
        # No operator of a graph can be seen: neither kept nor watched, and no mode is needed to look for any.
        compiled = CompiledForward(plan.forward, graphs, name)
        nothing: dict[bool, set[Any]] = {True: set(), False: set()}
        block.forward = replace(plan, forward=compiled, keep={}, watched={}, looked_at=nothing)
    else:
        block.forward = CompiledBlock(weakref.ref(block), CompiledForward(unbound_forward(block), graphs, name))


def forget_compile(block: nn.Module) -> None:
    """Undo compile_block: a model may be built again, and is tried out on fake tensors before."""
    forward = vars(block).get("forward")
    if isinstance(forward, RecomputePlan) and isinstance(forward.forward, CompiledForward):
        block.forward = replace(forward, forward=forward.forward.original)
    if isinstance(forward, CompiledBlock):
        del block.forward
        if isinstance(original := forward.forward.original, Patched):
            block.forward = original.forward


@dataclass(eq=False)
class CompiledForward:
    """A block's forward through its graph; takes the block first. Without gradients it runs as it was written."""

    original: Callable[..., Any]
    graphs: Graphs
    name: str

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Evaluation is not worth a graph of its own. And a model is tried out on fake tensors when it is taken apart:
        # kernels would read where no memory is.
        if not torch.is_grad_enabled() or self.graphs.is_fake != _any_fake((args, kwargs)):
            return self.original(block, *args, **kwargs)
        with compile_errors(self.name):
            return self.graphs(self.original, block, args, kwargs)

    def looked_after(self, block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The same of a block that keeps what it saves, with a warning where that is more than eager's."""
        graphs = self.graphs
        if graphs.is_looked_at or not torch.is_grad_enabled() or graphs.is_fake != _any_fake((args, kwargs)):
            return self(block, *args, **kwargs)
        given = [*block.parameters(), *block.buffers(), *tree_leaves((args, kwargs))]
        with SavedBytes(given) as saved:
            output = self(block, *args, **kwargs)
        graphs.is_looked_at = True
        if saved.num_bytes > graphs.done.eager_bytes:
            warnings.warn(
                f"{self.name} compiled saves {format_bytes(saved.num_bytes)} for backward, as it is written "
                f"{format_bytes(graphs.done.eager_bytes)}; use activation pointwise (--activation pointwise), or "
                "leave compile out",
                stacklevel=2,
            )
        return output


@dataclass(eq=False)
class CompiledBlock:
    """In the place of a block's forward. block: held weakly, since the block holds this."""

    block: weakref.ref[nn.Module]
    forward: CompiledForward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.block()
        assert block is not None
        return self.forward.looked_after(block, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledBlock:
        block = self.block()
        assert block is not None
        return replace(self, block=weakref.ref(deepcopy(block, memo)), forward=deepcopy(self.forward, memo))


class Graphs:
    """All that one build compiles for blocks of one tier, or of those that its graph does not care for ("keep").

    See NOTE [ One compilation ]. budget: the share of what keep's graph would save that it may save. done: what was
    compiled so far. is_looked_at: whether what a graph saves was compared with what eager code does.
    """

    def __init__(self, tier: Tier, budget: float, done: Compiled, *, is_fake: bool) -> None:
        self.partition, self.told = partition_for(tier, budget), (tier, budget if tier == "keep" else 1.0)
        self.done, self.is_fake = done, is_fake
        self.is_looked_at = tier != "keep" or budget < 1  # which is the advice that a warning would give
        copy = types.FunctionType(_run.__code__.replace(), _run.__globals__, _run.__name__)
        self._function = torch.compile(copy, backend=self._compile, fullgraph=True, dynamic=False)

    def __call__(self, forward: Any, block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not self.is_fake:
            return self._function(forward, block, args, kwargs)
        with _no_function_modes():
            return self._function(forward, block, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        return self  # the copy of a model runs the same graphs

    def _compile(self, graph: Any, inputs: Sequence[Any]) -> Any:
        begin = time.perf_counter()
        try:
            self.done.eager_bytes = max(self.done.eager_bytes, eager_bytes(graph))
            if self.is_fake:
                return lower_without_kernels(graph, inputs, self.partition, self.done, self.told)
            return lower(graph, inputs, self.partition)
        finally:
            self.done.graphs += 1
            self.done.seconds += time.perf_counter() - begin


def _any_fake(tree: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(tree))


def _run(forward: Any, block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return forward(block, *args, **kwargs)


@contextmanager
def _no_function_modes() -> Iterator[None]:
    """A rehearsal makes its tensors under a device's mode, which would become part of the graph."""
    with ExitStack() as stack:
        while torch._C._len_torch_function_stack():
            stack.enter_context(_pop_mode_temporarily())
        yield


@contextmanager
def compile_errors(name: str) -> Iterator[None]:
    """What the compiler cannot do becomes one line."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    try:
        yield
    except (TorchDynamoException, FailOnRecompileLimitHit) as error:
        inner = getattr(error, "inner_exception", error)
        if isinstance(error, FailOnRecompileLimitHit):
            inner = error.__cause__ or error  # which says what was too much
        if isinstance(inner, TrainfitError):
            raise inner from None
        reason = (str(inner).strip() or type(inner).__name__).splitlines()[0][:200]
        raise CompileError(
            f"{name} cannot be compiled as one graph ({type(inner).__name__}: {reason})",
            "leave compile out (--compile none), or see TORCH_LOGS=graph_breaks,recompiles",
        ) from error


def check_compiler(device_type: str) -> None:
    """Raises DeviceError where graphs for such a device cannot be compiled here."""
    from torch._inductor.codegen.common import get_wrapper_codegen_for_device, init_backend_registration

    init_backend_registration()
    if get_wrapper_codegen_for_device(device_type) is None:
        raise DeviceError(f"torch.compile has no backend for {device_type} here; leave compile out (--compile none)")
    if device_type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except (InvalidCxxCompiler, OSError) as error:
            raise DeviceError(
                "compile needs a C++ compiler, and none was found; install g++, name one in CXX, or leave compile out "
                "(--compile none)"
            ) from error
    elif not torch.utils._triton.has_triton():
        raise DeviceError(f"compile needs Triton for {device_type}, and there is none; leave compile out")
