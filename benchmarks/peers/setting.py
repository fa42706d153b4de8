"""What is the same for all runs that are compared: sizes, data, weights, optimizer, and what a variant is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from reference_model import ReferenceConfig, ReferenceModel

CONFIG = ReferenceConfig()
LEARNING_RATE, BETAS, EPS = 1e-3, (0.9, 0.95), 1e-8
Step = Callable[[], Tensor]  # one optimizer step -> this rank's loss, or that of all ranks


@dataclass(frozen=True)
class Setting:
    """One run: what is sharded, micro batches in a step, and whether every block is checkpointed."""

    stage: int
    accumulation: int = 1
    checkpoint: bool = False


@dataclass
class Variant:
    """One way to do a setting's run.

    group: "trainfit", "deepspeed", "other", or "beside" for what is shown and bounds nothing; memory is bounded by
        DeepSpeed's, time by DeepSpeed's and the others'.
    seconds, cpu_seconds: of each round's step on the clock, and of the process's threads.
    base, peak: bytes live between steps above what was live before it was built, and the most in a step above that.
    """

    group: str
    name: str
    build: Callable[[], Step]
    step: Step | None = None
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    base: int = 0
    peak: int = 0
    loss: float = 0.0


def new_model() -> ReferenceModel:
    torch.manual_seed(0)
    return ReferenceModel(CONFIG)


def local_tokens() -> tuple[Tensor, Tensor]:
    """This rank's rows of the batch: ids and labels, each (batch / ranks, seq)."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(CONFIG.vocab_size, (CONFIG.batch_size, CONFIG.seq_len + 1), generator=generator)
    mine = ids.chunk(dist.get_world_size())[dist.get_rank()]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


class WithLoss(nn.Module):
    """Model and mean token loss as one module, as peers take it."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.model = new_model()
        if setting.checkpoint:
            for block in self.model.blocks:
                block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(ids).flatten(0, 1), labels.flatten())
