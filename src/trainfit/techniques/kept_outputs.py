"""Which outputs a recompute need not make again: seen and stored in forward, handed back in recompute.

NOTE [ Looking only where there is something to see ]
Operators are seen by a dispatch mode, which costs several microseconds for each of the hundred operators of a block.
The first call of a block runs under it whole, and notes which functions (F.linear, F.scaled_dot_product_attention) led
to operators that were kept or guarded. Later calls run under a function mode, which costs less than one microsecond a
function, and turn the dispatch mode on only inside those functions; where there were none, under no mode at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from trainfit.errors import RecomputeError
from trainfit.techniques.deferred import Chain
from trainfit.techniques.offload_saved import unpack_all
from trainfit.techniques.surroundings import BufferWatch, same_state

if TYPE_CHECKING:
    from trainfit.techniques.recompute import Region

LATER: Literal["later"] = (
    "later"  # not stored, and put off in recompute: see NOTE [ Operators that nobody asks for ] in deferred.py
)
Verdict = bool | Literal["later"]
# (arguments, output, how many times the operator has run in this region, this time included) -> whether to store it
Rule = Callable[[tuple[Any, ...], Any, int], Verdict]
KeepRules = Mapping[Any, Rule]

ANYWHERE = object()  # stands for code outside of any function
WHOLE: set[Any] = {ANYWHERE}

LIKELY_CAUSES = (
    "likely causes: a key-value cache that the first pass filled (use_cache=False), or branches that depend on state; "
    "set this block's activation tier to keep"
)


@dataclass
class Kept:
    """An operator whose output may replace its second run; tensors is None where the rule said no, or LATER.

    random_after: where the operator left the generators, if it drew from them: a replay must leave them there too.
    is_away: tensors have been offloaded, as they were.
    """

    operator: Any
    tensors: Any
    versions: tuple[int, ...]
    slots_before: int
    random_after: tuple[Tensor, ...] | None = None
    is_away: bool = False
    is_put_off: bool = False


class OperatorMode(TorchDispatchMode):
    """Sees the operators whose outputs may be stored, numbered alike in forward and recompute."""

    def __init__(self, region: Region) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.region = region
        self.rules = region.plan.rules

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the guard that this asks for costs a third of what a call of the mode does

    def may_store(self, func: Any, kwargs: dict[str, Any] | None) -> bool:
        """Kept by the tier; or routing, or random numbers that no stash of generators can bring back."""
        # One look-up: an operator's hash is computed in Python.
        return func in self.rules or (kwargs is not None and kwargs.get("generator") is not None)


class KeepMode(OperatorMode):
    """Forward: stores the outputs that the tier keeps. learning is told where something was found."""

    def __init__(self, region: Region, buffers: BufferWatch, learning: CurrentFunction | None) -> None:
        super().__init__(region)
        self.buffers = buffers
        self.learning = learning
        self.runs: Counter[Any] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        store = self.may_store(func, kwargs)
        if self.buffers.any and func._schema.is_mutable and args and self.buffers.before_write(args[0]):
            self._found_something()
        if not store:
            return func(*args, **(kwargs or {}))
        before = self._random_state(func)
        output = func(*args, **(kwargs or {}))
        self.runs[func] += 1
        rule = self.rules.get(func)
        verdict = True if rule is None else rule(args, output, self.runs[func])
        self._store(func, output, verdict, random_before=before)
        return output

    def _random_state(self, func: Any) -> tuple[Tensor, ...] | None:
        if self.region.random_state is None or torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        return self.region.plan.random.get_state()

    def _store(self, func: Any, output: Any, verdict: Verdict, *, random_before: tuple[Tensor, ...] | None) -> None:
        self._found_something()
        kept = Kept(func, None, (), len(self.region.slots), is_put_off=verdict == LATER)
        self.region.kept.append(kept)
        if not verdict or kept.is_put_off:
            return
        # Choices and private noise are small, cannot be made again, and are often changed in place: store a copy.
        copy = _aliased if func in self.region.plan.keep and not func._schema.is_mutable else _cloned
        kept.tensors = copy(output) if isinstance(output, Tensor) else tree_map_only(Tensor, copy, output)
        kept.versions = versions_of(kept.tensors)
        if random_before is not None:
            after = self.region.plan.random.get_state()
            kept.random_after = None if same_state(random_before, after) else after

    def _found_something(self) -> None:
        if self.learning is not None:
            self.learning.found.add(self.learning.function or ANYWHERE)


class ReplayMode(OperatorMode):
    """Recompute: operators that were kept return what was stored."""

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        self.position = 0
        self.chain = Chain(region.plan.name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.chain.is_running or not self.may_store(func, kwargs) or self.position >= len(self.region.kept):
            return func(*args, **(kwargs or {}))
        kept = self.region.kept[self.position]
        self.position += 1
        if kept.operator is not func:
            raise RecomputeError(
                f"{self.region.plan.name}: forward ran {kept.operator} where recompute runs {func}; {LIKELY_CAUSES}"
            )
        if kept.is_put_off:
            return self.chain.put_off(func, args, kwargs or {})
        tensors, kept.tensors = kept.tensors, None
        kept.is_away, is_away = False, kept.is_away  # once: a second recompute runs the operator
        # An output that was overwritten after its operator ran (an in-place activation) is made again, and so is one
        # whose memory was given up since (a weight's cast under cast "block").
        if is_away:
            tensors = unpack_all(tensors)
        elif tensors is None or versions_of(tensors) != kept.versions or _is_emptied(tensors):
            return func(*args, **(kwargs or {}))
        if kept.random_after is not None:
            self.region.plan.random.set_state(kept.random_after)
        return args[0].copy_(tensors) if func._schema.is_mutable else tensors


class CurrentFunction(TorchFunctionMode):
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


class InsideFunctions(TorchFunctionMode):
    """Turns a dispatch mode on inside some functions only."""

    def __init__(self, mode: OperatorMode, functions: set[Any]) -> None:
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


def _is_emptied(tree: Any) -> bool:
    """Whether a tensor's memory was given up. Of DTensors and the like the parts inside come here."""
    plain = [leaf for leaf in tree_leaves(tree) if type(leaf) is Tensor or isinstance(leaf, FakeTensor)]
    return any(tensor.numel() and not tensor.untyped_storage().size() for tensor in plain)


def versions_of(tree: Any) -> tuple[int, ...]:
    if isinstance(tree, Tensor):
        return (tree._version,)
    versions: list[int] = []
    tree_map_only(Tensor, lambda tensor: versions.append(tensor._version), tree)
    return tuple(versions)
