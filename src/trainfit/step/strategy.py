"""Strategy: every knob of how a step is run, frozen and serialisable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from trainfit.errors import RecipeError
from trainfit.operators import KeptOperators
from trainfit.profile import (
    ALL_TIERS,
    MESH_DIMS,
    PRECISIONS,
    AllocatorSettings,
    Attention,
    Cast,
    Compile,
    FrozenStorage,
    LossScale,
    Mesh,
    Offload,
    OptimizerVariant,
    Pipeline,
    Precision,
    TensorParallel,
    Tier,
    TokenBucket,
    Zero,
)
from trainfit.step.strategy_rules import (
    check_allocator,
    check_attention,
    check_casts,
    check_compile,
    check_kept_operators,
    check_offload,
    check_optimizer,
    check_pipeline,
    check_recompute_ahead,
    check_table,
    check_tiers,
    check_zero,
)

# Fields of Strategy that are made of keys themselves, from what JSON has for them.
_PARTS: Mapping[str, Callable[[Any], Any]] = {
    "optimizer": lambda data: OptimizerVariant(**data),
    "mesh": lambda data: Mesh(**data),
    "zero": lambda data: Zero(**data),
    "tensor": lambda data: TensorParallel(**data),
    "pipeline": lambda data: Pipeline(**data),
    "allocator": lambda data: AllocatorSettings(**data),
    "compile": lambda data: Compile(**data),
    "offload": lambda data: Offload(**data),
    "loss_scale": lambda data: None if data is None else LossScale(**data),
    "tiers": tuple,
    "tier_table": lambda data: tuple(TokenBucket(**{**row, "tiers": tuple(row["tiers"])}) for row in data),
    "kept_operators": lambda data: tuple(
        KeptOperators(**{**each, "kept": tuple(each["kept"]), "skipped": tuple(each["skipped"])}) for each in data
    ),
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
    recompute_ahead: blocks whose recompute begins while the backward of the block after them still runs: 0 or 1.
    loss_chunks: pieces in which head and loss are computed; 1 materialises all logits.
    optimizer: how it keeps weights, gradients and states.
    frozen_weights: how parameters that do not train are kept; "half" is the compute dtype.
    mesh: how the processes are arranged; micro_batch_size and accumulation_steps are those of each data-parallel rank.
    zero: what ranks share and when.
    tensor: how the ranks that split each matrix work together.
    pipeline: how the stages of mesh.pipeline take turns.
    allocator: how the device's caching allocator goes about.
    tier_table: tiers by the tokens of a micro batch, ascending, in the place of tiers, which then are the last row's.
    micro_batch_tokens: that a micro batch of sequences of several lengths may have, padding included, if it is more
        than one sequence; 0 stands for micro_batch_size sequences of the full length.
    compile: which blocks are compiled.
    offload: where blocks under an offload tier put what they save.
    attention: whose it is: the model's own, or blockwise attention.
    kept_operators: what each chosen tier keeps; a plan makes them.
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
    recompute_ahead: int = 0
    tier_table: tuple[TokenBucket, ...] = ()
    micro_batch_tokens: int = 0
    compile: Compile = Compile()
    offload: Offload = Offload()
    attention: Attention = "model"
    kept_operators: tuple[KeptOperators, ...] = ()

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "accumulation_steps", "loss_chunks"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise RecipeError(f"{name} is {value!r}; it must be a whole number, at least 1")
        if self.precision not in PRECISIONS:
            raise RecipeError(f"unknown precision {self.precision!r}; one of {', '.join(PRECISIONS)}")
        if self.precision == "fp16" and self.loss_scale is None:
            object.__setattr__(self, "loss_scale", LossScale())
        check_optimizer(self.optimizer, self.precision, self.accumulation_steps)
        if self.optimizer.weights != "fp32" and self.mesh.pipeline > 1:
            raise RecipeError(
                f"optimizer.weights {self.optimizer.weights} does not work with mesh.pipeline {self.mesh.pipeline}: "
                "stages hand on hidden states as fp32 weights make them; use optimizer.weights: fp32, or mesh.shard"
            )
        check_casts(self)
        check_tiers(self.tiers, ALL_TIERS)
        check_kept_operators(self)
        for dim, size in zip(MESH_DIMS, self.mesh.shape):
            if type(size) is not int or size < 1:
                raise RecipeError(f"mesh.{dim} is {size!r}; it must be a whole number, at least 1")
        check_zero(self.zero, self.mesh, self.accumulation_steps, self.precision)
        if self.tensor.sequence and self.mesh.tensor == 1:
            raise RecipeError("tensor.sequence splits sequences over mesh.tensor, which is 1; set mesh.tensor too")
        if self.tensor.sequence and self.pipeline.stages_per_rank > 1:
            raise RecipeError("tensor.sequence does not work with pipeline.schedule interleaved; use 1f1b")
        check_pipeline(self.pipeline, self.mesh, self.accumulation_steps)
        check_allocator(self.allocator)
        check_recompute_ahead(self)
        check_table(self)
        check_compile(self)
        check_offload(self.offload)
        check_attention(self)

    @property
    def sequences_per_step(self) -> int:
        """Of one optimizer step, over all ranks."""
        return self.micro_batch_size * self.accumulation_steps * self.mesh.data

    def for_tokens(self, num_tokens: int) -> Strategy:
        """What this is for micro batches of so many tokens alone: with the tiers of their row, and no table."""
        row = next((row for row in self.tier_table if row.max_tokens >= num_tokens), None)
        return replace(self, tiers=self.tiers if row is None else row.tiers, tier_table=(), micro_batch_tokens=0)

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
        parts = {}
        for name, value in data.items():
            try:
                parts[name] = _PARTS[name](value) if name in _PARTS else value
            except (TypeError, KeyError) as error:
                raise RecipeError(f"the strategy's {name} has an unknown key or lacks one: {error}") from None
        return cls(**parts)

    @property
    def hash(self) -> str:
        """Twelve hex digits that every run and report cites."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:12]
