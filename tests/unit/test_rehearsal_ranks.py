"""What the tracker sees of FSDP and DTensor, and what its two clocks hide, on sequences whose answer is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from trainfit.hardware.ranks import fake_process_group
from trainfit.rehearsal.collectives import tally
from trainfit.rehearsal.events import Work
from trainfit.rehearsal.rehearse import fake_tensors
from trainfit.rehearsal.timeline import Timeline
from trainfit.rehearsal.tracker import StorageTracker

KIB = 1024
RANKS, TOKENS, DIM, WIDE = 4, 32, 64, 256


# ---- storages that are resized from Python --------------------------------------------------------------------------


def test_a_storage_that_is_resized_counts_at_its_moment_and_stays_what_it_was():
    tracker = StorageTracker()
    gathered = torch.zeros(4 * KIB, dtype=torch.uint8)
    tracker.register([gathered], "parameters")
    with tracker:
        gathered.untyped_storage().resize_(0)
        assert tracker.live_bytes() == 0
        other = torch.zeros(KIB, dtype=torch.uint8)
        gathered.untyped_storage().resize_(4 * KIB)
        assert tracker.live_bytes() == 5 * KIB
    profile = tracker.profile()
    assert profile.peak_bytes == 5 * KIB
    assert profile.categories["parameters"] == 4 * KIB
    gathered.untyped_storage().resize_(0)  # nobody looks any more
    assert tracker.live_bytes() == 5 * KIB
    del other


# ---- DTensor --------------------------------------------------------------------------------------------------------


def tensor_parallel_step() -> tuple[StorageTracker, int]:
    """Two matrices, the first split by columns, the second by rows. Returns the tracker and the parameters' bytes."""
    mesh = init_device_mesh("cpu", (RANKS,))
    with fake_tensors():
        model = nn.Sequential(nn.Linear(DIM, WIDE, bias=False), nn.Linear(WIDE, DIM, bias=False))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        tracker = StorageTracker()
        tracker.register(model.parameters(), "parameters")
        inputs = torch.empty(TOKENS, DIM)
        with tracker:
            output: Tensor = model(inputs)
            tracker.observe("backward")
            output.backward(torch.empty_like(output))
        return tracker, tracker.profile().categories["parameters"]


def test_dtensors_count_with_what_this_rank_has():
    with fake_process_group(RANKS):
        tracker, parameters = tensor_parallel_step()
    assert parameters == 2 * DIM * WIDE * 4 // RANKS
    # A whole hidden activation, or a whole matrix, would show.
    assert tracker.profile().peak_bytes < 3 * parameters + 8 * TOKENS * max(DIM, WIDE // RANKS) * 4
    assert max(event.num_bytes for event in tracker.record.events) == max(DIM * WIDE * 4 // RANKS, TOKENS * DIM * 4)


def test_collectives_of_tensor_parallelism_are_counted():
    with fake_process_group(RANKS):
        tracker, _ = tensor_parallel_step()
    reduced = tally(entry.call for entry in tracker.log if isinstance(entry, Work) and entry.call)["all_reduce"]
    assert reduced.group_sizes == (RANKS,)
    assert reduced.bytes == reduced.count * TOKENS * DIM * 4
    assert reduced.count >= 1


# ---- two clocks -----------------------------------------------------------------------------------------------------


def test_a_gather_is_hidden_by_the_block_before_it():
    timeline = Timeline()
    timeline.runs("fsdp::split_with_sizes_copy", (), 0.0)
    timeline.runs("mm", (), 3.0)
    timeline.communicates("all_gather", 2.0, gathers_ahead=True, storages=[7], in_backward=False)
    assert timeline.runs("fsdp::split_with_sizes_copy", [7], 0.0) == 0.0
    timeline.runs("mm", (), 3.0)
    timeline.communicates("all_gather", 5.0, gathers_ahead=True, storages=[8], in_backward=False)
    assert timeline.runs("fsdp::split_with_sizes_copy", [8], 0.0) == pytest.approx(2.0)


def test_a_reduction_is_waited_for_before_the_next_one_and_the_last_at_the_end():
    timeline = Timeline()
    timeline.communicates("reduce_scatter", 4.0, gathers_ahead=False, storages=[1], in_backward=True)
    assert timeline.runs("mm", [1], 1.0) == 0.0  # on the communication's own stream
    assert timeline.runs("fsdp::chunk_cat", (), 0.0) == pytest.approx(3.0)
    timeline.communicates("reduce_scatter", 4.0, gathers_ahead=False, storages=[2], in_backward=True)
    timeline.runs("mm", (), 1.0)
    assert timeline.finish() == pytest.approx(3.0)
    assert timeline.finish() == 0.0


def test_links_carry_one_collective_after_another():
    timeline = Timeline()
    for storage in (1, 2):
        timeline.communicates("all_gather", 2.0, gathers_ahead=False, storages=[storage], in_backward=False)
    assert timeline.runs("mm", [2], 0.0) == pytest.approx(4.0)


def test_a_node_and_the_network_carry_theirs_at_once():
    timeline = Timeline()
    timeline.communicates("all_gather", 5.0, gathers_ahead=True, storages=[1], in_backward=False, over="network")
    timeline.communicates("all_gather", 2.0, gathers_ahead=False, storages=[2], in_backward=False)
    assert timeline.runs("mm", [2], 1.0) == pytest.approx(2.0)
    assert timeline.runs("mm", [1], 0.0) == pytest.approx(2.0)
    timeline.communicates("all_reduce", 4.0, gathers_ahead=False, storages=[3], in_backward=True, over="network")
    timeline.communicates("all_reduce", 1.0, gathers_ahead=False, storages=[4], in_backward=True)
    assert timeline.finish() == pytest.approx(4.0)  # all of them, not the one that was called last


def test_nothing_is_hidden_where_one_stream_does_both():
    timeline = Timeline(overlaps=False)
    timeline.runs("mm", (), 9.0)
    waited = timeline.communicates("all_gather", 2.0, gathers_ahead=True, storages=[1], in_backward=False)
    assert waited == pytest.approx(2.0)
    assert timeline.runs("mm", [1], 1.0) == 0.0
