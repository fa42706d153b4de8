"""How sure a predicted time is.

NOTE [ The range of a step's time ]
Every second of a step is bound by one of the device's figures: arithmetic, memory, launches, links. A figure that is
off makes all its seconds too long or too short together; two figures are off independently. So a step's time is
uncertain by the root of the sum over figures of (its seconds x its error)**2. Errors by confidence are CONFIDENCE; of
a figure that is the product of two, both count. What was measured here is off by the spread of its rounds, and by
CALIBRATED for what tables do not know: sizes between those timed, and caches as another operator left them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from trainfit.hardware import DeviceSpec, Figure
from trainfit.hardware.device import Confidence
from trainfit.profile import Precision, Profile
from trainfit.rehearsal.operator_cost import Bound
from trainfit.rehearsal.timeline import Tally

CONFIDENCE: Mapping[Confidence, float] = {"high": 0.05, "medium": 0.15, "low": 0.30}
CALIBRATED = 0.05


def errors_of(spec: DeviceSpec, precision: Precision) -> dict[Bound, float]:
    """The relative error of everything that binds, see NOTE [ The range of a step's time ]."""
    reached = [spec.tflops.get(precision), spec.efficiency]
    calibration = spec.calibration
    return {
        "arithmetic": _both(*reached),
        "attention": _both(*reached, spec.attention_forward, spec.attention_backward),
        "memory": _both(spec.memory_bandwidth, spec.memory_efficiency),
        "launch": _both(spec.launch_seconds),
        "link": _both(spec.link_bandwidth),
        "network": _both(spec.network_bandwidth),
        "host": _both(spec.host_bandwidth),
        "calibration": math.hypot(calibration.spread, CALIBRATED) if calibration else 0.0,
    }


def _both(*figures: Figure | None) -> float:
    return math.hypot(*(CONFIDENCE[figure.confidence] for figure in figures if figure is not None))


def half_width(seconds: Mapping[Bound, float], errors: Mapping[Bound, float]) -> float:
    """Seconds by which the sum of all may be off."""
    return math.hypot(*(each * errors[bound] for bound, each in seconds.items()))


def with_certainty(profile: Profile, total: Tally, spec: DeviceSpec, precision: Precision, *, tokens: int) -> Profile:
    """The profile with the range of its time, what the model asks for, and the device's peak."""
    seconds = profile.step_seconds
    wide = half_width(total.by_bound, errors_of(spec, precision))
    peak = spec.tflops.get(precision)
    return replace(
        profile,
        # An error of more than all of it makes it twice as long or half as long.
        step_seconds_low=max(seconds - wide, seconds / 2),
        step_seconds_high=seconds + wide,
        tokens=tokens,
        model_flops=total.model_flops,
        peak_flops_per_second=peak.value * 1e12 if peak else 0.0,
    )
