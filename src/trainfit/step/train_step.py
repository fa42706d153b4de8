"""TrainStep: one optimizer step over a window of micro batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainfit.errors import DataError
from trainfit.hardware import Ranks
from trainfit.profile import Phase
from trainfit.step.gradient_norm import clip_gradients
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
    gradient_norm: unscaled and before clipping; None where nothing is clipped.
    skipped: a gradient was not finite on some rank, so the optimizer was not stepped; only with loss scaling.
    loss_scale: that of this step; None without.
    """

    loss: Tensor
    num_tokens: int
    gradient_norm: Tensor | None
    skipped: bool = False
    loss_scale: float | None = None


class TrainStep:
    """Micro batches, forward, backward, unscale, clip, update or skip.

    The loss of every micro batch is divided by the valid tokens of the whole window, so that gradients equal those of
    one big batch for windows of any length and rows of any length.
    """

    def __init__(self, build: Build, strategy: Strategy, *, max_grad_norm: float | None) -> None:
        assert build.optimizer is not None
        self.model: nn.Module = build.model
        self.optimizer: Optimizer = build.optimizer
        self.strategy = strategy
        self.anatomy: Anatomy = build.anatomy
        self.num_parameters = (build.whole or build.anatomy).num_parameters  # of all pipeline stages
        self.notes: tuple[str, ...] = tuple(build.notes)
        self.max_grad_norm = max_grad_norm
        self.observer: Observer = ignore_phase
        self.accelerator = build.accelerator
        self._device = build.accelerator.device
        self._autocast = build.autocast
        self.root: nn.Module = build.root or build.model  # what is sharded as one; its modules are all that are
        self._compute_loss = build.root or build.forward
        self._evaluate = build.evaluate
        self._run_window = build.run_window  # no bound method: a step must die with its last reference
        self._sync = build.sync
        self.scaling = build.scaling
        self.tier_switch = build.tier_switch
        self.compiled = build.compiled
        self.ranks: Ranks = build.ranks
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        elsewhere = {id(p) for name, p in self.model.named_parameters() if name in build.counted_elsewhere}
        self._counted = [p for p in self._parameters if id(p) not in elsewhere]

    def __call__(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """One optimizer step. Raises DataError if no label in the window is valid."""
        try:
            scale = None if self.scaling is None else self.scaling.scale
            loss, num_tokens = self._scaled_gradients(micro_batches)
            self._observe("optimizer")
            if self.scaling is not None:
                self.scaling.unscale(self.optimizer)
            norm = None
            if self.max_grad_norm is not None:
                norm = clip_gradients(self._parameters, self.max_grad_norm, self.ranks, counted=self._counted)
            skipped = self._update()
        except BaseException:
            # Half a window (out of memory, an interrupt) must not be added to the next one.
            self._sync.abandon()
            self.optimizer.zero_grad(set_to_none=True)
            raise
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, num_tokens, norm, skipped, scale)

    def accumulate(self, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, int]:
        """Gradients of the window's mean token loss, added to what parameters hold. Returns loss and valid tokens.

        The window is that of all ranks; each gives its own micro batches, as many as the others. With loss scaling
        parameters must hold none before, since the sum is unscaled.
        """
        loss, num_tokens = self._scaled_gradients(micro_batches)
        if self.scaling is not None:
            self.scaling.unscale(self.optimizer)
        return loss, num_tokens

    def _scaled_gradients(self, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, int]:
        """See NOTE [ One scale a window ] in techniques/loss_scaling.py."""
        num_tokens = self._count_tokens(micro_batches)
        scale = 1.0 if self.scaling is None else self.scaling.begin()
        run_window = self._run_window or self._one_after_another
        total = run_window(micro_batches, scale / num_tokens, self.observer)
        self._sync.finish()
        loss = self.ranks.sum(total, "replicate", "shard")
        return (loss if scale == 1.0 else loss / scale), num_tokens

    def _update(self) -> bool:
        """Step the optimizer, or skip. Whether it was skipped."""
        if self.scaling is not None:
            return self.scaling.step(self.optimizer)
        self.optimizer.step()
        return False

    def _count_tokens(self, micro_batches: Sequence[MicroBatch]) -> int:
        counts = self.ranks.everyones([sum(batch.num_tokens for batch in micro_batches), len(micro_batches)])
        lengths = [length for _, length in counts]
        if len(set(lengths)) > 1:
            other = next(rank for rank, length in enumerate(lengths) if length != lengths[0])
            raise DataError(
                f"data-parallel rank 0 has {lengths[0]} micro batches in this step, rank {other} has {lengths[other]}; "
                "give every rank as many, if need be some without a valid label"
            )
        num_tokens = sum(tokens for tokens, _ in counts)
        if num_tokens == 0:
            raise DataError(f"none of the {len(micro_batches)} micro batches has a valid label; check the data's masks")
        return num_tokens

    def _one_after_another(self, micro_batches: Sequence[MicroBatch], scale: float, observer: Observer) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        for index, batch in enumerate(micro_batches):
            self._sync.before_micro_batch(is_last=index == len(micro_batches) - 1)
            if self.tier_switch is not None:
                self.tier_switch.before(batch.labels.numel())
            with self._autocast():
                loss = self._compute_loss(batch.to(self._device), scale, observer)
            loss.backward()
            total += loss.detach()
            del loss
        return total

    @torch.no_grad()
    def evaluate(self, batch: MicroBatch) -> tuple[Tensor, int]:
        """Summed loss and valid tokens of a batch, this rank's own. Keeps no graph; dropout is off.

        With a mesh all ranks call it as often, since parameters are gathered for it.
        """
        # Module by module: a part that a user keeps in eval mode must not come back in training mode.
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with self._autocast():
                if self._evaluate is not None:
                    return self._evaluate(batch), batch.num_tokens
                return self._compute_loss(batch.to(self._device), 1.0, ignore_phase), batch.num_tokens
        finally:
            for module, training in modes:
                module.training = training

    def _observe(self, phase: Phase) -> None:
        self.observer(phase)
