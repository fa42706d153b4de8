"""Recipe: everything a run is asked to do, as frozen and checked data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from trainfit.errors import RecipeError
from trainfit.plan.per_batch import DEFAULT_THRESHOLD
from trainfit.plan.policies import parse_policy
from trainfit.profile import (
    AllocatorSettings,
    Cast,
    FrozenStorage,
    GradientStorage,
    GradientSyncTime,
    Layout,
    LossScale,
    Mesh,
    Offload,
    OptimizerKind,
    OptimizerVariant,
    Pipeline,
    PipelineSchedule,
    Precision,
    StateStorage,
    TensorParallel,
    WeightStorage,
    Zero,
)
from trainfit.step.strategy_rules import check_compiled_tiers
from trainfit.step.strategy_text import parse_compile
from trainfit.units import parse_bytes, parse_count
from trainfit.workload import LoRASettings

PYTHON_STDLIB = "python-stdlib"
MIN_VOCAB_SIZE = 257  # 256 byte values and the end-of-text token

PositiveInt = Annotated[int, Field(strict=True, ge=1, le=10**9)]
NaturalInt = Annotated[int, Field(strict=True, ge=0, le=10**9)]
Ratio = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
NumBytes = Annotated[int, BeforeValidator(parse_bytes)]
Count = Annotated[int, BeforeValidator(parse_count)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TokenizerSettings(_Section):
    """A byte-level BPE of vocab_size tokens trained on the text, or the tokenizer.json at path.

    end_of_text: the token put after each document; None looks for the usual names.
    """

    vocab_size: Annotated[int, Field(strict=True, ge=MIN_VOCAB_SIZE, le=2**20)] | None = None
    path: str | None = None
    end_of_text: str | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizerSettings:
        if (self.vocab_size is None) == (self.path is None):
            raise RecipeError("data.tokenizer needs either vocab_size (4096 trains one) or path (of a tokenizer.json)")
        return self


class DataSettings(_Section):
    """Where the text is and how it becomes tokens.

    paths: text files, .jsonl files, folders, or "python-stdlib"; relative to the recipe's folder.
    patterns: which files of a folder are read. text_key: the key that holds the text in a line of JSONL.
    max_bytes: a fixed random choice of documents up to this size; None takes all.
    lengths: "packed" joins documents and cuts them into sequences of seq_len; "documents" makes each a sequence of its
        own, seq_len at most.
    """

    paths: tuple[str, ...]
    patterns: tuple[str, ...] = ("*.txt", "*.md", "*.jsonl")
    text_key: str = "text"
    max_bytes: NumBytes | None = None
    lengths: Literal["packed", "documents"] = "packed"
    held_out_fraction: Annotated[float, Field(gt=0, le=0.5, allow_inf_nan=False)] = 0.02
    tokenizer: TokenizerSettings = TokenizerSettings(vocab_size=4096)

    @field_validator("paths", "patterns", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        if value == "" or value == []:
            raise RecipeError("it must name at least one; paths take files, folders or python-stdlib")
        return (value,) if isinstance(value, str) else value


_VARIANT = {each.name for each in fields(OptimizerVariant)}


class OptimizerSettings(_Section):
    """The optimizer's constants, and how it keeps what it needs; see OptimizerVariant.

    learning_rate is the peak of the schedule.
    """

    learning_rate: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] = 3e-4
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 0.1
    kind: OptimizerKind = "adamw"
    weights: WeightStorage = "fp32"
    gradients: GradientStorage = "fp32"
    states: StateStorage = "fp32"
    place: Literal["device", "host"] = "device"
    update: Literal["step", "backward"] = "step"
    kernel: Literal["fused", "foreach"] = "fused"

    def variant(self) -> OptimizerVariant:
        return OptimizerVariant(**self.model_dump(include=_VARIANT))

    def constants(self) -> dict[str, Any]:
        """learning_rate, betas, eps and weight_decay."""
        return self.model_dump(exclude=_VARIANT)


class LossScaleSettings(_Section):
    """Dynamic loss scaling of fp16; see LossScale."""

    init_scale: Annotated[float, Field(gt=0, lt=2.0**64, allow_inf_nan=False)] = 2.0**16
    growth_factor: Annotated[float, Field(gt=1, le=2.0**16, allow_inf_nan=False)] = 2.0
    backoff_factor: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.5
    growth_interval: PositiveInt = 2000
    max_skips: PositiveInt = 25
    per_block: bool = False

    def loss_scale(self) -> LossScale:
        return LossScale(**self.model_dump())


class AdapterSettings(_Section):
    """LoRA beside frozen weights; see LoRASettings. targets: last parts of module names, or all-linear."""

    rank: PositiveInt = 8
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 16.0
    dropout: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    targets: tuple[str, ...] | Literal["all-linear"] = ("q_proj", "v_proj")

    @field_validator("targets", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        if value in ("", []):
            raise RecipeError("it must name at least one module, such as [q_proj, v_proj], or be all-linear")
        return (value,) if isinstance(value, str) and value != "all-linear" else value

    def lora(self) -> LoRASettings:
        return LoRASettings(**self.model_dump())


def checked_compile(value: object) -> str:
    """The words themselves, once Strategy's parser takes them; YAML reads none as text, and nothing as None."""
    text = "none" if value is None else str(value)
    parse_compile(text)
    return text


