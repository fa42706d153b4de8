"""Strategies, tiers and optimizer variants as text that a person reads and writes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from itertools import groupby

from trainfit.errors import RecipeError
from trainfit.profile import MESH_DIMS, TIERS, AllocatorSettings, Compile, Offload, OptimizerVariant, Tier
from trainfit.step.strategy import Strategy
from trainfit.step.strategy_rules import unknown_tier
from trainfit.units import format_bytes


def describe_strategy(strategy: Strategy) -> str:
    """One line that a person can read: "micro batch 4 x 2, 6*full,2*keep, loss in 8 chunks, bf16"."""
    chunks = "full logits" if strategy.loss_chunks == 1 else f"loss in {strategy.loss_chunks} chunks"
    tiers = format_tiers(strategy.tiers) if strategy.tiers else "no blocks"
    size = f"micro batch {strategy.micro_batch_size} x {strategy.accumulation_steps}"
    if strategy.tier_table:
        size = f"micro batches of {strategy.micro_batch_tokens} tokens"
        tiers = f"tiers by tokens ({format_table(strategy)})"
    by_block = strategy.loss_scale is not None and strategy.loss_scale.per_block
    precision = f"{strategy.precision} scaled by block" if by_block else strategy.precision
    frozen = [] if strategy.frozen_weights == "fp32" else [f"frozen weights in {strategy.frozen_weights}"]
    ahead = ["recomputed one block ahead"] if strategy.recompute_ahead else []
    attention = [] if strategy.attention == "model" else [f"{strategy.attention} attention"]
    variant = describe_variant(strategy.optimizer)
    allocator = describe_allocator(strategy.allocator)
    compiled = describe_compile(strategy.compile)
    what = [tiers, *ahead, *attention, *compiled, chunks, precision, *describe_offload(strategy)]
    return ", ".join([size, *what, *frozen, *variant, *describe_mesh(strategy), *allocator])


def describe_offload(strategy: Strategy) -> list[str]:
    """Where offload tiers put what they save; nothing where there are none."""
    if not any(tier.startswith("offload") for tier in strategy.tiers):
        return []
    place, budget = strategy.offload.place, strategy.offload.budget_bytes
    return [f"offload to {place}" + (f" up to {format_bytes(budget)}" if budget else "")]


def describe_allocator(settings: AllocatorSettings) -> list[str]:
    """What differs from PyTorch's defaults, in words; nothing where nothing does."""
    words = ["expandable segments"] if settings.expandable_segments else []
    words += [f"no splits from {settings.max_split_size_mb} MiB"] if settings.max_split_size_mb else []
    share = settings.garbage_collection_threshold
    words += [f"cached blocks given back above {share:.0%}"] if share else []
    steps = settings.roundup_power2_divisions
    return words + ([f"requests in {steps} steps a power of two"] if steps else [])


def describe_compile(setting: Compile) -> list[str]:
    """What is compiled, in words; nothing where nothing is."""
    if not setting.blocks:
        return []
    return ["compiled blocks" + ("" if setting.budget == 1 else f" that save {setting.budget:.0%}")]


def parse_compile(text: str) -> Compile:
    """From "none", "block", or "block:0.5" for graphs that save at most half of what they would.

    Raises RecipeError for anything else; Strategy looks at the share.
    """
    if text.strip() == "none":
        return Compile()
    match = re.fullmatch(r"\s*block\s*(?::\s*([0-9.]+))?\s*", text)
    try:
        if match is not None:
            return Compile(1, float(match[1] or 1))
    except ValueError:
        pass
    raise RecipeError(f"compile {text!r} is not understood; use none, block, or block:0.5 for graphs that save half")


def describe_variant(variant: OptimizerVariant) -> list[str]:
    """What differs from fused AdamW on fp32 weights, in words; nothing where nothing does."""
    words: list[str] = [] if variant.kind == "adamw" else [variant.kind]
    words += [] if variant.weights == "fp32" else [f"{variant.weights.replace('_', ' + ')} weights"]
    words += [] if variant.gradients == "fp32" else ["half gradients"]
    words += [] if variant.states == "fp32" else [f"{variant.states} states"]
    words += [] if variant.place == "device" else ["states on the host"]
    words += [] if variant.update == "step" else ["update in backward"]
    return words + ([] if variant.kernel == "fused" else ["foreach"])


