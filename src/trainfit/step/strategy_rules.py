"""What a Strategy refuses, each in one line, and what it is given for nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from trainfit.errors import RecipeError
from trainfit.profile import (
    ATTENTIONS,
    CHOSEN_TIERS,
    COMPILED_TIERS,
    FROZEN_STORAGES,
    GRAPH_TIERS,
    MESH_DIMS,
    OPTIMIZER_KINDS,
    PIPELINE_SCHEDULES,
    PRECISIONS,
    STATE_STORAGES,
    TIERS,
    WEIGHT_STORAGES,
    AllocatorSettings,
    Compile,
    Mesh,
    Offload,
    OptimizerVariant,
    Pipeline,
    Precision,
    Tier,
    Zero,
)

if TYPE_CHECKING:
    from trainfit.step.strategy import Strategy


def check_optimizer(variant: OptimizerVariant, precision: Precision, accumulation_steps: int) -> None:
    for name, known in (
        ("kind", OPTIMIZER_KINDS),
        ("weights", WEIGHT_STORAGES),
        ("gradients", ("fp32", "half")),
        ("states", STATE_STORAGES),
        ("place", ("device", "host")),
        ("update", ("step", "backward")),
        ("kernel", ("fused", "foreach")),
    ):
        if (value := getattr(variant, name)) not in known:
            raise RecipeError(f"unknown optimizer.{name} {value!r}; one of {', '.join(known)}")
    half = None if variant.weights == "fp32" else variant.weights.partition("_")[0]
    if half is not None and precision != half:
        raise RecipeError(
            f"optimizer.weights {variant.weights} computes in {half}, precision is {precision}; set precision: {half}, "
            "or optimizer.weights: fp32"
        )
    if variant.gradients == "half" and half is None:
        raise RecipeError(
            "optimizer.gradients half is the dtype of half weights, optimizer.weights is fp32; set optimizer.weights: "
            "bf16_residual or another half one, or optimizer.gradients: fp32"
        )
    if variant.gradients == "half" and half == "fp16":
        raise RecipeError(
            "optimizer.gradients half would keep fp16 gradients, which loss scaling cannot unscale without losing what "
            "it saved; set optimizer.gradients: fp32"
        )
    if variant.kind == "adafactor" and variant != OptimizerVariant("adafactor", kernel=variant.kernel):
        raise RecipeError(
            "optimizer.kind adafactor keeps fp32 weights and factored states on the device and updates after backward; "
            "leave optimizer.weights, gradients, states, place and update out, or set optimizer.kind: adamw"
        )
    if variant.place == "host" and variant.weights in ("bf16_residual", "bf16_kahan", "bf16_stochastic"):
        raise RecipeError(
            f"optimizer.place host keeps fp32 masters there, optimizer.weights is {variant.weights}; set "
            "optimizer.weights: bf16_master, which takes the device no more, or optimizer.place: device"
        )
    if variant.update == "backward" and accumulation_steps > 1:
        raise RecipeError(
            f"optimizer.update backward takes a step in every backward, accumulation_steps is {accumulation_steps}; "
            "set accumulation_steps to 1 with a larger micro batch, or optimizer.update: step"
        )
    if variant.update == "backward" and precision == "fp16":
        raise RecipeError(
            "optimizer.update backward has updated before an overflow elsewhere shows, and fp16 must skip such a step; "
            "set precision: bf16, or optimizer.update: step"
        )
    if variant.update == "backward" and variant.place == "host":
        raise RecipeError(
            "optimizer.update backward would make backward wait for copies to the host; set optimizer.place: device, "
            "or optimizer.update: step"
        )


def check_casts(strategy: Strategy) -> None:
    if strategy.cast not in ("operator", "block"):
        raise RecipeError(f"unknown cast {strategy.cast!r}; it is operator or block")
    if strategy.frozen_weights not in FROZEN_STORAGES:
        raise RecipeError(f"unknown frozen_weights {strategy.frozen_weights!r}; one of {', '.join(FROZEN_STORAGES)}")
    if strategy.cast == "block" and (strategy.precision == "fp32" or strategy.optimizer.weights != "fp32"):
        raise RecipeError(
            f"cast block casts fp32 weights to a lower precision; here weights are {strategy.optimizer.weights} and "
            f"precision is {strategy.precision}: leave it out"
        )
    if strategy.frozen_weights == "half" and strategy.precision == "fp32":
        raise RecipeError(
            "frozen_weights half is the compute dtype, which is fp32; set precision: bf16, or leave it out"
        )
    scale = strategy.loss_scale
    if scale is None:
        return
    if strategy.precision != "fp16":
        raise RecipeError(f"loss_scale is for fp16, precision is {strategy.precision}, which needs none; leave it out")
    ranges = {
        "init_scale": 0.0 < scale.init_scale < 2.0**64,
        "growth_factor": 1.0 < scale.growth_factor <= 2.0**16,
        "backoff_factor": 0.0 < scale.backoff_factor < 1.0,
        "growth_interval": type(scale.growth_interval) is int and scale.growth_interval >= 1,
        "max_skips": type(scale.max_skips) is int and scale.max_skips >= 1,
    }
    if bad := [name for name, good in ranges.items() if not good]:
        raise RecipeError(
            f"loss_scale.{bad[0]} is {getattr(scale, bad[0])!r}; usual are init_scale 65536, growth_factor 2, "
            "backoff_factor 0.5, growth_interval 2000 and max_skips 25"
        )


def check_tiers(tiers: Iterable[Tier], known: Sequence[Tier]) -> None:
    if unknown := sorted(set(tiers) - set(known)):
        raise unknown_tier(unknown[0])


def unknown_tier(name: str) -> RecipeError:
    near = get_close_matches(name, TIERS, n=1, cutoff=0.7)
    hint = f"did you mean {near[0]}? It is " if near else ""
    return RecipeError(f"unknown activation tier {name!r}; {hint}one of {', '.join(TIERS)}")


def check_kept_operators(strategy: Strategy) -> None:
    """Each chosen tier that a block has is said once; ranks that split matrices run other operators than one does."""
    said = [each.tier for each in strategy.kept_operators]
    if bad := [tier for tier in said if tier not in CHOSEN_TIERS or said.count(tier) > 1]:
        raise RecipeError(
            f"kept_operators has {bad[0]!r} {said.count(bad[0])} times; it has each of {', '.join(CHOSEN_TIERS)} at "
            "most once"
        )
    rows = [strategy.tiers, *(row.tiers for row in strategy.tier_table)]
    used = sorted({tier for row in rows for tier in row if tier in CHOSEN_TIERS})
    if missing := [tier for tier in used if tier not in said]:
        raise RecipeError(
            f"activation tier {missing[0]} keeps the operators that kept_operators says, which has none for it; "
            "`trainfit plan --operators` makes both"
        )
    if used and strategy.tier_table:
        raise RecipeError(
            f"activation tier {used[0]} was chosen for one size of micro batch, a tier_table is for several; set "
            "another tier such as pointwise, or leave tier_table out"
        )
    if used and strategy.mesh.tensor > 1:
        raise RecipeError(
            f"activation tier {used[0]} was chosen for a block on one device, mesh.tensor is {strategy.mesh.tensor}; "
            "set mesh.tensor: 1, or another tier such as pointwise"
        )


def check_zero(zero: Zero, mesh: Mesh, accumulation_steps: int, precision: Precision) -> None:
    if zero.stage not in (0, 1, 2, 3):
        raise RecipeError(f"zero.stage is {zero.stage!r}; it is 0, 1, 2 or 3")
    if zero.stage == 0 and mesh.shard > 1:
        raise RecipeError(
            f"zero.stage 0 shards nothing over mesh.shard {mesh.shard}; set mesh.replicate, or stage 1 to 3"
        )
    if zero.gradient_sync not in (None, "step", "micro_batch"):
        raise RecipeError(f"zero.gradient_sync is {zero.gradient_sync!r}; it is step or micro_batch")
    if type(zero.prefetch) is not int or not 1 <= zero.prefetch <= 16:
        raise RecipeError(f"zero.prefetch is {zero.prefetch!r}; give a number of blocks from 1 to 16")
    if zero.reduce_dtype not in PRECISIONS:
        raise RecipeError(f"unknown zero.reduce_dtype {zero.reduce_dtype!r}; one of {', '.join(PRECISIONS)}")
    if zero.reduce_dtype == "fp16" and precision != "fp16":
        raise RecipeError(
            f"zero.reduce_dtype fp16 needs the loss scale of precision fp16, which is {precision}; use bf16 or fp32"
        )
    adds_up = mesh.data > 1 and accumulation_steps > 1 and (mesh.replicate > 1 or not zero.reduces_each_micro_batch)
    if zero.stage and zero.reduce_dtype != "fp32" and adds_up:
        raise RecipeError(
            f"zero.reduce_dtype {zero.reduce_dtype} would also add up {accumulation_steps} micro batches in it; "
            "use fp32, or set zero.gradient_sync: micro_batch without mesh.replicate"
        )
    size = zero.reshard_size if mesh.size > 1 else 0
    if size and mesh.tensor > 1:
        raise RecipeError(
            f"zero.reshard_size {size} does not work with mesh.tensor {mesh.tensor}; leave one of them out"
        )
    if size and (zero.stage != 3 or not 1 < size < mesh.shard or mesh.shard % size):
        raise RecipeError(
            f"zero.reshard_size is {size} at stage {zero.stage} over mesh.shard {mesh.shard}; it is for stage 3, and "
            "divides mesh.shard without being 1 or all of it"
        )


def check_pipeline(pipeline: Pipeline, mesh: Mesh, accumulation_steps: int) -> None:
    schedule, stages = pipeline.schedule, pipeline.stages_per_rank
    if schedule not in PIPELINE_SCHEDULES:
        raise RecipeError(f"unknown pipeline.schedule {schedule!r}; one of {', '.join(PIPELINE_SCHEDULES)}")
    if type(stages) is not int or stages < 1 or (stages > 1) != (schedule == "interleaved"):
        raise RecipeError(
            f"pipeline.stages_per_rank is {stages!r} with schedule {schedule}; give 2 or more for interleaved, else 1"
        )
    if mesh.pipeline > 1 and not pipeline.fits(accumulation_steps, mesh.pipeline):
        need = next(n for n in range(accumulation_steps + 1, 10**9) if pipeline.fits(n, mesh.pipeline))
        raise RecipeError(
            f"accumulation_steps is {accumulation_steps}, too few or uneven for {schedule} over mesh.pipeline "
            f"{mesh.pipeline}; use accumulation_steps={need} with smaller micro batches, or fewer stages"
        )


def check_attention(strategy: Strategy) -> None:
    if strategy.attention not in ATTENTIONS:
        raise RecipeError(f"unknown attention {strategy.attention!r}; one of {', '.join(ATTENTIONS)}")
    rows = [strategy.tiers, *(row.tiers for row in strategy.tier_table)]
    if strategy.attention == "blockwise" and any("recompute_core" in row for row in rows):
        raise RecipeError(
            "activation recompute_core recomputes attention's scores, which attention blockwise never holds; use keep "
            "or attention, or attention: model"
        )
    if strategy.attention == "blockwise" and strategy.compile.blocks:
        raise RecipeError(
            "compile makes a graph of a whole block, and attention blockwise is an operator that it does not look "
            "into; set attention: model, or leave compile out"
        )


def check_allocator(settings: AllocatorSettings) -> None:
    """What PyTorch's own parser takes (c10/core/AllocatorConfig.cpp), and no two that torch_npu refuses together."""
    if type(settings.expandable_segments) is not bool:
        raise RecipeError(f"allocator.expandable_segments is {settings.expandable_segments!r}; it is true or false")
    size = settings.max_split_size_mb
    if type(size) is not int or not (size == 0 or 20 < size <= 2**20):
        raise RecipeError(f"allocator.max_split_size_mb is {size!r}; give more than 20 MiB, or 0 to split all blocks")
    share = settings.garbage_collection_threshold
    if not isinstance(share, int | float) or not 0 <= share < 1:
        raise RecipeError(
            f"allocator.garbage_collection_threshold is {share!r}; give a share of the memory between 0 and 1, such as "
            "0.8, or 0 to keep cached blocks"
        )
    steps = settings.roundup_power2_divisions
    if type(steps) is not int or steps < 0 or steps > 64 or steps & (steps - 1):
        raise RecipeError(
            f"allocator.roundup_power2_divisions is {steps!r}; give a power of two up to 64, such as 8, or 0"
        )
    if settings.expandable_segments and (size or share):
        name = "max_split_size_mb" if size else "garbage_collection_threshold"
        raise RecipeError(
            f"allocator.{name} is for segments of fixed size, expandable_segments has none: set one of them only"
        )


