"""What every picture is drawn on: a square that the browser stretches, and labels beside it that do not stretch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from trainfit.report.html.axes import Tick
from trainfit.report.html.markup import Markup, element, joined

SIDE = 1000.0  # of the square, which is drawn from its upper left corner


def drawing(words: str, shapes: Iterable[Markup]) -> Markup:
    """The shapes on the square; words: what a reader hears who does not see them."""
    square = f"0 0 {SIDE:.0f} {SIDE:.0f}"
    title = element("title", words)
    return element("svg", title, joined(shapes), view_box=square, preserve_aspect_ratio="none", role="img")


def grid(tick: Tick) -> Markup:
    """A line across at a tick."""
    y = (1 - tick.at) * SIDE
    return element("line", x1=0.0, x2=SIDE, y1=y, y2=y, class_="grid")


def axis_labels(across: Sequence[Tick], up: Sequence[Tick]) -> Iterator[Markup]:
    """Labels below and to the left of a plot, as text that does not stretch."""
    for tick in up:
        yield element("span", tick.label, class_="tick y", style=f"bottom:{100 * tick.at:.2f}%")
    for tick in across:
        yield element("span", tick.label, class_="tick x", style=f"left:{100 * tick.at:.2f}%")
