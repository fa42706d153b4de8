"""The model of the caching allocator against traces whose answer follows from PyTorch's published rules."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfit.profile import AllocatorSettings
from trainfit.rehearsal.allocator import CachingAllocator, DeviceFullError
from trainfit.rehearsal.allocator_rules import round_size, segment_size

MIB = 2**20
EXPANDABLE = AllocatorSettings(expandable_segments=True)
ALL_SETTINGS = [
    AllocatorSettings(),
    EXPANDABLE,
    AllocatorSettings(max_split_size_mb=64),
    AllocatorSettings(roundup_power2_divisions=4),
]


def held(allocator: CachingAllocator) -> tuple[int, int]:
    """Allocated and reserved MiB."""
    return allocator.allocated_bytes // MIB, allocator.reserved_bytes // MIB


@pytest.mark.parametrize(
    ("requested", "rounded"),
    [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB), (10 * MIB + 1, 10 * MIB + 512)],
)
def test_requests_are_rounded_up_to_512_bytes(requested: int, rounded: int) -> None:
    assert round_size(requested) == rounded


def test_an_npu_adds_32_bytes_first() -> None:
    assert [round_size(n, padding=32) for n in (1, 480, 481, 512, 2**20)] == [512, 512, 1024, 1024, 2**20 + 512]


def test_roundup_power2_divisions() -> None:
    four = AllocatorSettings(roundup_power2_divisions=4)
    # The example in PyTorch's notes on memory management, in units of 512: 1200 becomes 1280.
    assert round_size(1200 * 512, four) == 1280 * 512
    assert round_size(1024 * 512, four) == 1024 * 512
    assert round_size(1793 * 512, four) == 2048 * 512
    assert round_size(4 * 512, four) == 4 * 512  # not above 512 x divisions
    assert round_size(5 * 512, four) == 5 * 512


@pytest.mark.parametrize(
    ("size", "segment"),
    [(512, 2), (MIB, 2), (MIB + 512, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 512, 12), (11 * MIB, 12)],
)
def test_segment_sizes(size: int, segment: int) -> None:
    assert segment_size(size) == segment * MIB


def test_small_requests_share_two_mib() -> None:
    allocator = CachingAllocator()
    for handle in range(4):
        allocator.malloc(handle, MIB // 2)
    assert held(allocator) == (2, 2)
    allocator.malloc(4, 512)
    assert allocator.reserved_bytes == 4 * MIB


def test_small_and_large_requests_never_share() -> None:
    allocator = CachingAllocator()
    allocator.malloc(0, MIB + 1)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.malloc(1, MIB)  # 18.99 MiB are free in the large pool
    assert allocator.reserved_bytes == 22 * MIB


def test_a_large_block_keeps_a_rest_of_up_to_one_mib() -> None:
    allocator = CachingAllocator()
    allocator.malloc(0, 11 * MIB)  # 12 MiB, 1 MiB over: not more than that, so it is not split
    assert held(allocator) == (12, 12)
    allocator.malloc(1, 11 * MIB - 512)
    assert allocator.allocated_bytes == 12 * MIB + 11 * MIB - 512  # 1 MiB and 512 bytes over: split


def test_expandable_segments_split_from_512_bytes_on() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    allocator.malloc(0, 20 * MIB - 512)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (20 * MIB - 512, 20 * MIB)
    allocator.malloc(1, 20 * MIB + 512)  # takes the 512 bytes left and one page
    assert allocator.reserved_bytes == 40 * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    for handle, size in enumerate((40, 20, 30)):
        allocator.malloc(handle, size * MIB)
    for handle in range(3):
        allocator.free(handle)
    allocator.malloc(3, 20 * MIB)
    allocator.malloc(4, 30 * MIB)
    allocator.malloc(5, 40 * MIB)
    assert held(allocator) == (90, 90)


def test_freed_neighbours_merge() -> None:
    allocator = CachingAllocator()
    allocator.malloc(0, 60 * MIB)
    allocator.free(0)
    for handle in (1, 2, 3):
        allocator.malloc(handle, 20 * MIB)
    assert held(allocator) == (60, 60)
    allocator.free(1)
    allocator.free(3)
    allocator.malloc(4, 40 * MIB)  # 20 and 20 are free, but not beside each other
    assert allocator.reserved_bytes == 100 * MIB
    allocator.free(2)
    allocator.malloc(5, 60 * MIB)
    assert held(allocator) == (100, 100)


def test_fragmentation_that_expandable_segments_do_not_have() -> None:
    """Blocks that grow from step to step never fit where the last one was."""
    held_bytes = []
    for choice in (AllocatorSettings(), EXPANDABLE):
        allocator = CachingAllocator(choice)
        for handle in range(5):
            allocator.malloc(handle, (100 + 20 * handle) * MIB)
            allocator.free(handle)
        held_bytes.append(allocator.reserved_bytes // MIB)
    assert held_bytes == [100 + 120 + 140 + 160 + 180, 180]


def test_expandable_pages() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    allocator.malloc(0, 512)
    allocator.malloc(1, 3 * MIB)
    assert allocator.reserved_bytes == (2 + 20) * MIB
    allocator.malloc(2, 90 * MIB)  # 17 are free at the end: 73 more, in pages of 20
    assert allocator.reserved_bytes == (2 + 20 + 80) * MIB


def test_expandable_segments_give_back_whole_pages_in_the_middle() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    for handle, size in enumerate((30, 50, 20)):
        allocator.malloc(handle, size * MIB)
    allocator.free(1)  # bytes 30 to 80 MiB: pages from 40 to 80
    allocator.empty_cache()
    assert held(allocator) == (50, 60)
    allocator.malloc(3, 45 * MIB)  # 10 MiB are free before the gap: 35 more, two pages at the lowest address
    assert held(allocator) == (95, 100)


def test_max_split_size() -> None:
    allocator = CachingAllocator(AllocatorSettings(max_split_size_mb=100))
    allocator.malloc(0, 200 * MIB)
    allocator.free(0)
    allocator.malloc(1, 50 * MIB)  # must not split a block of 100 MiB and more
    assert allocator.reserved_bytes == 250 * MIB
    allocator.malloc(2, 180 * MIB)  # 20 MiB to spare: too much
    assert allocator.reserved_bytes == 430 * MIB
    allocator.malloc(3, 181 * MIB)  # less than 20 MiB to spare; the whole block counts as in use
    assert held(allocator) == (50 + 180 + 200, 430)


def test_max_split_size_gives_large_blocks_back_first() -> None:
    allocator = CachingAllocator(AllocatorSettings(max_split_size_mb=100), limit_bytes=500 * MIB)
    for handle, size in enumerate((50, 200, 120)):
        allocator.malloc(handle, size * MIB)
        allocator.free(handle)
    allocator.malloc(3, 300 * MIB)  # over the limit: 200 and 120 go, 50 stays
    assert (held(allocator), allocator.num_retries) == ((300, 350), 0)


def test_retry_after_the_cache_was_emptied() -> None:
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    for handle in range(4):
        allocator.malloc(handle, 20 * MIB)
    for handle in (0, 2):
        allocator.free(handle)
    allocator.malloc(4, 40 * MIB)
    assert (held(allocator), allocator.num_retries) == ((80, 80), 1)


def test_out_of_memory_keeps_what_is_in_use() -> None:
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    allocator.malloc(0, 60 * MIB)
    allocator.malloc(1, 30 * MIB)
    allocator.free(1)
    with pytest.raises(DeviceFullError, match=f"{41 * MIB} bytes asked for, {60 * MIB} of {100 * MIB} held"):
        allocator.malloc(2, 41 * MIB)
    allocator.malloc(3, 40 * MIB)
    assert held(allocator) == (100, 100)


def test_garbage_collection_takes_blocks_that_were_free_for_longest() -> None:
    collecting = AllocatorSettings(garbage_collection_threshold=0.5)
    allocator = CachingAllocator(collecting, limit_bytes=400 * MIB, is_fraction=True)
    for handle, size in enumerate((100, 60, 80)):
        allocator.malloc(handle, size * MIB)
    for handle in range(3):
        allocator.free(handle)
    for _ in range(3):
        allocator.malloc(3, 60 * MIB)  # the smallest that fits, again and again: the others age
        allocator.free(3)
    allocator.malloc(4, 110 * MIB)  # 240 held, 200 the threshold: those go that are older than the mean
    assert held(allocator) == (110, 60 + 110)
    without_fraction = CachingAllocator(collecting, limit_bytes=400 * MIB)
    for size in (150, 160, 80):
        without_fraction.malloc(size, size * MIB)
    without_fraction.free(150)
    without_fraction.malloc(0, 2**10)
    assert without_fraction.reserved_bytes == 392 * MIB  # PyTorch collects under a set fraction only


def test_streams_do_not_share_blocks() -> None:
    allocator = CachingAllocator()
    allocator.malloc(0, 40 * MIB, stream=0)
    allocator.free(0)
    allocator.malloc(1, 40 * MIB, stream=1)
    assert held(allocator) == (40, 80)
    assert allocator.peak_growth is not None
    assert (allocator.peak_growth.stream, allocator.peak_growth.other_streams_bytes) == (1, 40 * MIB)


@pytest.mark.parametrize("choice", [AllocatorSettings(), EXPANDABLE])
def test_a_block_that_another_stream_uses_is_free_when_that_is_done(choice: AllocatorSettings) -> None:
    allocator = CachingAllocator(choice)
    allocator.malloc(0, 40 * MIB)
    allocator.record_stream(0, 1)
    allocator.record_stream(0, 0)  # its own: nothing to wait for
    allocator.free(0)
    assert held(allocator) == (0, 40)
    allocator.malloc(1, 40 * MIB)
    assert held(allocator) == (40, 80)
    allocator.catch_up(2)
    allocator.catch_up(1)
    allocator.malloc(2, 40 * MIB)
    assert held(allocator) == (80, 80)


def test_emptying_the_cache_waits_for_other_streams() -> None:
    allocator = CachingAllocator(limit_bytes=60 * MIB)
    allocator.malloc(0, 40 * MIB)
    allocator.record_stream(0, 1)
    allocator.free(0)
    allocator.malloc(1, 60 * MIB)
    assert (held(allocator), allocator.num_retries) == ((60, 60), 1)


def test_why_it_grew() -> None:
    allocator = CachingAllocator()
    allocator.malloc(0, 60 * MIB)
    allocator.free(0)
    for handle in (1, 2, 3):
        allocator.malloc(handle, 20 * MIB)
    allocator.free(1)
    allocator.free(3)
    allocator.malloc(4, 30 * MIB)
    growth = allocator.peak_growth
    assert growth is not None
    assert (growth.request_bytes, growth.num_bytes, growth.pool) == (30 * MIB, 30 * MIB, "large")
    assert (growth.pool_free_bytes, growth.largest_free_bytes) == (40 * MIB, 20 * MIB)
    assert (growth.allocated_bytes, growth.reserved_bytes) == (20 * MIB, 90 * MIB)


Action = tuple[bool, int, int]  # allocate, size or which to free, stream
actions = st.lists(
    st.tuples(
        st.booleans(),
        st.one_of(st.integers(1, 2 * MIB), st.integers(1, 300 * MIB)),
        st.sampled_from((0, 0, 0, 1, 2)),
    ),
    max_size=80,
)
settings_of_allocators = st.sampled_from(ALL_SETTINGS)


def play(allocator: CachingAllocator, trace: list[Action]) -> dict[int, int]:
    """Handles that are live at the end, with their rounded sizes."""
    live: dict[int, int] = {}
    for handle, (allocates, number, stream) in enumerate(trace):
        if allocates or not live:
            allocator.malloc(handle, number, stream)
            live[handle] = round_size(number, allocator.settings)
        else:
            freed = list(live)[number % len(live)]
            allocator.free(freed)
            del live[freed]
    return live


@given(actions, settings_of_allocators)
def test_more_is_held_than_in_use_and_no_two_blocks_overlap(trace: list[Action], choice: AllocatorSettings) -> None:
    allocator = CachingAllocator(choice)
    live = play(allocator, trace)
    blocks = sorted((block.address, block.address + block.size, handle) for handle, block in allocator._live.items())
    assert all(before[1] <= after[0] for before, after in pairwise(blocks))
    assert all(end - begin >= live[handle] for begin, end, handle in blocks)
    assert allocator.allocated_bytes == sum(end - begin for begin, end, _ in blocks)
    assert allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes
    free = sum(pool.free_bytes for pool in allocator._pools.values())
    assert allocator.reserved_bytes == allocator.allocated_bytes + free
    assert allocator.reserved_bytes == sum(pool.reserved_bytes for pool in allocator._pools.values())


@given(actions, settings_of_allocators)
def test_nothing_is_held_when_all_is_freed(trace: list[Action], choice: AllocatorSettings) -> None:
    allocator = CachingAllocator(choice)
    for handle in play(allocator, trace):
        allocator.free(handle)
    assert allocator.allocated_bytes == 0
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert not any(pool.free for pool in allocator._pools.values())


@settings(max_examples=25)
@given(actions, settings_of_allocators)
def test_a_step_that_repeats_settles(trace: list[Action], choice: AllocatorSettings) -> None:
    allocator = CachingAllocator(choice)
    peaks: list[int] = []
    for _ in range(12):
        for handle in play(allocator, trace):
            allocator.free(handle)
        peaks.append(allocator.peak_reserved_bytes)
    assert peaks[-1] == peaks[-2]


@given(actions, settings_of_allocators, st.integers(300, 2000))
def test_a_limit_is_never_passed(trace: list[Action], choice: AllocatorSettings, limit: int) -> None:
    free, limited = CachingAllocator(choice), CachingAllocator(choice, limit_bytes=limit * MIB)
    play(free, trace)
    try:
        play(limited, trace)
    except DeviceFullError:
        assert free.peak_reserved_bytes > limit * MIB
    assert limited.peak_reserved_bytes <= limit * MIB


def first_fit_by_hand(trace: list[tuple[int, int]]) -> int:
    """Reserved MiB of whole blocks that are never split (all requests of a kind alike): a free list by size."""
    free: Counter[int] = Counter()
    live: dict[int, int] = {}
    reserved = 0
    for handle, size in trace:
        if size < 0:
            free[live.pop(handle)] += 1
            continue
        if free[size]:
            free[size] -= 1
        else:
            reserved += size
        live[handle] = size
    return reserved


def test_equal_sizes_against_a_free_list() -> None:
    """Sizes 21 and 22 MiB differ by too little to split and by enough not to be mistaken for each other."""
    numbers = random.Random(0)
    allocator, trace, live = CachingAllocator(), [], []
    for handle in range(2000):
        if live and numbers.random() < 0.5:
            trace.append((live.pop(numbers.randrange(len(live))), -1))
        else:
            trace.append((handle, 22))
            live.append(handle)
    for handle, size in trace:
        if size < 0:
            allocator.free(handle)
        else:
            allocator.malloc(handle, size * MIB)
    assert allocator.peak_reserved_bytes == first_fit_by_hand(trace) * MIB
