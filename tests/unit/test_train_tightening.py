"""A tier table is tightened above its threshold, relaxed after calm, and does not swing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainfit.train.tightening import CALM, HOST_NOISE, RELAXED_BELOW, Tightening, UseMeter

LIMIT = 1000
LOW, BETWEEN, HIGH = int(RELAXED_BELOW * LIMIT), LIMIT - 1, LIMIT + 1


def changes(tightening: Tightening, *used: int) -> list[str | None]:
    return [tightening.after(each) for each in used]


def test_it_goes_down_a_row_for_each_update_above_the_threshold_and_stops_at_the_tightest():
    tightening = Tightening(LIMIT, max_level=2)
    assert changes(tightening, LIMIT, HIGH, HIGH, HIGH) == [None, "tightened", "tightened", None]
    assert tightening.level == 2


def test_it_goes_back_a_row_only_after_calm_in_a_row():
    tightening = Tightening(LIMIT, max_level=2)
    tightening.after(HIGH)
    assert changes(tightening, *[LOW] * (CALM - 1), BETWEEN) == [None] * CALM
    assert changes(tightening, *[LOW] * CALM) == [None] * (CALM - 1) + ["relaxed"]
    assert tightening.level == 0
    assert changes(tightening, *[LOW] * 2 * CALM) == [None] * 2 * CALM


def test_a_row_that_was_too_much_takes_twice_the_calm_to_come_back():
    tightening = Tightening(LIMIT, max_level=1)
    tightening.after(HIGH)
    waited = []
    for _ in range(3):
        waited.append(next(count for count in range(1, 10**6) if tightening.after(LOW)))
        assert tightening.after(HIGH) == "tightened"
    assert waited == [CALM, 2 * CALM, 4 * CALM]


class FakeMemory:
    """of_allocator: holds on to what was freed, until its cache is released."""

    def __init__(self, now: int = 0, *, of_allocator: bool = False) -> None:
        self.now = self.peak = self.cached = self.peak_reserved = now
        self.of_allocator = of_allocator

    def reset_peak(self) -> bool:
        self.peak, self.peak_reserved = self.now, self.reserved_bytes()
        return True

    def current_bytes(self) -> int:
        return self.now

    def peak_bytes(self) -> int:
        return self.peak

    def reserved_bytes(self) -> int:
        return self.cached if self.of_allocator else self.now

    def peak_reserved_bytes(self) -> int:
        return self.peak_reserved

    def release_cache(self, threshold: float = 0.9) -> bool:
        self.cached = self.now
        return self.of_allocator

    def update(self, rise: int, stays: int = 0, *, split: int = 0) -> None:
        """split: what fragmentation adds."""
        self.peak, self.now = self.now + rise, self.now + stays
        self.cached = max(self.cached, self.peak + split)
        self.peak_reserved = max(self.peak_reserved, self.cached if self.of_allocator else self.peak)


def meter_of(*, on_host: bool) -> tuple[UseMeter, FakeMemory]:
    memory = FakeMemory(10**9, of_allocator=not on_host)
    return UseMeter(SimpleNamespace(memory=memory, shares_host_memory=on_host)), memory


def used_on_device(meter: UseMeter, memory: FakeMemory, rise: int, split: int = 0) -> int:
    meter.begin()
    memory.update(rise, split=split)
    return meter.used_bytes() - 10**9


def test_a_device_tells_what_its_allocator_holds_not_what_is_in_use():
    meter, memory = meter_of(on_host=False)
    assert [used_on_device(meter, memory, *each) for each in ((70, 5), (300, 40), (20, 0))] == [75, 340, 340]
    meter.begin()
    memory.update(20)
    assert meter.recorded(20) - 10**9 == 340, "the recorded update tells it too"


def test_a_device_forgets_what_a_tightened_table_and_an_evaluation_leave_cached():
    meter, memory = meter_of(on_host=False)
    assert used_on_device(meter, memory, 300) == 300
    meter.shrink()
    assert used_on_device(meter, memory, 20) == 20
    memory.update(500)  # an evaluation
    assert used_on_device(meter, memory, 30) == 30


@pytest.mark.parametrize(("grows", "counts"), [(HOST_NOISE, False), (HOST_NOISE + 1, True)])
def test_a_host_counts_growth_from_the_update_after_the_recorded_one(grows, counts):
    meter, memory = meter_of(on_host=True)
    meter.begin()
    assert meter.used_bytes() == 0, "nothing is known before the recorded update"
    assert meter.recorded(500) == 500
    for rise, expected in ((10**6, 500), (10**6, 500), (10**6 + grows, 500 + counts * grows)):
        meter.begin()
        memory.update(rise)
        assert meter.used_bytes() == expected
        memory.now += 10**8  # an evaluation or a save leaves something behind
