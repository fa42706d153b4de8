"""The fast model: peak and seconds of any strategy, from traces. Numbers in, numbers out; no torch.

NOTE [ Events of a step ]
The peak is a maximum over moments, not a sum. With R what stays (parameters, states, batches), G the gradients that
earlier micro batches left (none in a step of one), S_i what block i saves, in the order of time:
    forward of block i    R + G + S_1 + ... + S_i-1 + (its forward peak)
    head and loss         R + G + S_1 + ... + S_n + (the shell's peak before the blocks' backward)
    backward of block i   R + G + S_1 + ... + S_i + (gradients left by head and later blocks) + (its backward peak)
    embedding             R + G + (gradients of all blocks) + (the shell's peak after the blocks' backward)
    optimizer             R + all gradients
Rotary tables and masks, which all blocks share, are in R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainfit.profile import BlockTrace, ShellTrace


@dataclass(frozen=True)
class Resident:
    """Bytes that stay: parameters and states, token ids of the window, what blocks share; the gradients of all
    parameters; seconds of the optimizer."""

    model_bytes: int
    batch_bytes: int
    shared_bytes: int
    gradient_bytes: int
    optimizer_seconds: float


def peak_bytes(resident: Resident, blocks: Sequence[BlockTrace], shell: ShellTrace, *, accumulates: bool) -> int:
    """The highest of all events. See NOTE [ Events of a step ]."""
    stays = resident.model_bytes + resident.batch_bytes
    floor = stays + resident.shared_bytes + (resident.gradient_bytes if accumulates else 0)
    saved = np.cumsum([0, *(block.saved_bytes for block in blocks)])
    own = np.array([0 if accumulates else block.gradient_bytes for block in blocks], dtype=np.int64)
    head = 0 if accumulates else shell.gradient_bytes
    later = head + own[::-1].cumsum()[::-1] - own
    forward = saved[:-1] + [block.forward_peak_bytes for block in blocks]
    backward = saved[1:] + later + [block.backward_peak_bytes for block in blocks]
    loss = saved[-1] + shell.before_blocks_peak_bytes
    embedding = int(own.sum()) + shell.after_blocks_peak_bytes
    return max(floor + int(max(loss, embedding, *forward, *backward)), stays + resident.gradient_bytes)


def step_seconds(resident: Resident, blocks: Sequence[BlockTrace], shell: ShellTrace, *, micro_batches: float) -> float:
    """Seconds of the whole step; micro_batches may be fractional when the last one is short."""
    one = shell.seconds + sum(block.forward_seconds + block.backward_seconds for block in blocks)
    return micro_batches * one + resident.optimizer_seconds
