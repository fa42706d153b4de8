"""Compute dtype: parameters, gradients and optimizer states stay fp32, matmuls run in bf16 or fp16 under autocast.

The autocast weight cache is off: it would hold a low-precision copy of every weight until the micro batch's forward
has ended, which is what activation tiers set out to save. Without it a weight is cast where it is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import ClassVar

from trainfit.profile import Precision
from trainfit.techniques.base import Asked, Build, Draft, Stage


class MixedPrecision:
    """Autocast around forward and loss."""

    stage: ClassVar[Stage] = Stage.STEP
    setting: ClassVar[str] = "precision"

    def choices(self, so_far: Draft, asked: Asked) -> Iterable[Precision]:
        wanted: Precision = asked.settings["precision"]
        yield wanted
        if "precision" in asked.may_change and wanted == "fp32" and asked.hardware.supports("bf16"):
            yield "bf16"

    def apply(self, build: Build, setting: Precision) -> None:
        """Raises DeviceError for a precision that the device lacks."""
        build.accelerator.require(setting)
        if setting == "fp32":
            return
        build.autocast = partial(build.accelerator.autocast, setting)
