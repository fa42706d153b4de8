"""compare: what was predicted against what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from trainfit.profile import PHASES, Collective, Phase, Profile
from trainfit.report.pieces import percent, table
from trainfit.units import format_bytes, format_seconds

GOOD_ERROR = 0.01


@dataclass(frozen=True)
class Comparison:
    """Two profiles of the same step. Errors are predicted / measured - 1: above zero, the prediction was too high.

    relative_error: of the peak. phase_errors: of the highest bytes of each phase that both have.
    step_seconds_error: of the step's time; None where one of the two has no time.
    """

    predicted: Profile
    measured: Profile
    relative_error: float
    phase_errors: Mapping[Phase, float]
    step_seconds_error: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain dict with the documented keys of `measure --json`."""
        return {
            "predicted": self.predicted.to_json(),
            "measured": self.measured.to_json(),
            "relative_error": self.relative_error,
            "phase_errors": dict(self.phase_errors),
            "step_seconds_error": self.step_seconds_error,
        }


def compare(predicted: Profile, measured: Profile) -> Comparison:
    """The errors of a prediction."""
    phases = [phase for phase in PHASES if predicted.phases.get(phase) and measured.phases.get(phase)]
    return Comparison(
        predicted,
        measured,
        relative_error=predicted.peak_bytes / measured.peak_bytes - 1,
        phase_errors={phase: predicted.phases[phase] / measured.phases[phase] - 1 for phase in phases},
        step_seconds_error=_ratio_error(predicted.step_seconds, measured.step_seconds),
    )


def _ratio_error(predicted: float, measured: float) -> float | None:
    return predicted / measured - 1 if predicted and measured else None


def comparison_rows(comparison: Comparison) -> Iterator[tuple[str, str, str, str | Text]]:
    """Peak, phases, resident bytes and step time: name, predicted, measured, error."""
    predicted, measured = comparison.predicted, comparison.measured
    yield "peak memory", *_bytes_row(predicted.peak_bytes, measured.peak_bytes)
    for phase in comparison.phase_errors:
        yield f"  {phase}", *_bytes_row(predicted.phases[phase], measured.phases[phase])
    yield "between steps", *_bytes_row(predicted.resident_bytes, measured.resident_bytes)
    for kind in sorted(predicted.collectives.keys() | measured.collectives.keys()):
        yield kind, _payload(predicted.collectives.get(kind)), _payload(measured.collectives.get(kind)), ""
    if comparison.step_seconds_error is not None:
        seconds = (format_seconds(predicted.step_seconds), format_seconds(measured.step_seconds))
        # A roofline's seconds are off by a factor, not by some percent: say which.
        yield "step time", *seconds, f"{measured.step_seconds / predicted.step_seconds:.2f} x"


def comparison_view(comparison: Comparison) -> RenderableType:
    """The rows, and where the peaks fall."""
    predicted, measured = comparison.predicted, comparison.measured
    made = table("", "predicted", "measured", "error")
    for number, row in enumerate(comparison_rows(comparison)):
        made.add_row(*row, style=None if number else "bold")
    peaks = f"The peak falls in {predicted.peak_phase} as predicted and in {measured.peak_phase} as measured."
    return Group(made, Text(peaks, style="dim"))


def _payload(collective: Collective | None) -> str:
    return "-" if collective is None else f"{collective.count} x, {format_bytes(collective.bytes)}"


def _bytes_row(predicted: int, measured: int) -> tuple[str, str, Text]:
    if measured <= 0:
        return format_bytes(predicted), format_bytes(measured), Text("")
    error = predicted / measured - 1
    style = "green" if abs(error) <= GOOD_ERROR else "red"
    return format_bytes(predicted), format_bytes(measured), Text(percent(error), style=style)
