"""largest_within against looking at every number."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from trainfit.plan.largest import largest_within


def brute(needed: Callable[[int], int], allowed: int, highest: int) -> int:
    return max((n for n in range(1, highest + 1) if needed(n) <= allowed), default=0)


def counted(needed: Callable[[int], int]) -> tuple[Callable[[int], int], list[int]]:
    asked: list[int] = []

    def ask(number: int) -> int:
        asked.append(number)
        return needed(number)

    return ask, asked


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=200),
    st.integers(0, 2000),
    st.integers(1, 300),
)
def test_it_is_the_largest_of_any_sizes_that_do_not_fall(rises: list[int], allowed: int, start: int):
    sizes = [sum(rises[: n + 1]) for n in range(len(rises))]
    ask, asked = counted(lambda number: sizes[number - 1])
    assert largest_within(ask, allowed, highest=len(sizes), start=start) == brute(
        lambda number: sizes[number - 1], allowed, len(sizes)
    )
    assert len(asked) == len(set(asked))


@given(st.integers(0, 10**9), st.integers(1, 10**6), st.integers(0, 10**12), st.integers(1, 64))
def test_a_straight_line_takes_few_questions(floor: int, slope: int, allowed: int, start: int):
    highest = 2**20
    ask, asked = counted(lambda number: floor + slope * number)
    found = largest_within(ask, allowed, highest=highest, start=start)
    assert found == max(0, min(highest, (allowed - floor) // slope))
    assert len(asked) <= 8


@given(st.integers(0, 10**6), st.integers(1, 100), st.integers(1, 10**7), st.integers(0, 10**8))
def test_a_line_that_leaves_a_floor_takes_few_more(floor: int, slope: int, below: int, above: int):
    """The optimizer's peak, until activations pass it: the larger of a constant and a line."""
    allowed = floor + above

    def needed(number: int) -> int:
        return max(floor, floor - below + slope * number)

    ask, asked = counted(needed)
    found = largest_within(ask, allowed, highest=2**24, start=16)
    assert needed(found) <= allowed
    assert found == 2**24 or needed(found + 1) > allowed
    assert len(asked) <= 3 * 24 + 10  # every third question halves, of 2**24 numbers
