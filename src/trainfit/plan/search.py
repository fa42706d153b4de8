"""The search: cheap bounds order the outer space, the solver runs where a point can still win.

NOTE [ Best first ]
Every point has a bound on its seconds and on its peak, from straight lines (sketch.py) and a knapsack (solver.py). A
heap gives the point with the least bound. The first time it goes back with that of the program without whole numbers,
less what a trace may find; the next time it is traced at its own micro batch, solved, and goes back with its true
seconds; after that no other point can be faster, and it is the next candidate. So of thousands of points some dozens
are looked at, and fewer solved. Seconds are weighed, see NOTE [ What accuracy is worth ] in variants.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

from trainfit.hardware import Hardware
from trainfit.plan.case import Case, case_of
from trainfit.plan.layout import every_layout
from trainfit.plan.sketch import Sketch, begin_tracer
from trainfit.plan.solver import Solution
from trainfit.plan.space import Point, asked_of, micro_batch_sizes, points_of
from trainfit.plan.target import Target
from trainfit.plan.variants import Tracers, facts_of, gradient_share, weight_of
from trainfit.profile import TIERS, BlockTrace, Layout, Phase, Tier
from trainfit.rehearsal.model_trace import ModelTrace
from trainfit.rehearsal.trace import Tracer
from trainfit.second_process import SecondProcess
from trainfit.step.strategy import Strategy

_SMALLEST_TRIED = 12  # points, when none fits
_NEVER = float("inf")
# Of what is allowed: taken to be lost to fragmentation, which the fast model does not know, until a rehearsal has said
# so. Rehearsals that fill a device need 4 to 15 % more than the fast model says.
_FRAGMENTS = 0.08
_SKETCH_MAY_BE = 0.97  # of a sketch's seconds: what a trace may find instead
_SKETCH_GAP = 0.005  # of them: less than that is worth no branching


class _Known(NamedTuple):
    """What is known of a point in a search: the room for which it was bounded, and whether by all of its sketch."""

    room: int | None
    is_sketched: bool


_NOTHING = _Known(None, is_sketched=False)


@dataclass(frozen=True)
class Candidate:
    """A strategy with the fast model's figures. weight: see NOTE [ What accuracy is worth ] in variants.py.

    case, solutions: what it was solved from.
    """

    strategy: Strategy
    peak_bytes: int
    step_seconds: float
    weight: float = 1.0
    case: Case | None = None
    solutions: tuple[Solution, ...] = ()

    @property
    def weighed_seconds(self) -> float:
        return self.step_seconds * self.weight

    @property
    def point(self) -> Point:
        assert self.case is not None
        return self.case.point

    @property
    def kind(self) -> object:
        return self.point.kind

    def binding(self, phase: Phase | None = None) -> str:
        """The event that limits. See Case.binding."""
        return "" if self.case is None else self.case.binding(self.solutions, phase)


@dataclass(frozen=True)
class Bounded:
    """A point with bounds that no tiers of it beat."""

    point: Point
    weight: float
    seconds: float  # weighed
    peak_bytes: int


class Search:
    """See NOTE [ Best first ]. excess: by how much a kind's rehearsal was above the fast model."""

    def __init__(
        self,
        tracers: Tracers,
        hardware: Hardware,
        target: Target,
        allowed_bytes: int,
        *,
        clips: bool = True,
        on_progress: Callable[[str], None] = lambda message: None,
        beside: SecondProcess | None = None,
    ) -> None:
        """clips: whether gradients are clipped by their norm, which an update in backward cannot know.

        beside: a process that traces some of what the search needs.
        """
        self._beside = beside
        self.tracers, self.hardware, self.target, self.allowed_bytes = tracers, hardware, target, allowed_bytes
        self.on_progress = on_progress
        if beside is not None:
            begin_tracer(beside, tracers.workload, hardware, *tracers.settings_of(target.optimizer))
        facts = tracers.of(target.optimizer).facts
        self.asked = asked_of(tracers.workload, hardware, target, facts, clips=clips)
        self.layouts = target.layouts or every_layout(self.asked, hardware.count)
        self.excess: dict[object, int] = {}
        self.unknown_excess = 0 if hardware.is_host else int(_FRAGMENTS * allowed_bytes)
        self._of_family: dict[tuple[bool, bool], list[int]] = {}
        self.refused: set[object] = set()  # kinds that a rehearsal could not build
        self.emitted: list[Candidate] = []
        self._again: list[Bounded] = []
        self._solved: dict[tuple[Point, int, bool], Candidate | None] = {}
        self._sketches: dict[object, Sketch] = {}
        self._most_ranks = max(layout.mesh.tensor for layout in self.layouts)
        self._largest = max(target.sequences_per_rank(layout) for layout in self.layouts)
        # What the other process traces for tensor ranks may take a while yet.
        first = sorted(self.layouts, key=lambda layout: layout.mesh.tensor > 1)
        points = {layout: list(self._bounded(layout)) for layout in first}
        self.points = [bounded for layout in self.layouts for bounded in points[layout]]

    @property
    def solved(self) -> int:
        """How often a point was solved."""
        return len(self._solved)

    # ---- bounds ----------------------------------------------------------------------------------------------------

    def _bounded(self, layout: Layout) -> Iterator[Bounded]:
        """Micro batches grow until not even the smallest strategy fits."""
        for size in micro_batch_sizes(self.target.sequences_per_rank(layout)):
            fits: bool | None = None  # nothing was offered: an update in backward takes one micro batch only
            for point in points_of(layout, size, self.target, self.asked):
                case = self.sketched(point)
                bound = Bounded(point, self._weight(point), _NEVER, case.peak_bound())
                fits = fits or bound.peak_bytes <= self.allowed_bytes
                if bound.peak_bytes <= self.allowed_bytes:
                    bound = replace(bound, seconds=case.seconds_bound(self.allowed_bytes) * bound.weight)
                yield bound
            if fits is False:
                break

    def _weight(self, point: Point) -> float:
        return weight_of(self.target, point.strategy.precision, point.strategy.optimizer)

    def sketched(self, point: Point) -> Case:
        """The point's case without a trace of its own."""
        strategy = point.strategy
        tracer = self.tracers.of(strategy.optimizer, strategy.compile, strategy.attention)
        key = tracer.variant, strategy.precision, strategy.compile, strategy.attention
        if key not in self._sketches:
            splits = {(self._most_ranks, layout.tensor) for layout in self.layouts if layout.mesh.tensor > 1}
            self._sketches[key] = Sketch(
                tracer, strategy.precision, self._largest, self.target.seq_len, splits=splits, beside=self._beside
            )
        sketch, size, ranks = self._sketches[key], strategy.micro_batch_size, strategy.mesh.tensor
        split = None
        if ranks > 1:
            split = sketch.split_blocks(size, ranks, strategy.tensor, self._most_ranks)
        trace = sketch.trace(size, strategy.loss_chunks, split)
        return self._case(point, trace, tracer, is_split=split is not None)

    def traced(self, point: Point) -> Case:
        strategy = point.strategy
        tracer = self.tracers.of(strategy.optimizer, strategy.compile, strategy.attention)
        what = strategy.micro_batch_size, strategy.precision, (strategy.loss_chunks,)
        accumulates = strategy.accumulation_steps > 1
        split = None
        if strategy.mesh.tensor > 1:
            split = tracer.split_trace(strategy.mesh.tensor, strategy.tensor, *what, accumulates=accumulates)
        trace = split or tracer.trace(*what, accumulates=accumulates)
        return self._case(point, trace, tracer, is_split=split is not None)

    def case_with(self, point: Point, more: Mapping[tuple[int, Tier], BlockTrace]) -> Case:
        """The point's case with more tiers than the tracer's own."""
        strategy = point.strategy
        tracer = self.tracers.of(strategy.optimizer, strategy.compile, strategy.attention)
        what = strategy.micro_batch_size, strategy.precision, (strategy.loss_chunks,)
        trace = tracer.trace(*what, accumulates=strategy.accumulation_steps > 1)
        return self._case(point, replace(trace, blocks={**trace.blocks, **more}), tracer)

    def _case(self, point: Point, trace: ModelTrace, tracer: Tracer, *, is_split: bool = False) -> Case:
        variant = point.strategy.optimizer
        share = gradient_share(tracer.variant, variant)
        facts = facts_of(tracer, variant)
        return case_of(point, trace, facts, self.target, self.hardware, gradients=share, is_split=is_split)

    # ---- candidates ------------------------------------------------------------------------------------------------

    def best_first(
        self,
        *,
        more_bytes: int = 0,
        kind: object = None,
        may_win: Callable[[Point, float], bool] = lambda point, seconds: True,
    ) -> Iterator[Candidate]:
        """Candidates that should fit, the best first. What excess says meanwhile is heeded.

        more_bytes: what may be taken beside what is allowed. kind: the only one to look at. may_win: whether a point of
        so many weighed seconds is worth while, asked before it is solved.
        """
        order = count()
        heap: list[tuple[float, int, int, Bounded, Candidate | None, _Known]] = []
        self._again.clear()

        def push(seconds: float, bounded: Bounded, known: _Known, candidate: Candidate | None = None) -> None:
            peak = bounded.peak_bytes if candidate is None else candidate.peak_bytes
            heapq.heappush(heap, (seconds, peak, next(order), bounded, candidate, known))

        for bounded in self.points:
            if kind in (None, bounded.point.kind) and bounded.peak_bytes <= self.allowed_bytes + more_bytes:
                push(bounded.seconds if not more_bytes else 0.0, bounded, _NOTHING)
        while heap or self._again:
            for bounded in self._again:
                push(bounded.seconds, bounded, _NOTHING)
            self._again.clear()
            seconds, _, _, bounded, candidate, known = heapq.heappop(heap)
            point = bounded.point
            if point.kind in self.refused or not may_win(point, seconds):
                continue
            room = self.allowed_bytes + more_bytes - self.excess_of(point)
            if known.room != room:  # what is known of the room has changed, or nothing was
                bound = self.sketched(point).seconds_bound(room) * bounded.weight
                if bound < _NEVER:
                    push(max(bound, seconds), bounded, _Known(room, is_sketched=False))
            elif candidate is not None:
                self.emitted.append(candidate)
                yield candidate
            elif not known.is_sketched:
                bound = _SKETCH_MAY_BE * self.sketched(point).relaxed_seconds(room) * bounded.weight
                if bound < _NEVER:
                    push(max(bound, seconds), bounded, _Known(room, is_sketched=True))
            elif (solved := self.solve(point, room)) is not None:
                push(solved.weighed_seconds, bounded, known, solved)

    def excess_of(self, point: Point) -> int:
        """By how much its rehearsal should be above the fast model: as that of its kind, or the least of its family.

        Where no rehearsal has said, as the least of any other family, and unknown_excess at least.
        """
        if point.kind in self.excess:
            return self.excess[point.kind]
        if known := self._of_family.get(family(point.strategy)):
            return min(known)
        others = [excess for known in self._of_family.values() for excess in known]
        return max(self.unknown_excess, min(others, default=0))

    def learn(self, candidate: Candidate, excess: int) -> None:
        """What a rehearsal of it needed beside what the fast model says; its point is solved once more."""
        self.excess[candidate.kind] = excess
        self._of_family.setdefault(family(candidate.strategy), []).append(excess)
        self.reconsider(candidate.point)

    def reconsider(self, point: Point) -> None:
        """Solve a point that was yielded once more, with the excess that is known now."""
        self._again += [bounded for bounded in self.points if bounded.point == point]

    def solve(self, point: Point, allowed_bytes: int, *, traced: bool = True) -> Candidate | None:
        """The fastest tiers of one point; None where none fit."""
        key = point, allowed_bytes, traced
        if key not in self._solved:
            self.on_progress(f"solving {len(self._solved) + 1} of {len(self.points)}")
            case = self.traced(point) if traced else self.sketched(point)
            solutions = case.fastest(allowed_bytes, gap=0.0 if traced else _SKETCH_GAP)
            self._solved[key] = None if solutions is None else self.candidate(case, solutions)
        return self._solved[key]

    def smallest(self) -> Candidate | None:
        """The candidate with the lowest peak; None where there is no point at all."""
        best: Candidate | None = None
        low = sorted(self.points, key=lambda bounded: (bounded.peak_bytes, bounded.weight))
        for bounded in [each for each in low if each.point.kind not in self.refused][:_SMALLEST_TRIED]:
            if best is not None and bounded.peak_bytes >= best.peak_bytes:
                break
            found = self.smallest_of(bounded.point)
            if best is None or (found.peak_bytes, found.weighed_seconds) < (best.peak_bytes, best.weighed_seconds):
                best = found
        return best

    def smallest_of(self, point: Point, *, traced: bool = True) -> Candidate:
        case = self.traced(point) if traced else self.sketched(point)
        return self.candidate(case, case.smallest())

    def uniform(self, case: Case) -> Iterator[Candidate]:
        """All blocks alike under each tier."""
        for tier in TIERS:
            if (solutions := case.uniform(tier)) is not None:
                yield self.candidate(case, solutions)

    def uniform_of(self, point: Point, tier: Tier) -> Candidate:
        """A point with all blocks alike, by its sketch."""
        case = self.sketched(point)
        solutions = case.uniform(tier)
        assert solutions is not None, f"{tier} is traced"
        return self.candidate(case, solutions)

    def estimated(self, bounded: Bounded) -> Candidate:
        """The point's best by its sketch: the fastest that should fit, else the smallest."""
        room = self.allowed_bytes - self.excess_of(bounded.point)
        found = self.solve(bounded.point, room, traced=False) if bounded.seconds < _NEVER else None
        return found or self.smallest_of(bounded.point, traced=False)

    def candidate(self, case: Case, solutions: list[Solution]) -> Candidate:
        tiers: tuple[Tier, ...] = case.tiers(solutions)
        seconds = case.seconds([solution.true_seconds for solution in solutions])
        weighed = case.seconds([solution.seconds for solution in solutions])
        point = case.point
        weight = self._weight(point) * (weighed / seconds if seconds else 1.0)
        return Candidate(point.with_tiers(tiers), case.peak(solutions), seconds, weight, case, tuple(solutions))


def family(strategy: Strategy) -> tuple[bool, bool]:
    """Whether there are pipeline stages, and tensor ranks."""
    return strategy.mesh.pipeline > 1, strategy.mesh.tensor > 1


def best_of_each(points: list[Bounded], key: Callable[[Point], Any]) -> dict[Any, Bounded]:
    """By key the point with the least bound: of those that should fit the fastest, else the smallest."""
    best: dict[Any, Bounded] = {}
    for bounded in sorted(points, key=lambda each: (each.seconds, each.peak_bytes)):
        best.setdefault(key(bounded.point), bounded)
    return best
