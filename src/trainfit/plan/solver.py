"""The tier of each block, exactly, as a mixed-integer program over the events of a step. No torch.

NOTE [ The program ]
A binary x[i, t] says that block i has tier t; of each block one is set. P[i] is what blocks 0 to i save, Q[i] what
blocks i to the last leave as gradients. Each row is one of the NOTE [ Events of a step ] in cost.py, w the other micro
batches whose saved activations live meanwhile:
    forward of block i    w P[n-1] + P[i-1] + sum_t forward_peak[t, i] x[i, t]                     <= room
    loss                  (w + 1) P[n-1] + before_loss                                             <= room
    backward of block i   w P[n-1] + P[i] + head_gradient + Q[i+1] + sum_t backward_peak[t, i] x   <= room
    embedding             w P[n-1] + Q[0] + embedding                                              <= room
The least of sum seconds x is looked for, or, where nothing fits, the least room. HiGHS proves it (mip_rel_gap 0). P and
Q are written out in x. As columns of their own they make the rows shorter, but HiGHS 1.12 loses optima of programs
where columns are binary and continuous (its issues 3043, 3073, 3094): of 4000 small problems near one, 194.

NOTE [ Tolerances ]
HiGHS works in floats, of which the room is a thousand. A row may be passed by 1e-6 of them, and a binary be as far from
a whole number. So each row is given that, or half a byte where that is more, as below 500 MB of room: there the program
is exact. What an assignment needs is counted again in whole bytes. `_Program.slack_bytes` is the most that tolerances
add up to in one event, some parts in a million of the room. Within it less is asked of HiGHS, twice at most: by the
excess, then by the slack, where nothing can be above the room any more. What is lost are assignments within the slack
of the room. An excess above it is no rounding but a row that is missing or wrong: an AssertionError.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp

from trainfit.errors import SolverError

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

# HiGHS' tolerances are absolute: scaled so, they are a thousandth of a millionth of room and seconds.
_SCALE = 1e3
_TOLERANCE = 1e-6  # of rows and of whole numbers: mip_feasibility_tolerance, HiGHS' largest
_OPTIMAL, _INFEASIBLE = 0, 2  # scipy.optimize.milp's status
_INFINITY = float("inf")


@dataclass(frozen=True)
class Problem:
    """Bytes and seconds of each block under each tier, (tiers, blocks), and what the model around them adds.

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
    """tiers: (blocks,) indices. peak_bytes: the highest event, above what the floor is. seconds: of all blocks."""

    tiers: Integers
    peak_bytes: int
    seconds: float


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
    seconds = problem.seconds[tiers, np.arange(problem.num_blocks)].sum()
    return Solution(tiers, int(moments(problem, tiers[None]).max()), float(seconds))


def fastest(problem: Problem, room: int) -> Solution | None:
    """The least seconds of all assignments whose events stay within room bytes; None where there is none."""
    quick = solution_of(problem, _cheapest(problem))
    if quick.peak_bytes <= room:
        return quick
    if problem.num_blocks == 0:
        return None
    reserve = 0
    while True:  # three times at most, see NOTE [ Tolerances ]
        program = _Program(problem, room - reserve)
        values = program.run()
        if values is None:
            return None
        found = solution_of(problem, program.tiers(values))
        if found.peak_bytes <= room:
            return _tidied(problem, found, room)
        program.check(found, room - reserve)
        reserve = program.slack_bytes if reserve else found.peak_bytes - room


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


