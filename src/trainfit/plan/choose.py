"""choose(): search with the fast model, rehearse the best, keep the reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trainfit.errors import ModelError, RecipeError
from trainfit.hardware import Hardware
from trainfit.plan.judged import judged
from trainfit.plan.plan import Alternative, Plan
from trainfit.plan.reasons import accuracy_note, allocator_note, alternatives_of, more_memory, notes_of, why, why_not
from trainfit.plan.search import Candidate, Search
from trainfit.plan.space import Point, layout_of
from trainfit.plan.target import Target
from trainfit.plan.variants import Tracers
from trainfit.profile import OptimizerVariant, Profile
from trainfit.rehearsal.rehearse import block_passes
from trainfit.rehearsal.shorten import shortened
from trainfit.step.strategy import Strategy, describe_strategy, parse_tiers
from trainfit.techniques.optimizer import skipping
from trainfit.workload import Workload

_FITTING = 3  # candidates that fit, before the fastest of them is chosen
_ATTEMPTS = 8  # rehearsals in all
_PASSES = 330  # of one micro batch through one block, in all rehearsals after the first: large models get fewer
_READY, _TAUGHT = 2, 4  # kinds of a large model that are compared, and that are rehearsed short for it
_LONG = 60  # such passes: what takes more is rehearsed short first
_DEEP = 24  # blocks: plain training of deeper models, which never fits, is estimated
_SIMPLE_FIRST = 1.2  # of the least seconds of all: so much slower a mesh of replicas and shards is tried first
_SLACK = 0.01  # of what is allowed: what a rehearsal leaves free beyond that is offered to the search again

_WORTH_IT = 0.995  # of the seconds of one that fits: another of its kind that is rehearsed must take less

Progress = Callable[[str], None]
Exact = Callable[..., Profile]  # (strategy, model=the whole one)


def choose(
    workload: Workload,
    hardware: Hardware,
    target: Target,
    *,
    max_grad_norm: float | None = 1.0,
    on_progress: Progress = lambda message: None,
) -> Plan:
    """The fastest strategy whose rehearsal stays within the budget less its margin.

    Plan.fits is False when there is none; the plan then holds the smallest one. Raises DeviceError for a precision that
    the device lacks and RecipeError for a target of another sequence length than the workload's.
    """
    _check(workload, hardware, target)
    allowed = target.allowed_bytes(hardware.spec.kind)
    on_progress("tracing one block")
    tracers = Tracers(workload, hardware, target)
    search = Search(tracers, hardware, target, allowed, clips=max_grad_norm is not None, on_progress=on_progress)
    if not search.points:
        raise _too_few_micro_batches(target)

    def exact(strategy: Strategy, model: Workload = workload) -> Profile:
        on_progress(f"rehearsing {describe_strategy(strategy)}")
        sequences = target.sequences_per_rank(layout_of(strategy))
        return judged(model, strategy, hardware, sequences=sequences, max_grad_norm=max_grad_norm)

    plain = _plain(len(workload.anatomy().blocks), target, hardware, search, exact)
    rehearsals = Rehearsals(search, exact, allowed)
    chosen, profile = rehearsals.best()
    chosen = rehearsals.expanded.get(chosen.strategy, chosen)
    profile = rehearsals.profiles[chosen.strategy]
    fits = profile.needed_bytes <= allowed
    on_progress("weighing what lost")
    return Plan(
        allowed_bytes=allowed,
        target=target,
        device=hardware.spec.name,
        workload=workload.name,
        strategy=chosen.strategy,
        predicted=profile,
        plain=plain,
        alternatives=tuple(alternatives_of(search, rehearsals.profiles, chosen, profile)),
        reason=why(chosen, profile, plain, allowed) if fits else why_not(profile, target, hardware),
        notes=(
            *notes_of(target),
            *accuracy_note(target, chosen.strategy, tracers.of(target.optimizer).facts.num_trained),
            *allocator_note(chosen.strategy, profile, rehearsals.profiles, allowed),
            *rehearsals.notes,
        ),
        binds=chosen.binding(profile.peak_phase),
        more_memory=more_memory(search, chosen, profile) if fits else None,
    )


def _check(workload: Workload, hardware: Hardware, target: Target) -> None:
    hardware.require(target.precision)
    if workload.make_optimizer is not None and "optimizer" in target.may_change:
        raise RecipeError(
            f"{workload.name} brings an optimizer of its own, which no plan changes; take optimizer out of may_change"
        )
    if target.seq_len != workload.seq_len:
        raise RecipeError(
            f"the target's seq_len is {target.seq_len}, the workload's {workload.seq_len}; make them equal"
        )


def _too_few_micro_batches(target: Target) -> RecipeError:
    layout = target.layouts[0]
    has, stages = target.sequences_per_rank(layout), layout.mesh.pipeline
    enough = next(count for count in range(has + 1, 2**62) if layout.pipeline.fits(count, stages))
    return RecipeError(
        f"tokens_per_step {target.tokens_per_step} are {has} sequences for each pipeline of {stages} stages, which "
        f"cannot be cut into micro batches that keep {layout.pipeline.schedule} busy; give "
        f"{enough * layout.mesh.data * target.seq_len}, or fewer stages"
    )


class Rehearsals:
    """Candidates under rehearsal, until some fit. See NOTE [ What a rehearsal teaches ].

    NOTE [ What a rehearsal teaches ]
    The difference between a rehearsal and the fast model is that of all points of its kind. When a candidate turns out
    too large, the search solves again with so much less room; when it leaves more than a hundredth free, with so much
    more. Of models too large to rehearse each time, a short one teaches first (NOTE [ Short rehearsals ]): its excess
    and its seconds over the fast model's (its pace) hold for the whole, and the best by these is rehearsed whole. A
    kind that is not known yet is taken to have the least pace of its family: of all with stages, with tensor ranks,
    with both, with neither. Meshes of replicas and shards are the cheapest to rehearse, and go first where they are
    near.
    """

    def __init__(self, search: Search, exact: Exact, allowed_bytes: int) -> None:
        self.search, self.exact, self.allowed_bytes = search, exact, allowed_bytes
        self.profiles: dict[Strategy, Profile] = {}
        self.notes: list[str] = []
        self.expanded: dict[Strategy, Candidate] = {}  # by the strategy without expandable segments
        self._expands = search.target.allocator is None and not search.hardware.is_host
        self.pace: dict[object, float] = {}  # by kind: seconds of a short rehearsal over the fast model's
        self._paces: list[tuple[object, float]] = []
        self._passes = self._rehearsed = 0

    def best(self) -> tuple[Candidate, Profile]:
        """Of those that fit the fastest, weighed; else the smallest of all."""
        good: dict[object, Candidate] = {}
        ready = self._simplest()  # of models rehearsed short, by kind
        for candidate in self.search.best_first():
            kind = self._kind(candidate)
            if ready and not self._may_win(candidate, ready):
                if (found := self._whole(ready)) is not None:
                    return found
                continue
            if block_passes(candidate.strategy) > _LONG and (known := self._taught(candidate)) is not None:
                if not known:
                    continue
                ready.setdefault(kind, candidate)
                if len(ready) < _READY and len(self.pace) < _TAUGHT:
                    continue
                if (found := self._whole(ready)) is not None:
                    return found
                continue
            same = good.get(kind)
            if same is not None and candidate.step_seconds > _WORTH_IT * same.step_seconds:
                continue
            if good and self._passes + block_passes(candidate.strategy) > _PASSES:
                break
            if (profile := self._rehearse(candidate)) is None:
                continue
            if profile.needed_bytes <= self.allowed_bytes:
                good[kind] = candidate
            if len(good) == _FITTING or self._rehearsed == _ATTEMPTS:
                break
        while ready:
            if (found := self._whole(ready)) is not None:
                return found
        if good:
            best = min(good.values(), key=lambda each: self.profiles[each.strategy].step_seconds * each.weight)
            return best, self.profiles[best.strategy]
        return self._smallest()

    def _simplest(self) -> dict[object, Candidate]:
        """The best without stages and tensor ranks, where it may win and is rehearsed short."""
        open_points = [bounded for bounded in self.search.points if bounded.seconds < float("inf")]
        least = min((bounded.seconds for bounded in open_points), default=0.0)
        simple = [each for each in open_points if family(each.point.strategy) == (False, False)]
        best = min(simple, key=lambda each: each.seconds, default=None)
        if best is None or best.seconds > _SIMPLE_FIRST * least:
            return {}
        for _ in range(2):  # taught, then solved again with what was learnt
            candidate = next(self.search.best_first(kind=best.point.kind), None)
            if candidate is None or block_passes(candidate.strategy) <= _LONG:
                return {}
            if (known := self._taught(candidate)) or known is None:
                break
        return {self._kind(candidate): candidate} if candidate and candidate.kind in self.pace else {}

    def _may_win(self, candidate: Candidate, ready: dict[object, Candidate]) -> bool:
        """Whether a candidate could be faster than those that are ready, by what is known of its family."""
        best = min(each.weighed_seconds * self.pace[each.kind] for each in ready.values())
        alike = family(candidate.strategy)
        paces = [pace for layout, pace in self._paces if layout == alike] or [pace for _, pace in self._paces]
        pace = self.pace.get(candidate.kind, min(paces, default=1.0))
        return self._kind(candidate) in ready or candidate.weighed_seconds * pace < _WORTH_IT * best

    def _whole(self, ready: dict[object, Candidate]) -> tuple[Candidate, Profile] | None:
        """Rehearse the best of those that were rehearsed short; None if it does not fit, and it is ready no more."""
        kind = min(ready, key=lambda each: ready[each].weighed_seconds * self.pace[ready[each].kind])
        candidate = ready.pop(kind)
        profile = self._rehearse(candidate)
        return None if profile is None or profile.needed_bytes > self.allowed_bytes else (candidate, profile)

    def _taught(self, candidate: Candidate) -> bool | None:
        """Whether a short rehearsal of the candidate's kind is done; if not it is, and the point is solved again. None
        where none can be."""
        if candidate.kind in self.pace:
            return True
        if (short := self.search.short_of(candidate)) is None:
            return None
        kept, fast = short
        if (workload := shortened(self.search.tracers.workload, kept)) is None:
            return None
        try:
            profile = self.exact(fast.strategy, workload)
        except (ModelError, RecipeError) as error:
            if self.search.target.layouts:
                raise
            self._refuse(candidate.strategy, str(error))
            return False
        self.search.excess[candidate.kind] = profile.needed_bytes - fast.peak_bytes
        pace = profile.step_seconds / fast.step_seconds if fast.step_seconds else 1.0
        self.pace[candidate.kind] = pace
        self._paces.append((family(candidate.strategy), pace))
        self.search.reconsider(candidate.point)
        return False

    def _kind(self, candidate: Candidate) -> object:
        """One of each is rehearsed: each layout, or, where there is one only, each micro batch and number of chunks."""
        return candidate.kind if len(self.search.layouts) > 1 else candidate.point

    def _rehearse(self, candidate: Candidate) -> Profile | None:
        """None where the layout, which the search came up with, is not one for this model."""
        kind = candidate.kind
        try:
            profile = self.exact(candidate.strategy)
        except (ModelError, RecipeError) as error:
            if self.search.target.layouts:
                raise
            self._refuse(candidate.strategy, str(error))
            return None
        self._passes += block_passes(candidate.strategy)
        self._rehearsed += 1
        self.profiles[candidate.strategy] = profile
        if self._expands and profile.peak_bytes <= self.allowed_bytes < profile.needed_bytes:
            profile = self._expanded(candidate, profile)
        excess, known = profile.needed_bytes - candidate.peak_bytes, self.search.excess.get(kind, 0)
        if profile.needed_bytes > self.allowed_bytes or excess < known - _SLACK * self.allowed_bytes:
            self.search.excess[kind] = excess
            self.search.reconsider(candidate.point)
        return profile

    def _expanded(self, candidate: Candidate, profile: Profile) -> Profile:
        """One that only fragmentation keeps from fitting may have expandable segments, and so may all that follow."""
        expanded = with_expandable_segments(candidate)
        smaller = self.profiles[expanded.strategy] = profile.with_expandable_segments()
        if smaller.needed_bytes >= profile.needed_bytes:
            return profile
        self.expanded[candidate.strategy] = expanded
        return smaller

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


def family(strategy: Strategy) -> tuple[bool, bool]:
    """Whether there are pipeline stages, and tensor ranks."""
    return strategy.mesh.pipeline > 1, strategy.mesh.tensor > 1


def with_expandable_segments(candidate: Candidate) -> Candidate:
    allocator = replace(candidate.strategy.allocator, expandable_segments=True)
    return replace(candidate, strategy=replace(candidate.strategy, allocator=allocator))


def _plain(num_blocks: int, target: Target, hardware: Hardware, search: Search, exact: Exact) -> Alternative:
    """No technique, the whole step as one micro batch."""
    replicas = max(layout.mesh.data for layout in search.layouts)
    strategy = Strategy(
        -(-target.sequences_per_step // replicas),
        precision=target.precision,
        tiers=parse_tiers("keep", num_blocks),
        optimizer=skipping(OptimizerVariant(target.optimizer.kind), target.precision, hardware),
    )
    why = "plain training: a device's share at once, no technique"
    if num_blocks > _DEEP:
        kept = search.uniform_of(Point(replace(strategy, tiers=()), strategy.micro_batch_size), "keep")
        return Alternative(strategy, kept.peak_bytes, kept.step_seconds, False, why)
    profile = exact(strategy)
    return Alternative(strategy, profile.needed_bytes, profile.step_seconds, True, why)
