"""Options that several verbs share. Imports no torch: help is made from this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from trainfit.errors import RecipeError

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
    str | None, typer.Option(metavar="fp32|bf16|fp16|auto", help="Compute dtype; auto takes bf16 where it is fast.")
]
ActivationOption = Annotated[
    str,
    typer.Option(
        metavar="TIERS", help='keep, pointwise, attention, full, every:K, or a list such as "6*full,2*pointwise".'
    ),
]
LossChunksOption = Annotated[str, typer.Option(metavar="N|auto", help="Chunks in which head and loss are computed.")]
DeviceOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", show_default="this machine", help="A device that `trainfit devices` lists."),
]
LocalDeviceOption = Annotated[
    str | None, typer.Option(metavar="NAME", show_default="a GPU or NPU if there is one", help="cpu, cuda or npu.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout and nothing else.")]

MAX_SEQ_LEN = 2**24
MAX_MICRO_BATCH_TOKENS = 2**30  # beyond it the bytes of an attention matrix pass 2**63
MAX_ACCUMULATION = 2**16
MAX_STEPS = 10_000


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

    def __post_init__(self) -> None:
        check_range("--seq-len", self.seq_len, 1, MAX_SEQ_LEN)
        check_range("--micro-batch", self.micro_batch, 1, MAX_MICRO_BATCH_TOKENS // (self.seq_len or 1))
        check_range("--accumulation", self.accumulation, 1, MAX_ACCUMULATION)


def check_range(option: str, value: int | None, lowest: int, highest: int) -> None:
    """Raises RecipeError when a value is outside the range; None is what was not given."""
    if value is not None and not lowest <= value <= highest:
        raise RecipeError(f"{option} is {value}; give a number from {lowest} to {highest}")
