"""TrainStep: one optimizer step over a window of micro batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainfit.errors import DataError
from trainfit.profile import Phase
from trainfit.step.strategy import Strategy
from trainfit.techniques.base import Build, Observer
from trainfit.techniques.chunked_loss import ignore_phase
from trainfit.workload import Anatomy
from trainfit.workload.batch import MicroBatch


@dataclass(frozen=True)
class StepResult:
    """What a step tells. Tensors stay on the device: reading them waits for it.

    loss: mean over the valid tokens of the whole window, 0-dim, detached.
    num_tokens: valid tokens of the window.
    gradient_norm: before clipping; None where nothing is clipped.
    skipped: the optimizer was not stepped.
    """

    loss: Tensor
    num_tokens: int
    gradient_norm: Tensor | None
    skipped: bool = False


class TrainStep:
    """Micro batches, forward, backward, clip, update.

    The loss of every micro batch is divided by the valid tokens of the whole window, so that gradients equal those of
    one big batch for windows of any length and rows of any length.
    """

    def __init__(self, build: Build, strategy: Strategy, *, max_grad_norm: float | None) -> None:
        assert build.optimizer is not None
        self.model: nn.Module = build.model
        self.optimizer: Optimizer = build.optimizer
        self.strategy = strategy
        self.anatomy: Anatomy = build.anatomy
        self.notes: tuple[str, ...] = tuple(build.notes)
        self.max_grad_norm = max_grad_norm
        self.observer: Observer = ignore_phase
        self._device = build.accelerator.device
        self._autocast = build.autocast
        self._compute_loss = build.compute_loss
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

    def __call__(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """One optimizer step. Raises DataError if no label in the window is valid."""
        try:
            loss, num_tokens = self.accumulate(micro_batches)
        except BaseException:
            # Half a window (out of memory, an interrupt) must not be added to the next one.
            self.optimizer.zero_grad(set_to_none=True)
            raise
        self._observe("optimizer")
        norm = None
        if self.max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(self._parameters, self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, num_tokens, norm)

    def accumulate(self, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, int]:
        """Gradients of the window's mean token loss, added to what parameters hold. Returns loss and valid tokens."""
        num_tokens = sum(batch.num_tokens for batch in micro_batches)
        if num_tokens == 0:
            raise DataError(f"none of the {len(micro_batches)} micro batches has a valid label; check the data's masks")
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        for batch in micro_batches:
            total += self._backward(batch.to(self._device), 1.0 / num_tokens)
        return total, num_tokens

    def _backward(self, batch: MicroBatch, scale: float) -> Tensor:
        with self._autocast():
            loss = self._compute_loss(batch, scale, self.observer)
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, batch: MicroBatch) -> tuple[Tensor, int]:
        """Summed loss and valid tokens of a batch. Keeps no graph; dropout is off."""
        # Module by module: a part that a user keeps in eval mode must not come back in training mode.
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with self._autocast():
                return self._compute_loss(batch.to(self._device), 1.0, ignore_phase), batch.num_tokens
        finally:
            for module, training in modes:
                module.training = training

    def _observe(self, phase: Phase) -> None:
        self.observer(phase)
