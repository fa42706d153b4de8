"""Tables of predicted against measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from published.predict import CONTEXT, Prediction
from published.records import Record

MEDIAN, TAIL, TAIL_SHARE, FIT_SHARE = 0.05, 0.12, 0.90, 0.95
TARGETS = (
    f"targets: median error at most {MEDIAN:.0%}, {TAIL_SHARE:.0%} of peaks within {TAIL:.0%}, "
    f"{FIT_SHARE:.0%} of labels fits / does not fit right"
)


@dataclass(frozen=True)
class Row:
    """A record and what was predicted of it."""

    record: Record
    prediction: Prediction

    @property
    def has_peak(self) -> bool:
        return self.record.peak_bytes > 0

    @property
    def has_label(self) -> bool:
        """Whether it fitted is known."""
        return self.record.fits is not None

    @property
    def error(self) -> float:
        """Relative; infinite where nothing could be predicted."""
        if not self.prediction.modelled:
            return math.inf
        return self.prediction.peak_bytes / self.record.peak_bytes - 1

    @property
    def label_is_right(self) -> bool:
        return self.prediction.modelled and self.prediction.fits == self.record.fits


@dataclass(frozen=True)
class Summary:
    """Of some rows: errors, signed and sorted by size; labels right and in all."""

    errors: tuple[float, ...]
    labels_right: int
    labels: int

    @property
    def median(self) -> float:
        return statistics.median(map(abs, self.errors)) if self.errors else 0.0

    @property
    def within(self) -> int:
        return sum(abs(error) <= TAIL for error in self.errors)

    @property
    def worst(self) -> float:
        return max(self.errors, key=abs, default=0.0)


def summary(rows: Sequence[Row]) -> Summary:
    """Over all of them."""
    labelled = [row for row in rows if row.has_label]
    return Summary(
        tuple(row.error for row in rows if row.has_peak), sum(row.label_is_right for row in labelled), len(labelled)
    )


def targets_met(rows: Sequence[Row]) -> bool:
    """All three."""
    total = summary(rows)
    return (
        total.median <= MEDIAN
        and total.within >= TAIL_SHARE * len(total.errors)
        and total.labels_right >= FIT_SHARE * total.labels
    )


def source_table(rows: Sequence[Row]) -> Table:
    """A line for each source, and one for all."""
    table = Table("source", title="predicted against measured peaks, by source")
    for name in ("records", "peaks", "median |error|", "mean error", "within 12 %", "worst", "fits right"):
        table.add_column(name, justify="right")
    for group in sorted({row.record.group for row in rows}):
        table.add_row(group, *_cells([row for row in rows if row.record.group == group]))
    table.add_section()
    table.add_row("all", *_cells(rows))
    return table


def _cells(rows: Sequence[Row]) -> list[str]:
    total = summary(rows)
    finite = [error for error in total.errors if math.isfinite(error)]
    mean = f"{statistics.mean(finite):+.1%}" if finite else "-"
    return [
        str(len(rows)),
        str(len(total.errors)),
        f"{total.median:.1%}" if total.errors else "-",
        mean,
        f"{total.within}/{len(total.errors)}" if total.errors else "-",
        f"{total.worst:+.1%}" if total.errors else "-",
        f"{total.labels_right}/{total.labels}" if total.labels else "-",
    ]


def rows_table(rows: Sequence[Row]) -> Table:
    """A line for each record."""
    table = Table("record", "metric")
    for name in ("measured GiB", "predicted GiB", "error", "allocated GiB", "reserved GiB"):
        table.add_column(name, justify="right")
    table.add_column("fits: measured / predicted")
    table.add_column("at the peak")
    for row in rows:
        table.add_row(*_row_cells(row))
    return table


def _row_cells(row: Row) -> list[str]:
    record, prediction = row.record, row.prediction
    seen = prediction.rehearsed
    if seen is None:
        return [record.id, record.metric, _gib(record.peak_bytes), "-", "miss", "-", "-", prediction.error]
    return [
        record.id,
        record.metric,
        _gib(record.peak_bytes),
        _gib(prediction.peak_bytes),
        f"{row.error:+.1%}" if row.has_peak else "",
        _gib(seen.peak_bytes),
        _gib(seen.reserved_bytes),
        f"{_word(record.fits)} / {_word(prediction.fits)}",
        seen.place,
    ]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}" if num_bytes else ""


def _word(fits: bool | None) -> str:
    return "?" if fits is None else "yes" if fits else "no"


def rows_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Keys: id, source, metric, measured_bytes, predicted_bytes, error, fits, predicted_fits, reason."""
    return [
        {
            "id": row.record.id,
            "source": row.record.source,
            "metric": row.record.metric,
            "measured_bytes": row.record.peak_bytes or None,
            "predicted_bytes": row.prediction.peak_bytes if row.prediction.modelled else None,
            "error": row.error if row.has_peak and row.prediction.modelled else None,
            "fits": row.record.fits,
            "predicted_fits": row.prediction.fits,
            "reason": row.prediction.error,
        }
        for row in rows
    ]


def constants_table() -> Table:
    """What no rehearsal shows."""
    table = Table("constant", "MiB", "how it was got", title="constants, CUDA")
    for name, (num_bytes, source) in CONTEXT.items():
        table.add_row(name, f"{num_bytes / 2**20:.0f}", source)
    return table
