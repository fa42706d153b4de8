"""The tier of each block, exactly, as a mixed-integer program over the events of a step. No torch.

NOTE [ The program ]
A binary x[i, t] says that block i has tier t; of each block one is set. P[i] is what blocks 0 to i save, Q[i] what
blocks i to the last leave as gradients. Each row is one of the NOTE [ Events of a step ] in cost.py, w the other micro
batches whose saved activations live meanwhile:
    forward of block i    w P[n-1] + P[i-1] + sum_t forward_peak[t, i] x[i, t]                     <= room
    loss                  (w + 1) P[n-1] + before_loss                                             <= room
    backward of block i   w P[n-1] + P[i] + head_gradient + Q[i+1] + sum_t backward_peak[t, i] x   <= room
    embedding             w P[n-1] + Q[0] + embedding                                              <= room
The least of sum seconds x is looked for, or, where nothing fits, the least room. HiGHS proves it (mip_rel_gap 0; with
more than 16 blocks 1e-4 of the seconds, where to prove the rest takes twice as long and buys nothing; whoever only
estimates gives a gap of its own). P and Q are columns of their own, bound from below: with equations presolve of HiGHS
1.12 loses optima of such programs (its issues 3043, 3073 and 3094), of 4000 small problems near one 194, and as bounds
none. Written out in x they make no columns but rows so long that forty blocks of llama-2-13b took 46 s where this takes
4.

NOTE [ Tolerances ]
HiGHS works in floats, of which the room is a thousand. A row may be passed by 1e-6 of them, and a binary be as far from
a whole number; so each row is given that, or half a byte where that is more. What an assignment needs is counted again
in whole bytes, and one that passes the room is forbidden by a row of its own: what is found next is still the fastest
that fits. After _MAX_FORBIDDEN of them the room is asked for less `_Program.slack_bytes`, the most that tolerances add
up to in one event, some parts in a million of the room; then nothing passes it, and assignments that need all of it are
lost. An excess above the slack is no rounding but a row that is missing or wrong: an AssertionError.

NOTE [ What is left out of the program ]
- A tier that another one of the same block beats or equals in every event and in seconds (`undominated`).
- Rows that no assignment can break.

NOTE [ Blocks that are alike ]
Blocks of one structure may exchange their tiers without a change in seconds. Of such assignments the one that keeps
less in earlier blocks is preferred where it fits too: their recompute runs when most that was saved is gone. It is not
always the one with the lowest peak: where blocks leave more gradients than they save, the early ones' recompute comes
on top of all gradients. So it is tried, not assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint
from scipy.sparse import coo_array

from trainfit.plan.highs import minimum

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

# HiGHS' tolerances are absolute: scaled so, they are a thousandth of a millionth of room and seconds.
_SCALE = 1e3
_TOLERANCE = 1e-6  # of rows and of whole numbers: mip_feasibility_tolerance, HiGHS' largest
_MAX_FORBIDDEN = 8
_FEW_BLOCKS, _GAP = 16, 1e-4  # more blocks than these: HiGHS may stop so near the least seconds
_INFINITY = float("inf")


@dataclass(frozen=True)
class Problem:
    """Bytes and seconds of each block under each tier, (tiers, blocks), and what the model around them adds.

    seconds: what is made least, where tiers that lose accuracy are dearer than they are. true_seconds: what they take;
    None where that is the same.
    structures: (blocks,); blocks of one number have equal columns. offered: tiers that a block can have.
    before_loss, head_gradient, embedding: the shell's peak until the blocks' backward, gradients it leaves before that,
    its peak after. waiting: other micro batches whose saved activations live meanwhile, as in a pipeline's first stage.
    """

    saved: Integers
    forward_peak: Integers
    backward_peak: Integers
    gradient: Integers
    seconds: Floats
    offered: Flags
    structures: Integers
    before_loss: int
    head_gradient: int
    embedding: int
    waiting: int = 0
    true_seconds: Floats | None = None

    @property
    def num_blocks(self) -> int:
        return int(self.saved.shape[1])

    @cached_property
    def undominated(self) -> Flags:
        """(tiers, blocks): what is left when each block drops the tiers that another one of its beats."""
        kept = np.zeros_like(self.offered)
        for structure in np.unique(self.structures):
            blocks = self.structures == structure
            kept[:, blocks] = self._undominated(int(blocks.argmax()))[:, None]
        return kept

    def _undominated(self, block: int) -> Flags:
        columns = (self.saved, self.forward_peak, self.saved + self.backward_peak, self.gradient, self.seconds)
        points = np.stack([column[:, block].astype(np.float64) for column in columns], axis=1)
        left = self.offered[:, block].copy()
        for tier in np.flatnonzero(left):
            no_worse = left & (points <= points[tier]).all(1)
            no_worse[tier] = False
            left[tier] = not no_worse.any()  # of equal ones the last stays
        return left


@dataclass(frozen=True)
class Solution:
    """tiers: (blocks,) indices. peak_bytes: the highest event, above what the floor is. seconds: of all blocks.

    true_seconds: without the weights that seconds has. See Problem.
    """

    tiers: Integers
    peak_bytes: int
    seconds: float
    true_seconds: float


def moments(problem: Problem, tiers: Integers) -> Integers:
    """Bytes of every event, (assignments, 2 * blocks + 2): forward of each block, backward of each, loss, embedding."""
    blocks = np.arange(problem.num_blocks)
    saved, own = problem.saved[tiers, blocks], problem.gradient[tiers, blocks]
    total = saved.sum(1, keepdims=True)
    before = saved.cumsum(1) - saved + problem.waiting * total
    later = own[:, ::-1].cumsum(1)[:, ::-1] - own + problem.head_gradient
    forward = before + problem.forward_peak[tiers, blocks]
    backward = before + saved + later + problem.backward_peak[tiers, blocks]
    loss = (problem.waiting + 1) * total + problem.before_loss
    embedding = problem.waiting * total + own.sum(1, keepdims=True) + problem.embedding
    return np.concatenate([forward, backward, loss, embedding], axis=1)


def solution_of(problem: Problem, tiers: Integers) -> Solution:
    """An assignment's own peak and seconds, in whole bytes."""
    blocks = np.arange(problem.num_blocks)
    seconds = float(problem.seconds[tiers, blocks].sum())
    true = seconds if problem.true_seconds is None else float(problem.true_seconds[tiers, blocks].sum())
    return Solution(tiers, int(moments(problem, tiers[None]).max()), seconds, true)


