"""A deep model's step from a shallow one's: events of a middle block, once more for each block that was left out.

NOTE [ Splicing ]
Blocks are alike, so the births and deaths of storages repeat from block to block. A run with seven blocks is cut into
segments: what is resident, each block's forward and backward, the update, and the shell around. A storage's name is
its segment and its number among that segment's births. Named relative to their block, the events of blocks 2, 3 and 4
must be the same: that is checked, and a run for which it fails is rehearsed whole. Then block 3 is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from trainfit.rehearsal.events import Entry, Event, in_place_additions

SHALLOW = 7
_COPIED = 3
_ALIKE = (2, 3, 4)


@dataclass(frozen=True)
class Segment:
    """kind: resident, forward, backward, update or shell; block: which, or -1 for the shell. start: first event."""

    kind: str
    block: int
    start: int


@dataclass
class Marks:
    """Where segments of the growing log begin. owners: the block of each trained parameter, or -1."""

    events: list[Entry]
    segments: list[Segment] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)

    def begin(self, kind: str, block: int = -1) -> None:
        self.segments.append(Segment(kind, block, len(self.events)))


class NotAlikeError(Exception):
    """Blocks whose events differ."""


Name = tuple[Any, ...]


def spliced(marks: Marks, layers: int, *, whole: bool = False) -> tuple[list[Event], frozenset[int]]:
    """Events of `layers` blocks, and which storages are optimizer states.

    whole: all blocks have run. Raises NotAlikeError where blocks 2, 3 and 4 differ.
    """
    events = in_place_additions(marks.events)
    names, parts = _named(events, marks)
    for kind in () if whole else ("forward", "backward", "resident", "states"):
        patterns = {tuple(_relative(part, names) for part in _parts(parts, kind, block)) for block in _ALIKE}
        if len(patterns) > 1:
            raise NotAlikeError(f"{kind} of blocks 2, 3 and 4 differs")
    copies = 0 if whole else layers - SHALLOW
    ids: dict[Name, int] = {}
    out: list[Event] = []
    for segment, part, block in _order(parts, copies):
        shift = block - segment.block
        for event in part:
            for name in _targets(names[event.storage], segment, shift, copies, event.num_bytes):
                out.append(replace(event, storage=ids.setdefault(name, len(ids)), in_place_of=None))
    return out, frozenset(number for name, number in ids.items() if name[0] == "states")


Part = tuple[Segment, list[Event]]


def _named(events: list[Entry], marks: Marks) -> tuple[dict[int, Name], list[Part]]:
    """Names of storages by their births, and events by segment. Events of no bytes are left out."""
    names: dict[int, Name] = {}
    parts: list[Part] = []
    seen: dict[tuple[str, int], int] = {}
    ends = [segment.start for segment in marks.segments[1:]] + [len(events)]
    for segment, end in zip(marks.segments, ends):
        part = [event for event in events[segment.start : end] if isinstance(event, Event) and event.num_bytes]
        owners = _owners(part, marks.owners) if segment.kind == "update" else {}
        for event in part:
            if event.storage not in names:
                key = (segment.kind, owners.get(event.storage, segment.block))
                seen[key] = seen.get(key, 0) + 1
                names[event.storage] = (*key, seen[key])
        parts.append((segment, part))
    return names, parts


def _owners(part: list[Event], owners: list[int]) -> dict[int, int]:
    """Whose an update's temporaries are: an operator over all parameters makes as many in a row as there are."""
    found: dict[int, int] = {}
    for (_, is_birth), group in groupby(part, lambda event: (event.operator, event.num_bytes > 0)):
        births = [event.storage for event in group]
        if is_birth and owners and len(births) % len(owners) == 0:
            found |= {storage: owners[index % len(owners)] for index, storage in enumerate(births)}
    return found


def _parts(parts: list[Part], kind: str, block: int) -> Iterator[Part]:
    return (part for part in parts if part[0].kind == kind and part[0].block == block)


def _relative(part: Part, names: dict[int, Name]) -> Any:
    segment, events = part
    return tuple((event.num_bytes, _shifted(names[event.storage], -segment.block)) for event in events)


def _shifted(name: Name, by: int) -> Name:
    kind, block, number = name
    return name if block == -1 else (kind, block + by + 1000, number)


def _order(parts: list[Part], copies: int) -> Iterator[tuple[Segment, list[Event], int]]:
    """Segments of the deep run: ascending blocks in forward, descending in backward; the last number is the block."""
    for segment, part in parts:
        blocks = [segment.block]
        if segment.block == _COPIED:
            blocks = [_COPIED + copy for copy in range(copies + 1)]
        elif segment.block > _COPIED:
            blocks = [segment.block + copies]
        for block in reversed(blocks) if segment.kind == "backward" else blocks:
            yield segment, part, block


def _targets(name: Name, segment: Segment, shift: int, copies: int, num_bytes: int) -> Iterator[Name]:
    """Which storages of the deep run an event of the shallow one stands for."""
    kind, block, number = name
    if block == -1:
        yield name
    elif segment.block != -1:
        yield kind, block + shift, number
    elif block < _COPIED:
        yield name
    elif block > _COPIED:
        yield kind, block + copies, number
    else:
        yield from ((kind, block + copy, number) for copy in range(copies + 1))