def check_recompute_ahead(strategy: Strategy) -> None:
    if type(strategy.recompute_ahead) is not int or strategy.recompute_ahead not in (0, 1):
        raise RecipeError(f"recompute_ahead is {strategy.recompute_ahead!r}; it is 0 or 1 blocks")
    if strategy.recompute_ahead and strategy.zero.stage == 3 and strategy.mesh.shard > 1:
        raise RecipeError(
            f"recompute_ahead 1 needs the weights of the block before while a block's backward runs, and zero.stage 3 "
            f"over mesh.shard {strategy.mesh.shard} has dropped them; set recompute_ahead: 0, or zero.stage: 2"
        )


def check_table(strategy: Strategy) -> None:
    table, tokens = strategy.tier_table, strategy.micro_batch_tokens
    if type(tokens) is not int or tokens < 0:
        raise RecipeError(f"micro_batch_tokens is {tokens!r}; give a whole number of tokens, or 0")
    if not table:
        return
    limits = [row.max_tokens for row in table]
    if any(type(limit) is not int or limit < 1 for limit in limits) or limits != sorted(set(limits)):
        raise RecipeError(f"tier_table has rows for {limits} tokens; they must ascend, from 1 on")
    if tokens > limits[-1]:
        raise RecipeError(f"micro_batch_tokens is {tokens}, the tier_table ends at {limits[-1]}; plan again")
    for row in table:
        if len(row.tiers) != len(strategy.tiers):
            raise RecipeError(
                f"tier_table gives {len(row.tiers)} blocks a tier, tiers {len(strategy.tiers)}; plan again"
            )
        check_tiers(row.tiers, TIERS)
        if away := [tier for tier in row.tiers if tier.startswith("offload")]:
            raise RecipeError(f"a tier_table cannot have {away[0]}; leave offload out of the recipe, or per_batch")
    for block, (own, last) in enumerate(zip(strategy.tiers, table[-1].tiers)):
        if own != last:
            raise RecipeError(
                f"tiers give block {block} {own}, the last row of tier_table {last}; make them the same, or plan again"
            )
    if strategy.compile != Compile():
        raise RecipeError(
            "a tier_table does not work with compile: blocks would be compiled for every tier and length; leave "
            "per_batch or compile out"
        )
    if strategy.mesh.pipeline > 1:
        raise RecipeError(
            f"a tier_table does not work with mesh.pipeline {strategy.mesh.pipeline}: its stages take micro batches of "
            "one shape; leave per_batch out, or use mesh.shard"
        )


