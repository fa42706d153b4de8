"""torch.compile with an activation memory budget: model and loss as one graph, or each block by itself."""

from __future__ import annotations

import torch
import torch._functorch.config

from contest.setting import Case, Step, WithLoss, loop


def whole(case: Case, *, budget: float) -> Step:
    torch._functorch.config.activation_memory_budget = budget
    model = WithLoss(case.new_model())
    return loop(case, torch.compile(model), model.parameters())


def blocks(case: Case, *, budget: float) -> Step:
    torch._functorch.config.activation_memory_budget = budget
    model = case.new_model()
    for block in model.blocks:
        block.compile()
    return loop(case, WithLoss(model), model.parameters())
