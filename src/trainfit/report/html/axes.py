"""Axes: where a value stands between 0 and 1, and which values get a label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Unit = tuple[float, str]
_BYTE_UNITS: Sequence[Unit] = tuple(
    (1024.0**power, name) for power, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))
)
_TIME_UNITS: Sequence[Unit] = ((1e-6, "us"), (1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h"))
_NUM_TICKS = 5
_BY_RATIO = 6.0


@dataclass(frozen=True)
class Tick:
    """A label and where it stands, 0 to 1."""

    at: float
    label: str


@dataclass(frozen=True)
class Axis:
    """From low (0) to high (1). logarithmic: equal ratios are equally far apart; low is then above 0."""

    low: float
    high: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def bytes_axis(highest: float) -> tuple[Axis, list[Tick]]:
    """From nothing to the highest."""
    axis = Axis(0.0, highest)
    return axis, _ticks(axis, _BYTE_UNITS)


def seconds_axis(longest: float) -> tuple[Axis, list[Tick]]:
    """From nothing to the longest."""
    axis = Axis(0.0, longest)
    return axis, _ticks(axis, _TIME_UNITS)


def spread_axis(values: list[float], *, is_bytes: bool) -> tuple[Axis, list[Tick]]:
    """Around values above zero; by ratio where the largest is 6 times the smallest or more."""
    units = _BYTE_UNITS if is_bytes else _TIME_UNITS
    low, high = min(values), max(values)
    if high < _BY_RATIO * low:
        pad = max(0.18 * (high - low), 0.02 * high)
        axis = Axis(max(0.0, low - pad), high + pad)
        return axis, _ticks(axis, units)
    axis = Axis(low / 1.5, high * 1.5, logarithmic=True)
    base = 2.0 if is_bytes else 10.0
    first, last = math.ceil(math.log(axis.low, base)), math.floor(math.log(axis.high, base))
    every = -(-(last - first + 1) // _NUM_TICKS)
    values = [base**power for power in range(first, last + 1, every)]
    return axis, [Tick(axis.at(value), _label(value, _unit(value, units))) for value in values]


def _ticks(axis: Axis, units: Sequence[Unit]) -> list[Tick]:
    """About five round values, all in the unit of the highest."""
    size, _ = unit = _unit(axis.high, units)
    step = _round_step((axis.high - axis.low) / size) * size
    numbers = range(math.ceil(axis.low / step - 1e-9), math.floor(axis.high / step + 1e-9) + 1)
    return [Tick(axis.at(step * number), _label(step * number, unit)) for number in numbers]


def _unit(value: float, units: Sequence[Unit]) -> Unit:
    return next((unit for unit in reversed(units) if value >= unit[0]), units[0])


def _label(value: float, unit: Unit) -> str:
    return f"{value / unit[0]:.6g} {unit[1]}"


def _round_step(span: float) -> float:
    """1, 2 or 5 times a power of ten, so that the span has 2 to 5 of it."""
    raw = span / _NUM_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
