"""StorageTracker: watches every storage of a step live and die.

NOTE [ What FSDP does outside of operators ]
FSDP frees and makes gathered parameters by UntypedStorage.resize_, which no dispatch mode sees: it is wrapped while the
tracker is entered. What its own operators read and write says what a storage is: copy-out fills parameters, the copy-in
of a reduction reads gradients. A resized storage stays what it was.
DTensor runs each new operator once on fake tensors of the global shape to know its output's: these are not there in a
real run, and the tracker looks away. DTensors themselves are left to their handler, whose local operators it sees.

NOTE [ Streams of a rehearsal ]
A CPU's streams do nothing, but torch.cpu.stream() remembers which one is current, and FSDP enters its own for copying
in, gathering and reducing as on any device. So the current one says where a device's allocator would place a storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainfit.hardware import Kind
from trainfit.hardware.host_scope import is_on_host
from trainfit.profile import CATEGORIES, Category, Moment, Phase, Profile
from trainfit.rehearsal.collectives import call_of, tally
from trainfit.rehearsal.course import course_of, last_forward
from trainfit.rehearsal.events import Event, in_place_additions, replay
from trainfit.rehearsal.flops import model_flops
from trainfit.rehearsal.operator_cost import OperatorCost, is_recompute
from trainfit.rehearsal.operators import fake_result, is_unknown_number, leaves_to_its_handler
from trainfit.rehearsal.timeline import StepClock
from trainfit.rehearsal.whereabouts import Whereabouts
from trainfit.rehearsal.workspaces import FUSED, Sizes, kept_bytes, scratch_sizes

_START = "start"
_ADD = torch.ops.aten.add.Tensor
_DEVICE = torch.ops.prim.device.default
_NAMES_BY_USE: Mapping[str, tuple[tuple[int | str, Category], ...]] = {
    "fsdp::all_gather_copy_in": ((1, "communication"),),
    "fsdp::split_with_sizes_copy": (("out", "parameters"),),
    "fsdp::chunk_cat": ((0, "gradients"), ("out", "communication")),
    "c10d::_reduce_scatter_base_": ((0, "gradients"),),
}


@dataclass
class StorageTracker(TorchDispatchMode):
    """Counts storages, not tensors: a view pins its whole base.

    rounding: bytes to which the device's allocator rounds (1 on a CPU).
    cost: seconds that an operator should take, or None to count none.
    kind: whose kernels run, see workspaces.py.
    clock: what time and collectives are told to.
    whereabouts: what knows the block that runs.
    """

    rounding: int = 1
    cost: OperatorCost | None = None
    kind: Kind = "cpu"
    clock: StepClock = field(default_factory=StepClock)
    whereabouts: Whereabouts = field(default_factory=Whereabouts)
    phase: Phase = "forward"
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, tuple[int, int, weakref.ref[Any] | None]] = {}
        self._names: dict[int, Category] = {}
        self._next = 0
        self._operator = _START
        self._looks_away = False
        self._streams: dict[int, tuple[int, Any]] = {}  # by id: number, and the stream itself, to keep the id its own
        self._more: dict[int, int] = {}  # by storage: what the device keeps more than it holds
        self._entered: list[ExitStack] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard that this asks for is paid at each operator

    def __enter__(self) -> StorageTracker:
        outside = ExitStack()
        outside.enter_context(_replaced(torch.UntypedStorage, "resize_", self._following_resize()))
        outside.enter_context(_replaced(ShardingPropagator, "_fake_mode_lock", _LookingAway(self)))
        for name, fused in FUSED[self.kind].items():
            outside.enter_context(_replaced(torch.nn.functional, name, fused))
        self._entered.append(outside)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        self._entered.pop().close()

    def _following_resize(self) -> Callable[[torch.UntypedStorage, int], Any]:
        original: Any = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            result = original(storage, num_bytes)
            if not self._looks_away:
                self._track(storage)
            return result

        return resize_

    @property
    def seconds(self) -> dict[Phase, float]:
        """By phase, of all that has run."""
        return self.clock.total().seconds

    def observe(self, phase: Phase) -> None:
        """The step's observer: from here on another phase runs."""
        self.clock.enters(phase, self.phase)
        self.phase = phase
        self.whereabouts.place = ""

    def register(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Name what is live already, or what a storage turned out to be."""
        for tensor in tensors:
            self._names[self._track(local_tensor(tensor).untyped_storage())] = category

    def _track(self, storage: torch.UntypedStorage, in_place_of: int | None = None) -> int:
        key = storage._cdata
        requested = storage.nbytes() + self._more.get(key, 0)
        num_bytes = -(-requested // self.rounding) * self.rounding
        identity = self._next
        if key in self._live:
            former, before, reference = self._live[key]
            if num_bytes == before:
                return former
            self._happens(former, -before)  # resized in place
            if (name := self._names.get(former)) is not None:
                self._names[identity] = name
        else:
            reference = weakref.ref(storage, self._dies(key))
        self._next += 1
        self._live[key] = identity, num_bytes, reference
        self._happens(identity, num_bytes, in_place_of, requested, self._stream())
        return identity

    def _stream(self) -> int:
        """See NOTE [ Streams of a rehearsal ]."""
        current = torch.cpu.current_stream()
        if current is torch.cpu._default_cpu_stream:
            return 0
        number, _ = self._streams.setdefault(id(current), (len(self._streams) + 1, current))
        return number

    def _happens(
        self,
        storage: int,
        num_bytes: int,
        in_place_of: int | None = None,
        requested: int = 0,
        stream: int = 0,
    ) -> None:
        where, now = self.whereabouts.place, self.clock.now
        self.events.append(
            Event(storage, num_bytes, self.phase, self._operator, in_place_of, requested, stream, where, now)
        )

    def _dies(self, key: int) -> Callable[[Any], None]:
        def callback(_: Any) -> None:
            identity, num_bytes, _reference = self._live.pop(key)
            self._more.pop(key, None)
            self._happens(identity, -num_bytes)

        return callback

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for more often than anything is computed
        if func is _DEVICE or self._looks_away:
            return func(*args, **kwargs)
        if is_on_host():
            return self._runs_on_host(func, args, kwargs)
        if self.phase == "optimizer" and is_unknown_number(func, args):
            return 1.0
        if any(map(leaves_to_its_handler, types)):
            return NotImplemented
        output = fake_result(func, args, kwargs)
        self._operator = func._schema.name
        self.whereabouts.look()
        in_place_of = self._accumulates_into(func, args)
        if more := kept_bytes(self.kind, func, output):
            self._more[output[1].untyped_storage()._cdata] = more
        for leaf in output if isinstance(output, list | tuple) else (output,):
            for tensor in leaf if isinstance(leaf, list | tuple) else (leaf,):
                if isinstance(tensor, Tensor):
                    self._track(tensor.untyped_storage(), in_place_of)
        self._name_by_use(args, kwargs)
        if sizes := scratch_sizes(self.kind, func, args):
            self._passing(sizes)
        self._takes_time(func, args, kwargs, output)
        return output

    def _runs_on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """It takes the device no bytes, but its time: it waits."""
        output = fake_result(func, args, kwargs)
        if self.cost is not None:
            time = self.cost.on_host(func, args, kwargs, output)
            self.clock.runs(self.phase, func._schema.name, (), time.seconds, time.bound)
        return output

    def _name_by_use(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See NOTE [ What FSDP does outside of operators ]."""
        for argument, category in _NAMES_BY_USE.get(self._operator, ()):
            self.register(_tensors(kwargs[argument] if isinstance(argument, str) else args[argument]), category)

    def _takes_time(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if (call := call_of(func, args, output)) is not None:
            storages = [self._track(tensor.untyped_storage()) for tensor in call.tensors]
            for storage in storages:
                self._names.setdefault(storage, "communication")
            self.clock.communicates(self.phase, self._operator, call, storages)
        elif self.cost is not None:
            time = self.cost.time(func, args, kwargs, output)
            touched: list[int] = []
            if self.clock.watches and not func.is_view:
                touched = [self._track(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))]
            self.clock.runs(self.phase, self._operator, touched, time.seconds, time.bound)
            if not is_recompute():
                self.clock.computes(model_flops(func, args, kwargs, output))

    def _passing(self, sizes: Sizes) -> None:
        """Memory that an operator takes and gives back."""
        for storage, num_bytes in reversed([self._take(size) for size in sizes]):
            self._happens(storage, -num_bytes)

    def _take(self, size: int) -> tuple[int, int]:
        storage, num_bytes = self._next, -(-size // self.rounding) * self.rounding
        self._happens(storage, num_bytes, None, size, self._stream())
        self._next += 1
        return storage, num_bytes

    def hold(self, size: int, category: Category) -> None:
        """Count memory that no tensor shows and nothing frees."""
        storage, num_bytes = self._take(size)
        self._names[storage] = category
        self._live[-1 - storage] = storage, num_bytes, None

    def _accumulates_into(self, func: Any, args: tuple[Any, ...]) -> int | None:
        """The storage that a real addition would reuse if it dies with it; see the NOTE in events.py."""
        if func is not _ADD or torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
            return None
        first, second = args[:2]
        if not isinstance(second, Tensor) or first.shape != second.shape or first._is_view():
            return None
        entry = self._live.get(first.untyped_storage()._cdata)
        return None if entry is None else entry[0]

    def storages(self, category: Category) -> frozenset[int]:
        """All that were ever named so."""
        return frozenset(storage for storage, name in self._names.items() if name == category)

    def live_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes, _ in self._live.values())

    def peak_bytes(self, *, start: int = 0) -> int:
        """The most that was live since the events were last cleared; start is what was live then."""
        return start + replay(in_place_additions(self.events))[1].total

    def peak_bytes_of(self, phase: Phase) -> int:
        """The most that was live within one phase; 0 if it never ran."""
        return replay(in_place_additions(self.events))[0].get(phase, 0)

    def profile(self, *, rank: int = 0, waiting: int = 0, like: int = 0, follow_all: bool = False) -> Profile:
        """What was seen since the tracker was made.

        waiting: micro batches that did not run, but take the time and the collectives of micro batch number `like`.
        follow_all: the timeline has all micro batches, and not only the last where the peak falls in it.
        """
        total = self.clock.total(waiting=waiting, like=like)
        collectives = tally(total.calls, self.clock.links)
        events = in_place_additions(self.events)
        phases, peak = replay(events)
        assert peak.event is not None
        return Profile(
            peak_bytes=peak.total,
            peak_phase=peak.event.phase,
            peak_place=peak.event.where,
            phases=phases,
            categories=self._categories(events, peak.position),
            resident_bytes=self.live_bytes(),
            step_seconds=sum(total.seconds.values()),
            phase_seconds=total.seconds,
            rank=rank,
            collectives=collectives,
            communication_seconds=sum(each.seconds for each in collectives.values()),
            exposed_communication_seconds=total.exposed,
            timeline=self._course(events, 0 if follow_all else last_forward(events, peak.total)),
        )

    def _categories(self, events: list[Event], position: int) -> dict[Category, int]:
        """Live bytes at the peak, by what each storage is or became."""
        born: dict[int, Event] = {}
        for event in events[: position + 1]:
            if event.num_bytes >= 0:
                born[event.storage] = event
            else:
                born.pop(event.storage, None)
        dead_in_forward = _dead_in_forward(events)
        totals = dict.fromkeys(CATEGORIES, 0)
        for storage, event in born.items():
            totals[self._category(storage, event, dead_in_forward)] += event.num_bytes
        return totals

    def _course(self, events: list[Event], start: int) -> tuple[Moment, ...]:
        """Memory from number `start` on, but not before all that stays is registered."""
        start = next((index for index, event in enumerate(events) if index >= start and event.operator != _START), 0)
        dead_in_forward = _dead_in_forward(events)
        return course_of(events, lambda birth: self._category(birth.storage, birth, dead_in_forward), start=start)

    def _category(self, storage: int, event: Event, dead_in_forward: set[int]) -> Category:
        if (named := self._names.get(storage)) is not None:
            return named
        if event.phase == "loss":
            return "loss"
        return "activations" if event.phase == "forward" and storage not in dead_in_forward else "temporary"


def _dead_in_forward(events: Iterable[Event]) -> set[int]:
    return {event.storage for event in events if event.num_bytes < 0 and event.phase == "forward"}


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind some tensors, each storage once."""
    storages = (local_tensor(tensor).untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank has of a DTensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class _LookingAway:
    """While it is entered the tracker sees nothing."""

    def __init__(self, tracker: StorageTracker) -> None:
        self._tracker = tracker

    def __enter__(self) -> None:
        self._tracker._looks_away = True

    def __exit__(self, *details: object) -> None:
        self._tracker._looks_away = False


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    previous = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, previous)
