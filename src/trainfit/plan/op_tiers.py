"""Chosen tiers for a plan that recomputes: what each block keeps, operator by operator, at the plan's own budget.

NOTE [ After the search ]
The search knows tiers that are the same lists of operators for every model. What it finds says how many bytes a block
may save in the mean. Around that many the frontier of choices (op_choice.py) has two corners: they become two tiers for
each structure, are traced as any other, and the solver mixes them with the rest. So a plan costs a graph and two traces
for each structure more, and a rehearsal, and the choice is as good as it can be where the plan is; other micro batches
and layouts are not looked at again. It needs costs that are this device's own, so by default only a plan for a
calibrated device does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from trainfit.hardware import Hardware
from trainfit.operators import BlockGraph, KeptOperators
from trainfit.plan.op_choice import Choice, neighbours
from trainfit.plan.search import Candidate, Search
from trainfit.plan.target import Target
from trainfit.profile import CHOSEN_TIERS, Profile, Tier
from trainfit.rehearsal.model_trace import ModelTrace
from trainfit.rehearsal.trace import Tracer
from trainfit.step.strategy import Strategy

_ATTEMPTS = 4  # rehearsals, each with less room than the last
_WORTH_IT = 0.999  # of the seconds without it, by the fast model


@dataclass(frozen=True)
class Budget:
    """The block of one structure at a plan's budget.

    room_bytes: what each such block saves in the mean, beside what it saves in full recompute: its input and what
    every tier keeps. low, high: corners of the frontier around it.
    """

    structure: int
    graph: BlockGraph
    room_bytes: int
    low: Choice
    high: Choice


def is_wanted(target: Target, hardware: Hardware) -> bool:
    """By default where costs of operators were measured on the device."""
    return target.operators if target.operators is not None else hardware.spec.calibration is not None


def trace_of(tracer: Tracer, strategy: Strategy) -> ModelTrace:
    """At the strategy's micro batch, with the tiers that it has beside the tracer's own."""
    accumulates = strategy.accumulation_steps > 1
    what = strategy.micro_batch_size, strategy.precision
    trace = tracer.trace(*what, (strategy.loss_chunks,), accumulates=accumulates)
    said = {each.tier: each for each in strategy.kept_operators}
    own = {pair: said.get(pair[1]) for pair in zip(tracer.facts.structures, strategy.tiers) if pair not in trace.blocks}
    return replace(trace, blocks={**trace.blocks, **tracer.trace_chosen(own, *what, accumulates=accumulates)})


def budgets_of(tracer: Tracer, strategy: Strategy, trace: ModelTrace, room_bytes: int | None = None) -> list[Budget]:
    """Of every structure. trace: at the strategy's micro batch and precision. room_bytes: instead of the plan's."""
    found = []
    structures = tracer.facts.structures
    for structure in sorted(set(structures)):
        tiers = [tier for tier, own in zip(strategy.tiers, structures) if own == structure]
        saved = [trace.blocks[structure, tier].saved_bytes for tier in tiers]
        room = sum(saved) // len(saved) - trace.blocks[structure, "full"].saved_bytes
        room = room if room_bytes is None else room_bytes
        graph = tracer.graph(structure, strategy.micro_batch_size, strategy.precision)
        if graph.operators:
            found.append(Budget(structure, graph, room, *neighbours(graph, room)))
    return found


def with_operators(
    search: Search, chosen: Candidate, profile: Profile, exact: Callable[[Strategy], Profile]
) -> tuple[Candidate, Profile] | None:
    """The candidate with chosen tiers, rehearsed; None where that is not faster or does not fit."""
    strategy, point = chosen.strategy, chosen.point
    if strategy.mesh.tensor > 1 or strategy.compile.blocks or set(strategy.tiers) <= {"keep"}:
        return None
    search.on_progress("choosing operators")
    tracer = search.tracers.of(strategy.optimizer, attention=strategy.attention)
    accumulates = strategy.accumulation_steps > 1
    what = strategy.micro_batch_size, strategy.precision
    trace = tracer.trace(*what, (strategy.loss_chunks,), accumulates=accumulates)
    tiers = _tiers_of(budgets_of(tracer, strategy, trace))
    traced = tracer.trace_chosen(tiers, *what, accumulates=accumulates)
    allowing = replace(point.strategy, kept_operators=tuple(tiers.values()))
    case = search.case_with(replace(point, strategy=allowing), traced)
    room = search.allowed_bytes - (profile.needed_bytes - chosen.peak_bytes)
    for attempt in range(_ATTEMPTS):
        if (solutions := case.fastest(room)) is None:
            return None
        found = search.candidate(case, solutions)
        if found.step_seconds > _WORTH_IT * chosen.step_seconds:
            return None
        found = replace(found, strategy=_tidied(found.strategy, strategy))
        rehearsed = exact(found.strategy)
        if rehearsed.needed_bytes <= search.allowed_bytes:
            return (found, rehearsed) if rehearsed.step_seconds < profile.step_seconds else None
        # What an allocator holds moves by more than a few bytes: each time twice as far.
        room -= (rehearsed.needed_bytes - search.allowed_bytes) << attempt
    return None


def _tiers_of(budgets: list[Budget]) -> dict[tuple[int, Tier], KeptOperators]:
    """Two for each structure, as far as there are names; the first structures have the most blocks."""
    names = iter(CHOSEN_TIERS)
    found: dict[tuple[int, Tier], KeptOperators] = {}
    for budget in budgets:
        for choice in dict.fromkeys((budget.low, budget.high)):
            if choice.kept and (name := next(names, None)) is not None:
                found[budget.structure, name] = budget.graph.rules(name, choice.kept)
    return found


def _tidied(strategy: Strategy, before: Strategy) -> Strategy:
    """Without what no block uses, and with the allocator of the strategy that it is made from."""
    used = tuple(each for each in strategy.kept_operators if each.tier in strategy.tiers)
    return replace(strategy, kept_operators=used, allocator=before.allocator)


def operator_notes(found: Candidate, profile: Profile, before: Profile) -> tuple[str, ...]:
    """What the chosen tiers keep, and what they are worth."""
    kept = ", ".join(f"{each.tier} {len(each.kept)}" for each in found.strategy.kept_operators)
    if not kept:
        return ()
    gain = before.step_seconds / profile.step_seconds - 1
    return (
        f"chosen tiers keep the outputs of single operators by their costs ({kept}); without them a step would take "
        f"{gain:.1%} longer; `trainfit explain` shows what each is worth",
    )
