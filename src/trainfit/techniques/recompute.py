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
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from trainfit.errors import RecomputeError

Rule = Callable[[tuple[Any, ...], Any], bool]
KeepRules = Mapping[Any, Rule]


class RandomState(Protocol):
    """Random number generators of host and device, as hardware's facade offers them."""

    def get_state(self) -> tuple[Tensor, ...]: ...
    def set_state(self, state: tuple[Tensor, ...]) -> None: ...


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
    """An operator whose output may replace its second run; tensors is None where the rule said no."""

    operator: Any
    tensors: Any
    versions: tuple[int, ...]
    slots_before: int


@dataclass(frozen=True)
class _Autocast:
    """Autocast as it stood in forward; backward may run outside of it, or on another thread."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool

    @classmethod
    def now(cls, device_type: str) -> _Autocast:
        return cls(
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_cache_enabled(),
        )

    def restored(self) -> torch.autocast:
        return torch.autocast(
            self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache_enabled
        )


@dataclass
class RecomputePlan:
    """How one block is recomputed; shared by all its calls.

    keep: operators whose outputs are stored instead of recomputed.
    watch: run forward under a dispatch mode even where keep is empty, to see routing and private generators.
    """

    name: str
    block: nn.Module
    forward: Callable[..., Any]
    device_type: str
    random: RandomState
    keep: KeepRules
    watched: KeepRules
    needs_mode: bool = True
    writes_buffers: bool = field(default=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Gate on grad mode, not on module.training: a frozen block in eval mode saves tensors too.
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return Region(self, args, kwargs).run()


class Region:
    """One call of one block. See NOTE [ One region ]."""

    def __init__(self, plan: RecomputePlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.plan = plan
        self.inputs = tree_map_only(Tensor, _detached, (args, kwargs))
        self.input_versions = _versions(self.inputs)
        # A rehearsal draws no numbers, and the states would come out fake.
        self.random_state = None if _any_fake(self.inputs) else plan.random.get_state()
        self.autocasts = {kind: _Autocast.now(kind) for kind in {plan.device_type, "cpu"}}
        self.slots: list[weakref.ref[_Slot]] = []
        self.shapes: list[tuple[torch.Size, torch.dtype]] = []
        self.kept: list[_Kept] = []
        self._original = (args, kwargs)

    def run(self) -> Any:
        """The block's forward, with nothing saved but inputs and kept outputs."""
        args, kwargs = self._original
        del self._original
        plan = self.plan
        buffers = _buffer_versions(plan.block)
        mode = _KeepMode(self) if plan.needs_mode else nullcontext()
        with saved_tensors_hooks(self._pack, _unpack), mode:
            output = plan.forward(*args, **kwargs)
        if isinstance(mode, _KeepMode) and not plan.keep and not mode.saw_watched:
            plan.needs_mode = False  # nothing to keep or guard was seen: later calls go without the mode
        if buffers != _buffer_versions(plan.block):
            plan.writes_buffers = True
        if self.random_state is not None and _equal(self.random_state, plan.random.get_state()):
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
                stack.enter_context(_random_state(self.plan.random, self.random_state))
            stack.enter_context(_buffers_restored(self.plan))
            for autocast in self.autocasts.values():
                stack.enter_context(autocast.restored())
            stack.enter_context(saved_tensors_hooks(filler.pack, filler.unpack))
            if self.kept:
                stack.enter_context(_ReplayMode(self))
            try:
                self.plan.forward(*args, **kwargs)
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
    if slot.value is None:
        slot.region.recompute()
    assert slot.value is not None
    value: Tensor = slot.value
    return value


class _KeepMode(TorchDispatchMode):
    """Forward: stores the outputs that the tier keeps."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region
        self.rules = region.plan.keep
        self.watched = region.plan.watched
        self.saw_watched = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if (rule := self.rules.get(func)) is not None:
            self._store(func, output, rule(args, output))
        elif (rule := self.watched.get(func)) is not None or (kwargs and kwargs.get("generator") is not None):
            # Routing that decides other shapes, and random numbers that no stash of generators can bring back.
            self.saw_watched = True
            self._store(func, output, rule is None or rule(args, output))
        return output

    def _store(self, func: Any, output: Any, keep: bool) -> None:
        kept = _Kept(func, None, (), len(self.region.slots))
        if keep:
            copy = _cloned if func._schema.is_mutable else _aliased
            kept.tensors = tree_map_only(Tensor, copy, output)
            kept.versions = _versions(kept.tensors)
        self.region.kept.append(kept)


class _ReplayMode(TorchDispatchMode):
    """Recompute: operators that were kept return what was stored."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region
        self.rules = region.plan.keep
        self.watched = region.plan.watched
        self.position = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        stored = func in self.rules or func in self.watched or (kwargs and kwargs.get("generator") is not None)
        if not stored or self.position >= len(self.region.kept):
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
        if func._schema.is_mutable:
            return args[0].copy_(tensors)
        return tensors


def _aliased(tensor: Tensor) -> Tensor:
    # A dispatch mode runs below the key that makes views share a version counter; without it a later in-place
    # change of the output would go unseen.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # type: ignore[attr-defined]
        return tensor.detach()


def _cloned(tensor: Tensor) -> Tensor:
    return tensor.clone()


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _versions(tree: Any) -> tuple[int, ...]:
    versions: list[int] = []
    tree_map_only(Tensor, lambda tensor: versions.append(tensor._version), tree)
    return tuple(versions)


def _any_fake(tree: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(tree))


def _equal(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second))


def _buffer_versions(block: nn.Module) -> dict[str, tuple[int, int]]:
    return {name: (id(buffer), buffer._version) for name, buffer in block.named_buffers()}


class _random_state:  # noqa: N801
    """The generators as they stood in forward, for the length of a recompute."""

    def __init__(self, random: RandomState, state: tuple[Tensor, ...]) -> None:
        self.random, self.state = random, state

    def __enter__(self) -> None:
        self.outer = self.random.get_state()
        self.random.set_state(self.state)

    def __exit__(self, *_: object) -> None:
        self.random.set_state(self.outer)


class _buffers_restored:  # noqa: N801
    """Buffers that a block writes (token counters, running statistics) must not move twice for one batch."""

    def __init__(self, plan: RecomputePlan) -> None:
        self.plan = plan

    def __enter__(self) -> None:
        self.saved = [
            (module, name, buffer, buffer.clone())
            for module in (self.plan.block.modules() if self.plan.writes_buffers else ())
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for module, name, buffer, value in self.saved:
                buffer.copy_(value)
                module._buffers[name] = buffer
