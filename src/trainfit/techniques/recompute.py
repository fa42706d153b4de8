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
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from trainfit.errors import RecomputeError
from trainfit.profile import CHOSEN_TIERS, Tier
from trainfit.techniques.deferred import Deferred
from trainfit.techniques.kept_outputs import (
    ANYWHERE,
    LIKELY_CAUSES,
    WHOLE,
    CurrentFunction,
    InsideFunctions,
    KeepMode,
    KeepRules,
    Kept,
    OperatorMode,
    ReplayMode,
    versions_of,
)
from trainfit.techniques.offload import Shipment, Stash
from trainfit.techniques.offload_saved import unpack_all
from trainfit.techniques.surroundings import (
    Autocast,
    BufferWatch,
    RandomState,
    WrittenBuffer,
    buffers_as_in_forward,
    random_state,
    same_state,
)


class _StopRecompute(Exception):  # noqa: N818
    """Everything that backward needs is there again."""


class _Slot:
    """What autograd holds in place of a saved tensor."""

    __slots__ = ("__weakref__", "region", "value")

    def __init__(self, region: Region) -> None:
        self.region = region
        self.value: Tensor | None = None


class Beside(Protocol):
    """Recomputes regions ahead of time, beside the backward of others; see recompute_ahead.py."""

    def before(self, region: Region) -> weakref.ref[Region] | None:
        """A region begins its forward: the one whose backward comes right after its own."""

    def start(self, region: Region) -> None:
        """Recompute it on a stream of its own."""


@dataclass(eq=False)
class RecomputePlan:
    """How one block is recomputed; shared by all its calls, and put in the place of its forward.

    block: held weakly, since the block holds the plan: a model must die with its last reference.
    forward: the block's own, unbound: takes the block first.
    keep: operators whose outputs are stored instead of recomputed.
    watched: operators whose outputs are stored because a second run may decide otherwise.
    looked_at: by training flag, the functions in which the first call found something.
        See NOTE [ Looking only where there is something to see ] in kept_outputs.py.
    tier: whose rules keep has.
    beside, number: what recomputes regions ahead of time, and the block's number to it.
    stash: where inputs and kept outputs go between forward and backward; None leaves them on the device.
    """

    name: str
    block: weakref.ref[nn.Module]
    forward: Callable[..., Any]
    device_type: str
    random: RandomState
    keep: KeepRules
    watched: KeepRules
    looked_at: dict[bool, set[Any]] = field(default_factory=dict)
    tier: Tier = "full"
    beside: Beside | None = None
    number: int = 0
    stash: Stash | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.block()
        assert block is not None
        # Gate on grad mode, not on module.training: a frozen block in eval mode saves tensors too.
        if not torch.is_grad_enabled():
            return self.forward(block, *args, **kwargs)
        if not asks_for_gradients(block, (args, kwargs)):
            return self.forward(block, *args, **kwargs)  # frozen, behind nothing that trains: nothing is saved
        return Region(self, block, args, kwargs).run()

    def __deepcopy__(self, memo: dict[int, Any]) -> RecomputePlan:
        # A copied block comes here while it is copied, so memo has it already.
        block = self.block()
        assert block is not None
        twin, forward = weakref.ref(deepcopy(block, memo)), deepcopy(self.forward, memo)
        return replace(self, block=twin, forward=forward, looked_at={})

    @cached_property
    def rules(self) -> KeepRules:
        """keep and watched as one table."""
        return {**self.watched, **self.keep}

    def looking(self, mode: OperatorMode, training: bool) -> AbstractContextManager[Any]:
        """The mode, turned on where there is something to see."""
        functions = self.looked_at.get(training, WHOLE)
        if ANYWHERE in functions:
            return mode
        return InsideFunctions(mode, functions) if functions else nullcontext()


