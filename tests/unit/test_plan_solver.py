"""The solver against exhaustive search over every assignment of small models."""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainfit.errors import SolverError
from trainfit.plan import highs, solver
from trainfit.plan.solver import (
    Problem,
    Solution,
    fastest,
    knapsack_bound,
    moments,
    peak_bound,
    relaxed_bound,
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
    rough = fastest(problem, room, gap=0.1)
    assert rough is not None
    assert rough.peak_bytes <= room
    assert rough.seconds <= 1.1 * best * (1 + 1e-9)
    assert relaxed_bound(problem, room) <= best * (1 + 1e-6)
    assert knapsack_bound(problem, room) <= best * (1 + 1e-9)
    assert peak_bound(problem) <= min(peaks)


# What HiGHS' presolve lost of a program with equations: 0.625 s in 6 bytes. See NOTE [ The program ].
TO_THE_BYTE = Problem(
    saved=np.array([[1, 0, 0, 1], [0, 1, 0, 0]]),
    forward_peak=np.zeros((2, 4), dtype=np.int64),
    backward_peak=np.array([[0, 2, 0, 0], [3, 2, 0, 3]]),
    gradient=np.array([[0, 2, 0, 0], [0, 0, 1, 0]]),
    seconds=np.array([[1, 1, 1, 1], [2, 1, 1, 2]]) / 8,
    offered=np.array([[True, True, False, True], [True, True, True, True]]),
    structures=np.array([2, 1, 0, 2]),
    before_loss=0,
    head_gradient=0,
    embedding=0,
    waiting=2,
)


@settings(max_examples=200, deadline=None)
@example(TO_THE_BYTE)
@given(problems())
def test_the_smallest_is_that_of_exhaustive_search(problem: Problem):
    every = every_assignment(problem)
    lowest = min(each.peak_bytes for each in every)
    found = smallest(problem)
    assert found.peak_bytes == lowest
    assert found.seconds == pytest.approx(min(each.seconds for each in every if each.peak_bytes == lowest), rel=1e-12)
    assert fastest(problem, lowest - 1) is None


def two_tiers(**changes: object) -> Problem:
    """Four blocks, fast or slow; but for what is changed nothing takes any memory."""
    table = np.zeros((2, 4), dtype=np.int64)
    tables = dict.fromkeys(("saved", "forward_peak", "backward_peak", "gradient"), table)
    seconds = np.array([[1.0] * 4, [2.0] * 4])
    given: dict[str, object] = {**tables, "before_loss": 0, "head_gradient": 0, "embedding": 0, **changes}
    return Problem(seconds=seconds, offered=seconds > 0, structures=np.zeros(4, dtype=np.int64), **given)


def fast(num_bytes: int) -> np.ndarray:
    """So much of each block that is fast, and as good as nothing of a slow one."""
    return np.array([[num_bytes] * 4, [1] * 4])


GIB = 2**30
# What the program may not forget: its name, bytes in which it alone limits, and what they allow.
EVENTS = {
    "forward_peak": two_tiers(forward_peak=fast(8 * GIB)),
    "backward_peak": two_tiers(backward_peak=fast(8 * GIB)),
    "saved": two_tiers(saved=fast(3 * GIB)),
    "before_loss": two_tiers(saved=fast(GIB), before_loss=4 * GIB),
    "gradient": two_tiers(gradient=fast(3 * GIB)),
    "head_gradient": two_tiers(saved=fast(GIB), head_gradient=4 * GIB),
    "embedding": two_tiers(gradient=fast(GIB), embedding=4 * GIB),
    "waiting": two_tiers(saved=fast(GIB), waiting=1),
}


@pytest.mark.parametrize("figure", EVENTS)
def test_each_figure_of_the_events_limits(figure: str):
    problem, room = EVENTS[figure], 7 * GIB
    without = replace(problem, **{figure: getattr(problem, figure) * 0})
    assert solution_of(without, np.zeros(4, dtype=int)).peak_bytes <= room  # nothing else does
    best = min(each.seconds for each in every_assignment(problem) if each.peak_bytes <= room)
    found = fastest(problem, room)
    assert found is not None
    assert (found.seconds, found.peak_bytes <= room) == (best, True)
    assert best > 4


# Events of four blocks in the program's order.
FORWARD, BACKWARD, LOSS, EMBEDDING = range(0, 8, 2), range(1, 8, 2), (8,), (9,)


@pytest.mark.parametrize(
    ("figure", "rows"),
    [
        ("forward_peak", FORWARD),
        ("backward_peak", BACKWARD),
        ("before_loss", LOSS),
        ("gradient", EMBEDDING),
        ("embedding", EMBEDDING),
    ],
)
def test_an_event_that_is_missing_is_no_rounding(monkeypatch: pytest.MonkeyPatch, figure: str, rows: Sequence[int]):
    """Without the check, less and less would be asked until something fits."""

    class Lacking(solver._Program):
        number = 0

        def _event(self, *row: object) -> None:
            if self.number not in rows:
                super()._event(*row)
            self.number += 1

    monkeypatch.setattr(solver, "_Program", Lacking)
    with pytest.raises(AssertionError, match=r"needs \d+ bytes more than the 7516192768 asked for.*is missing"):
        fastest(EVENTS[figure], 7 * GIB)
    with pytest.raises(AssertionError, match=r"needs \d+ bytes more than the \d+ asked for.*is missing"):
        smallest(replace(EVENTS[figure], offered=np.array([[True] * 4, [False] * 4])))


def test_what_passes_by_rounding_is_forbidden_and_the_rest_still_found():
    """One byte of a room of 1e9 is HiGHS' tolerance: of two tiers the faster needs it, the slower fits to the byte."""
    table = np.zeros((2, 3), dtype=np.int64)
    saved, gradient = table.copy(), table.copy()
    saved[:, :2], gradient[1, 2] = 500_000_001, 1
    seconds = np.array([[1.0, 1.0, 2.0], [1.0, 1.0, 1.0]])
    structures = np.array([0, 0, 1])
    problem = Problem(saved, table, table, gradient, seconds, seconds > 0, structures, 0, 0, 0)
    found = fastest(problem, 1_000_000_002)
    assert found is not None
    assert (found.seconds, found.peak_bytes) == (4.0, 1_000_000_002)


def test_rounding_is_forbidden_so_often_and_then_asked_for_less(monkeypatch: pytest.MonkeyPatch):
    """A solver that always finds what passes the room by a little."""
    problem, asked, runs = EVENTS["saved"], [], []

    class Rounding(solver._Program):
        def __init__(self, problem: Problem, room: int) -> None:
            super().__init__(problem, room)
            asked.append(room)

        def run(self, *, whole: bool = True, gap: float = 0.0) -> np.ndarray | None:
            runs.append(len(self._rows))
            return np.array([1.0, 0.0] * 4) if len(asked) == 1 else None

        @property
        def slack_bytes(self) -> int:
            return 50

    peak = solution_of(problem, np.zeros(4, dtype=int)).peak_bytes
    monkeypatch.setattr(solver, "_Program", Rounding)
    assert fastest(problem, peak - 10) is None
    assert asked == [peak - 10, peak - 60]
    assert np.diff(runs[:-1]).tolist() == [1] * (solver._MAX_FORBIDDEN - 1)


def test_what_the_solver_prints_is_not_in_stdout(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    """It comes from C, through a buffer of its own: `transformNewIntegerFeasibleSolution` and the like."""
    milp = highs.milp

    def noisy(*args: object, **options: object) -> object:
        ctypes.CDLL(None).puts(b"noise")
        return milp(*args, **options)

    monkeypatch.setattr(highs, "milp", noisy)
    print("before")
    assert fastest(EVENTS["saved"], 7 * GIB) is not None
    print("after")
    assert capfd.readouterr().out == "before\nafter\n"


@pytest.mark.parametrize("status", [1, 3, 4])
def test_only_a_proof_says_that_nothing_fits(monkeypatch: pytest.MonkeyPatch, status: int):
    """A limit that was reached, or a failure, gives no values either."""
    answer = SimpleNamespace(status=status, x=None, message="why")
    monkeypatch.setattr(highs, "milp", lambda *args, **options: answer)
    for ask in (fastest, relaxed_bound):
        with pytest.raises(SolverError, match=f"HiGHS stopped with status {status}, no optimum: why"):
            ask(EVENTS["saved"], 7 * GIB)
    answer.status = 2
    assert fastest(EVENTS["saved"], 7 * GIB) is None
    assert relaxed_bound(EVENTS["saved"], 7 * GIB) == float("inf")


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
        assert found.seconds <= relaxed_bound(problem, int(low + part * (high - low))) * 1.001
    assert time.process_time() - begin < 10


def test_an_estimate_is_solved_to_its_gap_and_all_else_to_none(monkeypatch: pytest.MonkeyPatch):
    gaps: list[float] = []

    def minimum(*program: object, gap: float) -> object:
        gaps.append(gap)
        return highs.minimum(*program, gap=gap)

    monkeypatch.setattr(solver, "minimum", minimum)
    fastest(EVENTS["saved"], 7 * GIB, gap=0.25)
    fastest(EVENTS["saved"], 7 * GIB)
    assert gaps == [0.25, 0.0]
