"""A deep model's step from a shallow one's: what one of many blocks alike did, once more for each that did not run.

NOTE [ Splicing ]
Blocks of one structure and tier do the same things to their own storages, one after another. So a rehearsal runs only
some of each run of blocks alike: a few at both ends, where neighbours, buffers of collectives and what is gathered
ahead differ, and between them two, of which the first stands for all that were left out. What repeats may be a unit of
several blocks, such as sliding attention in all but every sixth.

The log is cut into segments: what a block did without a break, or the rest of the model. A storage is named by the
segment of its birth, as the so-and-so-manieth visit of its block in its phase, and its number there. With names taken
relative to their block, the two in the middle must have done the same: that is checked. Then the log is written again
with the first one's segments repeated, forward in ascending and backward in descending order, and storages of the
others named by theirs. An operator of the update takes all parameters together: the tracker multiplies what it takes
and makes of a block that stands for others (StorageTracker.times). In the new log every storage must be born once
before it dies, which is checked too. Where a check fails, all blocks run.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainfit.profile import Category, Phase
from trainfit.rehearsal.events import Entry, Event, Work
from trainfit.rehearsal.record import StepRecord

LARGEST_UNIT = 8  # blocks
_WORTH_IT = 0.75  # of the blocks at most may run


class NotAlikeError(Exception):
    """Blocks that were taken to be alike are not."""


@dataclass(frozen=True)
class Repeat:
    """A run of units of `size` blocks that are alike, of which not all run.

    start, stop: its blocks in the shallow model. at: the first block of the unit that stands for `copies` more.
    """

    start: int
    stop: int
    at: int
    size: int
    copies: int
    reach: int

    def near(self, block: int, other: int) -> bool:
        """Whether what one block does to another's storages it does as its neighbour."""
        return abs((block - self.start) // self.size - (other - self.start) // self.size) <= self.reach

    def has(self, block: int) -> bool:
        return self.at <= block < self.at + self.size


@dataclass(frozen=True)
class Cut:
    """kept: blocks of the deep model that run, on all stages. repeats: of this rank's, in the shallow's numbers."""

    kept: tuple[int, ...]
    repeats: tuple[Repeat, ...]

    @property
    def times(self) -> dict[str, int]:
        """By block: for how many it stands."""
        return {
            place_of(block): repeat.copies + 1
            for repeat in self.repeats
            for block in range(repeat.at, repeat.at + repeat.size)
        }

    def deep(self, block: int) -> int:
        """The block of the deep model for which one of the shallow stands first."""
        return self.kept[block]

    def of(self, block: int) -> Repeat | None:
        """The run that a block of the shallow model is in."""
        return next((repeat for repeat in self.repeats if repeat.start <= block < repeat.stop), None)


def place_of(block: int) -> str:
    return f"block {block}"


def cut_of(kinds: Sequence[Hashable], stages: Sequence[Sequence[int]], own: int, reach: int) -> Cut | None:
    """What has to run of a model; None where that is all.

    kinds: of each block. stages: the blocks of each, of which number `own` is rehearsed. reach: how many units away
    from its end a run's blocks do something of their own.
    """
    mine = stages[own]
    kept: list[int] = []
    repeats: list[Repeat] = []
    offset, position = 0, 0
    while position < len(mine):
        size, units = _longest(kinds, mine, position, least=2 * reach + 3)
        if not units:
            kept.append(mine[position])
            position += 1
            continue
        copies, start = units - (2 * reach + 2), len(kept)
        end = position + units * size
        edge = (reach + 1) * size  # blocks
        kept += [*mine[position : position + edge], *mine[end - edge : end]]
        repeats.append(Repeat(start, len(kept), start + reach * size, size, copies, reach))
        position = end
    if not repeats or len(kept) > _WORTH_IT * len(mine) or any(len(blocks) < len(kept) for blocks in stages):
        return None
    all_kept: list[int] = []
    for number, blocks in enumerate(stages):
        if number == own:
            offset = len(all_kept)
        all_kept += kept if number == own else blocks[: len(kept)]
    moved = [replace(r, start=r.start + offset, stop=r.stop + offset, at=r.at + offset) for r in repeats]
    return Cut(tuple(all_kept), tuple(moved))


def _longest(kinds: Sequence[Hashable], blocks: Sequence[int], begin: int, least: int) -> tuple[int, int]:
    """The unit, and how often it repeats from here on, of which the most blocks need not run; (1, 0) for none."""
    best, saved = (1, 0), 0
    for size in range(1, LARGEST_UNIT + 1):
        end = begin + size
        while end < len(blocks) and kinds[blocks[end]] == kinds[blocks[end - size]]:
            end += 1
        units = (end - begin) // size
        if units >= least and (left := (units - least + 1) * size) > saved:
            best, saved = (size, units), left
    return best


Name = tuple[Phase, int, int, int]  # phase, block or -1, which visit, number


@dataclass
class _Segment:
    """block: -1 for the rest of the model."""

    phase: Phase
    block: int
    visit: int
    entries: list[Entry]


def spliced(record: StepRecord, cut: Cut) -> StepRecord:
    """The deep model's record, from a settled one of the shallow model. Raises NotAlikeError."""
    return _Splice(record, cut).result()


class _Splice:
    def __init__(self, record: StepRecord, cut: Cut) -> None:
        self.record, self.cut = record, cut
        self.segments = list(_segments(record.log))
        self.names = _names(self.segments)
        self.ids: dict[Name, int] = {}
        self.categories: dict[int, Category] = {}
        self.live: set[int] = set()
        self.dead: set[int] = set()
        self.log: list[Entry] = []

    def result(self) -> StepRecord:
        for repeat in self.cut.repeats:
            self._check(repeat)
        for stretch, repeats in self._stretches():
            if repeats is None:
                self._write(stretch[0], 0)
                continue
            copies = range(repeats.copies + 1)
            for copy in copies if self._ascends(stretch, repeats) else reversed(copies):
                for segment in stretch:
                    self._write(segment, copy)
        self._check_what_is_left()
        return StepRecord(self.log, self.categories)

    def _stretches(self) -> Iterator[tuple[list[_Segment], Repeat | None]]:
        """Segments one by one, those of a unit that stands for others together."""
        stretch: list[_Segment] = []
        current: Repeat | None = None
        for segment in self.segments:
            repeat = self.cut.of(segment.block)
            if repeat is not None and not repeat.has(segment.block):
                repeat = None
            if stretch and (repeat is None or repeat is not current or segment.phase != stretch[-1].phase):
                yield stretch, current
                stretch = []
            current = repeat
            if repeat is None:
                yield [segment], None
            else:
                stretch.append(segment)
        if stretch:
            yield stretch, current

    def _ascends(self, stretch: list[_Segment], repeat: Repeat) -> bool:
        """Whether the blocks after the unit's come after it."""
        last = self._index(stretch[-1])
        for segment in self.segments[last + 1 : last + 2]:
            if segment.block != -1 and repeat.start <= segment.block < repeat.stop:
                return segment.block >= repeat.at
        first = self._index(stretch[0])
        for segment in reversed(self.segments[max(0, first - 1) : first]):
            if segment.block != -1:
                return segment.block < repeat.at
        return stretch[0].phase != "backward"

    def _index(self, segment: _Segment) -> int:
        return next(index for index, each in enumerate(self.segments) if each is segment)

    # ---- checks ----------------------------------------------------------------------------------------------------

    def _check(self, repeat: Repeat) -> None:
        """The unit that stands for others did what the next one did."""
        one, other = ([*self._pattern(repeat, repeat.at + by)] for by in (0, repeat.size))
        if one != other:
            raise NotAlikeError(f"blocks {repeat.at} and {repeat.at + repeat.size} did not do the same")

    def _pattern(self, repeat: Repeat, first: int) -> Iterator[Any]:
        for segment in self.segments:
            if first <= segment.block < first + repeat.size:
                yield segment.phase, segment.block - first, segment.visit
                for entry in segment.entries:
                    yield self._relative(entry, repeat, first)

    def _relative(self, entry: Entry, repeat: Repeat, first: int) -> Any:
        def name(storage: int) -> Name:
            phase, block, visit, number = self.names[storage]
            inside = repeat.start <= block < repeat.stop
            return phase, (1000 + block - first if inside else block), visit, number

        if isinstance(entry, Work):
            touched = tuple(map(name, entry.touched))
            # Not seconds: equal work takes as long, but for what caches still hold of the block before.
            return entry.operator, entry.bound, entry.flops, touched, entry.call, entry.beside
        base = None if entry.in_place_of is None else name(entry.in_place_of)
        return entry.operator, entry.num_bytes, entry.requested, entry.stream, name(entry.storage), base

    def _check_what_is_left(self) -> None:
        """What outlives the step does so for each block."""
        lives = {event.storage for event in self.record.events if event.num_bytes > 0}
        lives -= {event.storage for event in self.record.events if event.num_bytes < 0}
        expected = {self._id(name) for storage in lives for name in self._deep_names(storage, -1, 0)}
        if self.live != expected:
            raise NotAlikeError(f"{len(self.live)} storages outlive the step instead of {len(expected)}")

    # ---- writing ---------------------------------------------------------------------------------------------------

    def _write(self, segment: _Segment, copy: int) -> None:
        repeat = self.cut.of(segment.block)
        shift = 0  # of this run's blocks, in the deep model's numbers
        place = ""
        if segment.block != -1:
            deep = self.cut.deep(segment.block) + (copy * repeat.size if repeat else 0)
            shift, place = deep - segment.block, place_of(deep)
        for entry in segment.entries:
            where = place if entry.place == place_of(segment.block) else self._place(entry.place)
            if isinstance(entry, Work):
                touched = tuple(
                    self._id(name) for each in entry.touched for name in self._deep_names(each, segment.block, shift)
                )
                kind, seconds, call = entry.bound, entry.seconds, entry.call
                self.log.append(
                    Work(
                        entry.phase, entry.operator, seconds, kind, entry.flops, touched, call, where, "", entry.beside
                    )
                )
                continue
            for name in self._deep_names(entry.storage, segment.block, shift):
                self._happens(entry, name, where, segment.block, shift)

    def _happens(self, entry: Event, name: Name, where: str, within: int, shift: int) -> None:
        storage = self._id(name)
        if entry.num_bytes > 0:
            if storage in self.live or storage in self.dead:
                raise NotAlikeError(f"{entry.operator} makes one storage twice")
            self.live.add(storage)
            if (category := self.record.names.get(entry.storage)) is not None:
                self.categories[storage] = category
        elif entry.num_bytes < 0:
            if storage not in self.live:
                raise NotAlikeError(f"{entry.operator} frees what is not there")
            self.live.remove(storage)
            self.dead.add(storage)
        base = None
        if entry.in_place_of is not None:
            base = self._id(next(self._deep_names(entry.in_place_of, within, shift)))
        self.log.append(
            Event(storage, entry.num_bytes, entry.phase, entry.operator, base, entry.requested, entry.stream, where)
        )

    def _deep_names(self, storage: int, within: int, shift: int) -> Iterator[Name]:
        """Storages of the deep model for which one of the shallow stands, to a segment of block `within`."""
        phase, block, visit, number = self.names[storage]
        if block == -1:
            yield phase, -1, visit, number
            return
        repeat = self.cut.of(block)
        if repeat is not None and repeat.start <= within < repeat.stop and repeat.near(block, within):
            yield phase, block + shift, visit, number
            return
        copies = repeat.copies if repeat is not None and repeat.has(block) else 0
        for copy in range(copies + 1):
            yield phase, self.cut.deep(block) + copy * (repeat.size if repeat else 0), visit, number

    def _id(self, name: Name) -> int:
        return self.ids.setdefault(name, len(self.ids))

    def _place(self, place: str) -> str:
        block = block_of(place)
        return place if block == -1 else place_of(self.cut.deep(block))


def block_of(place: str) -> int:
    """-1 for the rest of the model."""
    return int(place[6:]) if place.startswith("block ") else -1


def _segments(log: Iterable[Entry]) -> Iterator[_Segment]:
    """What happens at no place in particular, once a block has ended, belongs to what ran before."""
    visits: dict[tuple[Phase, int], int] = {}
    current: _Segment | None = None
    for entry in log:
        label = entry.owner or entry.place
        begins = current is None or entry.phase != current.phase
        block = block_of(label)
        if begins or (label and current is not None and block != current.block):
            if current is not None:
                yield current
            visit = visits[entry.phase, block] = visits.get((entry.phase, block), -1) + 1
            current = _Segment(entry.phase, block, visit, [])
        assert current is not None
        current.entries.append(entry)
    if current is not None:
        yield current


def _names(segments: Iterable[_Segment]) -> dict[int, Name]:
    names: dict[int, Name] = {}
    for segment in segments:
        number = 0
        for entry in segment.entries:
            if isinstance(entry, Event) and entry.storage not in names:
                names[entry.storage] = segment.phase, segment.block, segment.visit, number
                number += 1
    return names
