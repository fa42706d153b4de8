"""What a step needs, and the words for it: plain data that every room can speak of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Phase = Literal["forward", "loss", "backward", "optimizer", "save"]
Category = Literal["parameters", "gradients", "optimizer", "activations", "temporary", "communication", "loss"]
Tier = Literal["keep", "pointwise", "attention", "full"]
Precision = Literal["fp32", "bf16", "fp16"]
PHASES: tuple[Phase, ...] = get_args(Phase)
CATEGORIES: tuple[Category, ...] = get_args(Category)
TIERS: tuple[Tier, ...] = get_args(Tier)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True)
class Profile:
    """Bytes and seconds of one optimizer step that is not the first.

    peak_bytes: everything live at the peak, parameters and optimizer states included.
    peak_phase, peak_place: the phase it falls in, and the operator or module that was running.
    phases: the highest live bytes within each phase.
    categories: live bytes at the peak by category; they add up to peak_bytes.
    resident_bytes: what stays live between steps.
    step_seconds, phase_seconds: time of the whole step and of each phase; 0.0 where nobody measured it.
    """

    peak_bytes: int
    peak_phase: Phase
    peak_place: str
    phases: Mapping[Phase, int]
    categories: Mapping[Category, int]
    resident_bytes: int
    step_seconds: float = 0.0
    phase_seconds: Mapping[Phase, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain dict with the documented keys of `rehearse --json` and `measure --json`."""
        return asdict(self)


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