def fastest(problem: Problem, room: int, *, gap: float = 0.0) -> Solution | None:
    """The least seconds of all assignments whose events stay within room bytes; None where there is none.

    gap: of the seconds, by which what is found may be above the least.
    """
    quick = solution_of(problem, _cheapest(problem))
    if quick.peak_bytes <= room:
        return quick
    if problem.num_blocks == 0:
        return None
    program = _Program(problem, room)
    for _ in range(_MAX_FORBIDDEN):  # See NOTE [ Tolerances ].
        values = program.run(gap=gap)
        if values is None:
            return None
        found = solution_of(problem, program.tiers(values))
        if found.peak_bytes <= room:
            return _tidied(problem, found, room)
        program.check(found, room)
        program.forbid(found.tiers)
    program = _Program(problem, room - program.slack_bytes)
    values = program.run()
    if values is None:
        return None
    found = solution_of(problem, program.tiers(values))
    program.check(found, room - program.slack_bytes)
    return _tidied(problem, found, room)


def _tidied(problem: Problem, found: Solution, room: int) -> Solution:
    """See NOTE [ Blocks that are alike ]."""
    tiers = found.tiers.copy()
    for structure in np.unique(problem.structures):
        blocks = np.flatnonzero(problem.structures == structure)
        tiers[blocks] = tiers[blocks][np.argsort(problem.saved[tiers[blocks], blocks], kind="stable")]
    tidy = solution_of(problem, tiers)
    return tidy if tidy.peak_bytes <= room else found


def smallest(problem: Problem) -> Solution:
    """The assignment with the lowest peak, and of those the fastest."""
    if problem.num_blocks == 0:
        return solution_of(problem, _cheapest(problem))
    program = _Program(problem, None)
    values = program.run()
    assert values is not None, "some assignment has the lowest peak"
    low = solution_of(problem, program.tiers(values))
    program.check(low, math.ceil(values[-1] * program.unit))
    return fastest(problem, low.peak_bytes) or low


def relaxed_bound(problem: Problem, room: int) -> float:
    """No assignment that fits takes less: the program without whole numbers. Infinite where none fits."""
    quick = solution_of(problem, _cheapest(problem))
    if quick.peak_bytes <= room or problem.num_blocks == 0:
        return quick.seconds if quick.peak_bytes <= room else _INFINITY
    program = _Program(problem, room)
    values = program.run(whole=False)
    return _INFINITY if values is None else float(program.cost @ values[: program.cost.size])


def peak_bound(problem: Problem) -> int:
    """No assignment has a lower peak: each block at its least in every event."""
    return int(_extreme_moments(problem, np.min).max())


