"""What PyTorch's caching allocators do with a request, in numbers. Imports no torch.

NOTE [ Rules of the caching allocator ]
Requests are rounded up to 512 bytes, or to a part of a power of two (round_size, roundup_power2_next_division); an NPU
adds 32 bytes first. Up to 1 MiB they come from the small pool, else from the large one (get_pool); each stream has its
own. The smallest free block that holds a request serves it (get_free_block), and its rest is split off: in the small
pool and in expandable segments from 512 bytes on, in the large one above 1 MiB and only for requests below
max_split_size (should_split). Blocks of max_split_size and more serve only such requests, and only with less than
20 MiB to spare (max_non_split_rounding_size). When none is free a segment is asked of the device: 2 MiB, 20 MiB for
requests below 10 MiB, else the request rounded up to 2 MiB (get_allocation_size); an expandable segment, of which each
pool and stream has one, grows by pages of 2 MiB (small) or 20 MiB (find_expandable_block, map_block). When the device
has no more, blocks of max_split_size and more are given back, then all that are not split, and the request is tried
again (release_available_cached_blocks, release_cached_blocks). Over garbage_collection_threshold of the limit, unsplit
blocks that have been free the longest go first (garbage_collect_cached_blocks). Freed neighbours are merged
(try_merge_blocks). A block that other streams use (record_stream) is free when they are done (process_events).
Sources: c10/cuda/CUDACachingAllocator.cpp, c10/core/AllocatorConfig.h (PyTorch 2.13), and
torch_npu/csrc/core/npu/NPUCachingAllocator.cpp, which has the same rules; the names above are those of its functions.
"""

from __future__ import annotations

from trainfit.profile import AllocatorSettings

MIB = 2**20
MIN_BLOCK = 512
MAX_SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
MIN_LARGE_REQUEST = 10 * MIB
MAX_SPARE = 20 * MIB
DEFAULTS = AllocatorSettings()


def round_size(num_bytes: int, settings: AllocatorSettings = DEFAULTS, *, padding: int = 0) -> int:
    """What a request takes. padding: bytes that the device's allocator adds to each."""
    size = num_bytes + padding
    if size < MIN_BLOCK:
        return MIN_BLOCK
    divisions = settings.roundup_power2_divisions
    if divisions > 1 and size > MIN_BLOCK * divisions:
        floor = 1 << (size.bit_length() - 1)
        step = floor >> (divisions.bit_length() - 1)
        return -(-size // step) * step
    return -(-size // MIN_BLOCK) * MIN_BLOCK


def segment_size(size: int) -> int:
    """What is asked of the device for a rounded request."""
    if size <= MAX_SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < MIN_LARGE_REQUEST else -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
