"""StepRecord: what a tracker saw of a step, and the profile that follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from trainfit.profile import CATEGORIES, Category, Moment, Profile
from trainfit.rehearsal.collectives import tally
from trainfit.rehearsal.course import course_of, last_forward
from trainfit.rehearsal.events import Entry, Event, in_place_additions, replay
from trainfit.rehearsal.replay import START
from trainfit.rehearsal.timeline import TRANSFERS, StepClock


@dataclass
class StepRecord:
    """log: in order. names: what storages were said to be, by number."""

    log: list[Entry] = field(default_factory=list)
    names: dict[int, Category] = field(default_factory=dict)

    @property
    def events(self) -> list[Event]:
        return [entry for entry in self.log if isinstance(entry, Event)]

    def settled(self) -> StepRecord:
        """With sums in the place of the addends that die with them."""
        return StepRecord(in_place_additions(self.log), self.names)

    def storages(self, category: Category) -> frozenset[int]:
        """All that were ever named so."""
        return frozenset(storage for storage, name in self.names.items() if name == category)

    def profile(
        self, clock: StepClock, *, rank: int = 0, waiting: int = 0, like: int = 0, follow_all: bool = False
    ) -> Profile:
        """Of a settled record; the clock goes through it.

        waiting: micro batches that did not run, but take the time and the collectives of micro batch number `like`.
        follow_all: the timeline has all micro batches, and not only the last where the peak falls in it.
        """
        clock.plays(self.log)
        total = clock.total(waiting=waiting, like=like)
        collectives = tally(total.calls, clock.links)
        events = self.events
        phases, peak = replay(events)
        assert peak.event is not None
        return Profile(
            peak_bytes=peak.total,
            peak_phase=peak.event.phase,
            peak_place=peak.event.where,
            phases=phases,
            categories=self._categories(events, peak.position),
            resident_bytes=sum(event.num_bytes for event in events),
            step_seconds=sum(total.seconds.values()),
            phase_seconds=total.seconds,
            rank=rank,
            collectives=collectives,
            communication_seconds=sum(each.seconds for each in collectives.values()),
            exposed_communication_seconds=total.exposed,
            offloaded_bytes=self._offloaded(),
            timeline=self._course(events, 0 if follow_all else last_forward(events, peak.total)),
        )

    def _offloaded(self) -> int:
        """The most that copies beside computation had taken away and not brought back."""
        sizes: dict[int, int] = {}
        away = most = 0
        for entry in self.log:
            if isinstance(entry, Event):
                sizes[entry.storage] = max(sizes.get(entry.storage, 0), entry.num_bytes)
            elif entry.operator in TRANSFERS[:2]:
                signed = 1 if entry.operator == TRANSFERS[0] else -1
                away += signed * sum(sizes[storage] for storage in entry.touched)
                most = max(most, away)
        return most

    def _categories(self, events: Sequence[Event], position: int) -> dict[Category, int]:
        """Live bytes at the peak, by what each storage is or became."""
        born: dict[int, Event] = {}
        for event in events[: position + 1]:
            if event.num_bytes >= 0:
                born[event.storage] = event
            else:
                born.pop(event.storage, None)
        dead_in_forward = _dead_in_forward(events)
        totals = dict.fromkeys(CATEGORIES, 0)
        for event in born.values():
            totals[self._category(event, dead_in_forward)] += event.num_bytes
        return totals

    def _course(self, events: Sequence[Event], start: int) -> tuple[Moment, ...]:
        """Memory from number `start` on, but not before all that stays is registered."""
        start = next((index for index, event in enumerate(events) if index >= start and event.operator != START), 0)
        dead_in_forward = _dead_in_forward(events)
        return course_of(events, lambda birth: self._category(birth, dead_in_forward), start=start)

    def _category(self, birth: Event, dead_in_forward: set[int]) -> Category:
        if (named := self.names.get(birth.storage)) is not None:
            return named
        if birth.phase == "loss":
            return "loss"
        return "activations" if birth.phase == "forward" and birth.storage not in dead_in_forward else "temporary"


def _dead_in_forward(events: Iterable[Event]) -> set[int]:
    return {event.storage for event in events if event.num_bytes < 0 and event.phase == "forward"}
