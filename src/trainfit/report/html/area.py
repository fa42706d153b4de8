"""Memory through the step: layers of bytes by category over time, with the peak and the limits marked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from trainfit.profile import Category, Moment, Phase, Profile
from trainfit.report.html.axes import Axis, Tick, bytes_axis, seconds_axis
from trainfit.report.html.canvas import SIDE, axis_labels, drawing, grid
from trainfit.report.html.markup import Markup, element
from trainfit.report.html.palette import LAYERS
from trainfit.report.names import NAMES
from trainfit.report.pieces import seconds_cell
from trainfit.units import format_bytes

_HEADROOM = 1.1
_FAR_ABOVE = 2.5  # a limit beyond so many peaks would press the layers flat: it is told in words
_LABEL_SHARE = 0.11  # of the width, that a phase needs for its name


@dataclass(frozen=True)
class Line:
    """A limit across the picture."""

    name: str
    num_bytes: int
    style: str


def area_chart(
    profile: Profile,
    lines: Sequence[Line],
    *,
    title: str,
    highest: int | None = None,
    names: Mapping[Category, str] = NAMES,
) -> Markup:
    """The picture, its legend and axes. highest: bytes that the axis reaches, to compare pictures."""
    moments = profile.timeline
    near = [line for line in lines if line.num_bytes <= _FAR_ABOVE * profile.peak_bytes]
    top = max([highest or profile.peak_bytes, *(line.num_bytes for line in near)])
    axis, ticks = bytes_axis(top * _HEADROOM)
    at, time_ticks, time_name = _course(moments)
    layers = [name for name in LAYERS if any(moment.categories.get(name) for moment in moments)]
    peak = peak_index(moments)
    shapes = [
        *(grid(tick) for tick in ticks),
        *_layers(moments, layers, at, axis, names),
        *(_border(at[begin]) for begin, _, _ in list(_stretches(moments))[1:]),
        *(_limit(line, axis) for line in near),
        *_peak_mark(at[peak], axis.at(moments[peak].total_bytes)),
    ]
    words = f"{title}. Highest: {format_bytes(profile.peak_bytes)} in {profile.peak_phase}. The table beside says it."
    svg = drawing(words, shapes)
    plot = [svg, *axis_labels(time_ticks, ticks), *_phase_names(moments, at), _peak_label(profile, at[peak], axis)]
    data = [[round(x, 4), moment.total_bytes, moment.phase, moment.place] for x, moment in zip(at, moments)]
    holder = element("div", *plot, class_="plot area", data_moments=json.dumps(data, separators=(",", ":")))
    reading = element("p", class_="reading", hidden="")
    return element(
        "div", holder, element("p", time_name, class_="axis"), reading, _legend(layers, lines, names), class_="chart"
    )


def peak_index(moments: Sequence[Moment]) -> int:
    return max(range(len(moments)), key=lambda index: moments[index].total_bytes)


def _course(moments: Sequence[Moment]) -> tuple[list[float], list[Tick], str]:
    """Where each moment stands from left to right: by time, or by order where nobody counted time."""
    end = moments[-1].seconds
    if end <= 0:
        last = max(1, len(moments) - 1)
        return [index / last for index in range(len(moments))], [], "operators, in the order in which they run"
    axis, ticks = seconds_axis(end)
    return [axis.at(moment.seconds) for moment in moments], ticks, "time"


def _layers(
    moments: Sequence[Moment],
    layers: Sequence[Category],
    at: Sequence[float],
    axis: Axis,
    names: Mapping[Category, str],
) -> Iterator[Markup]:
    below = [0] * len(moments)
    for name in layers:
        above = [low + moment.categories.get(name, 0) for low, moment in zip(below, moments)]
        upper = [_point(x, axis.at(size)) for x, size in zip(at, above)]
        lower = [_point(x, axis.at(size)) for x, size in zip(at, below)]
        points = " ".join([*upper, *reversed(lower)])
        yield element(
            "polygon", element("title", names[name]), points=points, fill=LAYERS[name], class_="layer", data_layer=name
        )
        below = above


def _point(x: float, y: float) -> str:
    return f"{x * SIDE:.1f},{(1 - y) * SIDE:.1f}"


def _border(x: float) -> Markup:
    return element("line", x1=x * SIDE, x2=x * SIDE, y1=0.0, y2=SIDE, class_="border")


def _limit(line: Line, axis: Axis) -> Markup:
    y = (1 - axis.at(line.num_bytes)) * SIDE
    name = f"{line.name}: {format_bytes(line.num_bytes)}"
    return element("line", element("title", name), x1=0.0, x2=SIDE, y1=y, y2=y, class_=f"limit {line.style}")


def _peak_mark(x: float, y: float) -> Iterator[Markup]:
    left, top = x * SIDE, (1 - y) * SIDE
    yield element("line", x1=left, x2=left, y1=top, y2=SIDE, class_="peakline")
    for kind in ("ring", "dot"):
        yield element("path", d=f"M{left:.1f} {top:.1f}h0", class_=f"peak{kind}")


def _peak_label(profile: Profile, x: float, axis: Axis) -> Markup:
    """Beside its dot, on the side that has more room."""
    side = f"right:{100 * (1 - x):.2f}%" if x > 0.5 else f"left:{100 * x:.2f}%"
    text = f"peak {format_bytes(profile.peak_bytes)}"
    style = f"{side};bottom:{100 * axis.at(profile.peak_bytes):.2f}%"
    return element("span", text, class_="peaklabel", style=style)


def _stretches(moments: Sequence[Moment]) -> Iterator[tuple[int, int, Phase]]:
    """(first, last, phase) of moments in a row of one phase."""
    for phase, group in groupby(range(len(moments)), key=lambda index: moments[index].phase):
        indices = list(group)
        yield indices[0], indices[-1], phase


def _phase_names(moments: Sequence[Moment], at: Sequence[float]) -> Iterator[Markup]:
    stretches = list(_stretches(moments))
    ends = [at[begin] for begin, _, _ in stretches[1:]] + [1.0]
    for (begin, _, phase), end in zip(stretches, ends):
        width = end - at[begin]
        style = f"left:{100 * at[begin]:.2f}%;width:{100 * width:.2f}%"
        name = phase if width >= _LABEL_SHARE else ""
        yield element("span", name, class_="phase", title=phase, style=style)


def _legend(layers: Sequence[Category], lines: Sequence[Line], names: Mapping[Category, str]) -> Markup:
    """In the order of the layers, from the top."""
    made = [
        element("li", element("i", class_="chip", style=f"background:{LAYERS[name]}"), names[name])
        for name in reversed(layers)
    ]
    for line in lines:
        text = f"{line.name} {format_bytes(line.num_bytes)}"
        made.append(element("li", element("i", class_=f"stroke {line.style}"), text))
    return element("ul", *made, class_="legend")


def phase_rows(profile: Profile) -> list[tuple[str, str, str]]:
    """Phase, highest bytes, seconds."""
    rows = []
    for phase, size in profile.phases.items():
        seconds = profile.phase_seconds.get(phase, 0.0)
        if size:
            name = f"{phase} (peak)" if phase == profile.peak_phase else phase
            rows.append((name, format_bytes(size), seconds_cell(seconds)))
    return rows


def category_rows(categories: Mapping[Category, int]) -> list[tuple[str, str, str]]:
    """Category, bytes, share; in the order of the layers from the top."""
    total = sum(categories.values())
    return [
        (NAMES[name], format_bytes(categories[name]), f"{100 * categories[name] / total:.1f} %")
        for name in reversed(LAYERS)
        if categories.get(name)
    ]
