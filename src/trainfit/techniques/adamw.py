"""AdamW with its states built up front, so that the first step needs no more memory than the second."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from trainfit.profile import OptimizerVariant
from trainfit.techniques.base import Build, Stage
from trainfit.workload import AdamWSettings


class AdamWOptimizer:
    """Fused AdamW over the parameters that train: no temporaries, one pass over memory."""

    stage: ClassVar[Stage] = Stage.OPTIMIZER
    setting: ClassVar[str] = "optimizer"

    def apply(self, build: Build, setting: OptimizerVariant) -> None:
        build.optimizer = make_adamw(build.model.named_parameters(), build.workload.optimizer)


def make_adamw(named_parameters: Iterable[tuple[str, nn.Parameter]], settings: AdamWSettings) -> AdamW:
    """Fused AdamW; matrices decay, vectors (norms, biases) do not. States exist from the start."""
    trainable = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    groups: dict[Any, dict[str, Any]] = {}
    for parameter in trainable:
        decays = parameter.dim() >= 2
        # One fused update takes tensors of one mesh, or plain ones.
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        group = groups.setdefault(
            (not decays, mesh), {"params": [], "weight_decay": settings.weight_decay if decays else 0.0}
        )
        group["params"].append(parameter)
    optimizer = AdamW(
        [groups[key] for key in sorted(groups, key=lambda key: key[0])],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )
    for parameter in trainable:
        optimizer.state[parameter] = _first_state(parameter)
    return optimizer


def _first_state(parameter: nn.Parameter) -> dict[str, Any]:
    """What AdamW itself would set up in its first step."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }
