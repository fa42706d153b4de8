"""Figures that were measured at a start, kept for the next one: what was measured anew would make another plan.

A JSON file beside each calibration there is or could be. Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from trainfit.hardware.calibration_store import calibration_path
from trainfit.profile import Precision

FORMAT = 1


@dataclass(frozen=True)
class MeasuredFigures:
    """tflops by precision; bytes a second; seconds of a launch."""

    tflops: dict[Precision, float]
    memory_bandwidth: float
    launch_seconds: float

    @property
    def is_plausible(self) -> bool:
        figures = (*self.tflops.values(), self.memory_bandwidth, self.launch_seconds)
        return all(type(figure) is float and isfinite(figure) and figure > 0 for figure in figures)


def figures_of(
    device: str,
    num_threads: int,
    torch_version: str,
    precisions: tuple[Precision, ...],
    measure: Callable[[], MeasuredFigures],
) -> MeasuredFigures:
    """What was kept for exactly these on this processor, else what measure() gives, which is kept."""
    path = _path(device, num_threads, torch_version)
    if (kept := _read(path, precisions)) is not None:
        return kept
    figures = measure()
    passing = path.with_suffix(f".{os.getpid()}.tmp")
    with suppress(OSError):  # a home that cannot be written: each start measures
        path.parent.mkdir(parents=True, exist_ok=True)
        passing.write_text(json.dumps({"format": FORMAT, **asdict(figures)}, indent=1))
        passing.replace(path)
    return figures


def _path(device: str, num_threads: int, torch_version: str) -> Path:
    calibration = calibration_path(device, num_threads, torch_version)
    return calibration.parents[1] / "measured" / calibration.name


def _read(path: Path, precisions: tuple[Precision, ...]) -> MeasuredFigures | None:
    """None for a file that is not there or is broken."""
    try:
        data: Any = json.loads(path.read_text())
        if data.pop("format") != FORMAT:
            return None
        figures = MeasuredFigures(**data)
        return figures if figures.is_plausible and set(figures.tflops) == set(precisions) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
