"""Blocks of a device's memory and the lists of free ones: what the model of the caching allocator is made of."""

from __future__ import annotations

from bisect import bisect_left, insort


class Block:
    """A piece of a segment, with its neighbours in it.

    mapped: False for addresses of an expandable segment that have no memory yet.
    expandable: the page size of the expandable segment that it lies in, 0 in any other.
    users: other streams that used it and may not be done with it.
    freed_at: ticks of its pool's clock when it was freed.
    """

    __slots__ = ("address", "after", "allocated", "before", "expandable", "freed_at", "mapped", "pool", "size", "users")

    def __init__(self, pool: Pool, address: int, size: int, *, expandable: int = 0, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.expandable = expandable
        self.mapped = mapped
        self.allocated = False
        self.users: set[int] = set()
        self.before: Block | None = None
        self.after: Block | None = None
        self.freed_at = 0

    @property
    def is_split(self) -> bool:
        return self.before is not None or self.after is not None

    @property
    def is_free(self) -> bool:
        return not self.allocated and not self.users

    @property
    def room(self) -> int:
        """Its size and what it could grow by: best fit looks at this in expandable segments."""
        after = self.after
        return self.size + (after.size if after is not None and not after.mapped else 0)

    def cut(self, size: int) -> Block:
        """Keep the first size bytes; the rest becomes a block of its own, in no list yet."""
        rest = Block(self.pool, self.address + size, self.size - size, expandable=self.expandable, mapped=self.mapped)
        rest.before, rest.after = self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest

    def absorb(self, other: Block | None) -> None:
        """Take in a free neighbour of the same sort, out of its list."""
        if other is None or not other.is_free or other.mapped != self.mapped:
            return
        other.pool.remove(other)
        self.size += other.size
        if other is self.before:
            self.address, self.before = other.address, other.before
            if self.before is not None:
                self.before.after = self
        else:
            self.after = other.after
            if self.after is not None:
                self.after.before = self


class Clock:
    """Counts the searches for free blocks: the age of a block is how many went by without it."""

    ticks = 0


class Pool:
    """Free blocks of one size class that belong to one stream, by size and address; unmapped ones by address."""

    def __init__(self, stream: int, clock: Clock, *, is_small: bool) -> None:
        self.stream = stream
        self.clock = clock
        self.is_small = is_small
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []
        self.reserved_bytes = 0

    def add(self, block: Block) -> None:
        if block.mapped:
            block.freed_at = self.clock.ticks
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def best(self, size: int) -> Block | None:
        """The smallest that holds size; among parts of expandable segments the one with least room."""
        index = bisect_left(self.free, (size, -1))
        if index == len(self.free):
            return None
        block = self.free[index][2]
        while block.expandable and (index := index + 1) < len(self.free):
            other = self.free[index][2]
            if other.room >= block.room:
                break
            block = other
        return block

    @property
    def free_bytes(self) -> int:
        return sum(size for size, _, _ in self.free)

    @property
    def largest_free_bytes(self) -> int:
        return self.free[-1][0] if self.free else 0
