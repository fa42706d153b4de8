"""What a step needs, and the words for it: plain data that every room can speak of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

Phase = Literal["forward", "loss", "backward", "optimizer", "save"]
Category = Literal["parameters", "gradients", "optimizer", "activations", "temporary", "communication", "loss"]
Tier = Literal[
    "keep",
    "discard",
    "pointwise",
    "attention",
    "full",
    "selective",
    "recompute_attention",
    "recompute_core",
    "recompute_mlp",
    "keep_bf16",
    "keep_int8",
    "keep_fp8",
    "offload",
    "offload_pointwise",
    "offload_full",
    "chosen_1",
    "chosen_2",
    "chosen_3",
    "chosen_4",
    "chosen_5",
    "chosen_6",
]
Precision = Literal["fp32", "bf16", "fp16"]
OptimizerKind = Literal["adamw", "adafactor"]
WeightStorage = Literal["fp32", "bf16_master", "fp16_master", "bf16_residual", "bf16_kahan", "bf16_stochastic"]
GradientStorage = Literal["fp32", "half"]
StateStorage = Literal["fp32", "bf16", "int8", "fp8"]
Attention = Literal["model", "blockwise"]
FrozenStorage = Literal["fp32", "half", "int8", "nf4"]
Cast = Literal["operator", "block"]
Accuracy = Literal["exact", "rounding", "lossy"]
MeshDim = Literal["pipeline", "replicate", "shard", "tensor"]
PHASES: tuple[Phase, ...] = get_args(Phase)
CATEGORIES: tuple[Category, ...] = get_args(Category)
ALL_TIERS: tuple[Tier, ...] = get_args(Tier)
# What these keep is not the same in every run: Strategy.kept_operators says it, and a plan makes it.
CHOSEN_TIERS: tuple[Tier, ...] = tuple(tier for tier in ALL_TIERS if tier.startswith("chosen_"))
TIERS: tuple[Tier, ...] = tuple(tier for tier in ALL_TIERS if tier not in CHOSEN_TIERS)  # those a person may ask for
# Those that a search takes anyway; of the others some where it may, the rest is what people are used to.
SEARCH_TIERS: tuple[Tier, ...] = ("keep", "discard", "pointwise", "attention", "full")
# What tiers do to gradients; those that are not named keep every bit.
TIER_ACCURACY: Mapping[Tier, Accuracy] = {"keep_bf16": "rounding", "keep_int8": "lossy", "keep_fp8": "lossy"}
# Those that a compiled block's graph itself cares for: its backward makes again what they do not keep.
GRAPH_TIERS: tuple[Tier, ...] = ("pointwise", "attention")
COMPILED_TIERS: tuple[Tier, ...] = ("keep", *GRAPH_TIERS, "full")  # those that a compiled block may have
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
OPTIMIZER_KINDS: tuple[OptimizerKind, ...] = get_args(OptimizerKind)
WEIGHT_STORAGES: tuple[WeightStorage, ...] = get_args(WeightStorage)
STATE_STORAGES: tuple[StateStorage, ...] = get_args(StateStorage)
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
FROZEN_STORAGES: tuple[FrozenStorage, ...] = get_args(FrozenStorage)
MESH_DIMS: tuple[MeshDim, ...] = get_args(MeshDim)


@dataclass(frozen=True)
class TokenBucket:
    """The tiers of all blocks, first to last, in micro batches of at most max_tokens, padding included."""

    max_tokens: int
    tiers: tuple[Tier, ...]


@dataclass(frozen=True)
class Mesh:
    """How the processes of a run are arranged, one device each; the last dimension's ranks are neighbours.

    pipeline: stages of consecutive blocks. replicate: copies of the model. shard: ranks that share one copy's states
    (ZeRO). tensor: ranks that split each matrix.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.pipeline, self.replicate, self.shard, self.tensor

    @property
    def size(self) -> int:
        """Devices in all."""
        return self.pipeline * self.replicate * self.shard * self.tensor

    @property
    def data(self) -> int:
        """Ranks that each see other sequences."""
        return self.replicate * self.shard


GradientSyncTime = Literal["step", "micro_batch"]