def knapsack_bound(problem: Problem, room: int) -> float:
    """No assignment that fits takes less: the loss spike alone, with parts of blocks. A few microseconds a block."""
    fast = problem.seconds[_cheapest(problem), np.arange(problem.num_blocks)].sum()
    kept = problem.saved[_cheapest(problem), np.arange(problem.num_blocks)].sum()
    excess = float(kept - (room - problem.before_loss) / (problem.waiting + 1))
    steps: list[tuple[float, float]] = []  # (seconds a byte, bytes) of what can be given up
    structures, first, counts = np.unique(problem.structures, return_index=True, return_counts=True)
    for _, block, count in zip(structures, first.tolist(), counts.tolist()):
        steps += [(price, saved * count) for price, saved in _prices(problem, block)]
    total = float(fast)
    for price, saved in sorted(steps):
        if excess <= 0:
            break
        total += price * min(saved, excess)
        excess -= saved
    return total if excess <= 0 else _INFINITY


def _prices(problem: Problem, block: int) -> Iterator[tuple[float, float]]:
    """From a block's fastest tier along the convex hull to what saves least: (seconds a byte, bytes) of each step."""
    left = np.flatnonzero(problem.undominated[:, block])
    points = sorted((float(problem.seconds[tier, block]), -float(problem.saved[tier, block])) for tier in left)
    here = max(point for point in points if point[0] == points[0][0])
    while lower := [point for point in points if point[1] > here[1]]:
        price, then = min(((point[0] - here[0]) / (point[1] - here[1]), point) for point in lower)
        yield price, then[1] - here[1]
        here = then


def _extreme_moments(problem: Problem, pick: Callable[..., Integers]) -> Integers:
    """(2 * blocks + 2,): no assignment has a higher event (pick: np.max), or a lower one (np.min)."""
    kept = problem.undominated
    other = 0 if pick is np.max else np.iinfo(np.int64).max

    def one(table: Integers) -> Integers:
        return np.asarray(pick(np.where(kept, table, other), axis=0, keepdims=True))

    bound = replace(
        problem,
        saved=one(problem.saved),
        forward_peak=one(problem.forward_peak),
        backward_peak=one(problem.backward_peak),
        gradient=one(problem.gradient),
    )
    return np.asarray(moments(bound, np.zeros((1, problem.num_blocks), dtype=np.int64))[0])


def _cheapest(problem: Problem) -> Integers:
    """Each block's fastest tier; of equally fast ones that which saves least."""
    seconds = np.where(problem.undominated, problem.seconds, _INFINITY)
    ties = seconds == seconds.min(0)
    return np.asarray(np.where(ties, problem.saved, np.iinfo(np.int64).max).argmin(0), dtype=np.int64)