class Region:
    """One call of one block. See NOTE [ One region ]."""

    def __init__(self, plan: RecomputePlan, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.plan, self.block = plan, block
        self.inputs = tree_map_only(Tensor, _detached, (args, kwargs))
        self.input_versions = versions_of(self.inputs)
        # A rehearsal draws no numbers, and the states would come out fake.
        self.random_state = None if _any_fake(self.inputs) else plan.random.get_state()
        self.autocasts = {kind: Autocast.now(kind) for kind in {plan.device_type, "cpu"}}
        self.slots: list[weakref.ref[_Slot]] = []
        self.shapes: list[tuple[torch.Size, torch.dtype]] = []
        self.kept: list[Kept] = []
        self.buffers: list[WrittenBuffer] = []
        self.before = None if plan.beside is None else plan.beside.before(self)
        self.is_recomputed = False
        self.training = block.training
        self.started: Callable[[], None] | None = None  # ahead of time: waits until it is done
        self._original = (args, kwargs)

    def run(self) -> Any:
        """The block's forward, with nothing saved but inputs and kept outputs."""
        args, kwargs = self._original
        del self._original
        plan = self.plan
        buffers = BufferWatch(self.block)
        training = self.training
        learning = None if training in plan.looked_at else CurrentFunction()
        mode = KeepMode(self, buffers, learning)
        with saved_tensors_hooks(self._pack, _unpack), plan.looking(mode, training), learning or nullcontext():
            output = plan.forward(self.block, *args, **kwargs)
        self.buffers = buffers.written()
        if learning is not None:
            plan.looked_at[training] = learning.found
        if self.random_state is not None and same_state(self.random_state, plan.random.get_state()):
            self.random_state = None  # nothing random ran: recompute need not touch the generators
        while self.kept and self.kept[-1].slots_before == len(self.slots):
            self.kept.pop()  # recompute stops before these would be asked for
        if plan.stash is not None and plan.stash.current is not None:  # else a backward, which wants it at once
            self._send_away(plan.stash.current)
        return output

    def _send_away(self, shipment: Shipment) -> None:
        if versions_of(self.inputs) == self.input_versions:  # else recompute will say so
            self.inputs = shipment.pack_all(self.inputs)
            self.input_versions = versions_of(self.inputs)
        for kept in self.kept:
            if kept.tensors is not None and versions_of(kept.tensors) == kept.versions:
                kept.tensors, kept.is_away = shipment.pack_all(kept.tensors), True

    def _pack(self, tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter):
            return tensor
        slot = _Slot(self)
        self.slots.append(weakref.ref(slot))
        self.shapes.append((tensor.shape, tensor.dtype))
        return slot

    @property
    def costs_like(self) -> Tier:
        """Whose operators have as much around them: functions are looked at where something may be stored."""
        tier = self.plan.tier
        if tier in CHOSEN_TIERS or tier == "selective":
            return "pointwise"
        if tier not in ("full", "recompute_core"):
            return tier
        # A router's choices are stored even where nothing else is.
        return "attention" if self.kept or self.plan.looked_at.get(self.training) else "full"

    def open(self) -> None:
        """Backward asks for the first slot: fill all, or wait until they are, and let the next region begin."""
        started, self.started = self.started, None
        if started is None:
            self.recompute()
        else:
            started()
        following = None if self.before is None else self.before()
        if following is not None and not following.is_recomputed and self.plan.beside is not None:
            self.plan.beside.start(following)

    def recompute(self) -> None:
        """Fill every slot that is still alive."""
        self.is_recomputed = True
        if versions_of(self.inputs) != self.input_versions:
            raise RecomputeError(
                f"{self.plan.name}: an input was changed in place after forward, so it cannot be recomputed; "
                "set this block's activation tier to keep"
            )
        args, kwargs = self.inputs if self.plan.stash is None else unpack_all(self.inputs)
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
                stack.enter_context(self.plan.looking(ReplayMode(self), self.training))
            try:
                self.plan.forward(self.block, *args, **kwargs)
            except _StopRecompute:
                return
        if filler.position < filler.stop:
            raise RecomputeError(
                f"{self.plan.name}: forward saved {len(self.shapes)} tensors, recompute only {filler.position}; "
                f"{LIKELY_CAUSES}"
            )


class _Filler:
    """Pack hook of a recompute: the n-th saved tensor fills the n-th slot."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.costs_like = region.costs_like
        self.position = 0
        alive = [index for index, slot in enumerate(region.slots) if slot() is not None]
        self.stop = alive[-1] + 1 if alive else 0

    def pack(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor
        region, index = self.region, self.position
        slot = region.slots[index]() if index < len(region.slots) else None
        # Its dtype may not be that of its value: a CPU gives a norm's statistics that of half weights.
        is_idle = isinstance(tensor, Deferred) and slot is None
        if isinstance(tensor, Deferred) and slot is not None:
            tensor = tensor.value()
        if index >= len(region.shapes) or (not is_idle and region.shapes[index] != (tensor.shape, tensor.dtype)):
            raise RecomputeError(self._mismatch(tensor, index))
        self.position += 1
        if is_idle:
            return tensor
        tensor = tensor.detach()
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
            return f"{self.region.plan.name}: recompute saved more than forward's {index} tensors; {LIKELY_CAUSES}"
        shape, dtype = self.region.shapes[index]
        return (
            f"{self.region.plan.name}: saved tensor {index} was {tuple(shape)} {dtype} in forward and is {got} in "
            f"recompute; {LIKELY_CAUSES}"
        )


def priced_tier() -> Tier | None:
    """The tier whose overheads operators have that run now, by the innermost block; None where a block saves all.

    The hooks through which autograd's saved tensors go tell it.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    tier: Tier | None = getattr(getattr(hooks[0], "__self__", None), "costs_like", None) if hooks else None
    return tier


def _unpack(slot: Any) -> Tensor:
    if isinstance(slot, Tensor):
        return slot
    if torch.is_grad_enabled():
        raise RecomputeError(
            f"{slot.region.plan.name}: second derivatives (create_graph=True) do not go through a recomputed block; "
            "set this block's activation tier to keep"
        )
    if slot.value is None or slot.region.started is not None:
        slot.region.open()
    assert slot.value is not None
    value: Tensor = slot.value
    return value


def _detached(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return tensor  # pack hooks tell parameters from other tensors, so recompute must see one too
    return tensor.detach().requires_grad_(tensor.requires_grad)


def asks_for_gradients(block: nn.Module, inputs: Any) -> bool:
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(inputs)):
        return True
    return any(parameter.requires_grad for parameter in block.parameters())


def _any_fake(tree: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(tree))
