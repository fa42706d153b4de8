"""What PyTorch offers by itself: checkpointing, selective checkpointing, save_on_cpu, small micro batches."""

from __future__ import annotations

from functools import partial

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from contest.setting import Case, Step, WithLoss, loop, wrap_blocks

_ATEN = torch.ops.aten
_ATTENTION = (
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
)
_MATMULS = (_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default)


def plain(case: Case, *, fused: bool = True, micro_batches: int = 1) -> Step:
    model = WithLoss(case.new_model())
    return loop(case, model, model.parameters(), fused=fused, micro_batches=micro_batches)


def every(case: Case, *, k: int) -> Step:
    """Checkpoint the first of every k blocks; k = 1 is all."""
    model = case.new_model()
    wrap_blocks(model, partial(checkpoint, use_reentrant=False), every=k)
    return loop(case, WithLoss(model), model.parameters())


def selective(case: Case, *, matmuls: bool) -> Step:
    """Checkpoint every block, but save what attention gives, and what matmuls do."""
    saved = {*_ATTENTION, *(_MATMULS if matmuls else ())}

    def policy(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    model = case.new_model()
    contexts = partial(create_selective_checkpoint_contexts, policy)
    wrap_blocks(model, partial(checkpoint, use_reentrant=False, context_fn=contexts))
    return loop(case, WithLoss(model), model.parameters())


def on_host(case: Case, *, checkpointed: bool) -> Step:
    """save_on_cpu around all, or around checkpointed blocks, so that it moves their inputs."""
    model = case.new_model()
    if checkpointed:
        wrap_blocks(model, partial(checkpoint, use_reentrant=False))
    pin = case.device != "cpu"
    return loop(case, WithLoss(model), model.parameters(), around=partial(save_on_cpu, pin_memory=pin))
