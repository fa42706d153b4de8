"""compare_policies(): the tiers of known policies in a plan's own step, each rehearsed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainfit.errors import RecipeError
from trainfit.hardware import Hardware
from trainfit.plan.case import case_of
from trainfit.plan.cost import BlockTable
from trainfit.plan.judged import judged
from trainfit.plan.layout import shares_of
from trainfit.plan.op_tiers import trace_of
from trainfit.plan.plan import Plan
from trainfit.plan.policies import Policy, Prices, Situation, Tiers
from trainfit.plan.space import Point, layout_of
from trainfit.plan.target import Target
from trainfit.plan.variants import Tracers, facts_of, gradient_share
from trainfit.profile import ALL_TIERS, Profile
from trainfit.rehearsal.trace import Tracer
from trainfit.step.strategy import Strategy
from trainfit.techniques.pipeline_cut import divide
from trainfit.workload import Workload

PLANNED = "trainfit"  # how the plan's own row is called


@dataclass(frozen=True)
class PolicyResult:
    """A policy in the step of a plan: micro batch, accumulation, precision, optimizer, loss chunks and layout as there.

    strategy, predicted: None where the model or the layout does not take the policy; why then says so.
    slowdown: step seconds over those of the fastest that fits, less one; None where nothing fits or nobody timed it.
    """

    policy: str
    words: str
    strategy: Strategy | None
    predicted: Profile | None
    fits: bool
    slowdown: float | None = None
    why: str = ""

    @property
    def is_plan(self) -> bool:
        """Whether it is the row of the plan itself."""
        return self.policy == PLANNED

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "words": self.words,
            "tiers": None if self.strategy is None else list(self.strategy.tiers),
            "peak_bytes": None if self.predicted is None else self.predicted.needed_bytes,
            "step_seconds": None if self.predicted is None else self.predicted.step_seconds,
            "fits": self.fits,
            "slowdown": self.slowdown,
            "why": self.why,
        }


def compare_policies(
    workload: Workload,
    hardware: Hardware,
    plan: Plan,
    policies: Sequence[Policy],
    *,
    max_grad_norm: float | None = 1.0,
    on_progress: Callable[[str], None] = lambda message: None,
) -> tuple[PolicyResult, ...]:
    """The plan and each policy, fastest first, those that do not fit behind, the smallest of them first.

    Policies of the same tiers are rehearsed once. Raises RecipeError for a plan with a tier table.
    """
    if plan.strategy.tier_table:
        raise RecipeError(
            "policies give every micro batch the same tiers, the plan has a table of them; leave per_batch out to "
            "compare, or leave --compare and --policy out"
        )
    rehearsed: dict[Tiers, Profile] = {plan.strategy.tiers: plan.predicted}
    rows = [_row(PLANNED, "what the plan chose", plan.strategy, plan.predicted, plan.allowed_bytes)]
    sequences = plan.target.sequences_per_rank(layout_of(plan.strategy))
    prices: Prices | None = None
    for policy in policies:
        if policy.needs_prices and prices is None:
            on_progress("tracing one block")
            prices = prices_of_plan(workload, hardware, plan)
        try:
            tiers = policy.tiers(situation_of(plan.strategy, prices))
            if tiers not in rehearsed:
                on_progress(f"rehearsing {policy}")
                strategy = replace(plan.strategy, tiers=tiers)
                rehearsed[tiers] = judged(
                    workload, strategy, hardware, sequences=sequences, max_grad_norm=max_grad_norm
                )
        except RecipeError as error:
            rows.append(PolicyResult(str(policy), policy.words, None, None, False, why=str(error)))
            continue
        strategy = replace(plan.strategy, tiers=tiers)
        rows.append(_row(str(policy), policy.words, strategy, rehearsed[tiers], plan.allowed_bytes))
    return _ordered(rows)


def situation_of(strategy: Strategy, prices: Prices | None = None) -> Situation:
    """The blocks of a strategy's model, by pipeline stage."""
    blocks = len(strategy.tiers)
    parts = divide(blocks, strategy.mesh.pipeline * strategy.pipeline.stages_per_rank) if blocks else []
    return Situation(blocks, tuple(len(part.blocks) for part in parts) or None, prices)


def _row(name: str, words: str, strategy: Strategy, profile: Profile, allowed: int) -> PolicyResult:
    return PolicyResult(name, words, strategy, profile, profile.needed_bytes <= allowed)


def _ordered(rows: list[PolicyResult]) -> tuple[PolicyResult, ...]:
    seconds = [row.predicted.step_seconds for row in rows if row.fits and row.predicted is not None]
    best = min(seconds, default=0.0)

    def key(row: PolicyResult) -> tuple[int, float]:
        if row.predicted is None:
            return 2, 0.0
        return (0, row.predicted.step_seconds) if row.fits else (1, float(row.predicted.needed_bytes))

    timed = [
        replace(row, slowdown=row.predicted.step_seconds / best - 1) if best and row.predicted is not None else row
        for row in rows
    ]
    return tuple(sorted(timed, key=key))


def prices_of_plan(workload: Workload, hardware: Hardware, plan: Plan) -> Prices:
    """The fast model's figures around a plan's strategy, less what it was off by at the plan's own tiers."""
    strategy = plan.strategy
    tracers = Tracers(workload, hardware, plan.target)
    tracer = tracers.of(strategy.optimizer, strategy.compile, strategy.attention)
    prices = prices_of(tracer, hardware, plan.target, plan.strategy, plan.allowed_bytes)
    above = plan.predicted.needed_bytes - prices.peak_bytes(plan.strategy.tiers)
    return replace(prices, allowed_bytes=plan.allowed_bytes - above)


def prices_of(tracer: Tracer, hardware: Hardware, target: Target, strategy: Strategy, allowed_bytes: int) -> Prices:
    """What tiers save and cost in a strategy's step, by the fast model. The tracer has the strategy's weights."""
    facts = facts_of(tracer, strategy.optimizer)
    layout = layout_of(strategy)
    trace = trace_of(tracer, strategy)
    share = gradient_share(tracer.variant, strategy.optimizer)
    table = BlockTable.of(facts.structures, trace.blocks, shares_of(layout), gradients=share)
    point = Point(replace(strategy, tiers=()), target.sequences_per_rank(layout))
    case = case_of(point, trace, facts, target, hardware, gradients=share)

    def peak(tiers: Tiers) -> int:
        return case.peak(case.given(tiers))

    rows = {tier: ALL_TIERS.index(tier) for tier in tracer.tiers}
    saved = {tier: tuple(map(int, table.saved[row])) for tier, row in rows.items()}
    seconds = {tier: tuple(map(float, table.seconds[row])) for tier, row in rows.items()}
    return Prices(saved, seconds, peak, allowed_bytes)
