"""Whether a plan that was read from a file is one for this recipe, model and device."""

from __future__ import annotations

from trainfit.cli.setup import recipe_target
from trainfit.errors import DoesNotFitError, RecipeError
from trainfit.hardware import Hardware
from trainfit.plan import Plan, Target
from trainfit.plan.compare import situation_of
from trainfit.plan.policies import parse_policy
from trainfit.plan.space import layout_of
from trainfit.profile import (
    TIER_ACCURACY,
    LossScale,
    Offload,
)
from trainfit.step.strategy_text import (
    describe_compile,
    describe_strategy,
    describe_variant,
    format_tiers,
)
from trainfit.train import Recipe
from trainfit.units import format_bytes
from trainfit.workload import Workload


def refuse_other_plan(plan: Plan, recipe: Recipe, workload: Workload, hardware: Hardware) -> None:
    """Raises RecipeError or DoesNotFitError for a plan that was made for something else than this recipe here."""
    target, _ = recipe_target(recipe, workload, hardware)
    pairs = (
        ("model", plan.workload, workload.name),
        ("device", plan.device, hardware.spec.name),
        ("seq_len", plan.target.seq_len, target.seq_len),
        ("sequences a step", plan.target.sequences_per_step, target.sequences_per_step),
        ("devices", plan.strategy.mesh.size, hardware.count),
        ("frozen_weights", plan.strategy.frozen_weights, recipe.frozen_weights),
        ("number of blocks", len(plan.strategy.tiers), len(workload.anatomy().blocks)),
    )
    for what, planned, wanted in pairs:
        if planned != wanted:
            raise RecipeError(f"the plan is for {what} {planned}, the recipe for {wanted}; plan again with the recipe")
    _refuse_other_settings(plan, recipe, target)
    _refuse_other_choices(plan, recipe, target)
    allowed = target.allowed_bytes(hardware.spec.kind)
    if plan.predicted.peak_bytes > allowed:
        needs, may, has = map(format_bytes, (plan.predicted.peak_bytes, allowed, target.budget_bytes))
        raise DoesNotFitError(
            f"the plan needs {needs}, more than the {may} allowed of a budget of {has}; raise memory or plan again"
        )


def _refuse_other_settings(plan: Plan, recipe: Recipe, target: Target) -> None:
    """Where devices are arranged, or numbers kept, as the recipe does not say."""
    strategy = plan.strategy
    if bool(strategy.tier_table) != (recipe.per_batch is not None):
        plans, asks = ("one list of tiers", "per_batch") if recipe.per_batch else ("a tier table", "no per_batch")
        raise RecipeError(f"the plan has {plans}, the recipe {asks}; plan again with the recipe")
    if layout_of(strategy) not in target.layouts:
        raise RecipeError(
            f"the plan is for {describe_strategy(strategy)}, which is not how the recipe arranges its devices; "
            "plan again with the recipe"
        )
    if "precision" not in target.may_change and plan.strategy.precision != target.precision:
        raise RecipeError(
            f"the plan computes in {plan.strategy.precision}, the recipe in {target.precision}; "
            "plan again or set may_change=[precision]"
        )
    scale = target.loss_scale if strategy.precision == "fp16" else None
    if strategy.precision == "fp16" and scale is None:
        scale = LossScale()
    casts = strategy.precision != "fp32" and strategy.optimizer.weights == "fp32"
    ahead = strategy.recompute_ahead if recipe.recompute_ahead is None else recipe.recompute_ahead
    for what, planned_as, asked_as in (
        ("loss_scale", strategy.loss_scale, scale),
        ("cast", strategy.cast, target.cast if casts else "operator"),
        ("frozen_weights", strategy.frozen_weights, target.frozen_weights),
        ("recompute_ahead", strategy.recompute_ahead, ahead),
        ("attention", strategy.attention, strategy.attention if target.attention == "auto" else target.attention),
    ):
        if planned_as != asked_as:
            raise RecipeError(f"the plan has {what} {planned_as}, the recipe {asked_as}; plan again with the recipe")


def _refuse_other_choices(plan: Plan, recipe: Recipe, target: Target) -> None:
    """Where the plan chose what the recipe leaves to no plan: tiers, compile, offload, optimizer."""
    strategy = plan.strategy
    if recipe.activation and not (policy := parse_policy(recipe.activation)).needs_prices:
        tiers = policy.tiers(situation_of(plan.strategy))
        if plan.strategy.tiers != tiers:
            raise RecipeError(
                f"the plan's tiers are {format_tiers(plan.strategy.tiers)}, the recipe's activation {policy} makes "
                f"{format_tiers(tiers)}; plan again with the recipe"
            )
    if "compile" not in target.may_change and strategy.compile != target.compile:
        planned, asked = (", ".join(describe_compile(each)) or "none" for each in (strategy.compile, target.compile))
        raise RecipeError(f"the plan's compile is {planned}, the recipe's {asked}; plan again with the recipe")
    away = sorted({tier for tier in strategy.tiers if tier.startswith("offload")})
    if away and strategy.offload != (target.offload or (Offload() if recipe.activation else None)):
        raise RecipeError(
            f"the plan's tiers have {away[0]} to {strategy.offload.place}, the recipe's offload is another or none; "
            "plan again with the recipe"
        )
    lossy = sorted(set(strategy.tiers) & set(TIER_ACCURACY))
    if lossy and recipe.activation is None and "activations" not in target.may_change:
        raise RecipeError(
            f"the plan's tiers have {lossy[0]}, which rounds what backward reads; plan again or set "
            "may_change=[activations]"
        )
    if "optimizer" not in target.may_change and plan.strategy.optimizer != target.optimizer:
        planned, asked = (
            ", ".join(describe_variant(each)) or "fused AdamW" for each in (plan.strategy.optimizer, target.optimizer)
        )
        raise RecipeError(
            f"the plan's optimizer is {planned}, the recipe's {asked}; plan again or set may_change=[optimizer]"
        )
