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
What runs on a stream of the facade's own (RehearsedStream) runs beside the one that computes, until that waits for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.hardware import Kind
from trainfit.hardware.host_scope import is_on_host
from trainfit.hardware.runtime import RehearsedStream
from trainfit.hardware.transfers import Transfer, TransferPlace, watching_transfers
from trainfit.profile import Category, Phase, Profile
from trainfit.rehearsal.collectives import call_of
from trainfit.rehearsal.events import JOIN, SHELL, Entry, Event, Work, in_place_additions, replay
from trainfit.rehearsal.links import Links
from trainfit.rehearsal.operator_cost import OperatorCost, is_recompute
from trainfit.rehearsal.operators import DEVICE_OF, fake_result, is_composite, is_unknown_number, leaves_to_its_handler
from trainfit.rehearsal.record import StepRecord
from trainfit.rehearsal.replay import START
from trainfit.rehearsal.timeline import StepClock
from trainfit.rehearsal.traffic import tensors_of
from trainfit.rehearsal.whereabouts import Whereabouts
from trainfit.rehearsal.workspaces import FUSED, Sizes, kept_bytes, scratch_sizes
from trainfit.techniques.blockwise_attention import INSIDE

_ADD = torch.ops.aten.add.Tensor
_JOINS = frozenset({torch.ops.aten.stack.default, torch.ops.aten.cat.default})
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
    links: what collectives go over, for `seconds_of`; None where they take no time.
    kind: whose kernels run, see workspaces.py.
    whereabouts: what knows the block that runs.
    times: by block, of how many alike it is the only one that runs; see NOTE [ Splicing ] in splice.py.
    """

    rounding: int = 1
    cost: OperatorCost | None = None
    links: Links | None = None
    kind: Kind = "cpu"
    whereabouts: Whereabouts = field(default_factory=Whereabouts)
    times: Mapping[str, int] = field(default_factory=dict)
    phase: Phase = "forward"
    record: StepRecord = field(default_factory=StepRecord)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, tuple[int, int, weakref.ref[Any] | None]] = {}
        self._owners: dict[int, str] = {}  # by storage: the block that made it, or whose data it was made from
        self._owner_now = SHELL  # in the update: whose data was last computed on
        self._talks = False  # whether there was a collective
        self._next = 0
        self._operator = START
        self._looks_away = False
        self._is_inside = False  # an operator of several, whose parts come whole where autograd would take them apart
        self._streams: dict[int, tuple[int, Any]] = {}  # by id: number, and the stream itself, to keep the id its own
        self._more: dict[int, int] = {}  # by storage: what the device keeps more than it holds
        self._entered: list[ExitStack] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard that this asks for is paid at each operator

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled blocks are compiled under it, unseen; see NOTE [ Compiled without kernels ]

    def __enter__(self) -> StorageTracker:
        outside = ExitStack()
        outside.enter_context(_replaced(torch.UntypedStorage, "resize_", self._following_resize()))
        outside.enter_context(_replaced(torch.cpu.Stream, "wait_stream", self._following_waits()))
        outside.enter_context(watching_transfers(self._transfers))
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

    def _following_waits(self) -> Callable[[torch.cpu.Stream, Any], None]:
        def wait_stream(waits: torch.cpu.Stream, other: Any) -> None:
            if isinstance(other, RehearsedStream) and id(other) in self._streams:
                place = self.whereabouts.look()
                self.log.append(Work(self.phase, JOIN, 0.0, "launch", place=place, beside=self._streams[id(other)][0]))

        return wait_stream

    @property
    def log(self) -> list[Entry]:
        return self.record.log

    def seconds_of(self, *, copies: bool = True) -> dict[Phase, float]:
        """By phase, of all that has run, collectives included. copies: see StepClock."""
        clock = StepClock(links=self.links, overlaps=self.kind != "cpu", copies=copies)
        clock.plays(self.log)
        return clock.total().seconds

    def observe(self, phase: Phase) -> None:
        """The step's observer: from here on another phase runs."""
        self.phase = phase
        self.whereabouts.place = ""

    def register(self, tensors: Iterable[Tensor], category: Category, owner: str = SHELL) -> None:
        """Name what is live already, or what a storage turned out to be. owner: the block whose it is."""
        for tensor in tensors:
            self.record.names[self._track(local_tensor(tensor).untyped_storage(), owner=owner)] = category

    def _track(self, storage: torch.UntypedStorage, in_place_of: int | None = None, owner: str = "") -> int:
        key = storage._cdata
        requested = storage.nbytes() + self._more.get(key, 0)
        num_bytes = -(-requested // self.rounding) * self.rounding
        identity = self._next
        if key in self._live:
            former, before, reference = self._live[key]
            if num_bytes == before:
                return former
            self._happens(former, -before, owner=self._owner_if_late(former))  # resized in place
            if (name := self.record.names.get(former)) is not None:
                self.record.names[identity] = name
        else:
            reference = weakref.ref(storage, self._dies(key))
        self._next += 1
        self._live[key] = identity, num_bytes, reference
        self._happens(identity, num_bytes, in_place_of, requested, self._stream(), owner)
        return identity

    def _stream(self) -> int:
        """See NOTE [ Streams of a rehearsal ]."""
        current = torch.cpu.current_stream()
        if current is torch.cpu._default_cpu_stream:
            return 0
        number, _ = self._streams.setdefault(id(current), (len(self._streams) + 1, current))
        return number

    def _beside(self) -> int:
        return self._stream() if isinstance(torch.cpu.current_stream(), RehearsedStream) else 0

    def _happens(
        self,
        storage: int,
        num_bytes: int,
        in_place_of: int | None = None,
        requested: int = 0,
        stream: int = 0,
        owner: str = "",
    ) -> None:
        where = self.whereabouts.place
        if num_bytes > 0:
            self._owners[storage] = owner or where
        self.log.append(
            Event(storage, num_bytes, self.phase, self._operator, in_place_of, requested, stream, where, owner=owner)
        )

    def _dies(self, key: int) -> Callable[[Any], None]:
        def callback(_: Any) -> None:
            identity, num_bytes, _reference = self._live.pop(key)
            self._more.pop(key, None)
            self._happens(identity, -num_bytes, owner=self._owner_if_late(identity))

        return callback

    def _owner_if_late(self, storage: int) -> str:
        """In the update, whose a storage is that dies after an operator over all blocks; else what runs says enough."""
        return (self._owners.get(storage) or SHELL) if self.phase == "optimizer" and self._owner_now == SHELL else ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for more often than anything is computed
        if func is DEVICE_OF or self._looks_away:
            return func(*args, **kwargs)
        if is_on_host():
            return self._runs_on_host(func, args, kwargs)
        if self.phase == "optimizer" and is_unknown_number(func, args):
            return 1.0
        if any(map(leaves_to_its_handler, types)):
            return NotImplemented
        if func in INSIDE:
            return self._goes_inside(func, args, kwargs)
        if self._is_inside and is_composite(func):
            with self._again():
                return func.decompose(*args, **kwargs)
        output = fake_result(func, args, kwargs)
        self._operator = func._schema.name
        self.whereabouts.look()
        in_place_of = self._accumulates_into(func, args)
        if more := kept_bytes(self.kind, func, output):
            self._more[output[1].untyped_storage()._cdata] = more
        owners = self._owners_of(args) if self.phase == "optimizer" else [""]
        if len(owners) > 1 and func in _JOINS:
            self._more[output.untyped_storage()._cdata] = self._left_out(args[0], owners)
        self._made(output, in_place_of, owners)
        self._name_by_use(args, kwargs)
        owner = owners[0] if len(owners) == 1 else SHELL
        if sizes := scratch_sizes(self.kind, func, args):
            self._passing(sizes, owner)
        self._takes_time(func, self._all(args, owners), kwargs, self._all((output,), owners)[0], owner)
        return output

    def _goes_inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Watches what an operator of several runs. See NOTE [ One operator ] in blockwise_attention.py."""
        run, share = INSIDE[func]
        start = len(self.log)
        self._is_inside = True
        try:
            with self._again():
                output = run(*args, **kwargs, repeated=self._repeated)
        finally:
            self._is_inside = False
        for entry in self.log[start:]:
            if isinstance(entry, Work):
                entry.flops *= share
        return output

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Sees operators also while one is handled."""
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @contextmanager
    def _repeated(self, times: float) -> Iterator[None]:
        """What runs inside counts so often."""
        start = len(self.log)
        yield
        for entry in self.log[start:]:
            if isinstance(entry, Work):
                entry.seconds *= times
                entry.flops *= times

    def _made(self, output: Any, in_place_of: int | None, owners: Sequence[str]) -> None:
        """Outputs are born. owners: of each, or of the only one."""
        leaves = list(output) if isinstance(output, list | tuple) else [output]
        if len(owners) != len(leaves):
            owners = [owners[0] if len(owners) == 1 else SHELL] * len(leaves)
        for leaf, owner in zip(leaves, owners):
            for tensor in leaf if isinstance(leaf, list | tuple) else (leaf,):
                if isinstance(tensor, Tensor):
                    self._track(tensor.untyped_storage(), in_place_of, owner)

    def _owners_of(self, args: tuple[Any, ...]) -> list[str]:
        """Whose data an operator of the update computes on: of each tensor of its list, or of all that it is given.

        Where it is nobody's, such as random bits', it is for what ran before.
        """
        listed = args[0] if args and isinstance(args[0], list | tuple) else ()
        known = [owner for tensor in tensors_of(listed or args) if (owner := self._owner(tensor))]
        if listed and len(set(known)) > 1:
            owners = [self._owner(tensor) or SHELL for tensor in listed]
        else:
            owners = [next((owner for owner in known if owner != SHELL), known[0] if known else self._owner_now)]
        self._owner_now = owners[0] if len(owners) == 1 else SHELL
        return owners

    def _owner(self, tensor: Tensor) -> str:
        entry = self._live.get(local_tensor(tensor).untyped_storage()._cdata)
        return "" if entry is None else self._owners[entry[0]] or SHELL  # "": in host memory

    def _left_out(self, listed: Sequence[Tensor], owners: Sequence[str]) -> int:
        """Bytes of the tensors of blocks that do not run, in a list."""
        return sum((self.times.get(owner, 1) - 1) * tensor.nbytes for tensor, owner in zip(listed, owners))

    def _all(self, args: tuple[Any, ...], owners: Sequence[str]) -> tuple[Any, ...]:
        """With the tensors of blocks that do not run in the lists of an operator that takes all blocks' together."""
        if len(owners) == 1 or not self.times:
            return args
        times = [self.times.get(owner, 1) for owner in owners]
        return tuple(
            [each for each, often in zip(listed, times) for _ in range(often)]
            if isinstance(listed, list | tuple) and len(listed) == len(times)
            else listed
            for listed in args
        )

    def _runs_on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """It takes the device no bytes, but its time: it waits."""
        output = fake_result(func, args, kwargs)
        owners = self._owners_of(args) if self.phase == "optimizer" else [""]
        if self.cost is not None:
            time = self.cost.on_host(func, args, kwargs, output)
            where = self.whereabouts.place
            name = func._schema.name
            self.log.append(Work(self.phase, name, time.seconds, time.bound, place=where, owner=owners[0]))
        return output

    def _transfers(self, what: Transfer, tensor: Tensor, place: TransferPlace) -> None:
        """A copy beside computation begins, or is waited for: see NOTE [ Copies beside computation ] in timeline.py."""
        if self.cost is None:
            return
        storage, where = self._track(tensor.untyped_storage()), self.whereabouts.place
        seconds = 0.0
        if what != "wait":
            self.log.append(Work(self.phase, "offload::begin", self.cost.launch_seconds, "launch", place=where))
            seconds = tensor.nbytes / self.cost.transfer_bytes_per_second[place]
        self.log.append(Work(self.phase, f"offload::{what}", seconds, "host", touched=(storage,), place=where))

    def _name_by_use(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See NOTE [ What FSDP does outside of operators ]."""
        for argument, category in _NAMES_BY_USE.get(self._operator, ()):
            self.register(tensors_of(kwargs[argument] if isinstance(argument, str) else args[argument]), category)

    def _takes_time(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, owner: str) -> None:
        place = self.whereabouts.place
        if (call := call_of(func, args, output)) is not None:
            storages = tuple(self._track(tensor.untyped_storage()) for tensor in call.tensors)
            for storage in storages:
                self.record.names.setdefault(storage, "communication")
            self._talks = True
            call = replace(call, tensors=())
            self.log.append(
                Work(self.phase, self._operator, 0.0, "link", 0.0, storages, call, place, owner, self._beside())
            )
        elif self.cost is not None:
            time = self.cost.time(func, args, kwargs, output)
            touched: tuple[int, ...] = ()
            if self._talks and not func.is_view:
                touched = tuple(self._track(tensor.untyped_storage()) for tensor in tensors_of((args, kwargs)))
            flops, beside = 0.0 if is_recompute() else time.flops, self._beside()
            work = Work(
                self.phase, self._operator, time.seconds, time.bound, flops, touched, None, place, owner, beside
            )
            self.log.append(work)

    def _passing(self, sizes: Sizes, owner: str = "") -> None:
        """Memory that an operator takes and gives back."""
        for storage, num_bytes in reversed([self._take(size, owner) for size in sizes]):
            self._happens(storage, -num_bytes, owner=owner)

    def _take(self, size: int, owner: str = "") -> tuple[int, int]:
        storage, num_bytes = self._next, -(-size // self.rounding) * self.rounding
        self._happens(storage, num_bytes, None, size, self._stream(), owner)
        self._next += 1
        return storage, num_bytes

    def hold(self, size: int, category: Category) -> None:
        """Count memory that no tensor shows and nothing frees."""
        storage, num_bytes = self._take(size, SHELL)
        self.record.names[storage] = category
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

    def number_of(self, tensor: Tensor) -> int:
        """Of its storage in the log."""
        return self._track(local_tensor(tensor).untyped_storage())

    def live_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes, _ in self._live.values())

    def peak_bytes(self, *, since: int = 0) -> int:
        """The most that was live from entry number `since` of the log on, all that was live then included."""
        before = sum(entry.num_bytes for entry in self.log[:since] if isinstance(entry, Event))
        return before + replay(in_place_additions(self.log[since:]))[1].total

    def peak_bytes_of(self, phase: Phase) -> int:
        """The most that was live within one phase; 0 if it never ran."""
        return replay(in_place_additions(self.log))[0].get(phase, 0)

    def profile(self) -> Profile:
        """What was seen since the tracker was made, where collectives take no time."""
        return self.record.settled().profile(StepClock())


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind some tensors, each storage once."""
    storages = (local_tensor(tensor).untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank has of a DTensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


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