class _Program:
    """See NOTE [ The program ]. room None: the least room is looked for.

    Columns: a binary for each block and tier left, then P, then Q, then room where it is not given.
    """

    def __init__(self, problem: Problem, room: int | None) -> None:
        self.problem, self.room = problem, room
        tier, block = np.nonzero(problem.undominated)
        order = np.lexsort((tier, block))
        self.tier, self.block = tier[order], block[order]
        self.num_blocks, self.num_choices = problem.num_blocks, self.tier.size
        self.cost: Floats = problem.seconds[self.tier, self.block]
        highest = _extreme_moments(problem, np.max).max() if room is None else room
        self.unit = max(1.0, float(highest)) / _SCALE  # bytes
        self.tolerance_bytes = max(0.5, _TOLERANCE * self.unit)  # what each event is given
        self._rows: list[tuple[Any, ...]] = []  # (columns, coefficients)
        self._low: list[float] = []
        self._high: list[float] = []
        self._choices()
        self._sums()
        self._events()

    # ---- columns ---------------------------------------------------------------------------------------------------

    def _of(self, block: int) -> slice:
        return slice(*np.searchsorted(self.block, [block, block + 1]))

    def _saved(self, block: int) -> int:
        """The column of P[block]."""
        return self.num_choices + block

    def _left(self, block: int) -> int:
        """The column of Q[block]."""
        return self.num_choices + self.num_blocks + block

    @property
    def _room(self) -> int:
        return self.num_choices + 2 * self.num_blocks

    # ---- rows ------------------------------------------------------------------------------------------------------

    def _add(self, terms: Sequence[tuple[Any, Any]], low: float, high: float) -> None:
        columns, values = zip(*terms)
        self._rows.append(tuple(np.concatenate([np.atleast_1d(part) for part in parts]) for parts in (columns, values)))
        self._low.append(low)
        self._high.append(high)

    def _picked(self, table: Integers, block: int, sign: float = 1.0) -> tuple[Any, Any]:
        where = self._of(block)
        values = table[self.tier[where], block] * (sign / self.unit)
        return np.arange(where.start, where.stop), values

    def _choices(self) -> None:
        for block in range(self.num_blocks):
            where = self._of(block)
            self._add([(np.arange(where.start, where.stop), np.ones(where.stop - where.start))], 1.0, 1.0)

    def _sums(self) -> None:
        """P and Q are at least the sums, and no event is better off with more."""
        last = self.num_blocks - 1
        for block in range(self.num_blocks):
            before = [(self._saved(block - 1), 1.0)] if block else []
            self._add([(self._saved(block), -1.0), *before, self._picked(self.problem.saved, block)], -_INFINITY, 0.0)
            after = [(self._left(block + 1), 1.0)] if block < last else []
            self._add([(self._left(block), -1.0), *after, self._picked(self.problem.gradient, block)], -_INFINITY, 0.0)

    def _events(self) -> None:
        problem, last = self.problem, self.num_blocks - 1
        waits = [(self._saved(last), float(problem.waiting))] if problem.waiting else []
        highest = _extreme_moments(problem, np.max)
        for block in range(self.num_blocks):
            before = [(self._saved(block - 1), 1.0)] if block else []
            self._event([*waits, *before, self._picked(problem.forward_peak, block)], 0, highest[block])
            after = [(self._left(block + 1), 1.0)] if block < last else []
            backward = [*waits, (self._saved(block), 1.0), *after, self._picked(problem.backward_peak, block)]
            self._event(backward, problem.head_gradient, highest[self.num_blocks + block])
        self._event([(self._saved(last), problem.waiting + 1.0)], problem.before_loss, highest[-2])
        self._event([*waits, (self._left(0), 1.0)], problem.embedding, highest[-1])

    def _event(self, terms: list[tuple[Any, Any]], constant: int, highest: int) -> None:
        if self.room is None:
            self._add([*terms, (self._room, -1.0)], -_INFINITY, -constant / self.unit)
        elif highest > self.room:
            self._add(terms, -_INFINITY, (self.room + self.tolerance_bytes - constant) / self.unit)

    def forbid(self, tiers: Integers) -> None:
        """This assignment, which passes the room by rounding."""
        columns = np.flatnonzero(self.tier == tiers[self.block])
        self._add([(columns, np.ones(columns.size))], -_INFINITY, self.num_blocks - 1.0)

    # ---- the answer ------------------------------------------------------------------------------------------------

    def run(self, *, whole: bool = True, gap: float = 0.0) -> Floats | None:
        """The columns of the best; None where nothing fits.

        whole: whether blocks may not be in parts. gap: see fastest().
        Raises SolverError where HiGHS stops without either.
        """
        size = self._room + (self.room is None)
        rows = np.repeat(np.arange(len(self._rows)), [columns.size for columns, _ in self._rows])
        columns = np.concatenate([columns for columns, _ in self._rows])
        matrix = coo_array(
            (np.concatenate([values for _, values in self._rows]), (rows, columns)), shape=(len(self._rows), size)
        )
        cost = np.zeros(size)
        if self.room is None:
            cost[self._room] = 1.0
        else:
            cost[: self.num_choices] = self.cost * (_SCALE / max(float(self.cost.max()), 1e-30))
        integrality, high = np.zeros(size), np.full(size, _INFINITY)
        integrality[: self.num_choices], high[: self.num_choices] = float(whole), 1.0
        constraints = LinearConstraint(matrix.tocsr(), self._low, self._high)
        if self.room is not None and self.num_blocks > _FEW_BLOCKS:
            gap = max(gap, _GAP)
        return minimum(cost, integrality, Bounds(0.0, high), constraints, gap=gap)

    @property
    def slack_bytes(self) -> int:
        """By how much one event may be above what was asked for, all tolerances together. See NOTE [ Tolerances ]."""
        problem, copies = self.problem, self.problem.waiting + 1
        rows = 1 + (copies + 1) * self.num_blocks  # the event's own, and those of the sums that it holds

        def all_of(table: Integers) -> Integers:
            return np.asarray((table * problem.undominated).sum(0))

        own = np.maximum(all_of(problem.forward_peak), all_of(problem.backward_peak)).max()
        parts = copies * all_of(problem.saved).sum() + all_of(problem.gradient).sum() + own
        return int(self.tolerance_bytes + _TOLERANCE * (rows * self.unit + float(parts)))

    def check(self, found: Solution, room: int) -> None:
        """That tolerances explain by how much what was found passes the room that was asked for."""
        excess = found.peak_bytes - room
        assert excess <= self.slack_bytes, (
            f"what was found needs {excess} bytes more than the {room} asked for, where tolerances explain "
            f"{self.slack_bytes}: an event is missing from the program"
        )

    def tiers(self, values: Floats) -> Integers:
        picked = np.zeros(self.num_blocks, dtype=np.int64)
        chosen = values[: self.num_choices] > 0.5
        picked[self.block[chosen]] = self.tier[chosen]
        return picked
