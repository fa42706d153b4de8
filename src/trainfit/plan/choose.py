"""choose(): search with the fast model, rehearse the best, keep the reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from trainfit.errors import CompileError, RecipeError
from trainfit.hardware import Hardware
from trainfit.plan.judged import judged
from trainfit.plan.op_tiers import is_wanted, operator_notes, with_operators
from trainfit.plan.plan import Alternative, Plan
from trainfit.plan.reasons import (
    accuracy_note,
    allocator_note,
    alternatives_of,
    attention_note,
    binds,
    compile_choice_notes,
    more_memory,
    notes_of,
    tiers_note,
    why,
    why_not,
)
from trainfit.plan.rehearsals import Exact, Rehearsals
from trainfit.plan.search import Candidate, Search
from trainfit.plan.space import Point, layout_of, micro_batch_sizes, refusal_of
from trainfit.plan.target import Target
from trainfit.plan.variants import Tracers
from trainfit.profile import OptimizerVariant, Profile
from trainfit.second_process import SecondProcess
from trainfit.step.strategy import Strategy
from trainfit.step.strategy_text import describe_strategy, parse_tiers
from trainfit.techniques.offload import check_place
from trainfit.techniques.optimizer import skipping
from trainfit.workload import Workload

_DEEP = 24  # blocks: plain training of deeper models, which never fits, is estimated

Progress = Callable[[str], None]


def choose(
    workload: Workload,
    hardware: Hardware,
    target: Target,
    *,
    max_grad_norm: float | None = 1.0,
    on_progress: Progress = lambda message: None,
    beside: SecondProcess | None = None,
) -> Plan:
    """The fastest strategy whose rehearsal stays within the budget less its margin.

    Plan.fits is False when there is none; the plan then holds the smallest one. Raises DeviceError for a precision that
    the device lacks and RecipeError for a target of another sequence length than the workload's. beside: a process that
    does some of the work; the plan is the same. Where blocks may be compiled, and one cannot be, a note says so.
    """
    _check(workload, hardware, target)
    choose_within = partial(
        _choose, workload, hardware, max_grad_norm=max_grad_norm, on_progress=on_progress, beside=beside
    )
    try:
        return choose_within(target)
    except CompileError as error:
        if target.compile.blocks or "compile" not in target.may_change:
            raise
        without = replace(target, may_change=target.may_change - {"compile"})
        plan = choose_within(without)
        return replace(plan, target=target, notes=(*plan.notes, f"no block is compiled: {error.what}"))


def _choose(
    workload: Workload,
    hardware: Hardware,
    target: Target,
    *,
    max_grad_norm: float | None,
    on_progress: Progress,
    beside: SecondProcess | None,
) -> Plan:
    allowed = target.allowed_bytes(hardware.spec.kind)
    on_progress("tracing one block")
    tracers = Tracers(workload, hardware, target)
    clips = max_grad_norm is not None
    search = Search(tracers, hardware, target, allowed, clips=clips, on_progress=on_progress, beside=beside)
    if not search.points:
        raise _no_strategy(search)

    def exact(strategy: Strategy) -> Profile:
        on_progress(f"rehearsing {describe_strategy(strategy)}")
        sequences = target.sequences_per_rank(layout_of(strategy))
        return judged(
            workload,
            strategy,
            hardware,
            sequences=sequences,
            max_grad_norm=max_grad_norm,
            allowed_bytes=allowed,
            beside=beside,
        )

    rehearsals = Rehearsals(search, exact, allowed)
    plain = _plain(len(workload.anatomy().blocks), target, hardware, search, rehearsals)
    chosen, profile, late_notes = _decided(rehearsals, exact)
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
        notes=(*_notes(chosen.strategy, profile, tracers), *rehearsals.notes, *late_notes),
        binds=binds(chosen, profile),
        more_memory=more_memory(search, chosen, profile) if fits else None,
    )


def _notes(strategy: Strategy, profile: Profile, tracers: Tracers) -> Iterator[str]:
    """What was chosen where the target left it open, and what that means."""
    target = tracers.target
    yield from notes_of(target)
    yield from accuracy_note(target, strategy, tracers.of(target.optimizer).facts.num_trained)
    yield from tiers_note(strategy)
    yield from attention_note(target, strategy)
    yield from compile_choice_notes(target, strategy, profile, tracers.hardware)


def _decided(rehearsals: Rehearsals, exact: Exact) -> tuple[Candidate, Profile, tuple[str, ...]]:
    """The best, with what may be settled only then: recompute ahead of time, and operators; its profile; notes."""
    search, allowed = rehearsals.search, rehearsals.allowed_bytes
    found, _ = rehearsals.best()
    before = rehearsals.profiles[found.strategy]
    expanded = rehearsals.expanded.get(found.strategy, found)
    chosen = rehearsals.ahead(expanded)
    profile = rehearsals.profiles[chosen.strategy]
    wanted = profile.needed_bytes <= allowed and is_wanted(search.target, search.hardware)
    operators: tuple[str, ...] = ()
    if wanted and (better := with_operators(search, chosen, profile, exact)) is not None:
        operators = operator_notes(*better, profile)
        chosen, profile = better
    segments = allocator_note(before, rehearsals.profiles[expanded.strategy], profile, allowed)
    return chosen, profile, (*segments, *operators)


def _check(workload: Workload, hardware: Hardware, target: Target) -> None:
    hardware.require(target.precision)
    if target.offload is not None:
        check_place(target.offload, shares_host_memory=hardware.is_host)
    if workload.make_optimizer is not None and "optimizer" in target.may_change:
        raise RecipeError(
            f"{workload.name} brings an optimizer of its own, which no plan changes; take optimizer out of may_change"
        )
    if target.seq_len != workload.seq_len:
        raise RecipeError(
            f"the target's seq_len is {target.seq_len}, the workload's {workload.seq_len}; make them equal"
        )


def _no_strategy(search: Search) -> RecipeError:
    """Settings that do not go together, or too few micro batches for a pipeline."""
    target, layout = search.target, search.layouts[0]
    has, stages = target.sequences_per_rank(layout), layout.mesh.pipeline
    for size in micro_batch_sizes(has):
        if layout.pipeline.fits(-(-has // size), stages) and (
            refusal := refusal_of(layout, size, target, search.asked)
        ):
            return refusal
    enough = next(count for count in range(has + 1, 2**62) if layout.pipeline.fits(count, stages))
    return RecipeError(
        f"tokens_per_step {target.tokens_per_step} are {has} sequences for each pipeline of {stages} stages, which "
        f"cannot be cut into micro batches that keep {layout.pipeline.schedule} busy; give "
        f"{enough * layout.mesh.data * target.seq_len}, or fewer stages"
    )


def _plain(num_blocks: int, target: Target, hardware: Hardware, search: Search, rehearsals: Rehearsals) -> Alternative:
    """No technique, the whole step as one micro batch. It may be the best, where the search has it too."""
    replicas = max(layout.mesh.data for layout in search.layouts)
    strategy = Strategy(
        -(-target.sequences_per_step // replicas),
        precision=target.precision,
        tiers=parse_tiers("keep", num_blocks),
        optimizer=skipping(OptimizerVariant(target.optimizer.kind), target.precision, hardware),
    )
    why = "plain training: a device's share at once, no technique"
    point = Point(replace(strategy, tiers=()), strategy.micro_batch_size)
    if num_blocks > _DEEP:
        kept = search.uniform_of(point, "keep")
        return Alternative(strategy, kept.peak_bytes, kept.step_seconds, False, why)
    profile = rehearsals.exact(strategy)
    if any(bounded.point == point for bounded in search.points):
        rehearsals.consider(search.uniform_of(point, "keep"), profile)
    return Alternative(strategy, profile.needed_bytes, profile.step_seconds, True, why)
