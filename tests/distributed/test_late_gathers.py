"""Gathers of random lateness change no loss."""

from __future__ import annotations

from functools import cache

import pytest
from late_gathers import run_all
from ranks import run_ranks
from zero_ranks import Case

from late_gather import Delay

STEPS = 200
UNEVEN = Delay(0.0, 0.002)
# case, and whether gathers are waited for late
STRESSED = {
    "one block ahead": (Case("llama", 3, 1, "full"), True),
    "tied, two ahead": (Case("tied-5", 3, 1, "keep", zero=(("prefetch", 2),)), True),
}


@cache
def found() -> dict[tuple[str, bool], list[list[float]]]:
    """By name and whether gathers were late: each rank's losses and norms."""
    keys = [(name, is_late) for name in STRESSED for is_late in (False, True)]
    work = [(STRESSED[name][0], STEPS, UNEVEN if is_late else None, STRESSED[name][1]) for name, is_late in keys]
    ranks = run_ranks(run_all, 2, work)
    return {key: [rank[index] for rank in ranks] for index, key in enumerate(keys)}


@pytest.mark.parametrize("name", STRESSED)
def test_two_hundred_steps_with_random_delays_give_the_same_losses(name: str) -> None:
    """To the bit: the same numbers are gathered, only later."""
    assert found()[name, True] == found()[name, False]
    assert len(found()[name, True][0]) == 2 * STEPS
    assert found()[name, True][0] == found()[name, True][1]
