"""A VerifyReport: how far the planned step is from plain training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from trainfit.report.pieces import facts, table
from trainfit.units import format_bytes

if TYPE_CHECKING:
    from trainfit.rehearsal.verify import CompressionReport, VerifyReport


def verify_view(report: VerifyReport) -> RenderableType:
    """The losses of each step, the largest differences, and the verdict."""
    losses = table("step", "planned loss", "plain loss", "difference")
    for step, (planned, plain) in enumerate(report.losses, start=1):
        losses.add_row(str(step), f"{planned:.6f}", f"{plain:.6f}", f"{abs(planned - plain):.1e}")
    differences = facts(
        [
            ("loss", f"{report.loss_difference:.2e} relative"),
            ("gradient", f"{report.gradient_difference:.2e} of the largest, in {report.worst_parameter or 'none'}"),
            ("tolerance", _tolerance(report)),
            ("bits", "every gradient has the same bits" if report.bit_equal else "some gradients differ in their bits"),
        ],
        title="Largest differences",
    )
    return Group(losses, differences, *_compression(report.compression), verdict(report))


def _tolerance(report: VerifyReport) -> str:
    if report.compression is not None:
        return "that of the compressed activations below"
    return f"{report.tolerance:.0e}" if report.tolerance else "0: the arithmetic is the same"


def _compression(found: CompressionReport | None) -> list[RenderableType]:
    if found is None:
        return []
    ratio = found.original_bytes / found.compressed_bytes if found.compressed_bytes else 1.0
    rows = [
        ("bytes", f"{format_bytes(found.original_bytes)} to {format_bytes(found.compressed_bytes)}, {ratio:.2f} times"),
        ("their error", f"{found.activation_error:.2e} of their size, root mean square"),
        ("gradients'", f"{found.gradient_error:.2e} of their size, tolerated up to {found.tolerance:.2e}"),
    ]
    return [facts(rows, title="Compressed activations")]


def verdict(report: VerifyReport) -> Text:
    """One line: the same as plain training, or not."""
    if report.passed and report.compression is not None:
        words = "The planned step learns what plain training learns, but for what its compressed activations lose."
        return Text(words, style="bold green")
    if report.passed:
        return Text("The planned step learns what plain training learns.", style="bold green")
    return Text("The planned step is NOT plain training.", style="bold red")
