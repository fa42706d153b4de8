"""Strategies by speed and memory, each with a letter that the table beside has too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from trainfit.report.html.axes import Axis, spread_axis
from trainfit.report.html.canvas import SIDE, axis_labels, drawing, grid
from trainfit.report.html.markup import Markup, element
from trainfit.units import format_bytes, format_seconds

Kind = Literal["chosen", "fits", "large"]

# Labels are placed for a phone's width, in its pixels; where there is more room they only move apart.
_WIDTH, _HEIGHT = 270.0, 260.0
_LETTER, _LINE, _DOT = 8.0, 15.0, 7.0
_WORDS = {"chosen": "chosen", "fits": "fits", "large": "needs more than allowed"}


@dataclass(frozen=True)
class Point:
    """One strategy."""

    label: str
    seconds: float
    num_bytes: int
    kind: Kind


@dataclass(frozen=True)
class Box:
    """A rectangle around a middle."""

    x: float
    y: float
    width: float
    height: float

    def overlap(self, other: Box) -> float:
        """The area that both cover."""
        across = (self.width + other.width) / 2 - abs(self.x - other.x)
        up = (self.height + other.height) / 2 - abs(self.y - other.y)
        return max(0.0, across) * max(0.0, up)


def place_labels(points: Sequence[tuple[float, float, str]]) -> list[Box]:
    """A box for each (x, y, label), x and y from 0 to 1: near its dot, within the plot, over no dot or other label."""
    dots = [Box(x * _WIDTH, y * _HEIGHT, 2 * _DOT, 2 * _DOT) for x, y, _ in points]
    placed: list[Box] = []
    for dot, (_, _, label) in zip(dots, points):
        placed.append(min(_around(dot, label), key=lambda box: _cost(box, dot, [*dots, *placed])))
    return [Box(box.x / _WIDTH, box.y / _HEIGHT, box.width / _WIDTH, box.height / _HEIGHT) for box in placed]


def _around(dot: Box, label: str) -> Iterator[Box]:
    """Boxes around a dot, nearer ones first."""
    width = _LETTER * len(label) + 4
    for distance in (2.0, 10.0, 20.0, 32.0, 46.0, 62.0, 80.0):
        for step in range(16):
            angle = math.pi * step / 8
            x = dot.x + math.cos(angle) * (_DOT + distance + width / 2)
            y = dot.y + math.sin(angle) * (_DOT + distance + _LINE / 2)
            yield Box(x, y, width, _LINE)


def _cost(box: Box, dot: Box, taken: Sequence[Box]) -> float:
    left, right = box.x - box.width / 2, box.x + box.width / 2
    low, high = box.y - box.height / 2, box.y + box.height / 2
    outside = max(0.0, -left) + max(0.0, right - _WIDTH) + max(0.0, -low) + max(0.0, high - _HEIGHT)
    covered = sum(box.overlap(other) for other in taken)
    return 1000 * (covered + 20 * outside) + math.hypot(box.x - dot.x, box.y - dot.y)


def scatter(points: Sequence[Point], *, allowed_bytes: int) -> Markup:
    """Step time across, peak memory up, what is allowed as a line; the best is below it and on the left."""
    across, time_ticks = spread_axis([point.seconds for point in points], is_bytes=False)
    up, ticks = spread_axis([*(float(point.num_bytes) for point in points), float(allowed_bytes)], is_bytes=True)
    at = [(across.at(point.seconds), up.at(point.num_bytes)) for point in points]
    boxes = place_labels([(x, y, point.label) for (x, y), point in zip(at, points)])
    shapes = [
        *(grid(tick) for tick in ticks),
        _allowed(up, allowed_bytes),
        *(_leader(x, y, box) for (x, y), box in zip(at, boxes)),
        *(mark for (x, y), point in zip(at, points) for mark in _marks(x, y, point)),
    ]
    title = f"{len(points)} strategies by step time and peak memory; {format_bytes(allowed_bytes)} are allowed"
    svg = drawing(title, shapes)
    labels = [_label(point, box) for point, box in zip(points, boxes)]
    plot = element("div", svg, *axis_labels(time_ticks, ticks), *labels, class_="plot scatter")
    scales = [name for name, axis in (("time", across), ("memory", up)) if axis.logarithmic]
    note = f" ({' and '.join(scales)} by ratio)" if scales else ""
    return element(
        "div",
        plot,
        element("p", f"time of a step{note}", class_="axis"),
        _legend(points, allowed_bytes),
        class_="chart",
    )


def _allowed(up: Axis, allowed_bytes: int) -> Markup:
    y = (1 - up.at(allowed_bytes)) * SIDE
    return element("line", x1=0.0, x2=SIDE, y1=y, y2=y, class_="limit allowed")


def _leader(x: float, y: float, box: Box) -> Markup:
    ends = {"x1": x * SIDE, "y1": (1 - y) * SIDE, "x2": box.x * SIDE, "y2": (1 - box.y) * SIDE}
    return element("line", **ends, class_="leader")


def _marks(x: float, y: float, point: Point) -> Iterator[Markup]:
    """Lines of no length with round ends: circles, however the picture is stretched."""
    words = f"{point.label}: {format_bytes(point.num_bytes)}, {format_seconds(point.seconds)} a step"
    for part in ("outer", "inner"):
        place = f"M{x * SIDE:.1f} {(1 - y) * SIDE:.1f}h0"
        yield element("path", element("title", words), d=place, class_=f"mark {part} {point.kind}")


def _label(point: Point, box: Box) -> Markup:
    style = f"left:{100 * box.x:.2f}%;bottom:{100 * box.y:.2f}%"
    return element("span", point.label, class_=f"label {point.kind}", style=style)


def _legend(points: Sequence[Point], allowed_bytes: int) -> Markup:
    kinds = [kind for kind in _WORDS if any(point.kind == kind for point in points)]
    made = [element("li", element("i", class_=f"key {kind}"), _WORDS[kind]) for kind in kinds]
    made.append(element("li", element("i", class_="stroke allowed"), f"allowed {format_bytes(allowed_bytes)}"))
    return element("ul", *made, class_="legend")
