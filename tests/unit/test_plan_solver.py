"""The solver against exhaustive search over every assignment of small models."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfit.plan.solver import (
    Problem,
    Solution,
    fastest,
    knapsack_bound,
    moments,
    peak_bound,
    seconds_bound,
    smallest,
    solution_of,
)


@st.composite
def problems(draw, max_blocks: int = 5) -> Problem:
    """Up to five blocks of up to three structures under two to four tiers, of which a structure may lack some."""
    num_tiers = draw(st.integers(2, 4))
    structures = draw(st.lists(st.integers(0, 2), min_size=1, max_size=max_blocks))
    sizes = st.integers(0, draw(st.sampled_from([3, 40, 2**36])))

    def table(values: st.SearchStrategy) -> np.ndarray:
        by_structure = np.array(draw(st.lists(values, min_size=3 * num_tiers, max_size=3 * num_tiers)))
        return by_structure.reshape(num_tiers, 3)[:, structures]

    offered = table(st.booleans())
    offered[draw(st.integers(0, num_tiers - 1))] = True
    alike = draw(st.booleans())  # gradients that do not depend on the tier
    gradient = table(sizes)
    return Problem(
        saved=table(sizes),
        forward_peak=table(sizes),
        backward_peak=table(sizes),
        gradient=np.tile(gradient[:1], (num_tiers, 1)) if alike else gradient,
        seconds=table(st.integers(1, 20)) / 8,
        offered=offered,
        structures=np.array(structures),
        before_loss=draw(sizes),
        head_gradient=draw(sizes),
        embedding=draw(sizes),
        waiting=draw(st.integers(0, 2)),
    )


def every_assignment(problem: Problem) -> list[Solution]:
    choices = [np.flatnonzero(column) for column in problem.offered.T]
    return [solution_of(problem, np.array(tiers)) for tiers in itertools.product(*choices)]


@settings(max_examples=200, deadline=None)
@given(problems(), st.floats(0, 1.1))
def test_the_optimum_is_that_of_exhaustive_search(problem: Problem, part: float):
    every = every_assignment(problem)
    peaks = [each.peak_bytes for each in every]
    room = int(min(peaks) + part * (max(peaks) - min(peaks)))
    best = min(each.seconds for each in every if each.peak_bytes <= room)
    found = fastest(problem, room)
    assert found is not None
    assert found.peak_bytes <= room
    assert found.seconds == pytest.approx(best, rel=1e-12)
    assert problem.offered[found.tiers, np.arange(problem.num_blocks)].all()
    assert seconds_bound(problem, room) <= best * (1 + 1e-6)
    assert knapsack_bound(problem, room) <= best * (1 + 1e-9)
    assert peak_bound(problem) <= min(peaks)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_the_smallest_is_that_of_exhaustive_search(problem: Problem):
    every = every_assignment(problem)
    lowest = min(each.peak_bytes for each in every)
    found = smallest(problem)
    assert found.peak_bytes == lowest
    assert found.seconds == pytest.approx(min(each.seconds for each in every if each.peak_bytes == lowest), rel=1e-12)
    assert fastest(problem, lowest - 1) is None


@given(problems())
def test_moments_are_those_of_a_walk_through_the_step(problem: Problem):
    tiers = problem.offered.argmax(0)
    blocks = range(problem.num_blocks)
    saved, gradient = ([int(table[tiers[b], b]) for b in blocks] for table in (problem.saved, problem.gradient))
    live = problem.waiting * sum(saved)
    forward, backward = [], []
    for b in blocks:
        forward.append(live + problem.forward_peak[tiers[b], b])
        live += saved[b]
    loss = live + problem.before_loss
    live += problem.head_gradient
    for b in reversed(blocks):
        backward.insert(0, live + problem.backward_peak[tiers[b], b])
        live += gradient[b] - saved[b]
    expected = [*forward, *backward, loss, live - problem.head_gradient + problem.embedding]
    assert moments(problem, tiers[None])[0].tolist() == expected


def uniform(num_blocks: int, gradient: int = 0) -> Problem:
    """Blocks of Llama-3.1-70B, one sequence of 4096, as traced; MiB."""
    columns = ([3505, 785, 193, 128], [3569, 1649, 1281, 1217], [1024, 3744, 4336, 4401], [gradient] * 4)
    tables = [np.array([column] * num_blocks).T * 2**20 for column in columns]
    seconds = np.array([[0.12648, 0.13368, 0.15673, 0.15798]] * num_blocks).T
    alike = np.zeros(num_blocks, dtype=np.int64)
    return Problem(*tables, seconds, np.ones_like(seconds, dtype=bool), alike, 5179 * 2**20, 0, 4039 * 2**20)


def test_early_blocks_keep_less_where_that_fits():
    low, high = smallest(uniform(12)).peak_bytes, solution_of(uniform(12), np.zeros(12, dtype=int)).peak_bytes
    found = fastest(uniform(12), (low + high) // 2)
    assert found is not None
    kept = uniform(12).saved[found.tiers, 0]
    assert (np.diff(kept) >= 0).all()
    assert kept[0] < kept[-1]


@pytest.mark.parametrize("gradient", [0, 400])
def test_eighty_blocks_take_seconds_at_most(gradient: int):
    """Typical are 0.1 to 0.5 s; the bound leaves room for a busy machine."""
    problem = uniform(80, gradient)
    low, high = 48 * 2**30, solution_of(problem, np.zeros(80, dtype=int)).peak_bytes
    begin = time.process_time()
    for part in (0.3, 0.5, 0.8):
        found = fastest(problem, int(low + part * (high - low)))
        assert found is not None
        assert found.seconds <= seconds_bound(problem, int(low + part * (high - low))) * 1.001
    assert time.process_time() - begin < 10