def describe_mesh(strategy: Strategy) -> list[str]:
    """How devices are arranged, in words; nothing for one."""
    mesh = [f"{dim} {size}" for dim, size in zip(MESH_DIMS, strategy.mesh.shape) if size > 1]
    if not mesh:
        return []
    sequence = ["split sequences"] if strategy.tensor.sequence else []
    words = [" x ".join(mesh), *sequence, f"ZeRO {strategy.zero.stage}"]
    if strategy.mesh.pipeline > 1:
        stages = strategy.pipeline.stages_per_rank
        words.append(strategy.pipeline.schedule + (f" with {stages} stages a rank" if stages > 1 else ""))
    return words


def parse_offload(text: str) -> Offload:
    """From "host", "disk" or "disk:/scratch". Raises RecipeError for anything else."""
    place, _, directory = text.partition(":")
    if place not in ("host", "disk") or (directory and place == "host"):
        raise RecipeError(f"offload {text!r} is not understood; give host, disk, or disk:FOLDER")
    return Offload(place, directory=directory)  # type: ignore[arg-type]


def parse_variant(text: str) -> OptimizerVariant:
    """An optimizer variant from "weights=bf16_residual,states=int8"; the plain one from "".

    Raises RecipeError for another key; Strategy looks at the values.
    """
    known = [each.name for each in fields(OptimizerVariant)]
    values: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or key not in known:
            near = get_close_matches(key, known, n=1)
            meant = f"did you mean {near[0]}=...? " if near else ""
            raise RecipeError(
                f"optimizer {part!r} is not understood; {meant}give KEY=VALUE,... with keys {', '.join(known)}, "
                "such as weights=bf16_residual,states=int8"
            )
        values[key] = value
    return OptimizerVariant(**values)  # type: ignore[arg-type]


def parse_tiers(text: str, num_blocks: int) -> tuple[Tier, ...]:
    """Tiers of num_blocks blocks from "keep", "every:2" or "6*full,2*pointwise".

    every:K recomputes blocks 0, K, 2K, ... in full and keeps the rest. A list must name num_blocks blocks.
    Raises RecipeError for anything else.
    """
    text = text.strip()
    if text in TIERS:
        return (text,) * num_blocks
    if match := re.fullmatch(r"every:(\d+)", text):
        if (every := int(match[1])) < 1:
            raise RecipeError("activation every:0 recomputes nothing; use every:1 or more, or keep")
        return tuple("keep" if block % every else "full" for block in range(num_blocks))
    tiers: list[Tier] = []
    for part in text.split(","):
        count, tier = _parse_run(part, text)
        if (total := len(tiers) + count) > num_blocks:
            raise RecipeError(f"activation {text!r} names {total} blocks or more; the model has {num_blocks}")
        tiers += [tier] * count
    if len(tiers) != num_blocks:
        raise RecipeError(f"activation {text!r} names {len(tiers)} blocks; the model has {num_blocks}")
    return tuple(tiers)


def tiers_named(text: str) -> frozenset[Tier]:
    """Those of a list, of however many blocks."""
    return frozenset(_parse_run(part, text)[1] for part in text.split(","))


def _parse_run(part: str, text: str) -> tuple[int, Tier]:
    match = re.fullmatch(r"\s*(?:(\d+)\s*\*\s*)?([a-z][a-z0-9_]*)\s*", part)
    if match is None:
        raise RecipeError(
            f"activation {text!r} is not understood; use one of {', '.join(TIERS)}, every:K, "
            "or a list like 6*full,2*pointwise"
        )
    if (tier := match[2]) not in TIERS:
        raise unknown_tier(tier)
    return int(match[1] or 1), tier


def format_table(strategy: Strategy) -> str:
    """Its rows: "512 keep; 2048 4*full,2*keep"."""
    return "; ".join(f"{row.max_tokens} {format_tiers(row.tiers)}" for row in strategy.tier_table)


def format_tiers(tiers: Iterable[Tier]) -> str:
    """The shortest text that parse_tiers reads back: "full" or "6*full,2*pointwise"; "keep" for no tiers at all."""
    runs = [(tier, len(list(group))) for tier, group in groupby(tiers)]
    if len(runs) <= 1:
        return runs[0][0] if runs else "keep"
    return ",".join(f"{count}*{tier}" for tier, count in runs)
