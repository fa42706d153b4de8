"""Reserved memory: the rehearsed step's storages, step after step, through a model of the device's allocator.

NOTE [ What a later step finds ]
The events of one step are those of every step. What was there when it began and never dies (parameters, states) is
allocated once, in the order it was made. What was there and dies (gradients of earlier micro batches) is allocated
again before each step, last one first, as a backward makes them. What is born and outlives the step is there in the
next one already. Steps are repeated until two in a row hold as much, since only then do cached blocks fit what comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from trainfit.profile import AllocatorSettings, Phase, Reserved
from trainfit.rehearsal.allocator import CachingAllocator, Growth
from trainfit.rehearsal.events import Event

START = "start"  # the operator of what was there before the step
MIN_STEPS, MAX_STEPS = 3, 8


@dataclass(frozen=True)
class _Steps:
    """A step's events, sorted. once: before the first step; each: before every step; then events."""

    once: list[Event]
    each: list[Event]
    events: list[Event]
    outlives: frozenset[int]


def reserved_memory(
    events: Sequence[Event],
    settings: AllocatorSettings,
    *,
    padding: int = 0,
    limit_bytes: int | None = None,
    late: Iterable[int] = (),
) -> Reserved:
    """What a caching allocator holds over the steps of a run. See NOTE [ What a later step finds ].

    late: storages that were there before the rehearsed step, but in a run come with its first update, as the states of
    PyTorch's own optimizers do. limit_bytes: set as a fraction of the device. Raises DeviceFullError where that is not
    enough.
    """
    allocator = CachingAllocator(settings, padding=padding, limit_bytes=limit_bytes, is_fraction=True)
    steps, late = _sorted(_sums_in_place(events)), frozenset(late)
    grown_at = _Place()
    for event in steps.once:
        if event.storage not in late:
            _play(allocator, event, grown_at)
    held, num_steps = -1, 0
    while num_steps < MAX_STEPS and (num_steps < MIN_STEPS or allocator.peak_reserved_bytes > held):
        held, num_steps = allocator.peak_reserved_bytes, num_steps + 1
        _one_step(allocator, steps, grown_at, late if num_steps == 1 else frozenset(), is_first=num_steps == 1)
    return _reserved(allocator, grown_at, num_steps)


@dataclass
class _Place:
    """Where in the step the allocator last came to hold more than ever."""

    phase: Phase = "forward"
    where: str = START


def _sums_in_place(events: Sequence[Event]) -> list[Event]:
    """A sum that takes an addend's place asks for nothing: the addend lives on until the sum dies."""
    kept: list[Event] = []
    same: dict[int, int] = {}  # a sum: the storage whose place it has
    for event in events:
        storage = same.get(event.storage, event.storage)
        addend = same.get(event.in_place_of, event.in_place_of) if event.in_place_of is not None else None
        if addend is not None and kept and kept[-1].storage == addend and kept[-1].num_bytes == -event.num_bytes:
            kept.pop()
            same[event.storage] = addend
        else:
            kept.append(event if storage == event.storage else replace(event, storage=storage))
    return kept


def _sorted(events: Sequence[Event]) -> _Steps:
    dead = {event.storage for event in events if event.num_bytes < 0}
    begin = next((i for i, event in enumerate(events) if event.operator != START), len(events))
    there = events[:begin]
    return _Steps(
        once=[event for event in there if event.storage not in dead],
        each=[event for event in reversed(there) if event.storage in dead],
        events=list(events[begin:]),
        outlives=frozenset(e.storage for e in events[begin:] if e.num_bytes > 0 and e.storage not in dead),
    )


def _one_step(
    allocator: CachingAllocator, steps: _Steps, grown_at: _Place, late: frozenset[int], *, is_first: bool
) -> None:
    for event in steps.each:
        _play(allocator, event, grown_at)
    for event in steps.events:
        if late and event.phase == "optimizer":
            for state in (each for each in steps.once if each.storage in late):
                _play(allocator, state, grown_at)
            late = frozenset()
        if is_first or event.storage not in steps.outlives:
            _play(allocator, event, grown_at)


def _play(allocator: CachingAllocator, event: Event, grown_at: _Place) -> None:
    if not event.num_bytes:
        return
    if event.num_bytes < 0:
        allocator.free(event.storage)
        return
    before = allocator.peak_reserved_bytes
    allocator.malloc(event.storage, event.requested or event.num_bytes, event.stream)
    if allocator.peak_reserved_bytes > before:
        grown_at.phase, grown_at.where = event.phase, event.where


def _reserved(allocator: CachingAllocator, grown_at: _Place, num_steps: int) -> Reserved:
    growth = allocator.peak_growth or Growth(0, 0, 0, 0, "large", 0, 0, 0, 0)
    return Reserved(
        reserved_bytes=allocator.peak_reserved_bytes,
        allocated_bytes=allocator.peak_allocated_bytes,
        unused_bytes=allocator.peak_reserved_bytes - allocator.peak_allocated_bytes,
        other_streams_bytes=growth.other_streams_bytes,
        request_bytes=growth.request_bytes,
        pool=growth.pool,
        stream=growth.stream,
        pool_free_bytes=growth.pool_free_bytes,
        largest_free_bytes=growth.largest_free_bytes,
        phase=grown_at.phase,
        place=grown_at.where,
        num_steps=num_steps,
    )
