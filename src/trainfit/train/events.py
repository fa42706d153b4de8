"""What a run tells while it goes on, and what it gives at its end: plain data for whoever draws it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainfit.profile import Profile
from trainfit.step import Underflow
from trainfit.train.tightening import Change


@dataclass(frozen=True)
class Preparing:
    """Text is being read: done of total bytes."""

    what: str
    done: int
    total: int


@dataclass(frozen=True)
class Started:
    """The first update is next. steps: updates of the whole run; step: those that a resumed run has behind it."""

    step: int
    steps: int
    num_parameters: int
    training_tokens: int
    held_out_tokens: int
    held_out_loss_tokens: int
    unigram_loss: float
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Resumed:
    """A checkpoint was read. changed: dotted recipe keys that differ from the recipe that saved it."""

    step: int
    checkpoint: Path
    changed: tuple[str, ...]
    plan_changed: bool


@dataclass(frozen=True)
class Archived:
    """An earlier, finished run of this folder was moved aside."""

    folder: Path


@dataclass(frozen=True)
class StepDone:
    """One optimizer update. loss in nats per token; memory_bytes is in use on the device after it.

    loss_scale: of this update; None where losses are not scaled. skipped: it overflowed, and weights did not move.
    micro_batches: on this rank. used_bytes, tier_level: with a tier table, the update's peak and how many rows further
    down its micro batches were given their tiers.
    """

    step: int
    steps: int
    epoch: int
    loss: float
    learning_rate: float
    gradient_norm: float | None
    tokens: int
    tokens_per_second: float
    step_seconds: float
    memory_bytes: int
    loss_scale: float | None = None
    skipped: bool = False
    micro_batches: int = 1
    used_bytes: int | None = None
    tier_level: int | None = None


@dataclass(frozen=True)
class TiersChanged:
    """From the next update on a tier table is read `level` rows further down, because this one used so much."""

    step: int
    change: Change
    level: int
    max_level: int
    used_bytes: int
    limit_bytes: int


@dataclass(frozen=True)
class Measured:
    """The second update of this process was recorded, and this is what it took: as much as every other one."""

    step: int
    profile: Profile


@dataclass(frozen=True)
class Evaluated:
    """underflow: of gradients of the last window, where blocks have loss scales of their own."""

    step: int
    held_out_loss: float
    underflow: Underflow | None = None


@dataclass(frozen=True)
class Saved:
    step: int
    checkpoint: Path


@dataclass(frozen=True)
class Interrupted:
    """Someone asked the run to stop; it is saved after this step."""

    step: int


Event = Preparing | Archived | Resumed | Started | StepDone | Measured | Evaluated | Saved | Interrupted | TiersChanged


@dataclass(frozen=True)
class TrainReport:
    """The end of a run.

    skipped_steps: of steps, in fp16 those that overflowed and left the weights alone.
    held_out_loss, unigram_loss: nats per token over the same held-out tokens; held_out_loss is None when the run was
        interrupted before its evaluation.
    measured: Profile of the second update of this process where one was taken; measured_peak_bytes: its peak, or the
        meter's from the second update on (on a CPU that is the process's resident peak); None when the run had fewer
        than two updates.
    measured_shapes: (sequences, length) of the micro batches of that update.
    seconds: of the updates alone; total_seconds: data, evaluation and saving included.
    """

    run_folder: Path
    steps: int
    planned_steps: int
    skipped_steps: int
    interrupted: bool
    final_loss: float | None
    held_out_loss: float | None
    unigram_loss: float
    tokens: int
    tokens_per_second: float
    seconds: float
    total_seconds: float
    measured_peak_bytes: int | None
    measured: Profile | None
    checkpoint: Path | None
    measured_shapes: tuple[tuple[int, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values with these keys: summary.json of a run folder."""
        values = asdict(self)
        paths = {name: str(value) for name, value in values.items() if isinstance(value, Path)}
        return {**values, **paths}