def check_compiled_tiers(tiers: Iterable[Tier]) -> None:
    """Those that compiled blocks may have."""
    if unseen := sorted(set(tiers) - set(COMPILED_TIERS)):
        raise RecipeError(
            f"activation tier {unseen[0]!r} looks at operators as they run, and a compiled block has none that can be "
            f"seen; use {', '.join(COMPILED_TIERS)}, or leave compile out"
        )


def check_compile(strategy: Strategy) -> None:
    """What a graph cannot have in it, or around it."""
    blocks, budget = strategy.compile.blocks, strategy.compile.budget
    if type(blocks) is not int or blocks not in (0, 1):
        raise RecipeError(f"compile.blocks is {blocks!r}; it is 0 for none, or 1 for a graph of each block")
    if not isinstance(budget, int | float) or not 0 <= budget <= 1:
        raise RecipeError(f"compile.budget is {budget!r}; give a share between 0 and 1, such as 0.5")
    if not blocks:
        return
    check_compiled_tiers(strategy.tiers)
    if dims := [dim for dim, size in zip(MESH_DIMS, strategy.mesh.shape) if size > 1]:
        raise RecipeError(
            f"compile runs on one device, mesh.{dims[0]} is {getattr(strategy.mesh, dims[0])}; leave one of them out"
        )
    if strategy.recompute_ahead:
        raise RecipeError("compile does not work with recompute_ahead 1; leave one of them out")
    if strategy.tier_table:
        raise RecipeError("compile does not work with a tier_table, whose tiers change; leave compile or per_batch out")
    if strategy.cast == "block":
        raise RecipeError(
            "cast block swaps weights while a block runs, which a graph cannot follow; use cast: operator"
        )
    if strategy.loss_scale is not None and strategy.loss_scale.per_block:
        raise RecipeError("compile does not work with loss_scale.per_block; leave one of them out")
    if strategy.frozen_weights in ("int8", "nf4"):
        raise RecipeError(
            f"compile does not work with frozen_weights {strategy.frozen_weights}, which are unpacked as a block runs; "
            "use half, or leave compile out"
        )


