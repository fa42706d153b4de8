"""The fast model: peak and seconds of any strategy, from traces. Numbers in, numbers out; no torch.

NOTE [ Events of a step ]
The peak is a maximum over moments, not a sum. With R what stays (parameters, states, batches), G the gradients that earlier
micro batches left (none in a step of one), S_i what block i saves, in the order of time:
    forward of block i    R + G + S_1 + ... + S_i-1 + (its forward peak)
    loss                  R + G + S_1 + ... + S_n + (its peak)
    backward of block i   R + G + S_1 + ... + S_i + (gradients left by head and later blocks) + (its backward peak)
    optimizer             R + all gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainfit.profile import BlockTrace


@dataclass(frozen=True)
class Resident:
    """Bytes that stay: parameters and states, token ids of the window, all gradients; seconds of the optimizer."""

    model_bytes: int
    batch_bytes: int
    gradient_bytes: int
    optimizer_seconds: float


def peak_bytes(resident: Resident, blocks: Sequence[BlockTrace], loss: BlockTrace, *, accumulates: bool) -> int:
    """The highest of all events. See NOTE [ Events of a step ]."""
    floor = resident.model_bytes + resident.batch_bytes + (resident.gradient_bytes if accumulates else 0)
    saved = np.cumsum([0, *(block.saved_bytes for block in blocks)])
    own = np.array([block.gradient_bytes for block in blocks], dtype=np.int64)
    later = loss.gradient_bytes + own[::-1].cumsum()[::-1] - own
    if accumulates:
        later = np.zeros_like(later)
    forward = saved[:-1] + [block.forward_peak_bytes for block in blocks]
    backward = saved[1:] + later + [block.backward_peak_bytes for block in blocks]
    moments = [saved[-1] + loss.backward_peak_bytes, *forward, *backward]
    optimizer = resident.model_bytes + resident.batch_bytes + resident.gradient_bytes
    return max(floor + int(max(moments)), optimizer)


def step_seconds(
    resident: Resident,
    blocks: Sequence[BlockTrace],
    loss: BlockTrace,
    outside_seconds: float,
    *,
    micro_batches: float,
) -> float:
    """Seconds of the whole step; micro_batches may be fractional when the last one is short."""
    one = sum(block.forward_seconds + block.backward_seconds for block in blocks)
    one += loss.forward_seconds + loss.backward_seconds + outside_seconds
    return micro_batches * one + resident.optimizer_seconds
