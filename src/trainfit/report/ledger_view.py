"""The ledger of a block, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainfit.report.pieces import facts, table
from trainfit.step.strategy_text import format_tiers
from trainfit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from trainfit.plan.ledger import Ledger

_WIDTH = 24
_STYLES = {"kept": "green", "runs again": "", "left out": "dim"}


def ledger_view(ledger: Ledger) -> RenderableType:
    """What the block may keep, what that costs, and each operator."""
    rows: list[tuple[str, str | Text]] = [
        ("plan's tiers", format_tiers(ledger.tiers)),
        ("may keep", f"{format_bytes(max(0, ledger.room_bytes))} a block in the mean, beside its input"),
        ("plan recomputes", f"{_time(ledger.plan_seconds)} a block in the mean"),
        (
            "best possible",
            f"{_time(ledger.best_seconds)} with one choice, which keeps {format_bytes(ledger.kept_bytes)}",
        ),
        ("chosen tiers", f"{_time(ledger.mixed_seconds)} where blocks mix the two choices around it"),
    ]
    return Group(facts(rows), _operators(ledger))


def _operators(ledger: Ledger) -> Table:
    made = table("operator", "where", "time", "makes", "saved", "then", "worth")
    for position in (1, 4, 5):
        made.columns[position].justify = "left"
    for each in ledger.entries:
        name, _, run = each.operator.removeprefix("aten.").rpartition("#")
        made.add_row(
            f"{_clip(name.removesuffix('.default'))} {run}",
            _clip(each.place) or "-",
            _time(each.seconds),
            format_bytes(each.bytes),
            "yes" if each.saved else "-",
            Text(each.fate, style=_STYLES[each.fate]),
            _time(each.buys_seconds) if each.buys_seconds else "-",
        )
    return made


def _clip(text: str) -> str:
    return text if len(text) <= _WIDTH else "…" + text[1 - _WIDTH :]


def _time(seconds: float) -> str:
    return format_seconds(seconds) if seconds > 0 else "0"