@dataclass(frozen=True)
class Zero:
    """What the ranks of a mesh's shard dimension share, and when they talk.

    stage: 0 nothing; 1 optimizer states, with gradients reduced once a step; 2 gradients too, reduced after each micro
        batch; 3 parameters too, gathered for each block and dropped after it.
    gradient_sync: when gradients are reduced, where it is not the stage's own time: "step" keeps whole gradients until
        the last micro batch and reduces once.
    reshard_size: ranks over which stage 3 keeps parameters split between forward and backward; 0 takes all. A node's
        devices, for one, gather again within the node at the price of their share of memory.
    prefetch: blocks whose parameters are gathered ahead.
    reduce_dtype: of gradients on their way.
    """

    stage: int = 0
    gradient_sync: GradientSyncTime | None = None
    reshard_size: int = 0
    prefetch: int = 1
    reduce_dtype: Precision = "fp32"

    @property
    def reduces_each_micro_batch(self) -> bool:
        return (self.gradient_sync or ("micro_batch" if self.stage >= 2 else "step")) == "micro_batch"


PipelineSchedule = Literal["1f1b", "interleaved", "gpipe"]
PIPELINE_SCHEDULES: tuple[PipelineSchedule, ...] = get_args(PipelineSchedule)


@dataclass(frozen=True)
class Pipeline:
    """In which order the stages of a mesh's pipeline dimension run a window's micro batches.

    schedule: "1f1b" runs a backward as soon as it can, so that a stage holds no more micro batches than stages follow
        it; "interleaved" gives each rank several stages, for less waiting and more traffic; "gpipe" runs all forwards
        first and holds every micro batch.
    stages_per_rank: 1, or more for "interleaved".
    """

    schedule: PipelineSchedule = "1f1b"
    stages_per_rank: int = 1

    def fits(self, micro_batches: int, ranks: int) -> bool:
        """Whether the schedule takes a window of so many micro batches."""
        if self.schedule == "gpipe":
            return micro_batches >= 1
        return micro_batches >= ranks and (self.schedule == "1f1b" or micro_batches % (micro_batches // ranks) == 0)


@dataclass(frozen=True)
class OptimizerVariant:
    """How an optimizer keeps weights, gradients and states, where they are, and when it updates.

    kind: "adamw", or "adafactor", whose second moment is two vectors for a matrix.
    weights: "fp32"; "bf16_master" or "fp16_master": half weights in the model, fp32 ones with the optimizer;
        "bf16_residual": bf16 weights and the 16 bits that make them fp32 again; "bf16_kahan": bf16 weights and a bf16
        compensation; "bf16_stochastic": bf16 weights alone, rounded up or down by chance.
    gradients: what micro batches add up in: "fp32", or "half", the dtype of half weights.
    states: of the moments. "int8" and "fp8" have a scale for each block of them.
    place: "host" keeps states and masters in host memory and updates there.
    update: "backward" updates each parameter as soon as its gradient is there, and drops the gradient.
    kernel: "fused" has no temporaries; "foreach" has some, and runs where the device has no fused one.
    """

    kind: OptimizerKind = "adamw"
    weights: WeightStorage = "fp32"
    gradients: GradientStorage = "fp32"
    states: StateStorage = "fp32"
    place: Literal["device", "host"] = "device"
    update: Literal["step", "backward"] = "step"
    kernel: Literal["fused", "foreach"] = "fused"


OffloadPlace = Literal["host", "disk"]


@dataclass(frozen=True)
class Offload:
    """Where blocks under an offload tier put what they save.

    place: "host", pinned memory beside the device; "disk", a file without a name.
    budget_bytes: the most that may be there at once, of each rank; 0 takes what is free.
    directory: of the file; "" is the system's for temporary files.
    """

    place: OffloadPlace = "host"
    budget_bytes: int = 0
    directory: str = ""


@dataclass(frozen=True)
class Compile:
    """Which blocks torch.compile makes graphs of, and what these may save.

    blocks: in one graph: 0 compiles nothing, 1 makes a graph of each block.
    budget: the most that the graph of blocks with keep or full saves for backward, as a share of what it would save of
        itself; the partitioner picks what backward computes again.
    """

    blocks: int = 0
    budget: float = 1.0


@dataclass(frozen=True)
class AllocatorSettings:
    """What PYTORCH_CUDA_ALLOC_CONF or PYTORCH_NPU_ALLOC_CONF sets of a device's caching allocator.

    expandable_segments: one segment that grows by pages, instead of one for each request that finds no room.
    max_split_size_mb: blocks of so many MiB and more are not split; 0 splits all.
    garbage_collection_threshold: above this share of the memory, blocks that are free for long are given back; 0 keeps
        them.
    roundup_power2_divisions: requests are rounded up to so many steps between powers of two; 0 rounds to 512 bytes.
    """

    expandable_segments: bool = False
    max_split_size_mb: int = 0
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: int = 0


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling, which keeps fp16 gradients from vanishing.

    init_scale: to begin with. growth_factor: after growth_interval steps without overflow. backoff_factor: after a step
    that overflowed and was skipped. max_skips: so many skips in a row end the run.
    per_block: a scale for each block, chosen by the sizes of its gradients.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    max_skips: int = 25
    per_block: bool = False


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind that one rank takes part in during one optimizer step.

    bytes: the sum of payloads, whatever the number of ranks: of an all-gather its whole output, of a reduce-scatter
        its whole input, of the others the tensors themselves.
    group_sizes: how many ranks took part, each size once.
    seconds: what the links need for them, one after another, as rings.
    """

    count: int
    bytes: int
    group_sizes: tuple[int, ...]
    seconds: float = 0.0


@dataclass(frozen=True)
class TensorParallel:
    """How the ranks of a mesh's tensor dimension share a block.

    sequence: between attention and mlp each rank keeps a part of every sequence, instead of all of it.
    """

    sequence: bool = False


@dataclass(frozen=True)
class Layout:
    """Everything that says what the devices of a run do together."""

    mesh: Mesh = Mesh()
    zero: Zero = Zero()
    tensor: TensorParallel = TensorParallel()
    pipeline: Pipeline = Pipeline()


class Range(NamedTuple):
    """A figure and where it should lie."""

    low: float
    expected: float
    high: float


@dataclass(frozen=True)
class Reserved:
    """What a device's caching allocator holds over the steps of a run, and why it holds more than is in use.

    reserved_bytes: the most that it held. allocated_bytes: the most that was in use, as it counts: what a block has
        over and is too small to split off is in use too.
    unused_bytes: what it holds beyond that: fragmentation, and what each stream has at another time than the peak.
    other_streams_bytes: of reserved_bytes, what streams that communicate hold, and computation cannot use.
    request_bytes: the last request that made it hold more than ever, for which no free block was large enough. phase,
        place: who asked, as in a profile.
    pool, stream: where: "small" up to 1 MiB, else "large"; stream 0 computes, others communicate.
    pool_free_bytes, largest_free_bytes: what was free there, and the largest block of it.
    num_steps: after how many it held no more.
    """

    reserved_bytes: int
    allocated_bytes: int
    unused_bytes: int
    other_streams_bytes: int
    request_bytes: int
    pool: str
    stream: int
    pool_free_bytes: int
    largest_free_bytes: int
    phase: Phase
    place: str
    num_steps: int


@dataclass(frozen=True)
class Moment:
    """What was live at one point of a step.

    place: the block or module, and the operator, that ran; "" where nobody saw it.
    seconds: since the first moment; 0.0 throughout where nobody counted.
    categories: live bytes, only those that are not zero.
    """

    phase: Phase
    place: str
    seconds: float
    categories: Mapping[Category, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.categories.values())


@dataclass(frozen=True)
class Profile:
    """Bytes and seconds of one optimizer step that is not the first, on one rank.

    peak_bytes: everything live at the peak, parameters and optimizer states included.
    peak_phase, peak_place: the phase it falls in, and the block or module and operator that ran.
    phases: the highest live bytes within each phase.
    categories: live bytes at the peak by category; they add up to peak_bytes.
    resident_bytes: what stays live between steps.
    step_seconds, phase_seconds: time of the whole step and of each phase; 0.0 where nobody measured it.
    rank: whose profile this is.
    reserved_bytes: the most that the device's caching allocator held; 0 where there is none, as on a CPU.
    reserved: what that consists of; None where nobody replayed it.
    expandable: the same with expandable segments, where the step has none.
    timeline: what was live through the step, or through those of its micro batches that were watched; the peak is one
        of its moments. Empty where nobody followed it.
    step_seconds_low, step_seconds_high: where the step's time should lie, by how sure the figures are that it was
        predicted from; 0.0 where it was measured.
    tokens: of one step, of all ranks together. model_flops: what the model asks this rank to compute in one step,
        recomputation left out and causal attention counted by half. peak_flops_per_second: of the device, by its data
        sheet, in the precision of the step. 0 where nobody counted.
    compile_seconds: what compiling blocks adds to the first step; 0.0 where nothing is compiled.
    collectives: by kind: all_gather, reduce_scatter, all_reduce, send, ...; empty where nobody counted.
    communication_seconds: what the links need for all of them. exposed_communication_seconds: as much of it as no
        computation hides, which is part of step_seconds.
    offloaded_bytes: the most that saved tensors take in host memory or on disk at once.
    """

    peak_bytes: int
    peak_phase: Phase
    peak_place: str
    phases: Mapping[Phase, int]
    categories: Mapping[Category, int]
    resident_bytes: int
    step_seconds: float = 0.0
    phase_seconds: Mapping[Phase, float] = field(default_factory=dict)
    rank: int = 0
    collectives: Mapping[str, Collective] = field(default_factory=dict)
    communication_seconds: float = 0.0
    exposed_communication_seconds: float = 0.0
    reserved_bytes: int = 0
    reserved: Reserved | None = None
    expandable: Reserved | None = None
    timeline: tuple[Moment, ...] = ()
    step_seconds_low: float = 0.0
    step_seconds_high: float = 0.0
    tokens: int = 0
    model_flops: float = 0.0
    peak_flops_per_second: float = 0.0
    compile_seconds: float = 0.0
    offloaded_bytes: int = 0

    @property
    def is_on_host(self) -> bool:
        """Whether it is of a CPU, whose memory is the host's own: no caching allocator holds any of it."""
        return self.reserved_bytes == 0

    @property
    def tokens_per_second(self) -> Range | None:
        """Of all ranks together; None where tokens or seconds are not known."""
        return self._each_second(self.tokens)

    @property
    def mfu(self) -> Range | None:
        """Model FLOPs utilisation: the share of the peak that goes into what the model asks for."""
        return self._each_second(self.model_flops / self.peak_flops_per_second) if self.peak_flops_per_second else None

    def _each_second(self, count: float) -> Range | None:
        if not count or not self.step_seconds:
            return None
        low, high = self.step_seconds_low or self.step_seconds, self.step_seconds_high or self.step_seconds
        return Range(count / high, count / self.step_seconds, count / low)

    @property
    def needed_bytes(self) -> int:
        """What has to be free on the device: what its allocator holds, which is never less than what is live."""
        return max(self.peak_bytes, self.reserved_bytes)

    def with_phase_seconds(self, phases: Mapping[Phase, float]) -> Profile:
        """The profile with other seconds of its phases; the range of the step's grows or shrinks as their sum does."""
        seconds = sum(phases.values())
        ratio = seconds / self.step_seconds if self.step_seconds else 1.0
        return replace(
            self,
            phase_seconds=phases,
            step_seconds=seconds,
            step_seconds_low=self.step_seconds_low * ratio,
            step_seconds_high=self.step_seconds_high * ratio,
        )

    def with_expandable_segments(self) -> Profile:
        """The profile of the same step whose allocator has them; itself where that is not known."""
        if self.expandable is None:
            return self
        held = self.expandable
        return replace(self, reserved_bytes=held.reserved_bytes, reserved=held, expandable=None)

    def to_json(self) -> dict[str, Any]:
        """Plain dict with the documented keys of `rehearse --json` and `measure --json`."""
        derived = {name: value and value._asdict() for name, value in self._derived().items()}
        return {**asdict(self), **derived}

    def _derived(self) -> dict[str, Range | None]:
        return {"tokens_per_second": self.tokens_per_second, "mfu": self.mfu}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Profile:
        """The inverse of to_json. Raises TypeError for keys that a profile does not have."""
        data = {name: value for name, value in data.items() if name not in ("tokens_per_second", "mfu")}
        collectives = {
            kind: Collective(**{**each, "group_sizes": tuple(each["group_sizes"])})
            for kind, each in data.get("collectives", {}).items()
        }
        reserved, expandable = data.get("reserved"), data.get("expandable")
        timeline = tuple(Moment(**moment) for moment in data.get("timeline", ()))
        parts = {
            "collectives": collectives,
            "reserved": reserved and Reserved(**reserved),
            "expandable": expandable and Reserved(**expandable),
            "timeline": timeline,
        }
        return cls(**{**data, **parts})


@dataclass(frozen=True)
class BlockTrace:
    """One block under one activation tier at one micro batch, as the tracker saw it.

    saved_bytes: what its forward leaves behind for backward, its input included.
    forward_peak_bytes: the most that is live during its forward above what was live before it.
    backward_peak_bytes: the most that is live during its backward (recompute included) above what was live just
        before it; saved_bytes is not part of it.
    gradient_bytes: parameter gradients that its backward leaves behind; 0 where it adds to those of earlier micro
        batches.
    forward_seconds, backward_seconds: roofline time on the hardware at hand; backward includes recompute.
    """

    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    gradient_bytes: int
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True)
class ShellTrace:
    """A micro batch through the model with nothing in its blocks: embedding, last norm, head and loss.

    All bytes are above what was live before.
    before_blocks_peak_bytes: the most until the blocks' backward would begin.
    gradient_bytes: what head and last norm leave behind; 0 where they add to the gradients of earlier micro batches.
    after_blocks_peak_bytes: the most while the embedding's backward runs, gradient_bytes included.
    """

    before_blocks_peak_bytes: int
    gradient_bytes: int
    after_blocks_peak_bytes: int
    seconds: float
