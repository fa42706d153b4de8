"""Whether a model's attention holds all its scores, and blockwise attention could be put in its place."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.errors import ModelError, RecipeError
from trainfit.hardware import Hardware
from trainfit.hardware.runtime import rehearsed
from trainfit.rehearsal.rehearse import fake_tensors, model_errors, new_tracker
from trainfit.rehearsal.shorten import shortened
from trainfit.step import prepare
from trainfit.techniques.attention import AttentionKind
from trainfit.techniques.base import Build
from trainfit.workload import Workload, run_model

_SOFTMAX = frozenset({torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default})


def attention_holds_scores(workload: Workload, hardware: Hardware) -> bool:
    """Whether a softmax over (queries, keys) runs in its forward on such a device, and does not with blockwise.

    One block of each structure runs, on fake tensors, at the workload's sequence length. False where the model cannot:
    what the matter is shows when the step is rehearsed. False too where its attention is none that blockwise can be put
    in place of.
    """
    key = "attention holds scores", workload.seq_len, hardware.spec.kind
    if key not in workload.memo:
        workload.memo[key] = _look(workload, hardware)
    return bool(workload.memo[key])


def _look(workload: Workload, hardware: Hardware) -> bool:
    structures = workload.anatomy().structures
    first = sorted({structure: at for at, structure in reversed(list(enumerate(structures)))}.values())
    short = (shortened(workload, first) if first else None) or workload
    with fake_tensors():
        try:
            with model_errors():
                build = prepare(short, rehearsed(hardware.spec.kind))
                holds = _makes_scores(build, hardware)
            if not holds:
                return False
            # The model has run, so what else fails from here on is a bug of ours.
            AttentionKind().apply(build, "blockwise")
            return not _makes_scores(build, hardware)
        except (ModelError, RecipeError):
            return False


def _makes_scores(build: Build, hardware: Hardware) -> bool:
    ids = torch.zeros(1, build.workload.seq_len, dtype=torch.long)
    watch = _Scores(build.workload.seq_len)
    with ExitStack() as stack:
        stack.enter_context(new_tracker(hardware))  # it has the device's functions, see FUSED
        stack.enter_context(watch)
        run_model(build.model, ids)
    return watch.found


class _Scores(TorchDispatchMode):
    """Sees whether a softmax has a row for each query over as many keys."""

    def __init__(self, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length, self.found = length, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _SOFTMAX:
            scores: Tensor = args[0]
            self.found |= scores.dim() > 2 and min(scores.shape[-2:]) >= self.length > 1
        return func(*args, **(kwargs or {}))
