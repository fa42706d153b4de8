"""The fast model against a naive simulation of the step's events."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.plan.case import Case, Stage
from trainfit.plan.cost import BlockTable, Resident
from trainfit.plan.layout import stage_parts
from trainfit.plan.solver import Problem, solution_of
from trainfit.plan.space import Point
from trainfit.profile import TIERS, BlockTrace, Layout, ShellTrace
from trainfit.step import Strategy

sizes = st.integers(0, 2**40)
blocks = st.builds(
    BlockTrace,
    saved_bytes=sizes,
    forward_peak_bytes=sizes,
    backward_peak_bytes=sizes,
    gradient_bytes=sizes,
    forward_seconds=st.floats(0, 1),
    backward_seconds=st.floats(0, 1),
)
shells = st.builds(ShellTrace, sizes, sizes, sizes, st.floats(0, 1))
residents = st.builds(Resident, sizes, sizes, sizes, sizes, sizes, st.floats(0, 1))


@st.composite
def models(draw):
    """Structures of up to six blocks, their traces under every tier, and one assignment."""
    structures = draw(st.lists(st.integers(0, 1), max_size=6))
    traces = {(structure, tier): draw(blocks) for structure in (0, 1) for tier in TIERS}
    tiers = draw(st.lists(st.sampled_from(TIERS), min_size=len(structures), max_size=len(structures)))
    return structures, traces, tiers


def simulate(resident: Resident, traces: list[BlockTrace], shell: ShellTrace) -> int:
    """Walk through the step, moving one number up and down."""
    stays = resident.model_bytes + resident.batch_bytes
    live = stays + resident.shared_bytes + resident.earlier_gradient_bytes
    moments = []
    for block in traces:
        moments.append(live + block.forward_peak_bytes)
        live += block.saved_bytes
    moments.append(live + shell.before_blocks_peak_bytes)
    live += shell.gradient_bytes
    for block in reversed(traces):
        moments.append(live + block.backward_peak_bytes)
        live += block.gradient_bytes - block.saved_bytes
    moments.append(live - shell.gradient_bytes + shell.after_blocks_peak_bytes)
    moments.append(stays + resident.gradient_bytes)
    return max(moments)


def as_row(tiers: list[str]) -> np.ndarray:
    return np.array([TIERS.index(tier) for tier in tiers], dtype=np.int64)


def stage(resident: Resident, problem: Problem, beside_seconds: float = 0.0) -> Stage:
    """The only one of a model."""
    (part,) = stage_parts((0,) * problem.num_blocks, Layout(), 1)
    return Stage(part, resident, problem, beside_seconds)


@given(residents, models(), shells)
def test_peak_is_the_highest_of_all_events(resident, model, shell):
    structures, traces, tiers = model
    table = BlockTable.of(structures, traces)
    expected = simulate(resident, [traces[each] for each in zip(structures, tiers)], shell)
    problem = table.problem(shell)
    assert stage(resident, problem).peak(solution_of(problem, as_row(tiers))) == expected


@given(models(), shells, st.integers(1, 9))
def test_seconds_grow_with_micro_batches_and_the_optimizer_runs_once(model, shell, micro_batches):
    structures, traces, tiers = model
    table, resident = BlockTable.of(structures, traces), Resident(0, 0, 0, 0, 0, 0.5)
    problem = table.problem(shell)
    seconds = [solution_of(problem, as_row(tiers)).seconds]
    alone = stage(resident, problem, shell.seconds)
    one, many = (
        Case(Point(Strategy(1, count), count), (alone,)).seconds(seconds) - 0.5 for count in (1, micro_batches)
    )
    by_hand = shell.seconds + sum(
        traces[each].forward_seconds + traces[each].backward_seconds for each in zip(structures, tiers)
    )
    assert one == pytest.approx(by_hand)
    assert many == pytest.approx(one * micro_batches)
