"""A VerifyReport: how far the planned step is from plain training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from trainfit.report.pieces import facts, table

if TYPE_CHECKING:
    from trainfit.rehearsal import VerifyReport


def verify_view(report: VerifyReport) -> RenderableType:
    """The losses of each step, the largest differences, and the verdict."""
    losses = table("step", "planned loss", "plain loss", "difference")
    for step, (planned, plain) in enumerate(report.losses, start=1):
        losses.add_row(str(step), f"{planned:.6f}", f"{plain:.6f}", f"{abs(planned - plain):.1e}")
    differences = facts(
        [
            ("loss", f"{report.loss_difference:.2e} relative"),
            ("gradient", f"{report.gradient_difference:.2e} of the largest, in {report.worst_parameter or 'none'}"),
            ("tolerance", f"{report.tolerance:.0e}" if report.tolerance else "0: the arithmetic is the same"),
            ("bits", "every gradient has the same bits" if report.bit_equal else "some gradients differ in their bits"),
        ],
        title="Largest differences",
    )
    return Group(losses, differences, verdict(report))


def verdict(report: VerifyReport) -> Text:
    """One line: the same as plain training, or not."""
    if report.passed:
        return Text("The planned step learns what plain training learns.", style="bold green")
    return Text("The planned step is NOT plain training.", style="bold red")
