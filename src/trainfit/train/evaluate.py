"""Held-out loss, folded batch by batch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from trainfit.train.packing import Indices, PackedTokens
from trainfit.workload.batch import MicroBatch


def held_out_loss(
    evaluate: Callable[[MicroBatch], tuple[Tensor, int]], data: PackedTokens, indices: Indices, batch_size: int
) -> float:
    """Mean loss (nats per token) over the sequences at indices, batch_size at a time.

    evaluate gives the summed loss and valid tokens of a batch (TrainStep.evaluate). Each batch becomes two numbers
    before the next is made, so live memory does not grow with the number of batches.
    """
    total, num_tokens = 0.0, 0
    for start in range(0, len(indices), batch_size):
        loss, count = evaluate(data.rows(indices[start : start + batch_size]))
        total += float(loss)
        num_tokens += count
    return total / num_tokens
