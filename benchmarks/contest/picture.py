"""The picture of a case: step time against peak memory; peers as numbered dots, plans joined by a line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from contest.verdict import Point
from trainfit.report.html.scatter import place_labels

SCALE = 2  # pixels of the file for each one below
WIDTH, HEIGHT = 1180, 640
LEFT, TOP, RIGHT, BOTTOM = 70, 56, 830, 570
_INK, _FAINT, _GRID, _PLAN = "#1f2430", "#667085", "#e4e7ec", "#0b5fff"
_COLOURS = {
    "plain": "#1f2430",
    "checkpoint": "#e8590c",
    "selective": "#c2255c",
    "save_on_cpu": "#868e96",
    "compile": "#2b8a3e",
    "huggingface": "#e0a100",
    "torchtitan": "#7048e8",
    "deepspeed": "#0c8599",
    "ckptplan": "#a0522d",
}


_TOP_RATIO = 1.4  # slower ones stand at the upper edge, and the key has their ratio


@dataclass(frozen=True)
class _Scale:
    """Both axes; memory by ratio."""

    megabytes: tuple[float, float]
    ratios: tuple[float, float]

    @classmethod
    def of(cls, points: Sequence[Point]) -> _Scale:
        megabytes, ratios = [p.megabytes for p in points], [min(p.ratio, _TOP_RATIO) for p in points]
        room = 0.06 * (max(ratios) - min(ratios)) or 0.01
        return cls((min(megabytes) / 1.1, max(megabytes) * 1.1), (min(ratios) - room, max(ratios) + room))

    def share(self, megabytes: float, ratio: float) -> tuple[float, float]:
        """Across and up, from 0 to 1."""
        low, high = self.megabytes
        across = math.log(megabytes / low) / math.log(high / low)
        return across, min(1.0, (ratio - self.ratios[0]) / (self.ratios[1] - self.ratios[0]))

    def at(self, megabytes: float, ratio: float) -> tuple[float, float]:
        return _pixel(*self.share(megabytes, ratio))


def _pixel(across: float, up: float) -> tuple[float, float]:
    return SCALE * (LEFT + across * (RIGHT - LEFT)), SCALE * (BOTTOM - up * (BOTTOM - TOP))


def draw(points: Sequence[Point], title: str, path: Path) -> None:
    """A picture of plain, its peers and the plans; what stands beside is left out."""
    peers = [point for point in points if point.role in ("plain", "peer")]
    plans = sorted((point for point in points if point.role == "plan"), key=lambda point: point.megabytes)
    scale = _Scale.of([*peers, *plans])
    image = Image.new("RGB", (SCALE * WIDTH, SCALE * HEIGHT), "white")
    canvas = ImageDraw.Draw(image)
    _text(canvas, (LEFT, 16), title, size=18)
    _axes(canvas, scale)
    if len(best := not_beaten(plans)) > 1:
        canvas.line([scale.at(plan.megabytes, plan.ratio) for plan in best], fill=_PLAN, width=2 * SCALE, joint="curve")
    for plan in plans:
        _dot(canvas, scale.at(plan.megabytes, plan.ratio), _PLAN, radius=5)
    _peers(canvas, scale, peers)
    _key(canvas, peers, bool(plans))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, optimize=True)


def not_beaten(points: Sequence[Point]) -> list[Point]:
    """Those that no other is as small and as fast as, smallest first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda each: (each.megabytes, each.ratio)):
        if not best or point.ratio < best[-1].ratio:
            best.append(point)
    return best


