"""CachingAllocator: a model of the allocator that stands between PyTorch and a device's memory. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainfit.profile import AllocatorSettings
from trainfit.rehearsal.allocator_rules import (
    DEFAULTS,
    LARGE_SEGMENT,
    MAX_SMALL,
    MAX_SPARE,
    MIB,
    MIN_BLOCK,
    SMALL_SEGMENT,
    round_size,
    segment_size,
)
from trainfit.rehearsal.blocks import Block, Clock, Pool

# Addresses that an expandable segment reserves: 9/8 of the device's memory there, so much that it never matters here.
_ADDRESSES = 2**50


class DeviceFullError(MemoryError):
    """The device has no memory for a request, not even after all cached blocks were given back."""


@dataclass(frozen=True)
class Growth:
    """Why the allocator asked the device for more: no free block of the pool held the request.

    num_bytes: the segment or pages it got. request_bytes: rounded. allocated_bytes: in use before. reserved_bytes: held
    afterwards. pool: "small" or "large". pool_free_bytes, largest_free_bytes: of this pool and stream.
    other_streams_bytes: of reserved_bytes, what belongs to streams other than 0.
    """

    num_bytes: int
    request_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    pool: str
    stream: int
    pool_free_bytes: int
    largest_free_bytes: int
    other_streams_bytes: int


class CachingAllocator:
    """See NOTE [ Rules of the caching allocator ] in allocator_rules.py.

    padding: see round_size. limit_bytes: what the device has; None for no end. is_fraction: whether the limit was set
    by set_per_process_memory_fraction, without which nothing is collected as garbage, and which counts whole segments.
    """

    def __init__(
        self,
        settings: AllocatorSettings = DEFAULTS,
        *,
        padding: int = 0,
        limit_bytes: int | None = None,
        is_fraction: bool = False,
    ) -> None:
        self.settings = settings
        self.padding = padding
        self.limit_bytes = limit_bytes
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.num_retries = 0
        self.peak_growth: Growth | None = None  # the one that made peak_reserved_bytes
        self._is_fraction = is_fraction and limit_bytes is not None
        self._collects = self._is_fraction and settings.garbage_collection_threshold > 0
        self._max_split = settings.max_split_size_mb * MIB or _ADDRESSES
        self._pools: dict[tuple[bool, int], Pool] = {}
        self._clocks = {True: Clock(), False: Clock()}  # of small and large pools
        self._live: dict[int, Block] = {}
        self._waiting: list[Block] = []  # freed, and other streams use them
        self._next_address = 0

    def malloc(self, handle: int, num_bytes: int, stream: int = 0) -> None:
        """Raises DeviceFullError. handle: any number that names the allocation until it is freed."""
        self.place(handle, round_size(num_bytes, self.settings, padding=self.padding), stream)

    def place(self, handle: int, size: int, stream: int = 0) -> None:
        """malloc of a size that is rounded already."""
        pool = self._pool(size, stream)
        if self._collects:
            pool.clock.ticks += 1
        block = self._find(pool, size) or self._grow(pool, size)
        self._take(block, size)
        self._live[handle] = block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, handle: int) -> None:
        """Its bytes are free at once, unless other streams use them."""
        block = self._live.pop(handle)
        self.allocated_bytes -= block.size
        block.allocated = False
        if block.users:
            self._waiting.append(block)
        else:
            self._release(block)

    def record_stream(self, handle: int, stream: int) -> None:
        """Another stream than its own uses an allocation."""
        block = self._live[handle]
        if stream != block.pool.stream:
            block.users.add(stream)

    def catch_up(self, stream: int) -> None:
        """A stream has done all that it was given so far: what was freed meanwhile is free now."""
        waiting, self._waiting = self._waiting, []
        for block in waiting:
            block.users.discard(stream)
            if block.users:
                self._waiting.append(block)
            else:
                self._release(block)

    def empty_cache(self) -> None:
        """Wait for all streams and give back every segment, or page of one, that nothing lies in."""
        for stream in {stream for block in self._waiting for stream in block.users}:
            self.catch_up(stream)
        for pool in self._large_then_small():
            for _, _, block in list(pool.free):
                if block.expandable:
                    self._unmap(block)
                elif not block.is_split:
                    self._give_back(block)

    def _pool(self, size: int, stream: int) -> Pool:
        key = (size <= MAX_SMALL, stream)
        if (pool := self._pools.get(key)) is None:
            pool = self._pools[key] = Pool(stream, self._clocks[key[0]], is_small=key[0])
        return pool

    def _find(self, pool: Pool, size: int) -> Block | None:
        block = pool.best(size)
        if block is None:
            return None
        if size < self._max_split <= block.size:
            return None  # one that must not be split is kept for requests as large
        if size >= self._max_split and block.size >= size + MAX_SPARE:
            return None
        pool.remove(block)
        return block

    def _take(self, block: Block, size: int) -> None:
        rest = block.size - size
        if block.pool.is_small or self.settings.expandable_segments:
            splits = rest >= MIN_BLOCK
        else:
            splits = size < self._max_split and rest > MAX_SMALL
        if splits:
            block.pool.add(block.cut(size))
        block.allocated = True

    def _release(self, block: Block) -> None:
        block.absorb(block.before)
        block.absorb(block.after)
        block.pool.add(block)

    def _grow(self, pool: Pool, size: int) -> Block:
        if self._collects:
            self._collect_garbage()
        block = self._ask(pool, size)
        if block is None and self._give_back_large(pool, size):
            block = self._ask(pool, size)
        if block is None:
            self.empty_cache()
            self.num_retries += 1
            block = self._ask(pool, size)
        if block is None:
            raise DeviceFullError(
                f"{size} bytes asked for, {self.reserved_bytes} of {self.limit_bytes} held, "
                f"{self.allocated_bytes} of them in use"
            )
        return block

    def _has(self, num_bytes: int) -> bool:
        return self.limit_bytes is None or self.reserved_bytes + num_bytes <= self.limit_bytes

    def _ask(self, pool: Pool, size: int) -> Block | None:
        num_bytes = segment_size(size)
        if self.settings.expandable_segments:
            return None if self._is_fraction and not self._has(num_bytes) else self._expand(pool, size)
        if not self._has(num_bytes):
            return None
        self._hold(pool, size, num_bytes)
        return Block(pool, self._new_addresses(num_bytes), num_bytes)

    def _new_addresses(self, num_bytes: int, alignment: int = MIN_BLOCK) -> int:
        address = -(-self._next_address // alignment) * alignment
        self._next_address = address + num_bytes
        return address

    def _hold(self, pool: Pool, size: int, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        pool.reserved_bytes += num_bytes
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes
            self.peak_growth = Growth(
                num_bytes,
                size,
                self.allocated_bytes,
                self.reserved_bytes,
                "small" if pool.is_small else "large",
                pool.stream,
                pool.free_bytes,
                pool.largest_free_bytes,
                sum(each.reserved_bytes for each in self._pools.values() if each.stream),
            )

    def _expand(self, pool: Pool, size: int) -> Block | None:
        """Free addresses, mapped or not, that follow each other, the lowest; then memory for all of them."""
        block = self._free_addresses(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size), size):
            return None
        while block.size < size:
            after = block.after
            assert after is not None
            if not self._map(after, min(after.size, size - block.size), size):
                return None
            block = after  # it has taken in the free block before it
        pool.remove(block)
        return block

    def _free_addresses(self, pool: Pool, size: int) -> Block:
        for _, unmapped in pool.unmapped:
            before = unmapped.before
            first = before if before is not None and before.is_free else unmapped
            found: int = 0
            last: Block | None = first
            while last is not None and last.is_free and found < size:
                found, last = found + last.size, last.after
            if found >= size:
                return first
        page = SMALL_SEGMENT if pool.is_small else LARGE_SEGMENT
        addresses = -(-_ADDRESSES // page) * page
        block = Block(pool, self._new_addresses(addresses, page), addresses, expandable=page, mapped=False)
        pool.add(block)
        return block

    def _map(self, block: Block, num_bytes: int, size: int) -> bool:
        """Give whole pages from the start of unmapped addresses memory, and merge them with free neighbours."""
        num_bytes = -(-num_bytes // block.expandable) * block.expandable
        if not self._has(num_bytes):
            return False
        self._hold(block.pool, size, num_bytes)
        block.pool.remove(block)
        if num_bytes < block.size:
            block.pool.add(block.cut(num_bytes))
        block.mapped = True
        self._release(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages inside a free block of an expandable segment."""
        pool, page = block.pool, block.expandable
        begin = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            head, block = block, block.cut(begin - block.address)
            pool.add(head)
        if block.address + block.size > end:
            pool.add(block.cut(end - begin))
        block.mapped = False
        self._release(block)
        pool.reserved_bytes -= end - begin
        self.reserved_bytes -= end - begin

    def _give_back(self, block: Block) -> None:
        block.pool.remove(block)
        block.pool.reserved_bytes -= block.size
        self.reserved_bytes -= block.size

    def _give_back_large(self, pool: Pool, size: int) -> bool:
        """Give back blocks that must not be split: one that would have done, or as many as make up for it."""
        if not self.settings.max_split_size_mb or self.settings.expandable_segments:
            return False
        needed = max(size, self._max_split)
        if (block := pool.best(needed)) is not None:
            self._give_back(block)
            return True
        released = 0
        for block_size, _, block in reversed(list(pool.free)):
            if released >= needed or block_size < self._max_split:
                break
            released += block_size
            self._give_back(block)
        return released >= needed

    def _large_then_small(self) -> Iterator[Pool]:
        yield from (
            pool for is_small in (False, True) for pool in list(self._pools.values()) if pool.is_small is is_small
        )

    def _collect_garbage(self) -> None:
        """Give back unsplit large blocks that were free for longer than others, until the threshold is met."""
        assert self.limit_bytes is not None
        threshold = int(self.settings.garbage_collection_threshold * self.limit_bytes)
        blocks = [block for pool in self._large_then_small() if not pool.is_small for _, _, block in pool.free]
        ages = {block: block.pool.clock.ticks - block.freed_at for block in blocks if not block.is_split}
        target, reclaimed = self.reserved_bytes - threshold, 0
        while reclaimed < target and ages:
            mean = sum(ages.values()) / len(ages)
            for block in [block for block, age in ages.items() if age >= mean]:
                reclaimed += block.size
                self._give_back(block)
                del ages[block]
