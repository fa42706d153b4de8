"""The fast model against a naive simulation of the step's events."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.plan.cost import BlockTable, Resident, peak_bytes, step_seconds
from trainfit.profile import TIERS, BlockTrace, ShellTrace

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


def as_rows(tiers: list[str]) -> np.ndarray:
    return np.array([[TIERS.index(tier) for tier in tiers]], dtype=np.int64).reshape(1, len(tiers))


@given(residents, models(), shells)
def test_peak_is_the_highest_of_all_events(resident, model, shell):
    structures, traces, tiers = model
    table = BlockTable.of(structures, traces)
    expected = simulate(resident, [traces[each] for each in zip(structures, tiers)], shell)
    assert peak_bytes(resident, table.problem(shell), as_rows(tiers)).tolist() == [expected]


@given(models(), shells, st.integers(1, 9))
def test_seconds_grow_with_micro_batches_and_the_optimizer_runs_once(model, shell, micro_batches):
    structures, traces, tiers = model
    table, resident = BlockTable.of(structures, traces), Resident(0, 0, 0, 0, 0, 0.5)
    one = step_seconds(resident, table, as_rows(tiers), shell, micro_batches=1) - 0.5
    many = step_seconds(resident, table, as_rows(tiers), shell, micro_batches=micro_batches) - 0.5
    by_hand = shell.seconds + sum(
        traces[each].forward_seconds + traces[each].backward_seconds for each in zip(structures, tiers)
    )
    assert one[0] == pytest.approx(by_hand)
    assert many[0] == pytest.approx(one[0] * micro_batches)
