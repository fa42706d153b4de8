"""ME-10: no run may die late, at its longest batch or by fragmentation, and the two are told apart beforehand."""

from __future__ import annotations

import pytest
import torch

from trainfit.errors import RecipeError
from trainfit.hardware import find_device
from trainfit.profile import AllocatorSettings
from trainfit.rehearsal import rehearse
from trainfit.rehearsal.allocator import CachingAllocator, DeviceFullError
from trainfit.step import Strategy
from trainfit.workload import MicroBatch, workload_from_config

MIB = 2**20
LENGTHS = (20, 33, 17, 128, 40, 25)  # one long outlier, in the middle of a run
CONFIG = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}


def window(length: int) -> MicroBatch:
    ids = torch.zeros(2, length, dtype=torch.long)
    return MicroBatch(ids, ids.clone(), ids.numel())


def test_a_prediction_is_that_of_the_longest_batch_from_the_first_step_on():
    """A plan is for micro batches of seq_len tokens: what comes shorter, whenever it comes, needs less."""
    workload = workload_from_config(CONFIG, seq_len=max(LENGTHS), name="tiny")
    hardware = find_device("cpu")
    predicted = rehearse(workload, Strategy(2), hardware).needed_bytes
    needs = {
        length: rehearse(workload, Strategy(2), hardware, micro_batches=[window(length)]).needed_bytes
        for length in LENGTHS
    }
    assert needs[max(LENGTHS)] == predicted
    assert all(needs[length] < predicted for length in LENGTHS if length < max(LENGTHS))
    assert sorted(needs, key=needs.__getitem__) == sorted(LENGTHS)


def fragmented(settings: AllocatorSettings) -> CachingAllocator:
    """60 MiB held, 40 in use: of twelve blocks of 5 MiB, four to a segment, those at the two borders are free."""
    allocator = CachingAllocator(settings, limit_bytes=60 * MIB)
    for block in range(12):
        allocator.malloc(block, 5 * MIB)
    for block in (3, 4, 7, 8):
        allocator.free(block)
    return allocator


def test_fragmentation_is_full_where_there_is_room_and_expandable_segments_find_it():
    allocator = fragmented(AllocatorSettings())
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (60 * MIB, 40 * MIB)
    allocator.malloc(12, 5 * MIB)  # what a hole has room for
    with pytest.raises(DeviceFullError):
        fragmented(AllocatorSettings()).malloc(12, 8 * MIB)
    fragmented(AllocatorSettings(expandable_segments=True)).malloc(12, 8 * MIB)


@pytest.mark.parametrize("expandable", [False, True])
def test_what_is_too_large_is_too_large_under_any_setting(expandable: bool):
    with pytest.raises(DeviceFullError):
        fragmented(AllocatorSettings(expandable_segments=expandable)).malloc(12, 25 * MIB)


def test_the_two_knobs_exclude_each_other():
    settings = AllocatorSettings(expandable_segments=True, max_split_size_mb=128)
    with pytest.raises(RecipeError, match="max_split_size_mb"):
        Strategy(1, allocator=settings)