Patterns = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]


class ScheduleSettings(_Section):
    """Linear warm-up over warmup_steps updates, then a cosine down to min_ratio of the peak."""

    warmup_steps: NaturalInt = 0
    min_ratio: Ratio = 0.1


class EvaluationSettings(_Section):
    """Held-out loss after every `every` updates and at the end, over `batches` batches of tokens_per_step tokens."""

    every: PositiveInt = 100
    batches: PositiveInt = 4


class SaveSettings(_Section):
    """A checkpoint after every `every` updates and at the end; the last `keep` stay."""

    every: PositiveInt = 500
    keep: PositiveInt = 2


class MeshSettings(_Section):
    """How the devices of a run are arranged; see Mesh. What is left out is 1."""

    pipeline: PositiveInt = 1
    replicate: PositiveInt = 1
    shard: PositiveInt = 1
    tensor: PositiveInt = 1

    def mesh(self) -> Mesh:
        return Mesh(**self.model_dump())


class ZeroSettings(_Section):
    """What the ranks of mesh.shard share, and when they talk; see Zero. stage None lets the plan choose."""

    stage: Annotated[int, Field(strict=True, ge=0, le=3)] | None = None
    gradient_sync: GradientSyncTime | None = None
    reshard_size: NaturalInt = 0
    prefetch: Annotated[int, Field(strict=True, ge=1, le=16)] = 1
    reduce_dtype: Precision = "fp32"

    def zero(self, stage: int) -> Zero:
        return Zero(**{**self.model_dump(), "stage": stage})


class TensorSettings(_Section):
    """How the ranks of mesh.tensor share a block; see TensorParallel."""

    sequence: bool = False


class PipelineSettings(_Section):
    """How the stages of mesh.pipeline take turns; see Pipeline."""

    schedule: PipelineSchedule = "1f1b"
    stages_per_rank: PositiveInt = 1


class AllocatorSection(_Section):
    """The device's caching allocator; see AllocatorSettings. What is left out is PyTorch's default."""

    expandable_segments: bool = False
    max_split_size_mb: NaturalInt = 0
    garbage_collection_threshold: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    roundup_power2_divisions: NaturalInt = 0

    def settings(self) -> AllocatorSettings:
        return AllocatorSettings(**self.model_dump())


class PerBatchSettings(_Section):
    """Tiers by the tokens of each micro batch; threshold: of the budget, above which they are tightened at run time."""

    threshold: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = DEFAULT_THRESHOLD


def _on_or_off(value: object) -> object:
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


