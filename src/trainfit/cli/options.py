"""Options that several verbs share. Imports no torch: help is made from this file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from typing import Annotated, Any

import typer

from trainfit.errors import RecipeError
from trainfit.profile import TIERS, Mesh, Zero

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="Built-in name, Hugging Face config.json or its folder, or a recipe.")
]
RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="Path of a recipe, a YAML file.")]
SeqLenOption = Annotated[int | None, typer.Option("--seq-len", metavar="N", help="Tokens in a sequence.")]
MicroBatchOption = Annotated[
    int | None, typer.Option("--micro-batch", metavar="N", help="Sequences in one forward and backward.")
]
AccumulationOption = Annotated[int, typer.Option(metavar="K", help="Micro batches in one optimizer step.")]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        metavar="fp32|bf16|fp16|auto", help="Compute dtype; auto: bf16 on a GPU or NPU that has it, else fp32."
    ),
]
ActivationOption = Annotated[
    str,
    typer.Option(
        metavar="POLICY",
        help='keep, pointwise, attention, full, every:K, torchtitan, ..., or a list such as "6*full,2*pointwise".',
    ),
]
LossChunksOption = Annotated[str, typer.Option(metavar="N|auto", help="Chunks in which head and loss are computed.")]
OptimizerOption = Annotated[
    str | None,
    typer.Option(metavar="KEY=VALUE,...", help="Such as weights=bf16_residual,states=int8."),
]
CompileOption = Annotated[
    str | None, typer.Option(metavar="none|block|block:B", help="Compile each block; B: share of activations it saves.")
]
CastOption = Annotated[str | None, typer.Option(metavar="operator|block", help="Where fp32 weights are cast.")]
RecomputeAheadOption = Annotated[
    int | None, typer.Option(metavar="0|1", help="Blocks recomputed beside the backward of the next one.")
]
OffloadOption = Annotated[
    str | None, typer.Option(metavar="host|disk|disk:FOLDER", help="Where blocks of offload tiers put what they save.")
]
AttentionOption = Annotated[
    str | None,
    typer.Option("--attention", metavar="model|blockwise", help="The model's own attention, or a tile at a time."),
]
DevicesOption = Annotated[int, typer.Option(metavar="N", help="Devices that run the step together, a process each.")]
SharingDevicesOption = Annotated[int, typer.Option(metavar="N", help="Devices that share the tokens of a step.")]
MemoryOption = Annotated[
    str | None, typer.Option(metavar="SIZE", show_default="what it has", help="Budget of one device, such as 60GiB.")
]
ZeroStageOption = Annotated[
    int, typer.Option(metavar="0|1|2|3", help="What they share: nothing, optimizer states, gradients, parameters.")
]
TensorOption = Annotated[int, typer.Option(metavar="T", help="Devices that split each matrix.")]
PipelineOption = Annotated[int, typer.Option(metavar="P", help="Stages of consecutive blocks.")]
ReplicateOption = Annotated[
    int | None, typer.Option(metavar="R", show_default="1; at stage 0 all that is left", help="Copies of the model.")
]
DeviceOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", show_default="this machine", help="A device that `trainfit devices` lists."),
]
LocalDeviceOption = Annotated[
    str | None, typer.Option(metavar="NAME", show_default="a GPU or NPU if there is one", help="cpu, cuda or npu.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout and nothing else.")]
HtmlOption = Annotated[
    str | None, typer.Option("--html", metavar="FILE", help="Write one self-contained page with pictures, too.")
]

# Those of plan/policies.py, which imports torch.
POLICY_NAMES = ", ".join(TIERS) + (
    ", none, every:K, memory, cost, ratio:R, huggingface, torchtitan, torchtitan:full, torchtitan:selective:K, "
    "megatron:selective, megatron:selective:mlp, megatron:uniform:K, megatron:block:K"
)
MAX_SEQ_LEN = 2**24
MAX_MICRO_BATCH_TOKENS = 2**30  # beyond it the bytes of an attention matrix pass 2**63
MAX_ACCUMULATION = 2**16
MAX_STEPS = 10_000
MAX_DEVICES = 65_536

Verb = Callable[..., int]


@dataclass(frozen=True)
class StepOptions:
    """One optimizer step as the command line asks for it; None where nothing was said."""

    model: str
    seq_len: int | None = None
    micro_batch: int | None = None
    accumulation: int = 1
    precision: str | None = None
    activation: str = "keep"
    loss_chunks: str = "1"
    optimizer: str | None = None
    cast: str | None = None
    recompute_ahead: int | None = None
    compile: str | None = None
    offload: str | None = None
    attention: str | None = None
    devices: int = 1
    zero_stage: int = 0
    tensor: int = 1
    pipeline: int = 1
    replicate: int | None = None

    def __post_init__(self) -> None:
        check_range("--seq-len", self.seq_len, 1, MAX_SEQ_LEN)
        check_range("--micro-batch", self.micro_batch, 1, MAX_MICRO_BATCH_TOKENS // (self.seq_len or 1))
        check_range("--accumulation", self.accumulation, 1, MAX_ACCUMULATION)
        check_range("--recompute-ahead", self.recompute_ahead, 0, 1)
        check_range("--devices", self.devices, 1, MAX_DEVICES)
        check_range("--zero-stage", self.zero_stage, 0, 3)
        for name in ("tensor", "pipeline", "replicate"):
            check_range(f"--{name}", getattr(self, name), 1, self.devices)
        self.mesh_and_zero()

    @property
    def said(self) -> list[str]:
        """The options that are not at their defaults, beside model, sequence length and micro batch."""
        given = ((each.name, getattr(self, each.name), each.default) for each in fields(self)[3:])
        return [f"--{name.replace('_', '-')} {value}" for name, value, default in given if value != default]

    def mesh_and_zero(self) -> tuple[Mesh, Zero]:
        """Tensor, pipeline and copies as given, and what is left of the devices sharded, or replicas at stage 0."""
        split = self.tensor * self.pipeline
        data, rest = divmod(self.devices, split)
        if rest:
            raise RecipeError(
                f"--devices {self.devices} is no multiple of --tensor {self.tensor} x --pipeline {self.pipeline}; "
                f"give {split * max(1, data)} or {split * (data + 1)}"
            )
        if self.zero_stage == 0:
            if self.replicate not in (None, data):
                raise RecipeError(
                    f"--zero-stage 0 makes {data} replicas on these {self.devices} devices, not --replicate "
                    f"{self.replicate}; leave it out, or shard the rest with --zero-stage 1, 2 or 3"
                )
            return Mesh(self.pipeline, data, 1, self.tensor), Zero(0)
        copies = self.replicate or 1
        shard, rest = divmod(data, copies)
        if rest:
            raise RecipeError(f"--replicate {copies} does not divide the {data} devices that tensor and pipeline leave")
        if shard == 1:
            raise RecipeError(
                f"--zero-stage {self.zero_stage} has 1 device to share over: {self.devices} devices / (tensor "
                f"{self.tensor} x pipeline {self.pipeline} x replicate {copies}); give more --devices or --zero-stage 0"
            )
        return Mesh(self.pipeline, copies, shard, self.tensor), Zero(self.zero_stage)


_STEP: dict[str, Any] = {
    "model": ModelArgument,
    "seq_len": SeqLenOption,
    "micro_batch": MicroBatchOption,
    "accumulation": AccumulationOption,
    "precision": PrecisionOption,
    "activation": ActivationOption,
    "loss_chunks": LossChunksOption,
    "optimizer": OptimizerOption,
    "cast": CastOption,
    "recompute_ahead": RecomputeAheadOption,
    "compile": CompileOption,
    "offload": OffloadOption,
    "attention": AttentionOption,
}
_MESH: dict[str, Any] = {
    "devices": DevicesOption,
    "zero_stage": ZeroStageOption,
    "tensor": TensorOption,
    "pipeline": PipelineOption,
    "replicate": ReplicateOption,
}


def takes_step(*, mesh: bool) -> Callable[[Verb], Verb]:
    """Turns verb(options: StepOptions, *, ...) into a command with MODEL, the options of one step and the verb's own.

    mesh: whether the step may run on several devices.
    """
    return takes(StepOptions, {**_STEP, **(_MESH if mesh else {})})


@dataclass(frozen=True)
class QuestionOptions:
    """What plans and questions share, as the command line asks for it; None where nothing was said."""

    model: str
    device: str | None = None
    devices: int = 1
    seq_len: int | None = None
    tokens_per_step: str | None = None
    memory: str | None = None
    precision: str | None = None
    optimizer: str | None = None

    def __post_init__(self) -> None:
        check_range("--devices", self.devices, 1, MAX_DEVICES)


def question_options(tokens_per_step: Any) -> dict[str, Any]:
    """Of QuestionOptions by field. tokens_per_step: its option, since questions have a default that plans have not."""
    return {
        "model": ModelArgument,
        "device": DeviceOption,
        "devices": SharingDevicesOption,
        "seq_len": SeqLenOption,
        "tokens_per_step": tokens_per_step,
        "memory": MemoryOption,
        "precision": PrecisionOption,
        "optimizer": OptimizerOption,
    }


def takes(kind: type[Any], shared: Mapping[str, Any]) -> Callable[[Verb], Verb]:
    """Turns verb(options, *, ...) into a command with the shared options and the verb's own.

    kind: dataclass of what verbs share, with its defaults. shared: by its field, the option; those that the verb has.
    """
    defaults = {each.name: each.default for each in fields(kind)}
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            annotation=annotation,
            default=inspect.Parameter.empty if defaults[name] is MISSING else defaults[name],
        )
        for name, annotation in shared.items()
    ]

    def decorate(verb: Verb) -> Verb:
        @wraps(verb)
        def command(**values: Any) -> int:
            options = kind(**{name: values.pop(name) for name in shared})
            return verb(options, **values)

        own = list(inspect.signature(verb, eval_str=True).parameters.values())[1:]
        signature = inspect.Signature([*parameters, *own], return_annotation=int)
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {}
        return command

    return decorate


def check_range(option: str, value: int | None, lowest: int, highest: int) -> None:
    """Raises RecipeError when a value is outside the range; None is what was not given."""
    if value is not None and not lowest <= value <= highest:
        raise RecipeError(f"{option} is {value}; give a number from {lowest} to {highest}")
