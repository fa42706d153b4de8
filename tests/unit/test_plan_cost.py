"""The fast model against a naive simulation of the step's events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainfit.plan.cost import Resident, peak_bytes, step_seconds
from trainfit.profile import BlockTrace, ShellTrace

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


def simulate(resident: Resident, traces: list[BlockTrace], shell: ShellTrace, accumulates: bool) -> int:
    """Walk through the step, moving one number up and down."""
    stays = resident.model_bytes + resident.batch_bytes
    live = stays + resident.shared_bytes + (resident.gradient_bytes if accumulates else 0)
    moments = []
    for block in traces:
        moments.append(live + block.forward_peak_bytes)
        live += block.saved_bytes
    moments.append(live + shell.before_blocks_peak_bytes)
    left_by_head = 0 if accumulates else shell.gradient_bytes
    live += left_by_head
    for block in reversed(traces):
        moments.append(live + block.backward_peak_bytes)
        live += (0 if accumulates else block.gradient_bytes) - block.saved_bytes
    moments.append(live - left_by_head + shell.after_blocks_peak_bytes)
    moments.append(stays + resident.gradient_bytes)
    return max(moments)


@given(
    st.builds(Resident, sizes, sizes, sizes, sizes, st.floats(0, 1)),
    st.lists(blocks, max_size=6),
    shells,
    st.booleans(),
)
def test_peak_is_the_highest_of_all_events(resident, traces, shell, accumulates):
    expected = simulate(resident, traces, shell, accumulates)
    assert peak_bytes(resident, traces, shell, accumulates=accumulates) == expected


@given(st.lists(blocks, max_size=4), shells, st.integers(1, 9))
def test_seconds_grow_with_micro_batches_and_the_optimizer_runs_once(traces, shell, micro_batches):
    resident = Resident(0, 0, 0, 0, 0.5)
    one = step_seconds(resident, traces, shell, micro_batches=1) - 0.5
    many = step_seconds(resident, traces, shell, micro_batches=micro_batches) - 0.5
    assert abs(many - one * micro_batches) < 1e-9
