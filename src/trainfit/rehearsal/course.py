"""The course of memory through a step, in few points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, islice, pairwise

from trainfit.profile import CATEGORIES, Category, Moment
from trainfit.rehearsal.events import Event

MAX_MOMENTS = 400


def highs_and_lows(totals: Sequence[int], limit: int = MAX_MOMENTS) -> list[int]:
    """Positions that show a curve's shape, ascending, at most `limit` (4 or more).

    First and last, and of each of many equal stretches its first highest and first lowest point: nothing in a stretch
    is above the former, and the highest of all, the first such, is among them.
    """
    if len(totals) <= limit:
        return list(range(len(totals)))
    stretches = (limit - 2) // 2
    edges = [len(totals) * number // stretches for number in range(stretches + 1)]
    chosen = {0, len(totals) - 1}
    for begin, end in pairwise(edges):
        stretch = range(begin, end)
        chosen |= {max(stretch, key=totals.__getitem__), min(stretch, key=totals.__getitem__)}
    return sorted(chosen)


def last_forward(events: Sequence[Event], peak_bytes: int) -> int:
    """Where the last micro batch begins, if as much as the peak is live from there on; else 0."""
    begins = [
        number for number, (one, other) in enumerate(pairwise(events), start=1) if one.phase != other.phase == "forward"
    ]
    totals = accumulate(event.num_bytes for event in events)
    begin = begins[-1] if begins else 0
    return begin if max(islice(totals, begin, None), default=0) >= peak_bytes else 0


def course_of(
    events: Sequence[Event], category_of: Callable[[Event], Category], *, start: int = 0, limit: int = MAX_MOMENTS
) -> tuple[Moment, ...]:
    """What was live by category after some of the events, from number `start` on. category_of is asked of births.

    Seconds are counted from the first of them.
    """
    totals = list(accumulate(event.num_bytes for event in events))
    wanted = [start + position for position in highs_and_lows(totals[start:], limit)]
    live = dict.fromkeys(CATEGORIES, 0)
    known: dict[int, Category] = {}
    moments = []
    done = 0
    begin = events[start].seconds if events else 0.0
    for position in wanted:
        for event in events[done : position + 1]:
            if event.num_bytes >= 0:
                known[event.storage] = category_of(event)
            live[known[event.storage]] += event.num_bytes
        done = position + 1
        event = events[position]
        seconds = event.seconds - begin
        bytes_by_category: dict[Category, int] = {name: num_bytes for name, num_bytes in live.items() if num_bytes}
        moments.append(Moment(event.phase, event.where, seconds, bytes_by_category))
    return tuple(moments)
