"""Throw away what a block's forward saved, and make it again when backward asks for it.

NOTE [ One region ]
A region is one forward call of one block.
  forward    Every tensor that autograd saves becomes an empty _Slot. Outputs that the tier keeps (`KeepRules`) are
             stored beside, in the order in which their operators ran.
  backward   The first slot that is asked for runs the block again. Kept operators return what was stored, the others
             run; every tensor that autograd saves now fills the slot of the same number. The last slot that is needed
             stops the run, so operators behind it never run twice, and outputs kept only for them are dropped at the
             end of forward already.
A slot is owned by the autograd node that saved it, so its value dies when that node has run, as in plain training.
Parameters are never put into slots: they live anyway.

NOTE [ Looking only where there is something to see ]
Operators are seen by a dispatch mode, which costs several microseconds for each of the hundred operators of a block.
The first call of a block runs under it whole, and notes which functions (F.linear, F.scaled_dot_product_attention) led
to operators that were kept or guarded. Later calls run under a function mode, which costs less than one microsecond a
function, and turn the dispatch mode on only inside those functions; where there were none, under no mode at all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from trainfit.errors import RecomputeError
from trainfit.techniques.surroundings import (
    Autocast,
    BufferWatch,
    RandomState,
    WrittenBuffer,
    buffers_as_in_forward,
    random_state,
    same_state,
)

_ANYWHERE = object()  # stands for code outside of any function
_WHOLE: set[Any] = {_ANYWHERE}

Rule = Callable[[tuple[Any, ...], Any], bool]
KeepRules = Mapping[Any, Rule]


class _StopRecompute(Exception):  # noqa: N818
    """Everything that backward needs is there again."""


class _Slot:
    """What autograd holds in place of a saved tensor."""

    __slots__ = ("__weakref__", "region", "value")

    def __init__(self, region: Region) -> None:
        self.region = region
        self.value: Tensor | None = None


@dataclass
class _Kept:
    """An operator whose output may replace its second run; tensors is None where the rule said no.

    random_after: where the operator left the generators, if it drew from them: a replay must leave them there too.
    """

    operator: Any
    tensors: Any
    versions: tuple[int, ...]
    slots_before: int
    random_after: tuple[Tensor, ...] | None = None


@dataclass(eq=False)
class RecomputePlan:
    """How one block is recomputed; shared by all its calls, and put in the place of its forward.

    block: held weakly, since the block holds the plan: a model must die with its last reference.
    forward: the block's own, unbound: takes the block first.
    keep: operators whose outputs are stored instead of recomputed.
    watched: operators whose outputs are stored because a second run may decide otherwise.
    looked_at: by training flag, the functions in which the first call found something.
        See NOTE [ Looking only where there is something to see ].
    """

    name: str
    block: weakref.ref[nn.Module]
    forward: Callable[..., Any]
    device_type: str
    random: RandomState
    keep: KeepRules
    watched: KeepRules
    looked_at: dict[bool, set[Any]] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.block()
        assert block is not None
        # Gate on grad mode, not on module.training: a frozen block in eval mode saves tensors too.
        if not torch.is_grad_enabled():
            return self.forward(block, *args, **kwargs)
        return Region(self, block, args, kwargs).run()

    def __deepcopy__(self, memo: dict[int, Any]) -> RecomputePlan:
        # A copied block comes here while it is copied, so memo has it already.
        block = self.block()
        assert block is not None
        return replace(self, block=weakref.ref(deepcopy(block, memo)), looked_at={})

    def looking(self, mode: _OperatorMode, training: bool) -> AbstractContextManager[Any]:
        """The mode, turned on where there is something to see."""
        functions = self.looked_at.get(training, _WHOLE)
        if _ANYWHERE in functions:
            return mode
        return _InsideFunctions(mode, functions) if functions else nullcontext()


class Region:
    """One call of one block. See NOTE [ One region ]."""

    def __init__(self, plan: RecomputePlan, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.plan, self.block = plan, block
        self.inputs = tree_map_only(Tensor, _detached, (args, kwargs))
        self.input_versions = _versions(self.inputs)
        # A rehearsal draws no numbers, and the states would come out fake.
        self.random_state = None if _any_fake(self.inputs) else plan.random.get_state()
        self.autocasts = {kind: Autocast.now(kind) for kind in {plan.device_type, "cpu"}}
        self.slots: list[weakref.ref[_Slot]] = []
        self.shapes: list[tuple[torch.Size, torch.dtype]] = []
        self.kept: list[_Kept] = []
        self.buffers: list[WrittenBuffer] = []
        self._original = (args, kwargs)

    def run(self) -> Any:
        """The block's forward, with nothing saved but inputs and kept outputs."""
        args, kwargs = self._original
        del self._original
        plan = self.plan
        buffers = BufferWatch(self.block)
        training = self.block.training
        self.training = training
        learning = None if training in plan.looked_at else _CurrentFunction()
        mode = _KeepMode(self, buffers, learning)
        with saved_tensors_hooks(self._pack, _unpack), plan.looking(mode, training), learning or nullcontext():
            output = plan.forward(self.block, *args, **kwargs)
        self.buffers = buffers.written()
        if learning is not None:
            plan.looked_at[training] = learning.found
        if self.random_state is not None and same_state(self.random_state, plan.random.get_state()):
            self.random_state = None  # nothing random ran: recompute need not touch the generators
        while self.kept and self.kept[-1].slots_before == len(self.slots):
            self.kept.pop()  # recompute stops before these would be asked for
        return output

    def _pack(self, tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter):
            return tensor
        slot = _Slot(self)
        self.slots.append(weakref.ref(slot))
        self.shapes.append((tensor.shape, tensor.dtype))
        return slot

    def recompute(self) -> None:
        """Fill every slot that is still alive."""
        if _versions(self.inputs) != self.input_versions:
            raise RecomputeError(
                f"{self.plan.name}: an input was changed in place after forward, so it cannot be recomputed; "
                "set this block's activation tier to keep"
            )
        args, kwargs = self.inputs
        filler = _Filler(self)
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if self.random_state is not None:
                stack.enter_context(random_state(self.plan.random, self.random_state))
            stack.enter_context(buffers_as_in_forward(self.buffers))
            for autocast in self.autocasts.values():
                stack.enter_context(autocast.restored())
            stack.enter_context(saved_tensors_hooks(filler.pack, filler.unpack))
            if self.kept:
                stack.enter_context(self.plan.looking(_ReplayMode(self), self.training))
            try:
                self.plan.forward(self.block, *args, **kwargs)
            except _StopRecompute:
                return
        if filler.position < filler.stop:
            raise RecomputeError(
                f"{self.plan.name}: forward saved {len(self.shapes)} tensors, recompute only {filler.position}; "
                f"{_LIKELY_CAUSES}"
            )


