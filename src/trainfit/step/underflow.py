"""count_underflow: what fp16 loses of a window's gradients, with a scale for each block and with one for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainfit.hardware.ranks import local_part
from trainfit.step.left_alone import left_alone
from trainfit.step.train_step import TrainStep
from trainfit.techniques.block_scales import BlockScaling
from trainfit.workload.batch import MicroBatch


@dataclass(frozen=True)
class Underflow:
    """Shares of zeros among the gradient elements of the blocks' matrices.

    with_blocks: with a scale for each block. with_one: with the smallest of these for all, at which every block has the
    headroom that its own scale leaves it.
    """

    with_blocks: float
    with_one: float


def count_underflow(step: TrainStep, micro_batches: Sequence[MicroBatch]) -> Underflow | None:
    """Run a window forward and backward twice; None where blocks have no scales of their own. Nothing is updated.

    Weights, buffers and random numbers are after it what they were; with a mesh all ranks call it.
    """
    if not isinstance(step.scaling, BlockScaling):
        return None
    shares = []
    for scales in (step.scaling.book.scales, [min(step.scaling.book.scales)] * len(step.scaling.book.scales)):
        with left_alone(step), step.scaling.other_scales(scales):
            shares.append(_share_of_zeros(step, micro_batches))
    return Underflow(*shares)


def _share_of_zeros(step: TrainStep, micro_batches: Sequence[MicroBatch]) -> float:
    try:
        step._scaled_gradients(micro_batches)
        blocks = [step.model.get_submodule(name) for name in step.anatomy.blocks]
        matrices = [p.grad for block in blocks for p in block.parameters() if p.dim() >= 2 and p.grad is not None]
        nothing = torch.zeros(2, dtype=torch.long, device=step.accelerator.device)
        counts = torch.stack([nothing, *(_zeros(local_part(gradient)) for gradient in matrices)]).sum(0)
    except BaseException:
        step._sync.abandon()
        raise
    zeros, elements = step.ranks.sum(counts, "replicate", "shard").tolist()
    return zeros / elements if elements else 0.0


def _zeros(gradient: Tensor) -> Tensor:
    elements = gradient.numel()
    return torch.stack([elements - torch.count_nonzero(gradient), torch.tensor(elements, device=gradient.device)])
