"""StorageTracker: watches every storage of a step live and die.

NOTE [ Fake gradients are added in place ]
Autograd adds a second gradient of a tensor into the first one's memory when nobody else holds that (a view's base
counts as somebody), but never does so for tensor subclasses, which fake tensors are: there it makes a new tensor and
lets the old one die. The tracker recognises these additions (two tensors added inside backward, with grad mode off,
the first no view and dying before the next operator) and counts them as the in-place additions that real tensors get.
Source: can_accumulate_inplace in torch/csrc/autograd/input_buffer.cpp.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.profile import CATEGORIES, PHASES, Category, Phase, Profile
from trainfit.rehearsal.operators import OperatorCost, fake_result, temporary_bytes

_ADD = torch.ops.aten.add.Tensor
_DEVICE = torch.ops.prim.device.default


@dataclass(frozen=True)
class Event:
    """A storage is born (num_bytes > 0) or dies (num_bytes < 0)."""

    storage: int
    num_bytes: int
    phase: Phase
    operator: str
    in_place_of: int | None = None


@dataclass
class _Peak:
    total: int = 0
    event: Event | None = None
    position: int = -1


@dataclass
class StorageTracker(TorchDispatchMode):
    """Counts storages, not tensors: a view pins its whole base.

    rounding: bytes to which the device's allocator rounds (1 on a CPU).
    cost: seconds that an operator should take, or None to count none.
    inside_operators: count what CPU kernels allocate inside; other devices have other kernels.
    """

    rounding: int = 1
    cost: OperatorCost | None = None
    inside_operators: bool = True
    phase: Phase = "forward"
    events: list[Event] = field(default_factory=list)
    seconds: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, tuple[int, int, weakref.ref[Any]]] = {}
        self._names: dict[int, Category] = {}
        self._next = 0
        self._operator = "start"

    def observe(self, phase: Phase) -> None:
        """The step's observer: from here on another phase runs."""
        self.phase = phase

    def register(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Name what is live already, or what a storage turned out to be."""
        for tensor in tensors:
            self._names[self._track(tensor, None)] = category

    def _track(self, tensor: Tensor, in_place_of: int | None) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        num_bytes = -(-storage.nbytes() // self.rounding) * self.rounding
        if key in self._live:
            identity, before, reference = self._live[key]
            if num_bytes == before:
                return identity
            self.events.append(Event(identity, -before, self.phase, self._operator))  # resized in place
        else:
            reference = weakref.ref(storage, self._dies(key))
        identity = self._next
        self._next += 1
        self._live[key] = identity, num_bytes, reference
        self.events.append(Event(identity, num_bytes, self.phase, self._operator, in_place_of))
        return identity

    def _dies(self, key: int) -> Callable[[Any], None]:
        def callback(_: Any) -> None:
            identity, num_bytes, _reference = self._live.pop(key)
            self.events.append(Event(identity, -num_bytes, self.phase, self._operator))

        return callback

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:
            return func(*args)
        output = fake_result(func, args, kwargs or {})
        self._operator = func._schema.name
        in_place_of = self._accumulates_into(func, args)
        for leaf in output if isinstance(output, list | tuple) else (output,):
            for tensor in leaf if isinstance(leaf, list | tuple) else (leaf,):
                if isinstance(tensor, Tensor):
                    self._track(tensor, in_place_of)
        if self.inside_operators and (num_bytes := temporary_bytes(func, args)):
            self._passing(num_bytes)
        if self.cost is not None:
            self.seconds[self.phase] += self.cost.seconds(func, args, kwargs or {}, output)
        return output

    def _passing(self, num_bytes: int) -> None:
        for change in (num_bytes, -num_bytes):
            self.events.append(Event(self._next, change, self.phase, self._operator))
        self._next += 1

    def _accumulates_into(self, func: Any, args: tuple[Any, ...]) -> int | None:
        """The storage that a real addition would reuse if it dies with it. See the NOTE above."""
        if func is not _ADD or torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
            return None
        first, second = args[:2]
        if not isinstance(second, Tensor) or first.shape != second.shape or first._is_view():
            return None
        entry = self._live.get(first.untyped_storage()._cdata)
        return None if entry is None else entry[0]

    def live_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes, _ in self._live.values())

    def peak_bytes(self, *, start: int = 0) -> int:
        """The most that was live since the events were last cleared; start is what was live then."""
        return start + _replay(in_place_additions(self.events))[1].total

    def peak_bytes_of(self, phase: Phase) -> int:
        """The most that was live within one phase; 0 if it never ran."""
        return _replay(in_place_additions(self.events))[0].get(phase, 0)

    def profile(self, *, repeats: int = 1) -> Profile:
        """What was seen since the tracker was made. repeats: how often all phases but the optimizer run."""
        seconds = {phase: value * (1 if phase == "optimizer" else repeats) for phase, value in self.seconds.items()}
        events = in_place_additions(self.events)
        phases, peak = _replay(events)
        assert peak.event is not None
        return Profile(
            peak_bytes=peak.total,
            peak_phase=peak.event.phase,
            peak_place=peak.event.operator,
            phases=phases,
            categories=self._categories(events, peak.position),
            resident_bytes=self.live_bytes(),
            step_seconds=sum(seconds.values()),
            phase_seconds=seconds,
        )

    def _categories(self, events: list[Event], position: int) -> dict[Category, int]:
        """Live bytes at the peak, by what each storage is or became."""
        born: dict[int, Event] = {}
        for event in events[: position + 1]:
            if event.num_bytes >= 0:
                born[event.storage] = event
            else:
                born.pop(event.storage, None)
        last_forward = max((i for i, e in enumerate(events) if e.phase == "forward"), default=-1)
        dead_in_forward = {e.storage for e in events[: last_forward + 1] if e.num_bytes < 0}
        totals = dict.fromkeys(CATEGORIES, 0)
        for storage, event in born.items():
            totals[self._category(storage, event, dead_in_forward)] += event.num_bytes
        return totals

    def _category(self, storage: int, event: Event, dead_in_forward: set[int]) -> Category:
        if (named := self._names.get(storage)) is not None:
            return named
        if event.phase == "loss":
            return "loss"
        return "activations" if event.phase == "forward" and storage not in dead_in_forward else "temporary"


def in_place_additions(events: list[Event]) -> list[Event]:
    """Let a sum take the place of the addend that dies with it. See NOTE [ Fake gradients are added in place ]."""
    ordered = list(events)
    for index, event in enumerate(ordered):
        if event.in_place_of is None:
            continue
        for later in range(index + 1, len(ordered)):
            if ordered[later].num_bytes > 0:
                break
            if ordered[later].storage == event.in_place_of:
                ordered[index : later + 1] = [ordered[later], *ordered[index:later]]
                break
    return ordered


def _replay(events: list[Event]) -> tuple[dict[Phase, int], _Peak]:
    phases: dict[Phase, int] = {}
    live, peak = 0, _Peak()
    for position, event in enumerate(events):
        live += event.num_bytes
        phases[event.phase] = max(phases.get(event.phase, 0), live)
        if live > peak.total:
            peak = _Peak(live, event, position)
    return {phase: phases[phase] for phase in PHASES if phase in phases}, peak


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind some tensors, each storage once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
