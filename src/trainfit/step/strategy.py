"""Strategy: every knob of how a step is run, frozen and serialisable."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from itertools import groupby
from typing import Any

from trainfit.errors import RecipeError
from trainfit.profile import (
    FROZEN_STORAGES,
    MESH_DIMS,
    OPTIMIZER_KINDS,
    PIPELINE_SCHEDULES,
    PRECISIONS,
    STATE_STORAGES,
    TIERS,
    WEIGHT_STORAGES,
    AllocatorSettings,
    Cast,
    FrozenStorage,
    LossScale,
    Mesh,
    OptimizerVariant,
    Pipeline,
    Precision,
    TensorParallel,
    Tier,
    Zero,
)

# Fields of Strategy that are made of keys themselves.
_PARTS: Mapping[str, Callable[..., Any]] = {
    "optimizer": OptimizerVariant,
    "mesh": Mesh,
    "zero": Zero,
    "tensor": TensorParallel,
    "pipeline": Pipeline,
    "allocator": AllocatorSettings,
}


@dataclass(frozen=True)
class Strategy:
    """How one optimizer step is run.

    micro_batch_size: sequences in one forward and backward.
    accumulation_steps: micro batches in one optimizer step.
    precision: compute dtype.
    cast: where fp32 weights are cast to it: "operator", each where it is used, and the copy kept for backward; "block",
        each block's at its entry, in forward and again in backward.
    loss_scale: None but for fp16, which has one in any case.
    tiers: activation tier of each block, first to last.
    loss_chunks: pieces in which head and loss are computed; 1 materialises all logits.
    optimizer: how it keeps weights, gradients and states.
    frozen_weights: how parameters that do not train are kept; "half" is the compute dtype.
    mesh: how the processes are arranged; micro_batch_size and accumulation_steps are those of each data-parallel rank.
    zero: what ranks share and when.
    tensor: how the ranks that split each matrix work together.
    pipeline: how the stages of mesh.pipeline take turns.
    allocator: how the device's caching allocator goes about.
    """

    micro_batch_size: int
    accumulation_steps: int = 1
    precision: Precision = "fp32"
    tiers: tuple[Tier, ...] = ()
    loss_chunks: int = 1
    optimizer: OptimizerVariant = OptimizerVariant()
    cast: Cast = "operator"
    loss_scale: LossScale | None = None
    frozen_weights: FrozenStorage = "fp32"
    mesh: Mesh = Mesh()
    zero: Zero = Zero()
    tensor: TensorParallel = TensorParallel()
    pipeline: Pipeline = Pipeline()
    allocator: AllocatorSettings = AllocatorSettings()

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "accumulation_steps", "loss_chunks"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise RecipeError(f"{name} is {value!r}; it must be a whole number, at least 1")
        if self.precision not in PRECISIONS:
            raise RecipeError(f"unknown precision {self.precision!r}; one of {', '.join(PRECISIONS)}")
        if self.precision == "fp16" and self.loss_scale is None:
            object.__setattr__(self, "loss_scale", LossScale())
        _check_optimizer(self.optimizer, self.precision, self.accumulation_steps)
        if self.optimizer.weights != "fp32" and self.mesh.pipeline > 1:
            raise RecipeError(
                f"optimizer.weights {self.optimizer.weights} does not work with mesh.pipeline {self.mesh.pipeline}: "
                "stages hand on hidden states as fp32 weights make them; use optimizer.weights: fp32, or mesh.shard"
            )
        _check_casts(self)
        if unknown := sorted(set(self.tiers) - set(TIERS)):
            raise RecipeError(f"unknown activation tier {unknown[0]!r}; one of {', '.join(TIERS)}")
        for dim, size in zip(MESH_DIMS, self.mesh.shape):
            if type(size) is not int or size < 1:
                raise RecipeError(f"mesh.{dim} is {size!r}; it must be a whole number, at least 1")
        _check_zero(self.zero, self.mesh, self.accumulation_steps, self.precision)
        if self.tensor.sequence and self.mesh.tensor == 1:
            raise RecipeError("tensor.sequence splits sequences over mesh.tensor, which is 1; set mesh.tensor too")
        if self.tensor.sequence and self.pipeline.stages_per_rank > 1:
            raise RecipeError("tensor.sequence does not work with pipeline.schedule interleaved; use 1f1b")
        _check_pipeline(self.pipeline, self.mesh, self.accumulation_steps)
        _check_allocator(self.allocator)

    @property
    def sequences_per_step(self) -> int:
        """Of one optimizer step, over all ranks."""
        return self.micro_batch_size * self.accumulation_steps * self.mesh.data

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Strategy:
        """The inverse of to_json. Raises RecipeError for keys that Strategy does not have."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise RecipeError(f"unknown strategy key {unknown[0]!r}; known keys are {', '.join(sorted(known))}")
        if "micro_batch_size" not in data:
            raise RecipeError("a strategy has no micro_batch_size; give one, at least 1")
        try:
            parts = {name: kind(**data.get(name, {})) for name, kind in _PARTS.items()}
            if data.get("loss_scale") is not None:
                parts["loss_scale"] = LossScale(**data["loss_scale"])
        except TypeError as error:
            raise RecipeError(f"the strategy's {', '.join(_PARTS)} have an unknown key: {error}") from None
        return cls(**{**data, "tiers": tuple(data.get("tiers", ())), **parts})

    @property
    def hash(self) -> str:
        """Twelve hex digits that every run and report cites."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:12]


def _check_optimizer(variant: OptimizerVariant, precision: Precision, accumulation_steps: int) -> None:
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


def _check_casts(strategy: Strategy) -> None:
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


def _check_zero(zero: Zero, mesh: Mesh, accumulation_steps: int, precision: Precision) -> None:
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


def _check_pipeline(pipeline: Pipeline, mesh: Mesh, accumulation_steps: int) -> None:
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


def _check_allocator(settings: AllocatorSettings) -> None:
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
    return lines


def _changed(section: str, settings: object, defaults: object, names: Iterable[str], why: str) -> list[str]:
    values = ((name, getattr(settings, name), getattr(defaults, name)) for name in names)
    return [f"{section}.{name} {value} has no effect: {why}" for name, value, default in values if value != default]


def describe_strategy(strategy: Strategy) -> str:
    """One line that a person can read: "micro batch 4 x 2, 6*full,2*keep, loss in 8 chunks, bf16"."""
    chunks = "full logits" if strategy.loss_chunks == 1 else f"loss in {strategy.loss_chunks} chunks"
    tiers = format_tiers(strategy.tiers) if strategy.tiers else "no blocks"
    size = f"micro batch {strategy.micro_batch_size} x {strategy.accumulation_steps}"
    by_block = strategy.loss_scale is not None and strategy.loss_scale.per_block
    precision = f"{strategy.precision} scaled by block" if by_block else strategy.precision
    frozen = [] if strategy.frozen_weights == "fp32" else [f"frozen weights in {strategy.frozen_weights}"]
    variant = describe_variant(strategy.optimizer)
    allocator = describe_allocator(strategy.allocator)
    return ", ".join([size, tiers, chunks, precision, *frozen, *variant, *describe_mesh(strategy), *allocator])


def describe_allocator(settings: AllocatorSettings) -> list[str]:
    """What differs from PyTorch's defaults, in words; nothing where nothing does."""
    words = ["expandable segments"] if settings.expandable_segments else []
    words += [f"no splits from {settings.max_split_size_mb} MiB"] if settings.max_split_size_mb else []
    share = settings.garbage_collection_threshold
    words += [f"cached blocks given back above {share:.0%}"] if share else []
    steps = settings.roundup_power2_divisions
    return words + ([f"requests in {steps} steps a power of two"] if steps else [])


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


def _parse_run(part: str, text: str) -> tuple[int, Tier]:
    match = re.fullmatch(r"\s*(?:(\d+)\s*\*\s*)?([a-z_]+)\s*", part)
    if match is None or match[2] not in TIERS:
        raise RecipeError(
            f"activation {text!r} is not understood; use one of {', '.join(TIERS)}, every:K, "
            "or a list like 6*full,2*pointwise"
        )
    return int(match[1] or 1), match[2]


def format_tiers(tiers: Iterable[Tier]) -> str:
    """The shortest text that parse_tiers reads back: "full" or "6*full,2*pointwise"; "keep" for no tiers at all."""
    runs = [(tier, len(list(group))) for tier, group in groupby(tiers)]
    if len(runs) <= 1:
        return runs[0][0] if runs else "keep"
    return ",".join(f"{count}*{tier}" for tier, count in runs)
