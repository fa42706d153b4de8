"""Which operators' outputs a block keeps, exactly: the least seconds of recompute within so many bytes. No torch.

NOTE [ The choice as a program ]
For each operator of a BlockGraph two binaries: there (its output is there in backward) and runs (it runs again). What
is there and does not run is kept.
    runs <= there                      what runs again is there
    there[j] >= runs[i]                for each input j of i: what runs again needs its inputs
    there = 1                          for what autograd saved, and for writes and random numbers
    runs = there                       for what may not be kept
    sum of bytes (there - runs) <= room
The least of sum seconds runs is looked for; of choices that are equal the one that keeps fewer operators, since to keep
an operator's output takes a dispatch in forward and in recompute. Without the room every row is a difference of two
binaries, so that the program without whole numbers has them all the same: a minimum cut. So where bytes have a price
instead of a room (`_priced`), a linear program is enough, and the corners of the frontier between bytes and seconds are
found one by one. Blocks that mix two corners which are neighbours lie on the line between them, which is never above
what one choice for all blocks could do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint
from scipy.sparse import coo_array

from trainfit.operators import BlockGraph
from trainfit.plan.highs import Floats, minimum

_SCALE = 1e3  # HiGHS' tolerances are absolute: of room and of all seconds
_FEWER = 1e-7  # of all seconds: what an operator less to keep is worth
_SAME = 1e-9


@dataclass(frozen=True)
class Choice:
    """kept: numbers of operators. num_bytes: of their outputs. seconds: of what runs again."""

    kept: frozenset[int]
    num_bytes: int
    seconds: float

    @classmethod
    def of(cls, graph: BlockGraph, kept: frozenset[int]) -> Choice:
        return cls(kept, graph.num_bytes(kept), graph.seconds(kept))


def best_choice(graph: BlockGraph, room: int) -> Choice:
    """The least seconds of all choices within room bytes, and of those the fewest operators."""
    return _Program(graph).within(room)


def frontier(graph: BlockGraph) -> list[Choice]:
    """Corners of the lower convex hull of all choices, from nothing kept to nothing run again."""
    program = _Program(graph)
    least, most = program.ends()
    return [least, *_between(program, least, most)]


def neighbours(graph: BlockGraph, room: int) -> tuple[Choice, Choice]:
    """The two corners of the frontier between which room bytes lie; the same one twice at its ends."""
    program = _Program(graph)
    low, high = program.ends()
    if room >= high.num_bytes:
        return high, high
    if room <= low.num_bytes:
        return low, low
    while (corner := program.corner(low, high)) is not None:
        if corner.num_bytes <= room:
            low = corner
        else:
            high = corner
    return low, high


def mixed_seconds(corners: Sequence[tuple[float, float]], room: float) -> float:
    """The least seconds of a block where many of them mix choices: (bytes, seconds), room bytes in the mean.

    Raises ValueError where all need more.
    """
    best = min((seconds for num_bytes, seconds in corners if num_bytes <= room), default=None)
    if best is None:
        raise ValueError(f"every choice needs more than {room} bytes")
    for few, slow in corners:
        for many, fast in corners:
            if few <= room < many and fast < slow:
                best = min(best, slow + (fast - slow) * (room - few) / (many - few))
    return best


def _between(program: _Program, low: Choice, high: Choice) -> list[Choice]:
    """Corners behind low, up to high."""
    if low.kept == high.kept:
        return []
    if (corner := program.corner(low, high)) is None:
        return [high]
    return [*_between(program, low, corner), *_between(program, corner, high)]


class _Program:
    """See NOTE [ The choice as a program ]. Columns: there of each operator, then runs of each."""

    def __init__(self, graph: BlockGraph) -> None:
        self.graph = graph
        operators = graph.operators
        self.size = len(operators)
        self.seconds: Floats = np.array([each.seconds for each in operators], dtype=np.float64)
        self.bytes: Floats = np.array([each.num_bytes for each in operators], dtype=np.float64)
        self.second = max(float(self.seconds.sum()), 1e-30) / _SCALE
        self.byte = max(1.0, float(self.bytes.sum())) / _SCALE
        low, high = np.zeros(2 * self.size), np.ones(2 * self.size)
        rows: list[tuple[int, int, float]] = []  # at least: there (+1), runs (-1)
        for number, operator in enumerate(operators):
            low[number] = float(operator.is_saved or not operator.may_skip)
            rows.append((number, self.size + number, 0.0 if operator.may_store else 1.0))
            rows += [(each, self.size + number, 0.0) for each in operator.inputs]
        self.bounds = Bounds(low, high)
        self._rows = rows

    def within(self, room: int) -> Choice:
        kept = np.concatenate([self.bytes, -self.bytes]) / self.byte
        limit = float(room) / self.byte
        while True:
            values = self._run(self._cost(0.0), whole=True, more=[(kept, limit)])
            assert values is not None, "to keep nothing fits any room"
            choice = self._choice(values)
            if choice.num_bytes <= room:
                return choice
            limit -= 2 * (choice.num_bytes - room) / self.byte  # HiGHS' tolerance let it pass

    def ends(self) -> tuple[Choice, Choice]:
        """The least seconds without any bytes, and the fewest bytes with which nothing runs again that need not."""
        return self.within(0), self._priced(1e-6 * self.second / self.byte)

    def corner(self, low: Choice, high: Choice) -> Choice | None:
        """A choice below the line between two; None where there is none."""
        if high.num_bytes <= low.num_bytes or low.seconds <= high.seconds:
            return None
        price = (low.seconds - high.seconds) / (high.num_bytes - low.num_bytes)
        found = self._priced(price)
        gained = low.seconds + price * low.num_bytes - (found.seconds + price * found.num_bytes)
        if gained <= _SAME * self.second * _SCALE or not low.num_bytes < found.num_bytes < high.num_bytes:
            return None
        return found

    def _priced(self, seconds_per_byte: float) -> Choice:
        values = self._run(self._cost(seconds_per_byte), whole=False, more=[])
        assert values is not None, "to run everything again is always possible"
        return self._choice(values)

    def _cost(self, seconds_per_byte: float) -> Floats:
        """Of there and of runs: kept is there - runs."""
        kept = seconds_per_byte * self.bytes / self.second + _FEWER * _SCALE
        return np.concatenate([kept, self.seconds / self.second - kept])

    def _run(self, cost: Floats, *, whole: bool, more: list[tuple[Floats, float]]) -> Floats | None:
        numbers = np.arange(len(self._rows))
        there = np.array([row[0] for row in self._rows], dtype=np.int64)
        runs = np.array([row[1] for row in self._rows], dtype=np.int64)
        high = np.array([0.0 if row[2] else np.inf for row in self._rows])
        data = np.concatenate([np.ones(numbers.size), -np.ones(numbers.size)])
        at = (np.concatenate([numbers, numbers]), np.concatenate([there, runs]))
        matrix = coo_array((data, at), shape=(numbers.size, 2 * self.size)).tocsr()
        constraints = [LinearConstraint(matrix, np.zeros(numbers.size), high)]
        constraints += [LinearConstraint(row[None, :], -np.inf, limit) for row, limit in more]
        return minimum(cost, np.full(2 * self.size, float(whole)), self.bounds, constraints)

    def _choice(self, values: Floats) -> Choice:
        kept = values[: self.size] - values[self.size :] > 0.5
        return Choice.of(self.graph, frozenset(np.flatnonzero(kept).tolist()))
