"""The fast model: peak and seconds of any strategy, from traces. Numbers in, numbers out; no torch.

NOTE [ Events of a step ]
The peak is a maximum over moments, not a sum. With R what stays (parameters, states, batches), G the gradients that
earlier micro batches left (none in a step of one), S_i what block i saves, in the order of time:
    forward of block i    R + G + S_1 + ... + S_i-1 + (its forward peak)
    head and loss         R + G + S_1 + ... + S_n + (the shell's peak before the blocks' backward)
    backward of block i   R + G + S_1 + ... + S_i + (gradients left by head and later blocks) + (its backward peak)
    embedding             R + G + (gradients of all blocks) + (the shell's peak after the blocks' backward)
    optimizer             R + all gradients + (the update's temporaries)
Rotary tables and masks, which all blocks share, are in R.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainfit.profile import SEARCH_TIERS, BlockTrace, ShellTrace, Tier

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


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


@dataclass(frozen=True)
class Shares:
    """Over how many ranks a block's activations, its gradients and its work are split."""

    activations: int = 1
    gradients: int = 1
    compute: int = 1


@dataclass(frozen=True)
class BlockTable:
    """Traces of all blocks under all tiers, as arrays (tiers, blocks)."""

    saved: Integers
    forward_peak: Integers
    backward_peak: Integers
    gradient: Integers
    seconds: Floats

    @classmethod
    def of(
        cls,
        structures: Sequence[int],
        traces: Mapping[tuple[int, Tier], BlockTrace],
        shares: Shares | None = None,
        *,
        gradients: float = 1.0,
        tiers: Sequence[Tier] = SEARCH_TIERS,
    ) -> BlockTable:
        """gradients: what those that stay take, over what was traced. tiers: the rows."""
        shares = shares or Shares()
        rows = [[traces[structure, tier] for structure in structures] for tier in tiers]

        def integers(name: str) -> Integers:
            return np.array([[getattr(trace, name) for trace in row] for row in rows], dtype=np.int64)

        seconds = [[trace.forward_seconds + trace.backward_seconds for trace in row] for row in rows]
        return cls(
            integers("saved_bytes") // shares.activations,
            integers("forward_peak_bytes") // shares.activations,
            integers("backward_peak_bytes") // shares.activations,
            (integers("gradient_bytes") * gradients).astype(np.int64) // shares.gradients,
            np.array(seconds, dtype=np.float64) / shares.compute,
        )


def peak_bytes(resident: Resident, table: BlockTable, tiers: Integers, shell: ShellTrace) -> Integers:
    """The highest of all events, for many assignments at once. See NOTE [ Events of a step ].

    tiers (assignments, blocks): rows of the table. Returns (assignments,).
    """
    blocks = np.arange(tiers.shape[1])
    saved, own = table.saved[tiers, blocks], table.gradient[tiers, blocks]
    before = saved.cumsum(1) - saved
    later = own[:, ::-1].cumsum(1)[:, ::-1] - own + shell.gradient_bytes
    forward = before + table.forward_peak[tiers, blocks]
    backward = before + saved + later + table.backward_peak[tiers, blocks]
    loss = saved.sum(1) + shell.before_blocks_peak_bytes
    embedding = own.sum(1) + shell.after_blocks_peak_bytes
    moments = np.concatenate([forward, backward, loss[:, None], embedding[:, None]], axis=1)
    stays = resident.model_bytes + resident.batch_bytes
    floor = stays + resident.working_bytes + resident.shared_bytes + resident.earlier_gradient_bytes
    return np.asarray(np.maximum(floor + moments.max(1), stays + resident.gradient_bytes + resident.update_bytes))


def step_seconds(
    resident: Resident, table: BlockTable, tiers: Integers, shell: ShellTrace, *, micro_batches: float
) -> Floats:
    """Seconds of the whole step, (assignments,); micro_batches may be fractional when the last one is short."""
    one = table.seconds[tiers, np.arange(tiers.shape[1])].sum(1) + shell.seconds + resident.micro_batch_seconds
    return np.asarray(micro_batches * one + resident.step_seconds)