def check_offload(offload: Offload) -> None:
    if offload.place not in ("host", "disk"):
        raise RecipeError(f"offload.place is {offload.place!r}; it is host or disk")
    if type(offload.budget_bytes) is not int or offload.budget_bytes < 0:
        raise RecipeError(f"offload.budget_bytes is {offload.budget_bytes!r}; give bytes, or 0 for what is free")
    if offload.directory and offload.place != "disk":
        raise RecipeError(
            f"offload.directory {offload.directory} is for offload.place disk, and it is {offload.place}; set "
            "offload.place: disk, or leave the directory out"
        )


def settings_without_effect(strategy: Strategy) -> list[str]:
    """A line for each setting that changes nothing, with the reason.

    They are not refused: a recipe for many devices is resumed on one.
    """
    mesh, zero, pipeline = strategy.mesh, strategy.zero, strategy.pipeline
    lines = []
    if zero.stage and mesh.shard == 1:
        lines.append(f"zero.stage {zero.stage} shares nothing: mesh.shard is 1")
    if zero.reshard_size and mesh.size == 1:
        lines.append(f"zero.reshard_size {zero.reshard_size} has no effect: there is one process")
    if mesh.data == 1 or zero.stage == 0:
        why = "zero.stage is 0" if mesh.data > 1 else "mesh.replicate x mesh.shard is 1, so no gradients are exchanged"
        lines += _changed("zero", zero, Zero(), ("gradient_sync", "prefetch", "reduce_dtype"), why)
    if mesh.pipeline == 1:
        lines += _changed("pipeline", pipeline, Pipeline(), ("schedule", "stages_per_rank"), "mesh.pipeline is 1")
    if strategy.compile.budget < 1 and strategy.tiers and set(strategy.tiers) <= set(GRAPH_TIERS):
        why = "no block has keep or full, whose graph it is for"
        lines += _changed("compile", strategy.compile, Compile(1), ("budget",), why)
    if not any(tier.startswith("offload") for tier in strategy.tiers):
        why = "no block has an offload tier"
        lines += _changed("offload", strategy.offload, Offload(), ("place", "budget_bytes"), why)
    return lines


def _changed(section: str, settings: object, defaults: object, names: Iterable[str], why: str) -> list[str]:
    values = ((name, getattr(settings, name), getattr(defaults, name)) for name in names)
    return [f"{section}.{name} {value} has no effect: {why}" for name, value, default in values if value != default]
