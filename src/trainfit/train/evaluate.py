"""Held-out loss, folded batch by batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainfit.hardware import Ranks
from trainfit.train.packing import Indices, Sequences, shared_batches
from trainfit.workload.batch import MicroBatch

ONE_PROCESS = Ranks()


def held_out_loss(
    evaluate: Callable[[MicroBatch], tuple[Tensor, int]],
    data: Sequences,
    indices: Indices,
    batch_size: int,
    ranks: Ranks = ONE_PROCESS,
) -> float:
    """Mean loss (nats per token) over the sequences at indices, batch_size at a time.

    evaluate gives the summed loss and valid tokens of a batch (TrainStep.evaluate). Each batch becomes two numbers
    before the next is made, so live memory does not grow with the number of batches.
    ranks: each data-parallel rank evaluates its share, in as many batches as the others; all get the same mean.
    """
    total, num_tokens = 0.0, 0
    for batch in shared_batches(data, indices, batch_size, (ranks.data_index, ranks.mesh.data)):
        loss, count = evaluate(batch)
        total += float(loss)
        num_tokens += count
    if ranks.mesh.data > 1:
        # On the host in fp64, which not every device has: fp32 counts exactly to 16.8 million only.
        sums = torch.tensor([total, num_tokens], dtype=torch.float64)
        total, num_tokens = ranks.sum(sums, "replicate", "shard").tolist()
    return total / num_tokens
