"""choose_held(): a plan whose tiers a policy decides, as a recipe's `activation` asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from trainfit.errors import RecipeError
from trainfit.hardware import Hardware
from trainfit.plan.choose import choose
from trainfit.plan.compare import prices_of, situation_of
from trainfit.plan.judged import judged
from trainfit.plan.plan import Alternative, Plan
from trainfit.plan.policies import Policy, Prices
from trainfit.plan.space import layout_of
from trainfit.plan.target import Target
from trainfit.plan.variants import Tracers
from trainfit.profile import COMPILED_TIERS, Profile
from trainfit.step.strategy import Strategy
from trainfit.step.strategy_text import describe_strategy
from trainfit.units import format_bytes
from trainfit.workload import Workload

_ATTEMPTS = 3  # rehearsals of one micro batch under a policy that aims at the budget

Rehearsed = tuple[Strategy, Profile]


def choose_held(
    workload: Workload,
    hardware: Hardware,
    target: Target,
    policy: Policy,
    *,
    max_grad_norm: float | None = 1.0,
    on_progress: Callable[[str], None] = lambda message: None,
) -> Plan:
    """The plan that is free to choose tiers, and then the fastest micro batch under the policy.

    Layout, precision, optimizer and loss chunks are the free plan's. Every micro batch that fits is rehearsed, from the
    free plan's up and down by powers of two. What the policy costs against the free plan is among the alternatives.
    """
    fixed = replace(target, operators=False)  # the policy says what blocks keep
    free = choose(workload, hardware, fixed, max_grad_norm=max_grad_norm, on_progress=on_progress)
    if "compile" in fixed.may_change and (unseen := _not_of_graphs(policy, free.strategy)):
        fixed = replace(fixed, may_change=fixed.may_change - {"compile"})
        free = choose(workload, hardware, fixed, max_grad_norm=max_grad_norm, on_progress=on_progress)
        note = f"no block is compiled: activation {policy} asks for {unseen}, which a compiled block cannot have"
        free = replace(free, notes=(*free.notes, note))
    free = replace(free, target=target)
    tracers = Tracers(workload, hardware, target)

    def exact(strategy: Strategy) -> Profile:
        on_progress(f"rehearsing {describe_strategy(strategy)}")
        sequences = target.sequences_per_rank(layout_of(strategy))
        return judged(workload, strategy, hardware, sequences=sequences, max_grad_norm=max_grad_norm)

    def held(strategy: Strategy) -> Rehearsed:
        prices: Prices | None = None
        allowed = free.allowed_bytes
        if policy.needs_prices:
            tracer = tracers.of(strategy.optimizer, strategy.compile, strategy.attention)
            prices = prices_of(tracer, hardware, target, strategy, allowed)
        for attempt in range(_ATTEMPTS):
            found = replace(strategy, tiers=policy.tiers(situation_of(strategy, prices)))
            profile = exact(found)
            if prices is None or profile.needed_bytes <= allowed or attempt == _ATTEMPTS - 1:
                break
            above = profile.needed_bytes - prices.peak_bytes(found.tiers)
            prices = replace(prices, allowed_bytes=allowed - above)
        return found, profile

    return _held_plan(free, policy, list(_tries(free, target, held)))


def _not_of_graphs(policy: Policy, strategy: Strategy) -> str:
    """A tier of the policy's that a strategy with compiled blocks would refuse; "" where there is none."""
    if not strategy.compile.blocks or policy.needs_prices:  # prices are of tiers that the blocks may have
        return ""
    return next((tier for tier in policy.tiers(situation_of(strategy)) if tier not in COMPILED_TIERS), "")


def _tries(free: Plan, target: Target, held: Callable[[Strategy], Rehearsed]) -> Iterator[Rehearsed]:
    """The free plan's micro batch; larger ones while they fit; smaller ones until one fits."""
    first = held(free.strategy)
    yield first
    fits = first[1].needed_bytes <= free.allowed_bytes
    for strategy in _resized(free.strategy, target, larger=fits):
        tried = held(strategy)
        yield tried
        if (tried[1].needed_bytes <= free.allowed_bytes) is not fits:
            return


def _resized(strategy: Strategy, target: Target, *, larger: bool) -> Iterator[Strategy]:
    sequences, size = target.sequences_per_rank(layout_of(strategy)), strategy.micro_batch_size
    while size < sequences if larger else size > 1:
        size = min(2 * size, sequences) if larger else size // 2
        try:
            yield replace(strategy, micro_batch_size=size, accumulation_steps=-(-sequences // size))
        except RecipeError:  # an update in backward takes one micro batch; stages of a pipeline want several
            return


def _held_plan(free: Plan, policy: Policy, tried: list[Rehearsed]) -> Plan:
    allowed = free.allowed_bytes
    fitting = [each for each in tried if each[1].needed_bytes <= allowed]
    if fitting:
        strategy, profile = min(fitting, key=lambda each: each[1].step_seconds)
    else:
        strategy, profile = min(tried, key=lambda each: each[1].needed_bytes)
    others = [each for each in tried if each[0] != strategy]
    return replace(
        free,
        strategy=strategy,
        predicted=profile,
        alternatives=(
            *(_alternative(*each, profile, allowed) for each in others),
            Alternative(
                free.strategy,
                free.predicted.needed_bytes,
                free.predicted.step_seconds,
                True,
                f"the plan without activation {policy}: {_times(free.predicted, profile)}",
            ),
        ),
        reason=_reason(policy, strategy, profile, allowed, fits=bool(fitting)),
        notes=(*free.notes, f"activation {policy} decides the tiers: {policy.words}"),
    )


def _alternative(strategy: Strategy, profile: Profile, best: Profile, allowed: int) -> Alternative:
    over = profile.needed_bytes - allowed
    why = f"needs {format_bytes(over)} more than allowed" if over > 0 else _times(profile, best)
    return Alternative(strategy, profile.needed_bytes, profile.step_seconds, True, why)


def _times(profile: Profile, best: Profile) -> str:
    if not best.step_seconds:
        return "not timed"
    more = profile.step_seconds / best.step_seconds - 1
    return f"{abs(more):.1%} {'slower' if more >= 0 else 'faster'}"


def _reason(policy: Policy, strategy: Strategy, profile: Profile, allowed: int, *, fits: bool) -> str:
    if fits:
        return (
            f"the fastest micro batch under activation {policy} that stays within {format_bytes(allowed)}: "
            f"{describe_strategy(strategy)}; its peak of {format_bytes(profile.peak_bytes)} comes in the "
            f"{profile.peak_phase} phase"
        )
    return (
        f"does not fit under activation {policy}: {describe_strategy(strategy)} needs "
        f"{format_bytes(profile.needed_bytes)}, {format_bytes(profile.needed_bytes - allowed)} more than the "
        f"{format_bytes(allowed)} allowed; leave activation out, and the plan chooses tiers"
    )