def seconds_bound(problem: Problem, room: int) -> float:
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

    Columns: a binary for each block and tier left, block by block, then room where it is not given.
    """

    def __init__(self, problem: Problem, room: int | None) -> None:
        self.problem, self.room = problem, room
        tier, block = np.nonzero(problem.undominated)
        order = np.lexsort((tier, block))
        self.tier, self.block = tier[order], block[order]
        self.cost: Floats = problem.seconds[self.tier, self.block]
        self.highest = _extreme_moments(problem, np.max)
        self.unit = max(1.0, float(self.highest.max() if room is None else room)) / _SCALE  # bytes
        self.tolerance_bytes = max(0.5, _TOLERANCE * self.unit)  # what each event is given

    def events(self) -> tuple[Integers, Integers]:
        """(events, binaries) and (events,) in the order of moments(): bytes of each choice, and those beside."""
        problem = self.problem
        saved, gradient, forward_peak, backward_peak = (
            table[self.tier, self.block]
            for table in (problem.saved, problem.gradient, problem.forward_peak, problem.backward_peak)
        )
        of, now = self.block, np.arange(problem.num_blocks)[:, None]
        waiting = problem.waiting * saved
        forward = waiting + saved * (of < now) + forward_peak * (of == now)
        backward = waiting + saved * (of <= now) + gradient * (of > now) + backward_peak * (of == now)
        loss, embedding = waiting + saved, waiting + gradient
        beside = np.repeat([0, problem.head_gradient], problem.num_blocks)
        return (
            np.concatenate([forward, backward, loss[None], embedding[None]]),
            np.concatenate([beside, [problem.before_loss, problem.embedding]]),
        )

    def _rows(self) -> list[LinearConstraint]:
        chosen = (self.block == np.arange(self.problem.num_blocks)[:, None]).astype(np.float64)
        bytes_of, beside = self.events()
        if self.room is None:
            chosen = np.pad(chosen, ((0, 0), (0, 1)))
            events = np.pad(bytes_of / self.unit, ((0, 0), (0, 1)), constant_values=-1.0)
            return [LinearConstraint(chosen, 1.0, 1.0), LinearConstraint(events, -_INFINITY, -beside / self.unit)]
        room = (self.room + self.tolerance_bytes - beside) / self.unit
        breaks = self.highest > self.room
        events = bytes_of[breaks] / self.unit
        return [LinearConstraint(chosen, 1.0, 1.0), LinearConstraint(events, -_INFINITY, room[breaks])]

    def run(self, *, whole: bool = True) -> Floats | None:
        """The columns of the best; None where nothing fits. whole: whether blocks may not be in parts.

        Raises SolverError where HiGHS stops without either.
        """
        if self.room is None:
            cost, integrality = (
                np.pad(np.zeros(self.cost.size), (0, 1), constant_values=1.0),
                np.ones(self.cost.size + 1),
            )
            integrality[-1] = 0.0
            high = np.where(integrality, 1.0, _INFINITY)
        else:
            cost = self.cost * (_SCALE / max(float(self.cost.max()), 1e-30))
            integrality = high = np.ones(self.cost.size)
        result = milp(
            cost,
            integrality=integrality * whole,
            bounds=Bounds(0.0, high),
            constraints=self._rows(),
            options={"mip_rel_gap": 0.0},
        )
        if result.status not in (_OPTIMAL, _INFEASIBLE):
            raise SolverError(f"HiGHS stopped with status {result.status}, no optimum: {result.message}")
        return None if result.status == _INFEASIBLE else np.asarray(result.x, dtype=np.float64)

    @property
    def slack_bytes(self) -> int:
        """By how much one event may be above what was asked for, all tolerances together. See NOTE [ Tolerances ]."""
        parts = _TOLERANCE * float(self.events()[0].sum(1).max())  # each binary is so far from a whole number
        return int(self.tolerance_bytes + _TOLERANCE * self.unit + parts)

    def check(self, found: Solution, room: int) -> None:
        """That tolerances explain by how much what was found passes the room that was asked for."""
        excess = found.peak_bytes - room
        assert excess <= self.slack_bytes, (
            f"what was found needs {excess} bytes more than the {room} asked for, where tolerances explain "
            f"{self.slack_bytes}: an event is missing from the program"
        )

    def tiers(self, values: Floats) -> Integers:
        picked = np.zeros(self.problem.num_blocks, dtype=np.int64)
        chosen = values[: self.cost.size] > 0.5
        picked[self.block[chosen]] = self.tier[chosen]
        return picked
