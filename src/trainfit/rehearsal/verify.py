"""verify(): the planned step against plain training, on the same weights, data and random numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainfit.errors import RecipeError
from trainfit.hardware import Accelerator
from trainfit.profile import TIER_ACCURACY, Precision, Tier
from trainfit.rehearsal.measure import random_window
from trainfit.step import Strategy, TrainStep, build_step
from trainfit.techniques.compression import CompressionWatch, watch_compression
from trainfit.workload import IGNORED_LABEL, MicroBatch, Workload, run_model

_LOSS_ROUNDING = 1e-6  # the planned loss is a sum of micro batches in fp32, the plain one is added up in Python
# Chunking sums the same products in another order: a few units in the last place of the sum. In bf16 a unit is 2**-8 of
# a term, and plain training rounds the gradient of every logit where chunking rounds its factors.
_TOLERANCES: dict[Precision, float] = {"fp32": 1e-5, "bf16": 0.05, "fp16": 0.02}
# Of all gradients together where activations are compressed, root mean square: four times the codec's own error for
# numbers of a normal distribution (0.0017, 0.0066, 0.026). Models of 2 to 32 blocks have up to 1.7 times.
_COMPRESSED: dict[Tier, float] = {"keep_bf16": 0.0066, "keep_int8": 0.026, "keep_fp8": 0.103}
_HALF_ROUNDING = 2.0**-7  # beside that, where a backward in half precision rounds other numbers


@dataclass(frozen=True)
class CompressionReport:
    """Saved activations in fewer bits, over all steps.

    original_bytes, compressed_bytes: of what was compressed, scales included. activation_error, gradient_error: root
    mean square of what they are off by, over that of what they are; gradient_error is the worst step's, tolerated up to
    tolerance.
    """

    original_bytes: int
    compressed_bytes: int
    activation_error: float
    gradient_error: float
    tolerance: float


@dataclass(frozen=True)
class VerifyReport:
    """Largest differences between the planned step and plain training.

    loss_difference: largest |planned - plain| / |plain| over the steps.
    gradient_difference: largest over steps and parameters of max|planned - plain| / max|plain|; worst_parameter is its.
    bit_equal: every gradient had the very same bits. tolerance: what the arithmetic allows; 0 where it is the same.
    losses: (planned, plain) of each step.
    compression: what lossy tiers did; None where no block has one. What is tolerated is then its gradient_error.
    """

    loss_difference: float
    gradient_difference: float
    worst_parameter: str
    bit_equal: bool
    tolerance: float
    passed: bool
    losses: tuple[tuple[float, float], ...]
    compression: CompressionReport | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def verify(
    workload: Workload, strategy: Strategy, device: Accelerator, *, steps: int = 2, seed: int = 0
) -> VerifyReport:
    """Compare losses and gradients over some optimizer steps; weights move, so later steps compare trained ones.

    Plain training runs the same micro batches through the model's own forward, with full logits and a mean over the
    valid tokens of the window. Dropout draws the same numbers on both sides, but that of blockwise attention and of
    compiled blocks.
    Raises RecipeError where the strategy rounds weights, where it leaves no gradients to compare, and where compiled
    blocks draw.
    """
    _check_comparable(strategy)
    torch.manual_seed(seed)
    with device.device:
        model = workload.make_model()
    if strategy.compile.blocks and (drawing := _drawing(model, workload.anatomy().blocks)):
        raise RecipeError(
            f"{drawing}, and compiled blocks draw other numbers than plain training, so there is nothing to compare; "
            "set dropout to 0 in the model's config to verify the rest of the step"
        )
    step = build_step(workload, strategy, device, max_grad_norm=None, model=copy.deepcopy(model))
    # In fp16 both sides have the scale that a run begins with.
    scale = 1.0 if step.scaling is None else step.scaling.scale
    plain = _PlainStep(workload, model.train(), device, strategy.precision, scale)
    by_block = strategy.loss_scale is not None and strategy.loss_scale.per_block
    in_order = strategy.loss_chunks == 1 and strategy.attention == "model" and not strategy.compile.blocks
    is_the_same = in_order and not by_block
    tolerance = 0.0 if is_the_same else _TOLERANCES[strategy.precision]
    loss_difference = gradient_difference = 0.0
    worst, bit_equal, losses = "", True, []
    compression = _Compression(strategy)
    for index in range(steps):
        window = [batch.to(device.device) for batch in random_window(workload, strategy, seed=seed + index)]
        torch.manual_seed(seed + index)
        with compression.watching():
            planned_loss = float(step.accumulate(window)[0])
        torch.manual_seed(seed + index)
        plain_loss = plain.accumulate(window)
        losses.append((planned_loss, plain_loss))
        loss_difference = max(loss_difference, _finite(abs(planned_loss - plain_loss) / abs(plain_loss)))
        difference, name, equal = _compare(step.model, plain.model)
        bit_equal = bit_equal and equal
        if difference >= gradient_difference:
            gradient_difference, worst = difference, name
        compression.compare(step.model, plain.model)
        plain.update_like(step)
    report = compression.report(tolerance)
    passed = gradient_difference <= tolerance if report is None else report.gradient_error <= report.tolerance
    # Compression does not change forward, so neither may the losses.
    passed = passed and loss_difference <= max(tolerance, _LOSS_ROUNDING)
    return VerifyReport(
        loss_difference, gradient_difference, worst, bit_equal, tolerance, passed, tuple(losses), report
    )


class _Compression:
    """Collects what lossy tiers do to activations and gradients; nothing where a strategy has none."""

    def __init__(self, strategy: Strategy) -> None:
        self.lossy = [tier for tier in strategy.tiers if tier in TIER_ACCURACY]
        self.precision = strategy.precision
        self.watch: CompressionWatch | None = None
        self.gradient_error = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        if not self.lossy:
            yield
            return
        with watch_compression(self.watch) as self.watch:
            yield

    def compare(self, planned: nn.Module, plain: nn.Module) -> None:
        if not self.lossy:
            return
        error = size = 0.0
        for ours, theirs in zip(planned.parameters(), plain.parameters()):
            if ours.grad is not None and theirs.grad is not None:
                error += float((ours.grad.double() - theirs.grad.double()).square().sum())
                size += float(theirs.grad.double().square().sum())
        self.gradient_error = max(self.gradient_error, _finite(math.sqrt(error / size) if size else error))

    def report(self, tolerance: float) -> CompressionReport | None:
        if self.watch is None:
            return None
        allowed = tolerance + max(_COMPRESSED[tier] for tier in self.lossy)
        allowed += 0.0 if self.precision == "fp32" else _HALF_ROUNDING
        watch = self.watch
        return CompressionReport(
            watch.original_bytes, watch.compressed_bytes, watch.relative_error, self.gradient_error, allowed
        )


def _check_comparable(strategy: Strategy) -> None:
    """Raises RecipeError for what plain training has nothing equal to."""
    if strategy.frozen_weights != "fp32":
        raise RecipeError(
            f"frozen_weights {strategy.frozen_weights} rounds weights before training, plain training would not; set "
            "frozen_weights: fp32 to verify the rest of the step"
        )
    if strategy.optimizer.weights != "fp32":
        raise RecipeError(
            f"optimizer.weights {strategy.optimizer.weights} rounds weights before training, plain training would not; "
            "set optimizer.weights: fp32 to verify the rest of the step"
        )
    if strategy.optimizer.update == "backward":
        raise RecipeError(
            "optimizer.update backward drops each gradient in backward, so there are none to compare; set "
            "optimizer.update: step, whose updates are the same to the bit"
        )


def _drawing(model: nn.Module, blocks: Sequence[str]) -> str:
    """What the first module in a block with a dropout that is not 0 has, by torch's and transformers' names for it.

    "" where there is none: what is drawn outside of compiled blocks is as in plain training.
    """
    for block in blocks:
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            values = {key: value for key, value in vars(module).items() if "dropout" in key}
            if isinstance(module, nn.Dropout):
                values["p"] = module.p
            if drawn := [value for value in values.values() if isinstance(value, float) and value > 0]:
                return f"{name} has dropout {drawn[0]:g}"
    return ""


class _PlainStep:
    """A loop as one writes it by hand, with a fixed loss scale."""

    def __init__(
        self, workload: Workload, model: nn.Module, device: Accelerator, precision: Precision, scale: float
    ) -> None:
        self.workload, self.model, self.device, self.precision = workload, model, device, precision
        self.scale = scale

    def accumulate(self, window: list[MicroBatch]) -> float:
        num_tokens = sum(batch.num_tokens for batch in window)
        total = 0.0
        for batch in window:
            with self.device.autocast(self.precision):
                output = run_model(self.model, batch.inputs)
                loss = self._summed(output, batch.labels) / num_tokens
            (loss * self.scale).backward()
            total += float(loss.detach())
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / self.scale)
        return total

    def _summed(self, output: Tensor, labels: Tensor) -> Tensor:
        if self.workload.loss is not None:
            return self.workload.loss(output, labels)
        logits = output.flatten(0, -2).float()
        return F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL)

    def update_like(self, step: TrainStep) -> None:
        """Move both sides by the planned side's update, so that differences of one step do not pile up in the next."""
        step.optimizer.step()
        step.optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for ours, theirs in zip(self.model.parameters(), step.model.parameters()):
                ours.copy_(theirs)


def _finite(difference: float) -> float:
    """Not a number is as different as can be: comparing with it would let it pass."""
    return difference if math.isfinite(difference) else math.inf


def _compare(planned: nn.Module, plain: nn.Module) -> tuple[float, str, bool]:
    """Largest relative gradient difference, whose it is, and whether all bits agree."""
    largest, worst, equal = 0.0, "", True
    for (name, ours), theirs in zip(planned.named_parameters(), plain.parameters()):
        if (ours.grad is None) != (theirs.grad is None):
            return float("inf"), name, False
        if ours.grad is None or theirs.grad is None:
            continue
        equal = equal and torch.equal(ours.grad, theirs.grad)
        scale = float(theirs.grad.abs().max()) or 1.0
        difference = _finite(float((ours.grad - theirs.grad).abs().max()) / scale)
        if difference >= largest:
            largest, worst = difference, name
    return largest, worst, equal
