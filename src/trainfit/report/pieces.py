"""The pieces that every view is made of: tables without frames, pairs of name and value, bars of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rich import box
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from trainfit.profile import Category
from trainfit.units import format_bytes, format_seconds

_EIGHTHS = " ▏▎▍▌▋▊▉"
BAR_WIDTH = 32


def seconds_cell(seconds: float) -> str:
    """Of a table; a dash where nobody knows them, 0."""
    return format_seconds(seconds) if seconds else "-"


def table(*columns: str, title: str | None = None) -> Table:
    """A table with one rule under its header; columns after the first are aligned to the right."""
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for position, name in enumerate(columns):
        made.add_column(name, justify="right" if position else "left", header_style="dim", no_wrap=True)
    return made


def facts(rows: Iterable[tuple[str, str | Text]], *, title: str | None = None) -> Table:
    """Names on the left, values on the right of them, nothing around."""
    made = Table(box=None, show_header=False, title=title, title_justify="left", title_style="bold", pad_edge=False)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, value)
    return made


def memory_bars(categories: Mapping[Category, int], *, title: str | None = None) -> Table:
    """Bytes by category with their share as a bar, largest first; categories without bytes are left out."""
    total = sum(categories.values())
    made = Table(box=None, show_header=False, title=title, title_justify="left", title_style="bold", pad_edge=False)
    alignment: tuple[JustifyMethod, ...] = ("left", "right", "right", "left")
    for justify in alignment:
        made.add_column(justify=justify, no_wrap=True)
    for name, size in sorted(categories.items(), key=lambda item: -item[1]):
        if size > 0:
            made.add_row(name, format_bytes(size), f"{100 * size / total:.1f} %", Text(bar(size / total), style="cyan"))
    return made


def bar(fraction: float, width: int = BAR_WIDTH) -> str:
    """A bar of fraction * width characters, to an eighth of a character."""
    eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def ranged(expected: float, low: float, high: float, show: Callable[[float], str]) -> str:
    """A figure and where it should lie: "1.2 s (1.0 s to 1.4 s)"."""
    return f"{show(expected)} ({show(low)} to {show(high)})"


def share(fraction: float) -> str:
    """A percentage without a sign: "41 %", "4.1 %"."""
    return f"{100 * fraction:.2g} %" if fraction < 0.1 else f"{100 * fraction:.0f} %"


def percent(fraction: float) -> str:
    """A signed percentage with two decimals."""
    return f"{100 * fraction:+.2f} %"