class OffloadSettings(_Section):
    """Where blocks under an offload tier put what they save; see Offload. budget 0 takes all that is free."""

    place: Literal["host", "disk"] = "host"
    budget: NumBytes = 0
    directory: str = ""

    @model_validator(mode="after")
    def _directory_is_of_disk(self) -> OffloadSettings:
        if self.directory and self.place != "disk":
            raise RecipeError("offload.directory is for offload.place disk; set place: disk, or leave it out")
        return self

    def settings(self) -> Offload:
        return Offload(self.place, self.budget, self.directory)


class Recipe(_Section):
    """One training run. memory None means all that the device has; steps None means `epochs` passes over the text.

    activation: a policy that decides the tiers; None leaves them to the plan. recompute_ahead: blocks that are
    recomputed ahead of time; None lets a plan try it.
    per_batch: true, or its settings: tiers follow the length of each micro batch, for data.lengths: documents.
    attention: auto leaves it to the plan.
    weights: a folder of safetensors to start from. freeze, train_only: patterns on names of parameters.
    """

    model: str | dict[str, Any]
    data: DataSettings
    seq_len: Annotated[int, Field(strict=True, ge=1, le=2**24)]
    tokens_per_step: Count
    memory: NumBytes | None = None
    steps: PositiveInt | None = None
    epochs: PositiveInt | None = None
    precision: Precision = "fp32"
    cast: Cast = "operator"
    loss_scale: LossScaleSettings | None = None
    weights: str | None = None
    adapter: AdapterSettings | None = None
    freeze: Patterns | None = None
    train_only: Patterns | None = None
    frozen_weights: FrozenStorage = "fp32"
    compile: Annotated[str, BeforeValidator(checked_compile)] = "none"
    attention: Literal["auto", "model", "blockwise"] = "auto"
    activation: Annotated[str, BeforeValidator(lambda value: str(parse_policy(str(value))))] | None = None
    recompute_ahead: Annotated[int, Field(strict=True, ge=0, le=1)] | None = None
    per_batch: Annotated[PerBatchSettings | None, BeforeValidator(_on_or_off)] = None
    may_change: tuple[Literal["precision", "optimizer", "activations", "compile"], ...] = ()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    max_grad_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 1.0
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = 0
    evaluation: EvaluationSettings = EvaluationSettings()
    save: SaveSettings = SaveSettings()
    run_folder: str
    device: str = "this"
    mesh: MeshSettings | None = None
    zero: ZeroSettings = ZeroSettings()
    tensor: TensorSettings = TensorSettings()
    pipeline: PipelineSettings = PipelineSettings()
    allocator: AllocatorSection | None = None
    offload: OffloadSettings | None = None
    timeout_seconds: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] = 60.0

    _folder: Path = PrivateAttr(default_factory=Path.cwd)

    @field_validator("model", mode="before")
    @classmethod
    def _name_or_config(cls, value: object) -> object:
        if isinstance(value, str) and value:
            return value
        if isinstance(value, Mapping) and isinstance(value.get("model_type"), str):
            return dict(value)
        raise RecipeError("it must be a built-in name, the path of a config.json, or a config with its model_type")

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        if (self.steps is None) == (self.epochs is None):
            both = f"steps {self.steps} and epochs {self.epochs} are both set; keep one"
            raise RecipeError(both if self.steps else "steps is missing; set steps or epochs")
        if self.adapter is not None and self.train_only is not None:
            raise RecipeError("adapter freezes everything but itself, so train_only has nothing to choose; keep one")
        if self.tokens_per_step < self.seq_len:
            raise RecipeError(
                f"tokens_per_step {self.tokens_per_step} is less than one sequence of {self.seq_len} tokens; "
                f"set tokens_per_step to {self.seq_len} or more, or lower seq_len"
            )
        if self.steps is not None and self.schedule.warmup_steps > self.steps:
            raise RecipeError(
                f"schedule.warmup_steps {self.schedule.warmup_steps} is more than steps {self.steps}; lower it"
            )
        self._check_lengths()
        self._check_compiled()
        if self.zero.reshard_size and self.zero.stage != 3:
            stage = "not set" if self.zero.stage is None else str(self.zero.stage)
            raise RecipeError(
                f"zero.reshard_size {self.zero.reshard_size} is for zero.stage 3, and zero.stage is {stage}; set "
                "zero.stage=3 or leave zero.reshard_size out"
            )
        return self

    def _check_compiled(self) -> None:
        """What a strategy would refuse too, but only once it is planned."""
        if self.activation is not None and self.compile != "none":
            check_compiled_tiers(parse_policy(self.activation).named)

    def _check_lengths(self) -> None:
        if self.per_batch is not None and self.data.lengths != "documents":
            raise RecipeError(
                f"per_batch is for sequences of several lengths, data.lengths {self.data.lengths} makes all of seq_len "
                f"{self.seq_len}; set data.lengths: documents, or leave per_batch out"
            )
        if self.per_batch is not None and self.activation is not None:
            raise RecipeError(
                f"per_batch chooses the tiers of each micro batch, activation {self.activation} fixes them; keep one"
            )
        compiles = self.compile != "none" or ("compile" in self.may_change and self.per_batch is None)
        if self.data.lengths == "documents" and compiles:
            raise RecipeError(
                "data.lengths documents makes micro batches of several shapes, and each would be compiled anew; leave "
                "compile out, of may_change too, or set data.lengths: packed"
            )
        if self.data.lengths == "documents" and self.mesh is not None:
            for name, taken in (("mesh.pipeline", self.mesh.pipeline > 1), ("tensor.sequence", self.tensor.sequence)):
                if taken:
                    raise RecipeError(
                        f"data.lengths documents makes micro batches of several shapes, {name} takes one; set "
                        "data.lengths: packed, or use mesh.shard"
                    )

    def located(self, folder: Path) -> Recipe:
        """This recipe with the folder that its relative paths start from."""
        self._folder = folder
        return self

    def resolve(self, path: str) -> Path:
        """A path of the recipe as this process can open it."""
        return self._folder / Path(path).expanduser()

    def layouts(self, num_devices: int) -> tuple[Layout, ...]:
        """Every arrangement that this many devices may take, the least communication first.

        Without a mesh in the recipe all devices are copies (stage 0) or shards (1 to 3). Raises RecipeError for a mesh
        of another size.
        """
        stages: tuple[int, ...] = (0, 1, 2, 3) if self.zero.stage is None else (self.zero.stage,)
        if self.mesh is None:
            if num_devices == 1:
                # What has no effect here stays in the strategy, so that build_step can say so.
                return (replace(self._layout(Mesh(), self.zero.stage or 0), tensor=TensorParallel()),)
            return tuple(
                self._layout(Mesh(shard=num_devices) if stage else Mesh(replicate=num_devices), stage)
                for stage in stages
            )
        mesh = self.mesh.mesh()
        if mesh.size != num_devices:
            raise RecipeError(
                f"mesh has {mesh.size} devices ({' x '.join(map(str, mesh.shape))}), the run has {num_devices}; "
                f"start it with torchrun --nproc-per-node {mesh.size} -m trainfit train, or change the mesh"
            )
        if self.zero.stage is None:
            stages = (1, 2, 3) if mesh.shard > 1 else (0,)
        return tuple(self._layout(mesh, stage) for stage in stages)

    def _layout(self, mesh: Mesh, stage: int) -> Layout:
        return Layout(
            mesh,
            self.zero.zero(stage),
            TensorParallel(**self.tensor.model_dump()),
            Pipeline(**self.pipeline.model_dump()),
        )

    @property
    def sequences_per_step(self) -> int:
        """Sequences in one optimizer step: as near tokens_per_step as whole sequences come, as in a plan's Target."""
        return max(1, round(self.tokens_per_step / self.seq_len))

    def to_json(self) -> dict[str, Any]:
        """Plain values with paths as they were written, so that a moved folder is still the same recipe."""
        return self.model_dump(mode="json")

    @property
    def hash(self) -> str:
        """Twelve hex digits that checkpoints and reports cite."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:12]
