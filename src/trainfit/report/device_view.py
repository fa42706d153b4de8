"""Devices as a table: what is known of each, and how surely."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from trainfit.hardware import DeviceSpec, Figure
from trainfit.profile import PRECISIONS
from trainfit.report.pieces import table
from trainfit.units import format_bytes

_RANK = ("high", "medium", "low")
_STYLE = {"high": "green", "medium": "yellow", "low": "red"}


def devices_table(devices: Iterable[tuple[str, DeviceSpec]]) -> Table:
    """One row for each (name to use, spec). The last column is the least sure figure of the row."""
    made = table("device", "memory", "usable", *PRECISIONS, "GB/s", "confidence", title="Devices (dense TFLOP/s)")
    for name, spec in devices:
        rates = [f"{spec.tflops[p].value:.4g}" if p in spec.tflops else "-" for p in PRECISIONS]
        confidence = least_sure(spec)
        made.add_row(
            name,
            format_bytes(spec.memory_bytes.value),
            format_bytes(spec.usable_bytes),
            *rates,
            f"{spec.memory_bandwidth.value / 1e9:.4g}",
            Text(confidence, style=_STYLE[confidence]),
        )
    return made


def least_sure(spec: DeviceSpec) -> str:
    """The lowest confidence among memory, arithmetic and memory bandwidth, which decide most of a plan."""
    figures: list[Figure] = [spec.memory_bytes, spec.memory_bandwidth, *spec.tflops.values()]
    return max((figure.confidence for figure in figures), key=_RANK.index)
