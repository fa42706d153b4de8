"""SideWork: what a stream beside the one that computes has still to do, and when it gets the device. Imports no torch.

NOTE [ Two streams share one device ]
Kernels of two streams are no faster together than one after the other: while both have something to compute, each gets
half of the device. What is won is what the device would have idled: the side stream computes while the other one waits
for the links, and its own collectives are under way while the other one computes. The links of a node
do one collective after another, and so does the network between nodes, in the order in which the host calls them, and
the host has called all of the side stream's before it goes on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from trainfit.rehearsal.operator_cost import Bound


@dataclass
class _Item:
    """Seconds of the device, or of the links."""

    seconds: float
    bound: Bound
    is_link: bool


@dataclass
class SideWork:
    """clock: until when it is busy or held up. links: of each, when they are free. seconds: that it has computed.

    ran: of these, by bound, what takes_ran() has not told yet.
    """

    links: dict[Bound, float] = field(default_factory=dict)
    clock: float = 0.0
    seconds: float = 0.0
    ran: dict[Bound, float] = field(default_factory=dict)
    _items: deque[_Item] = field(default_factory=deque)

    def add(self, now: float, seconds: float, bound: Bound, *, is_link: bool = False) -> None:
        """The host puts more on the stream; it begins no sooner than what is put on the other one."""
        if not self._items:
            self.clock = max(self.clock, now)
        self._items.append(_Item(seconds, bound, is_link))

    def links_carry(self, over: Bound, begin: float, seconds: float) -> float:
        """One collective more, over links that are free of those before. Returns when it is done."""
        done = self.links[over] = max(self.links.get(over, 0.0), begin) + seconds
        return done

    def shares(self, now: float, seconds: float) -> float:
        """The other stream computes for so long, from now on. Returns when it is done."""
        while seconds > 0:
            self._calls(now)
            if not self._items or self.clock > now:
                alone = self.clock - now if self._items else seconds
                now, seconds = (now + seconds, 0.0) if seconds <= alone else (self.clock, seconds - alone)
                continue
            step = min(seconds, self._items[0].seconds)
            now, seconds = now + 2 * step, seconds - step
            self.clock = now
            self._runs(step)
        return now

    def alone(self, now: float, until: float) -> float:
        """The other stream waits from now until then, which is returned."""
        if self._items:
            self.clock = max(self.clock, now)
        while self._items and self.clock < until:
            self._calls(until)
            if self._items and self.clock < until:
                step = min(self._items[0].seconds, until - self.clock)
                self.clock += step
                self._runs(step)
        return until

    def ends(self, now: float) -> float:
        """The other stream waits for all of it. Returns until when."""
        self.alone(now, float("inf"))
        return max(now, self.clock)

    def calls_all(self, now: float) -> float:
        """The other stream has a collective behind all of these. Returns when the last of them has begun."""
        while any(item.is_link for item in self._items):
            self.clock = max(self.clock, now)
            if self._items[0].is_link:
                now = max(now, self.clock)
                self._calls(now)
            else:
                self.clock += self._items[0].seconds
                self._runs(self._items[0].seconds)
        return now

    def takes_ran(self) -> dict[Bound, float]:
        """What it computed since this was last asked for."""
        ran, self.ran = self.ran, {}
        return ran

    def _calls(self, now: float) -> None:
        """Collectives whose turn has come by now are under way, and hold the stream up."""
        while self._items and self._items[0].is_link and self.clock <= now:
            item = self._items.popleft()
            self.clock = self.links_carry(item.bound, self.clock, item.seconds)

    def _runs(self, seconds: float) -> None:
        item = self._items[0]
        item.seconds -= seconds
        self.seconds += seconds
        self.ran[item.bound] = self.ran.get(item.bound, 0.0) + seconds
        if item.seconds <= 0:
            self._items.popleft()