def _axes(canvas: ImageDraw.ImageDraw, scale: _Scale) -> None:
    for megabytes in _ticks(*scale.megabytes, (1, 1.5, 2, 3, 4, 5, 6, 8)):
        x, bottom = scale.at(megabytes, scale.ratios[0])
        canvas.line([(x, SCALE * TOP), (x, bottom)], fill=_GRID, width=SCALE)
        _text(canvas, (x / SCALE, BOTTOM + 8), f"{megabytes:g}", anchor="ma", fill=_FAINT)
    for ratio in _even(*scale.ratios):
        left, y = scale.at(scale.megabytes[0], ratio)
        width = 2 * SCALE if abs(ratio - 1) < 1e-9 else SCALE
        canvas.line([(left, y), (SCALE * RIGHT, y)], fill=_GRID, width=width)
        _text(canvas, (LEFT - 8, y / SCALE), f"{ratio:.2f}", anchor="rm", fill=_FAINT)
    below = "peak MB above what is live between steps (by ratio)"
    _text(canvas, ((LEFT + RIGHT) / 2, BOTTOM + 34), below, anchor="ma", fill=_FAINT)
    _text(canvas, (LEFT - 50, TOP - 18), "x plain's step time; the best is below and on the left", fill=_FAINT)


def _ticks(low: float, high: float, steps: Sequence[float]) -> Iterator[float]:
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        yield from (step * 10**power for step in steps if low <= step * 10**power <= high)


def _even(low: float, high: float) -> Iterator[float]:
    step = next(each for each in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5) if (high - low) / each < 11)
    for number in range(math.ceil(low / step), math.floor(high / step) + 1):
        yield number * step


def _peers(canvas: ImageDraw.ImageDraw, scale: _Scale, peers: Sequence[Point]) -> None:
    """A dot each, with its number where there is room."""
    shares = [scale.share(peer.megabytes, peer.ratio) for peer in peers]
    boxes = place_labels([(x, y, str(number)) for number, (x, y) in enumerate(shares, 1)])
    for (x, y), box in zip(shares, boxes):
        canvas.line([_pixel(x, y), _pixel(box.x, box.y)], fill="#c5cad3", width=SCALE)
    for number, (peer, (x, y), box) in enumerate(zip(peers, shares, boxes), 1):
        _dot(canvas, _pixel(x, y), _COLOURS[peer.family], radius=5)
        left, top = _pixel(box.x, box.y)
        _text(canvas, (left / SCALE, top / SCALE), str(number), anchor="mm", fill=_COLOURS[peer.family], halo=True)


def _key(canvas: ImageDraw.ImageDraw, peers: Sequence[Point], has_plans: bool) -> None:
    x, y = RIGHT + 26, TOP - 18
    line = min(19.0, (HEIGHT - y - 12) / (len(peers) + 2))
    if has_plans:
        _dot(canvas, (SCALE * (x + 10), SCALE * (y + 8)), _PLAN, radius=5)
        _text(canvas, (x + 28, y + 8), "trainfit's plans", anchor="lm", fill=_PLAN)
    for number, peer in enumerate(peers, 1):
        middle = y + 12 + line * (number + 0.3)
        _text(canvas, (x + 18, middle), str(number), anchor="rm", fill=_COLOURS[peer.family])
        words = peer.name if peer.ratio <= _TOP_RATIO else f"{peer.name} ({peer.ratio:.2f})"
        _text(canvas, (x + 28, middle), words, anchor="lm", fill=_COLOURS[peer.family])


def _dot(canvas: ImageDraw.ImageDraw, place: tuple[float, float], colour: str, *, radius: int) -> None:
    (x, y), size = place, SCALE * radius
    canvas.ellipse((x - size, y - size, x + size, y + size), fill=colour, outline="white", width=SCALE)


def _text(
    canvas: ImageDraw.ImageDraw,
    at: tuple[float, float],
    words: str,
    *,
    size: int = 13,
    anchor: str = "la",
    fill: str = _INK,
    halo: bool = False,
) -> None:
    font = ImageFont.load_default(SCALE * size)
    place = (SCALE * at[0], SCALE * at[1])
    canvas.text(place, words, fill=fill, font=font, anchor=anchor, stroke_width=2 if halo else 0, stroke_fill="white")
