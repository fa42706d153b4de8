"""The fast model: peak and seconds of any strategy, from traces. Numbers in, numbers out; no torch.

NOTE [ Events of a step ]
The peak is a maximum over moments, not a sum. With R what stays (parameters, states, batches), G the gradients that
earlier micro batches left (none in a step of one), S_i what block i saves, in the order of time:
    forward of block i    R + G + S_1 + ... + S_i-1 + (its forward peak)
    head and loss         R + G + S_1 + ... + S_n + (the shell's peak before the blocks' backward)
    backward of block i   R + G + S_1 + ... + S_i + (gradients left by head and later blocks) + (its backward peak)
    embedding             R + G + (gradients of all blocks) + (the shell's peak after the blocks' backward)
    optimizer             R + all gradients + (the update's temporaries)
Rotary tables and masks, which all blocks share, are in R, and so are buffers of collectives. In a pipeline's stage, S_1
+ ... + S_n of each other micro batch that is under way comes on top of all but the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainfit.plan.solver import Flags, Floats, Integers, Problem, moments
from trainfit.profile import ALL_TIERS, TIER_ACCURACY, Accuracy, BlockTrace, Phase, ShellTrace, Tier

# By how much seconds must be fewer: see NOTE [ What accuracy is worth ] in variants.py.
MUST_WIN: Mapping[Accuracy, float] = {"exact": 1.0, "rounding": 1.02, "lossy": 1.1}
_WEIGHTS: Floats = np.array([[MUST_WIN[TIER_ACCURACY.get(tier, "exact")]] for tier in ALL_TIERS])  # (tiers, 1)
_NOTHING = BlockTrace(0, 0, 0, 0, 0.0, 0.0)


@dataclass(frozen=True)
class Resident:
    """Bytes of one rank beside activations, and what a step costs beside its micro batches.

    model_bytes: its parameters and optimizer states, between steps.
    working_bytes: more that lives while micro batches run: parameters that were gathered, gradients on their way.
    batch_bytes: token ids of the window. shared_bytes: what all blocks are given beside hidden states.
    gradient_bytes: all its gradients when the optimizer runs. update_bytes: temporaries of the update.
    earlier_gradient_bytes: of it, what earlier micro batches left; 0 in a step of one.
    micro_batch_seconds, step_seconds: communication of each micro batch, and of the step with its optimizer.
    """

    model_bytes: int
    batch_bytes: int
    shared_bytes: int
    gradient_bytes: int
    earlier_gradient_bytes: int
    step_seconds: float
    working_bytes: int = 0
    update_bytes: int = 0
    micro_batch_seconds: float = 0.0

    @property
    def floor_bytes(self) -> int:
        """What lives beside activations, and beside the gradients of this micro batch, while micro batches run."""
        stays = self.model_bytes + self.batch_bytes + self.working_bytes
        return stays + self.shared_bytes + self.earlier_gradient_bytes

    @property
    def optimizer_peak_bytes(self) -> int:
        return self.model_bytes + self.batch_bytes + self.gradient_bytes + self.update_bytes


@dataclass(frozen=True)
class Shares:
    """Over how many ranks a block's activations, its gradients and its work are split."""

    activations: int = 1
    gradients: int = 1
    compute: int = 1


@dataclass(frozen=True)
class BlockTable:
    """Traces of all blocks under all tiers, as arrays (tiers, blocks). offered: tiers that a structure has."""

    saved: Integers
    forward_peak: Integers
    backward_peak: Integers
    gradient: Integers
    seconds: Floats
    offered: Flags
    structures: Integers

    @classmethod
    def of(
        cls,
        structures: Sequence[int],
        traces: Mapping[tuple[int, Tier], BlockTrace],
        shares: Shares | None = None,
        *,
        gradients: float = 1.0,
    ) -> BlockTable:
        """gradients: what those that stay take, over what was traced. A tier without a trace is not offered."""
        shares = shares or Shares()
        kinds = sorted(set(structures))
        place = np.array([kinds.index(structure) for structure in structures], dtype=np.int64)
        rows = [[traces.get((kind, tier), _NOTHING) for kind in kinds] for tier in ALL_TIERS]

        def numbers(of: Callable[[BlockTrace], float], dtype: type) -> Any:
            """A figure of each tier and block, from that of its structure: deep models have few."""
            values: Any = np.array([[of(trace) for trace in row] for row in rows], dtype=dtype)
            return values.reshape(len(ALL_TIERS), len(kinds))[:, place]

        offered = np.array([[(kind, tier) in traces for kind in kinds] for tier in ALL_TIERS], dtype=np.bool_)
        gradient = numbers(lambda trace: trace.gradient_bytes, np.int64) * gradients
        return cls(
            numbers(lambda trace: trace.saved_bytes, np.int64) // shares.activations,
            numbers(lambda trace: trace.forward_peak_bytes, np.int64) // shares.activations,
            numbers(lambda trace: trace.backward_peak_bytes, np.int64) // shares.activations,
            gradient.astype(np.int64) // shares.gradients,
            numbers(lambda trace: trace.forward_seconds + trace.backward_seconds, np.float64) / shares.compute,
            offered.reshape(len(ALL_TIERS), len(kinds))[:, place],
            np.array(structures, dtype=np.int64),
        )

    def problem(self, shell: ShellTrace, blocks: Sequence[int] | None = None, waiting: int = 0) -> Problem:
        """The events of some blocks, all by default, with the shell around them, for the solver."""
        blocks = range(self.saved.shape[1]) if blocks is None else blocks
        blocks = list(blocks)
        return Problem(
            saved=self.saved[:, blocks],
            forward_peak=self.forward_peak[:, blocks],
            backward_peak=self.backward_peak[:, blocks],
            gradient=self.gradient[:, blocks],
            seconds=self.seconds[:, blocks] * _WEIGHTS,
            true_seconds=self.seconds[:, blocks],
            offered=self.offered[:, blocks],
            structures=self.structures[blocks],
            before_loss=shell.before_blocks_peak_bytes,
            head_gradient=shell.gradient_bytes,
            embedding=shell.after_blocks_peak_bytes,
            waiting=waiting,
        )


def events(
    resident: Resident, problem: Problem, tiers: Integers, blocks: Sequence[int]
) -> list[tuple[Phase, str, int]]:
    """Every event of one assignment: its phase, its words, its bytes. blocks: their numbers in the model."""
    values = (resident.floor_bytes + moments(problem, tiers[None])[0]).tolist()
    named: list[tuple[Phase, str]] = [("forward", f"forward of block {block}") for block in blocks]
    named += [("backward", f"backward of block {block}") for block in blocks]
    named += [("loss", "the loss spike"), ("backward", "backward of the embedding")]
    listed = [(phase, words, int(value)) for (phase, words), value in zip(named, values)]
    return [*listed, ("optimizer", "the optimizer step", resident.optimizer_peak_bytes)]


def binding(resident: Resident, problem: Problem, tiers: Integers, phase: Phase | None, blocks: Sequence[int]) -> str:
    """The event that limits; phase: of those in it, where a rehearsal has told which phase the peak is in."""
    all_events = events(resident, problem, tiers, blocks)
    inside = [event for event in all_events if event[0] == phase] or all_events
    return max(inside, key=lambda event: event[2])[1]
