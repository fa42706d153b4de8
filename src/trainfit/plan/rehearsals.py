"""Rehearsals: candidates of the search under rehearsal, until nothing that is left can win."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

from trainfit.errors import ModelError, RecipeError
from trainfit.plan.search import Candidate, Search, family
from trainfit.plan.space import Point
from trainfit.profile import Profile
from trainfit.rehearsal.rehearse import block_passes
from trainfit.step.strategy import Strategy
from trainfit.units import format_bytes

_FITTING = 3  # kinds that fit, before the fastest of them is chosen
_ATTEMPTS = 8  # rehearsals in all
_PASSES = 200  # of one micro batch through one block, in all rehearsals: large models get fewer, once one fits
_SLACK = 0.01  # of what is allowed: what a rehearsal leaves free beyond that is offered to the search again
# Of the best seconds: what else is rehearsed must take less by the fast model. It tells layouts apart worse than it
# does what a rehearsal of them would be worth; points of one layout are cheap to rehearse, and as near as that.
_WORTH_IT, _NEAR = 0.995, 1.02
# Of the best seconds: what its point must take less, in all the room there is, to be rehearsed; and how often it is.
_WORTH_ROOM, _REFINEMENTS = 0.998, 2

Exact = Callable[[Strategy], Profile]


class Rehearsals:
    """See NOTE [ What a rehearsal teaches ].

    NOTE [ What a rehearsal teaches ]
    The difference between a rehearsal and the fast model is that of all points of its kind. When a candidate turns out
    too large, the search solves again with so much less room; when it leaves more than a hundredth free, with so much
    more. Its seconds over the fast model's are its kind's pace; a kind that is not known yet is taken to have the least
    pace of its family (of all with stages, with tensor ranks, with both, with neither), or of all. What would not be
    faster than the best by that is not rehearsed, and once nothing can be, the best is chosen.
    """

    def __init__(self, search: Search, exact: Exact, allowed_bytes: int) -> None:
        self.search, self.exact, self.allowed_bytes = search, exact, allowed_bytes
        self.profiles: dict[Strategy, Profile] = {}
        self.notes: list[str] = []
        self.expanded: dict[Strategy, Candidate] = {}  # by the strategy without expandable segments
        self._expands = search.target.allocator is None and not search.hardware.is_host
        self._paces: dict[object, tuple[tuple[bool, bool], float]] = {}  # by kind: its family, and its pace
        self._good: dict[object, Candidate] = {}  # by kind: what fits
        self._rehearsed = self._passes = 0

    def best(self) -> tuple[Candidate, Profile]:
        """Of those that fit the fastest, weighed; else the smallest of all."""
        self._rehearse_all()
        if not self._good and self.search.unknown_excess:
            self.search.unknown_excess = 0  # nothing has room for fragments; it may fit without any
            self._rehearse_all()
        if (best := self._best()) is None:
            return self._smallest()
        best = self._with_all_room(best)
        return best, self.profiles[best.strategy]

    def _rehearse_all(self) -> None:
        """Until nothing that is left can win, or enough has been rehearsed."""
        for candidate in self._candidates():
            if not self._takes_passes(candidate):
                break
            if (profile := self._rehearse(candidate)) is None:
                continue
            if profile.needed_bytes <= self.allowed_bytes:
                self._good[self._kind(candidate)] = candidate
            if len(self._good) == _FITTING or self._rehearsed >= _ATTEMPTS:
                break

    def _takes_passes(self, candidate: Candidate) -> bool:
        """Whether its rehearsal stays within _PASSES, which it then has taken. It always may until one fits."""
        passes = block_passes(self.search.tracers.workload, candidate.strategy)
        if self._good and self._passes + passes > _PASSES:
            return False
        self._passes += passes
        return True

    def _with_all_room(self, best: Candidate) -> Candidate:
        """Its point solved once more, in the room that its rehearsal has left: what is too little to be offered to the
        whole search may still be a block's. Rehearsed only where the fast model finds enough to win, within _PASSES."""
        profile = self.profiles[self.expanded.get(best.strategy, best).strategy]
        excess = profile.needed_bytes - best.peak_bytes
        for _ in range(_REFINEMENTS):
            found = self.search.solve(best.point, self.allowed_bytes - excess)
            if found is None or found.strategy in self.profiles:
                break
            if found.weighed_seconds > _WORTH_ROOM * best.weighed_seconds or not self._takes_passes(found):
                break
            if (made := self._rehearse(found)) is None:
                break
            self.search.emitted.append(found)
            if made.needed_bytes <= self.allowed_bytes and self._weighed(found) < self._weighed(best):
                best = found
            excess = max(excess, made.needed_bytes - found.peak_bytes)
        return best

    def consider(self, candidate: Candidate, profile: Profile) -> None:
        """One that was rehearsed for another reason may be the best too."""
        if profile.needed_bytes <= self.allowed_bytes:
            self.profiles[candidate.strategy] = profile
            self._keeps_pace(candidate, profile)
            self._good[self._kind(candidate)] = candidate

    def _keeps_pace(self, candidate: Candidate, profile: Profile) -> None:
        if candidate.step_seconds:
            pace = profile.step_seconds / candidate.step_seconds
            self._paces[candidate.kind] = family(candidate.strategy), pace

    def _best(self) -> Candidate | None:
        return min(self._good.values(), key=self._weighed, default=None)

    def _candidates(self) -> Iterator[Candidate]:
        for candidate in self.search.best_first(may_win=self._may_win):
            if candidate.strategy not in self.profiles:
                yield candidate

    def _weighed(self, candidate: Candidate) -> float:
        return self.profiles[candidate.strategy].step_seconds * candidate.weight

    def _may_win(self, point: Point, seconds: float) -> bool:
        """Whether a point could be faster than the best, by what is known of its kind or family."""
        if (best := self._best()) is None:
            return True
        alike = [pace for of, pace in self._paces.values() if of == family(point.strategy)]
        own = self._paces.get(point.kind)
        pace = own[1] if own else min(alike or [pace for _, pace in self._paces.values()], default=1.0)
        return seconds * pace < (_WORTH_IT if len(self.search.layouts) > 1 else _NEAR) * self._weighed(best)

    def _kind(self, candidate: Candidate) -> object:
        """One of each is enough: each layout, or, where there is one only, each micro batch and number of chunks."""
        return candidate.kind if len(self.search.layouts) > 1 else candidate.point

    def _rehearse(self, candidate: Candidate) -> Profile | None:
        """None where the layout, which the search came up with, is not one for this model."""
        try:
            profile = self.exact(candidate.strategy)
        except (ModelError, RecipeError) as error:
            if self.search.target.layouts:
                raise
            self._refuse(candidate.strategy, str(error))
            return None
        self._rehearsed += 1
        self.profiles[candidate.strategy] = profile
        self._keeps_pace(candidate, profile)
        if self._expands and profile.peak_bytes <= self.allowed_bytes < profile.needed_bytes:
            profile = self._expanded(candidate, profile)
        excess, known = profile.needed_bytes - candidate.peak_bytes, self.search.excess_of(candidate.point)
        if profile.needed_bytes > self.allowed_bytes or excess < known - _SLACK * self.allowed_bytes:
            self.search.learn(candidate, excess)
        return profile

    def _expanded(self, candidate: Candidate, profile: Profile) -> Profile:
        """One that only fragmentation keeps from fitting may have expandable segments, and so may all that follow."""
        expanded = with_expandable_segments(candidate)
        smaller = self.profiles[expanded.strategy] = profile.with_expandable_segments()
        if smaller.needed_bytes >= profile.needed_bytes:
            return profile
        self.expanded[candidate.strategy] = expanded
        return smaller

    def ahead(self, chosen: Candidate) -> Candidate:
        """With recompute ahead of time, where that may win, fits and is faster: communication inside of blocks is what
        the rest of a block waits for. See recompute_ahead.py."""
        strategy, asked = chosen.strategy, self.search.target.recompute_ahead
        recomputed = [tier != "keep" for tier in strategy.tiers]
        may = asked is None and not self.search.hardware.is_host and strategy.mesh.tensor > 1
        if not may or not any(one and other for one, other in pairwise(recomputed)):
            return chosen
        try:
            early = replace(strategy, recompute_ahead=1)
        except RecipeError:
            return chosen  # sharded weights
        before, profile = self.profiles[strategy], self.exact(early)
        wins = profile.step_seconds < _WORTH_IT * before.step_seconds
        if not wins or profile.needed_bytes > self.allowed_bytes:
            return chosen
        self.profiles[early] = profile
        less, more = 1 - profile.step_seconds / before.step_seconds, profile.needed_bytes - before.needed_bytes
        self.notes.append(
            f"recompute one block ahead: {less:.1%} less time than without, since tensor ranks wait for each other in "
            f"every block's backward; {format_bytes(max(0, more))} more memory"
        )
        return replace(chosen, strategy=early)

    def _refuse(self, strategy: Strategy, reason: str) -> None:
        points = [bounded.point for bounded in self.search.points]
        alike = [point for point in points if family(point.strategy) == family(strategy)]
        self.search.refused |= {point.kind for point in alike}
        if all(point.kind in self.search.refused for point in points):
            raise ModelError(reason)
        self.notes.append(f"not every mesh was tried: {reason}")

    def _smallest(self) -> tuple[Candidate, Profile]:
        while (candidate := self.search.smallest()) is not None:
            if candidate.strategy in self.profiles:
                return candidate, self.profiles[candidate.strategy]
            if (profile := self._rehearse(candidate)) is not None:
                return candidate, profile
        raise AssertionError("the search has points")


def with_expandable_segments(candidate: Candidate) -> Candidate:
    allocator = replace(candidate.strategy.allocator, expandable_segments=True)
    return replace(candidate, strategy=replace(candidate.strategy, allocator=allocator))
