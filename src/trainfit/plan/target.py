"""Target: what the user wants, and what a plan may use of the budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from trainfit.errors import RecipeError
from trainfit.hardware import Kind
from trainfit.profile import (
    ATTENTIONS,
    PRECISIONS,
    AllocatorSettings,
    Attention,
    Cast,
    Compile,
    FrozenStorage,
    Layout,
    LossScale,
    Mesh,
    Offload,
    OptimizerVariant,
    Pipeline,
    Precision,
    TensorParallel,
    Zero,
)

_PARTS = {"mesh": Mesh, "zero": Zero, "tensor": TensorParallel, "pipeline": Pipeline}
MAY_CHANGE = ("precision", "optimizer", "activations", "compile")
MAX_SEQUENCES = 2**20

# Part of the budget that a plan leaves free, for what a prediction does not know. Allocated bytes are exact to 1% on a
# CPU. What a caching allocator reserves is predicted too, up to 4% too low where published runs could tell; an NPU's
# kernels have scratch of unknown size besides. See docs/design/prediction.md.
MARGINS: Mapping[Kind, float] = {"cpu": 0.01, "cuda": 0.04, "npu": 0.05}


@dataclass(frozen=True)
class Target:
    """What the step must do, and what it may take.

    budget_bytes: memory of one device for this run. tokens_per_step: tokens of one optimizer step, padding included.
    may_change: "precision" allows bf16 where the precision given is fp32; "optimizer" allows other ways to keep weights
        and states than that given; "activations" allows saved tensors of fewer bits, such as keep_int8;
        "compile" allows compiled blocks.
    allocator: its settings; None lets a plan choose expandable segments where they make it fit.
    recompute_ahead: see Strategy; None lets a plan try it on its best.
    offload: where blocks may put what they save; None keeps it on the device.
    layouts: every arrangement of the devices that may be taken, all that techniques find where there are none;
        tokens_per_step are those of all ranks.
    attention: see Strategy; "auto" lets a plan choose blockwise attention where the model's own holds all scores.
    operators: whether blocks may keep outputs of single operators by their costs; None where these were measured on the
        device.
    Raises RecipeError for sizes below one and for words that are not known.
    """

    budget_bytes: int
    tokens_per_step: int
    seq_len: int
    precision: Precision = "fp32"
    may_change: frozenset[str] = frozenset()
    layouts: tuple[Layout, ...] = (Layout(),)
    optimizer: OptimizerVariant = OptimizerVariant()
    cast: Cast = "operator"
    loss_scale: LossScale | None = None
    frozen_weights: FrozenStorage = "fp32"
    allocator: AllocatorSettings | None = None
    recompute_ahead: int | None = None
    compile: Compile = Compile()
    offload: Offload | None = None
    attention: Attention | Literal["auto"] = "auto"
    operators: bool | None = None

    def __post_init__(self) -> None:
        for name in ("budget_bytes", "tokens_per_step", "seq_len"):
            if getattr(self, name) < 1:
                raise RecipeError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.sequences_per_step > MAX_SEQUENCES:
            raise RecipeError(
                f"tokens_per_step {self.tokens_per_step} is {self.sequences_per_step} sequences of {self.seq_len}; "
                f"at most {MAX_SEQUENCES} make a step"
            )
        if self.precision not in PRECISIONS:
            raise RecipeError(f"unknown precision {self.precision!r}; one of {', '.join(PRECISIONS)}")
        if self.cast not in get_args(Cast):
            raise RecipeError(f"unknown cast {self.cast!r}; it is {' or '.join(get_args(Cast))}")
        if self.attention not in ("auto", *ATTENTIONS):
            raise RecipeError(f"unknown attention {self.attention!r}; one of auto, {', '.join(ATTENTIONS)}")
        may_be_half = self.precision != "fp32" or "precision" in self.may_change
        if self.cast == "block" and not may_be_half:
            raise RecipeError("cast block casts fp32 weights to a lower precision, which is fp32; set precision: bf16")
        if self.loss_scale is not None and self.precision != "fp16":
            raise RecipeError(f"loss_scale is for fp16, precision is {self.precision}, which needs none; leave it out")
        if unknown := sorted(self.may_change - set(MAY_CHANGE)):
            raise RecipeError(f"may_change has {unknown[0]!r}; what may change is {', '.join(MAY_CHANGE)}")

    @property
    def sequences_per_step(self) -> int:
        """The nearest whole number of sequences, at least one."""
        return max(1, round(self.tokens_per_step / self.seq_len))

    def sequences_per_rank(self, layout: Layout) -> int:
        """Sequences of one step that each data-parallel rank takes, rounded up."""
        return -(-self.sequences_per_step // layout.mesh.data)

    def allowed_bytes(self, kind: Kind) -> int:
        """What a prediction may reach: the budget less the margin."""
        return max(1, int(self.budget_bytes * (1 - MARGINS[kind])))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "may_change": sorted(self.may_change)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Target:
        layouts = tuple(
            Layout(**{name: kind(**each[name]) for name, kind in _PARTS.items()}) for each in data["layouts"]
        )
        loss_scale = data["loss_scale"] and LossScale(**data["loss_scale"])
        allocator = data.get("allocator") and AllocatorSettings(**data["allocator"])
        offload = data.get("offload") and Offload(**data["offload"])
        parts = {
            "allocator": allocator,
            "offload": offload,
            "optimizer": OptimizerVariant(**data["optimizer"]),
            "loss_scale": loss_scale,
        }
        parts["compile"] = Compile(**data.get("compile", {}))
        return cls(**{**data, **parts, "may_change": frozenset(data["may_change"]), "layouts": layouts})
