"""Windows as a pipeline takes them: micro batches of one shape, as many as its schedule wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from trainfit.errors import DataError
from trainfit.workload.batch import IGNORED_LABEL, MicroBatch


def even_window(batches: Sequence[MicroBatch], fits: Callable[[int], bool]) -> list[MicroBatch]:
    """The window padded with tokens, rows and micro batches whose labels are ignored.

    Stages know what they will receive before it comes, and the last window of an epoch may be too short to fill them.
    fits: whether the schedule takes so many micro batches. Raises DataError for uneven batches that are not (batch,
    sequence).
    """
    number = len(batches)
    while not fits(number):
        number += 1
    shapes = {batch.inputs.shape for batch in batches}
    if number == len(batches) and len(shapes) == 1:
        return list(batches)
    if any(batch.inputs.shape != batch.labels.shape or batch.inputs.dim() != 2 for batch in batches):
        raise DataError(
            f"a window of {len(batches)} micro batches of {len(shapes)} shapes cannot be padded for the pipeline: they "
            f"are not (batch, sequence); give {number} micro batches of one shape"
        )
    rows, tokens = (max(shape[dim] for shape in shapes) for dim in (0, 1))
    even = [_padded(batch, rows, tokens) for batch in batches]
    empty = MicroBatch(even[0].inputs, torch.full_like(even[0].labels, IGNORED_LABEL), 0)
    return even + [empty] * (number - len(batches))


def _padded(batch: MicroBatch, rows: int, tokens: int) -> MicroBatch:
    more = (0, tokens - batch.inputs.shape[1], 0, rows - batch.inputs.shape[0])
    if not any(more):
        return batch
    return MicroBatch(F.pad(batch.inputs, more), F.pad(batch.labels, more, value=IGNORED_LABEL), batch.num_tokens)
