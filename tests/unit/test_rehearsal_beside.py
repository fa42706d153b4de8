"""Seconds of what runs beside: no faster together, and what a device would have idled is won."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.rehearsal.beside import SideWork
from trainfit.rehearsal.events import JOIN, Entry, Work
from trainfit.rehearsal.timeline import StepClock, Tally

SECONDS = st.floats(0.0, 3.0).map(lambda seconds: round(seconds, 3))


def computes(seconds: float, beside: int = 0) -> Work:
    return Work("backward", "aten::mm", seconds, "arithmetic", beside=beside)


def joins() -> Work:
    return Work("backward", JOIN, 0.0, "launch", beside=1)


def played(*log: Entry) -> tuple[float, Tally]:
    clock = StepClock(links=None)
    clock.plays([*log, Work("optimizer", "aten::mul", 0.0, "memory")])
    total = clock.total()
    return sum(total.seconds.values()), total


def test_side_work_takes_as_long_as_it_would_without():
    seconds, total = played(computes(1), computes(2, beside=1), computes(3), joins(), computes(4))
    assert seconds == pytest.approx(10)
    assert total.exposed == 0
    assert total.by_bound["arithmetic"] == pytest.approx(10)


def test_streams_share_the_device_while_both_have_work():
    side = SideWork()
    side.add(1.0, 2.0, "memory")
    assert side.shares(1.0, 1.0) == pytest.approx(3.0)  # half a second's worth in each
    assert side.takes_ran() == {"memory": pytest.approx(1.0)}
    assert side.shares(3.0, 5.0) == pytest.approx(9.0)
    assert side.ends(9.0) == 9.0


def test_it_runs_where_the_other_stream_waits():
    side = SideWork()
    side.add(0.0, 2.0, "memory")
    side.add(0.0, 3.0, "link", is_link=True)
    side.add(0.0, 1.0, "memory")
    assert side.alone(0.0, 4.0) == 4.0
    assert side.seconds == 2.0
    assert side.links == {"link": 5.0}
    assert side.shares(4.0, 0.5) == 4.5  # the side stream waits for its own collective
    assert side.ends(4.5) == 6.0
    assert side.seconds == 3.0


def test_a_collective_goes_behind_those_of_the_side_stream():
    side = SideWork()
    side.add(0.0, 2.0, "memory")
    side.add(0.0, 3.0, "link", is_link=True)
    assert side.calls_all(1.0) == 3.0
    assert side.links == {"link": 6.0}


@given(st.lists(st.tuples(SECONDS, st.booleans()), max_size=6), st.lists(st.tuples(SECONDS, st.booleans()), max_size=6))
def test_nothing_is_lost_and_nothing_is_faster_than_the_device(beside: list, own: list):
    """All side work is done in the end, no sooner than one device could, no later than without a second stream."""
    side, now, waits = SideWork(), 0.0, 0.0
    for seconds, is_link in beside:
        side.add(0.0, seconds, "link", is_link=is_link)
    for seconds, is_wait in own:
        now = side.alone(now, now + seconds) if is_wait else side.shares(now, seconds)
        waits += seconds * is_wait
    end = side.ends(now)
    computing = sum(seconds for seconds, is_link in beside if not is_link)
    on_links = sum(seconds for seconds, is_link in beside if is_link)
    busy = computing + sum(seconds for seconds, is_wait in own if not is_wait)
    assert side.seconds == pytest.approx(computing)
    assert max(busy, computing + on_links, now) - 1e-9 <= end <= busy + on_links + waits + 1e-9
