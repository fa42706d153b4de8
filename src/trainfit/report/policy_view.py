"""Known policies beside a plan: one row each, all in the plan's step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from trainfit.report.pieces import seconds_cell, table
from trainfit.step.strategy import Strategy
from trainfit.step.strategy_text import format_tiers
from trainfit.units import format_bytes

if TYPE_CHECKING:
    from trainfit.plan.compare import PolicyResult

_TIERS_WIDTH = 26


def policies_table(rows: Sequence[PolicyResult], strategy: Strategy, seq_len: int, allowed_bytes: int) -> Table:
    """strategy: the plan's, whose micro batch and accumulation all rows have."""
    step = f"{strategy.micro_batch_size} x {strategy.accumulation_steps} sequences of {seq_len}"
    made = table(
        "policy", "activation", "peak", "step", "slower", "fits",
        title=f"Policies in the plan's step of {step}, within {format_bytes(allowed_bytes)}",
    )  # fmt: skip
    made.columns[1].justify = made.columns[5].justify = "left"
    made.columns[5].no_wrap = False
    for row in rows:
        made.add_row(*_cells(row, allowed_bytes), style="bold" if row.is_plan else "")
    return made


def _cells(row: PolicyResult, allowed_bytes: int) -> tuple[str | Text, ...]:
    if row.strategy is None or row.predicted is None:
        return row.policy, "-", "-", "-", "-", Text(row.why, style="yellow")
    peak, seconds = row.predicted.needed_bytes, row.predicted.step_seconds
    slower = "-" if row.slowdown is None else f"{row.slowdown:+.1%}"
    fits = Text("yes", style="green") if row.fits else Text(f"{format_bytes(peak - allowed_bytes)} over", style="red")
    return (
        row.policy,
        _clip(format_tiers(row.strategy.tiers)),
        format_bytes(peak),
        seconds_cell(seconds),
        slower,
        fits,
    )


def _clip(text: str) -> str:
    return text if len(text) <= _TIERS_WIDTH else text[: _TIERS_WIDTH - 1] + "…"
