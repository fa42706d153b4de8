"""ckptplan: profiles blocks, picks which to checkpoint for a share of their activations, and runs them as a chain."""

from __future__ import annotations

import dataclasses

import ckptplan
import torch
from torch import Tensor, nn

from contest.setting import Case, Step, WithLoss, loop
from heap import Heap
from reference_model import ReferenceModel


class _Chained(nn.Module):
    """A block of one argument: ckptplan hands each one's output to the next, so the tables are kept apart."""

    def __init__(self, block: nn.Module, cos: Tensor, sin: Tensor) -> None:
        super().__init__()
        self.block = block
        self.__dict__["tables"] = (cos, sin)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.block(hidden, *self.tables)
        return out


class _Planned(nn.Module):
    def __init__(self, model: ReferenceModel, chain: nn.Module) -> None:
        super().__init__()
        self.embedding, self.chain, self.norm, self.head = model.embedding, chain, model.norm, model.head

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.chain(self.embedding(ids))))
        return logits


def saving(case: Case, *, share: float) -> Step:
    """share: of all blocks' activations that is to be saved."""
    model, config = case.new_model(), case.config
    chained = [_Chained(block, model.cos, model.sin) for block in model.blocks]
    blocks = ckptplan.declare_blocks(nn.ModuleList(chained), [(f"block{i}", each) for i, each in enumerate(chained)])
    example = torch.randn(config.batch_size, config.seq_len, config.dim, requires_grad=True)
    with case.autocast():
        found = ckptplan.profile_blocks(
            blocks, (example,), device="cpu", dtype=torch.float32, num_warmup=1, num_trials=2
        )
        saved = _saved_bytes(chained[0], example)
        # On a CPU it knows seconds alone and plans nothing, so it is told the bytes, as its user would have to.
        known = {"timing_only": False, "activation_bytes_method": "isolated_forward_delta"}
        profiles = [dataclasses.replace(each, activation_bytes_estimate=saved, **known) for each in found]
        plan = ckptplan.plan_checkpoints(profiles, blocks, target_kind="activation_saving_fraction", target_value=share)
        chain = ckptplan.apply_plan(blocks, plan, (example,), None)
    return loop(case, WithLoss(_Planned(model, chain)), model.parameters())


def _saved_bytes(block: nn.Module, example: Tensor) -> int:
    heap = Heap("python benchmarks/frontier.py")
    before = heap.live()
    output = block(example)
    saved = heap.live() - before
    del output
    return saved
