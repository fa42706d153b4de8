"""torchtitan's own classes for activation checkpointing."""

from __future__ import annotations

import torch
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from contest.setting import Case, Step, WithLoss, loop


class _WithCpuAttention(SelectiveAC):
    """Its list names the attention kernels of GPUs; this one has the CPU's too."""

    def get_save_ops(self) -> set[object]:
        return super().get_save_ops() | {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}


_POLICIES = {"full": FullAC, "selective": SelectiveAC, "selective_cpu_attention": _WithCpuAttention}


def policy(case: Case, *, name: str) -> Step:
    model, kind = case.new_model(), _POLICIES[name]
    model.layers = model.blocks  # the name that torchtitan looks for; wrapped in place
    kind(kind.Config()).apply(model)
    del model.layers
    return loop(case, WithLoss(model), model.parameters())