_LIKELY_CAUSES = (
    "likely causes: a key-value cache that the first pass filled (use_cache=False), or branches that depend on state; "
    "set this block's activation tier to keep"
)


class _Filler:
    """Pack hook of a recompute: the n-th saved tensor fills the n-th slot."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.position = 0
        alive = [index for index, slot in enumerate(region.slots) if slot() is not None]
        self.stop = alive[-1] + 1 if alive else 0

    def pack(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor
        region, index = self.region, self.position
        if index >= len(region.shapes) or region.shapes[index] != (tensor.shape, tensor.dtype):
            raise RecomputeError(self._mismatch(tensor, index))
        self.position += 1
        tensor = tensor.detach()
        slot = region.slots[index]()
        if slot is not None and slot.value is None:
            slot.value = tensor
        if self.position == self.stop:
            raise _StopRecompute
        return tensor

    def unpack(self, tensor: Tensor) -> Tensor:
        return tensor

    def _mismatch(self, tensor: Tensor, index: int) -> str:
        got = f"{tuple(tensor.shape)} {tensor.dtype}"
        if index >= len(self.region.shapes):
            return f"{self.region.plan.name}: recompute saved more than forward's {index} tensors; {_LIKELY_CAUSES}"
        shape, dtype = self.region.shapes[index]
        return (
            f"{self.region.plan.name}: saved tensor {index} was {tuple(shape)} {dtype} in forward and is {got} in "
            f"recompute; {_LIKELY_CAUSES}"
        )


def _unpack(slot: Any) -> Tensor:
    if isinstance(slot, Tensor):
        return slot
    if torch.is_grad_enabled():
        raise RecomputeError(
            f"{slot.region.plan.name}: second derivatives (create_graph=True) do not go through a recomputed block; "
            "set this block's activation tier to keep"
        )
    if slot.value is None:
        slot.region.recompute()
    assert slot.value is not None
    value: Tensor = slot.value
    return value


class _OperatorMode(TorchDispatchMode):
    """Sees the operators whose outputs may be stored, numbered alike in forward and recompute."""

    def __init__(self, region: Region) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.region = region
        self.rules = region.plan.keep
        self.watched = region.plan.watched

    def may_store(self, func: Any, kwargs: dict[str, Any] | None) -> bool:
        """Kept by the tier; or routing, or random numbers that no stash of generators can bring back."""
        random = kwargs is not None and kwargs.get("generator") is not None
        return func in self.rules or func in self.watched or random


class _KeepMode(_OperatorMode):
    """Forward: stores the outputs that the tier keeps. learning is told where something was found."""

    def __init__(self, region: Region, buffers: BufferWatch, learning: _CurrentFunction | None) -> None:
        super().__init__(region)
        self.buffers = buffers
        self.learning = learning

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        store = self.may_store(func, kwargs)
        if func._schema.is_mutable and args and self.buffers.before_write(args[0]):
            self._found_something()
        if not store:
            return func(*args, **(kwargs or {}))
        before = self._random_state(func)
        output = func(*args, **(kwargs or {}))
        rule = self.rules.get(func) or self.watched.get(func)
        self._store(func, output, keep=rule is None or rule(args, output), random_before=before)
        return output

    def _random_state(self, func: Any) -> tuple[Tensor, ...] | None:
        if self.region.random_state is None or torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        return self.region.plan.random.get_state()

    def _store(self, func: Any, output: Any, *, keep: bool, random_before: tuple[Tensor, ...] | None) -> None:
        self._found_something()
        kept = _Kept(func, None, (), len(self.region.slots))
        self.region.kept.append(kept)
        if not keep:
            return
        # Choices and private noise are small, cannot be made again, and are often changed in place: store a copy.
        copy = _aliased if func in self.rules and not func._schema.is_mutable else _cloned
        kept.tensors = copy(output) if isinstance(output, Tensor) else tree_map_only(Tensor, copy, output)
        kept.versions = _versions(kept.tensors)
        if random_before is not None:
            after = self.region.plan.random.get_state()
            kept.random_after = None if same_state(random_before, after) else after

    def _found_something(self) -> None:
        if self.learning is not None:
            self.learning.found.add(self.learning.function or _ANYWHERE)


class _ReplayMode(_OperatorMode):
    """Recompute: operators that were kept return what was stored."""

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        self.position = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.may_store(func, kwargs) or self.position >= len(self.region.kept):
            return func(*args, **(kwargs or {}))
        kept = self.region.kept[self.position]
        self.position += 1
        if kept.operator is not func:
            raise RecomputeError(
                f"{self.region.plan.name}: forward ran {kept.operator} where recompute runs {func}; {_LIKELY_CAUSES}"
            )
        tensors, kept.tensors = kept.tensors, None
        # An output that was overwritten after its operator ran (an in-place activation) is made again.
        if tensors is None or _versions(tensors) != kept.versions:
            return func(*args, **(kwargs or {}))
        if kept.random_after is not None:
            self.region.plan.random.set_state(kept.random_after)
        return args[0].copy_(tensors) if func._schema.is_mutable else tensors


class _CurrentFunction(TorchFunctionMode):
    """Knows the outermost function of torch that is running, and collects those in which something was found."""

    def __init__(self) -> None:
        super().__init__()
        self.function: Any = None
        self.found: set[Any] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.function = func
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.function = None


class _InsideFunctions(TorchFunctionMode):
    """Turns a dispatch mode on inside some functions only."""

    def __init__(self, mode: _OperatorMode, functions: set[Any]) -> None:
        super().__init__()
        self.mode, self.functions = mode, functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in self.functions:
            return func(*args, **kwargs) if kwargs else func(*args)
        with self.mode:
            return func(*args, **kwargs) if kwargs else func(*args)


def _aliased(tensor: Tensor) -> Tensor:
    # A dispatch mode runs below the key that makes views share a version counter; without it a later in-place
    # change of the output would go unseen.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _cloned(tensor: Tensor) -> Tensor:
    return tensor.clone()


def _detached(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return tensor  # pack hooks tell parameters from other tensors, so recompute must see one too
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _versions(tree: Any) -> tuple[int, ...]:
    if isinstance(tree, Tensor):
        return (tree._version,)
    versions: list[int] = []
    tree_map_only(Tensor, lambda tensor: versions.append(tensor._version), tree)
    return tuple(versions)


def _any_fake(tree: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(tree))
