"""The fast model against a naive simulation of the step's events."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.hardware import find_device
from trainfit.plan.case import Case, Stage
from trainfit.plan.cost import BlockTable, Resident
from trainfit.plan.layout import resident_of, stage_parts
from trainfit.plan.solver import Problem, solution_of
from trainfit.plan.space import Point
from trainfit.profile import TIERS, BlockTrace, Layout, Mesh, ShellTrace, Zero
from trainfit.rehearsal.model_trace import ModelFacts
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
residents = st.builds(
    Resident, sizes, sizes, sizes, sizes, sizes, st.floats(0, 1), working_bytes=sizes, update_bytes=sizes
)


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
    live = stays + resident.shared_bytes + resident.earlier_gradient_bytes + resident.working_bytes
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
    moments.append(stays + resident.gradient_bytes + resident.update_bytes)
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
    seconds = [solution_of(problem, as_row(tiers)).true_seconds]
    alone = stage(resident, problem, shell.seconds)
    one, many = (
        Case(Point(Strategy(1, count), count), (alone,)).seconds(seconds) - 0.5 for count in (1, micro_batches)
    )
    by_hand = shell.seconds + sum(
        traces[each].forward_seconds + traces[each].backward_seconds for each in zip(structures, tiers)
    )
    assert one == pytest.approx(by_hand)
    assert many == pytest.approx(one * micro_batches)


def test_a_tier_that_loses_accuracy_must_be_as_much_faster():
    """keep does not fit, both others do: int8 at 1.1 times its seconds is faster than full's 1.3, and is not."""
    shell = ShellTrace(0, 0, 0, 0.0)
    for compressed, chosen in ((1.0, "keep_int8"), (1.25, "full")):
        blocks = {(0, "keep"): (1000, 0.9), (0, "keep_int8"): (0, compressed), (0, "full"): (0, 1.3)}
        traces = {key: BlockTrace(saved, 0, 0, 0, seconds, 0.0) for key, (saved, seconds) in blocks.items()}
        problem = BlockTable.of((0,), traces).problem(shell)
        alone = stage(Resident(0, 0, 0, 0, 0, 0.0), problem)
        (found,) = Case(Point(Strategy(1), 1), (alone,)).fastest(500)
        assert TIERS[found.tiers[0]] == chosen
        assert found.true_seconds == (compressed if chosen == "keep_int8" else 1.3)
        assert found.seconds == pytest.approx(found.true_seconds * (1.1 if chosen == "keep_int8" else 1.0))


def facts_of(num_blocks: int) -> ModelFacts:
    """Blocks of 1000 bytes, 500 around them, two optimizer states."""
    total = 1000 * num_blocks + 500
    sizes = {"parameter_bytes": total, "block_bytes": 1000 * num_blocks, "largest_block_bytes": 1000}
    updates = {"optimizer_bytes": 2 * total, "gradient_bytes": total, "update_peak_bytes": 0, "optimizer_seconds": 0.0}
    return ModelFacts((0,) * num_blocks, total, **sizes, **updates, dim=8, vocab_size=8, can_chunk=True)


@pytest.mark.parametrize(("stage_number", "working"), [(0, 0), (1, 4500), (2, 4500 + 2000), (3, 500 + 2000 + 2000)])
def test_what_ranks_send_lives_beside_the_activations(stage_number: int, working: int):
    """By the table atop layout.py: what is gathered, in stage 3 of 1 + prefetch blocks; two gradient buffers."""
    layout = Layout(Mesh(shard=4), Zero(stage_number))
    (part,) = stage_parts((0,) * 4, layout, 1)
    device = find_device("ascend-910b3", 4)
    resident = resident_of(facts_of(4), layout, device, part, batch_bytes=0, shared_bytes=0, accumulates=False)
    assert resident.working_bytes == working
    assert resident.floor_bytes == resident.model_bytes + working


@pytest.mark.parametrize("stage_number", [2, 3])
def test_gradients_are_reduced_in_as_much_as_is_outside_of_the_blocks(stage_number: int):
    """Where an allocator keeps it for the stream that communicates: not on a CPU."""
    layout = Layout(Mesh(shard=4), Zero(stage_number))
    (part,) = stage_parts((0,) * 4, layout, 1)

    def working(outside: int, device: str) -> int:
        facts = replace(facts_of(4), parameter_bytes=4000 + outside)
        hardware = find_device(device, 4)
        found = resident_of(facts, layout, hardware, part, batch_bytes=0, shared_bytes=0, accumulates=False)
        return found.working_bytes

    gathered = 4500  # more of the parameters
    assert working(5000, "ascend-910b3") - working(500, "ascend-910b3") == gathered + 5000 - 2000
    assert working(5000, "cpu") - working(500, "cpu") == gathered


def test_blocks_keep_what_the_communication_working_set_leaves():
    """Of four blocks that save 1000 bytes or nothing, each 1000 bytes of buffers make one more recompute."""
    one, other = (BlockTrace(saved, saved, 0, 0, seconds, 0.0) for saved, seconds in ((1000, 1.0), (0, 2.0)))
    table = BlockTable.of((0,) * 4, {(0, "keep"): one, (0, "full"): other})
    problem = table.problem(ShellTrace(0, 0, 0, 0.0))
    for working in (0, 1000, 3000):
        found = Case(
            Point(Strategy(1), 1), (stage(Resident(0, 0, 0, 0, 0, 0.0, working_bytes=working), problem),)
        ).fastest(4000)
        assert found is not None
        assert found[0].seconds == 4 + working // 1000
