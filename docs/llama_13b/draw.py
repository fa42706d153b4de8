"""The page's pictures: bars as SVG with a ground of its own, in the colours of the reader's light or dark setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from llama_13b.tables import GIB, PARTS
from trainfit.profile import Category, Profile

WIDTH, LEFT, RIGHT = 880, 190, 100
BAR, GAP, TOP = 26, 14, 92

# Light and dark. Seven hues that differ in lightness too, for readers who see colours differently.
COLOURS: Mapping[Category, tuple[str, str]] = {
    "parameters": ("#1f4e8c", "#6ea8ff"),
    "gradients": ("#b8860b", "#f0c24b"),
    "optimizer": ("#5a3e9b", "#b79bff"),
    "communication": ("#4d4d4d", "#a8a8a8"),
    "loss": ("#b3261e", "#ff8a80"),
    "temporary": ("#8a6d5a", "#c9a98f"),
    "activations": ("#2e8b6f", "#58cfa8"),
}
_WORDS: Mapping[Category, str] = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "AdamW's moments",
    "communication": "communication",
    "loss": "logits",
    "temporary": "other",
    "activations": "activations",
}


@dataclass(frozen=True)
class Line:
    """A vertical line at so many units, with its words."""

    at: float
    words: str


def document(height: int, title: str, body: Sequence[str]) -> str:
    """An SVG that reads well on a light and on a dark page."""
    light = "".join(f".{name}{{fill:{pair[0]}}}" for name, pair in COLOURS.items())
    dark = "".join(f".{name}{{fill:{pair[1]}}}" for name, pair in COLOURS.items())
    style = (
        "text{font:13px system-ui,sans-serif;fill:#1f2328;stroke:#ffffff;stroke-width:3;paint-order:stroke}"
        ".ground{fill:#ffffff;stroke:#d1d9e0}.title{font-weight:600;"
        "font-size:15px}.limit{stroke:#1f2328;stroke-dasharray:5 4}.cut{stroke:#ffffff;stroke-width:3;fill:none}"
        f".soft{{fill:#59636e}}.end{{text-anchor:end}}.middle{{text-anchor:middle}}{light}"
        "@media(prefers-color-scheme:dark){text{fill:#f0f6fc;stroke:#0d1117}.ground{fill:#0d1117;stroke:#3d444d}"
        f".limit{{stroke:#f0f6fc}}.cut{{stroke:#0d1117}}.soft{{fill:#9198a1}}{dark}}}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            f'role="img" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title>",
            f"<style>{style}</style>",
            f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
            *body,
            "</svg>",
            "",
        ]
    )


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'


def memory_picture(title: str, rows: Sequence[tuple[str, Profile]], limits: Sequence[Line], widest: float) -> str:
    """Stacked bars in GiB. Bars longer than `widest` are cut, with a mark, and say how long they are."""
    scale = (WIDTH - LEFT - RIGHT) / widest
    body = [text(20, 30, title, "title"), *_legend()]
    for index, (name, profile) in enumerate(rows):
        body += _bar(TOP + index * (BAR + GAP), name, profile, scale)
    bottom = TOP + len(rows) * (BAR + GAP)
    for limit in limits:
        x = LEFT + limit.at * scale
        body.append(f'<line class="limit" x1="{x:.1f}" y1="{TOP - 10}" x2="{x:.1f}" y2="{bottom}"/>')
    body += _limit_words(limits, scale, bottom)
    return document(bottom + 20 * len(limits) + 18, title, body)


def _limit_words(limits: Sequence[Line], scale: float, bottom: int) -> list[str]:
    return [
        text(LEFT + line.at * scale + 6, bottom + 8 + 20 * row, line.words, "soft") for row, line in enumerate(limits)
    ]


def _legend() -> list[str]:
    body, x = [], 20.0
    for part in PARTS:
        body.append(f'<rect class="{part}" x="{x:.1f}" y="48" width="13" height="13" rx="2"/>')
        body.append(text(x + 18, 59, _WORDS[part]))
        x += 40 + 8 * len(_WORDS[part])
    return body


def _bar(y: int, name: str, profile: Profile, scale: float) -> list[str]:
    body, x, edge = [text(LEFT - 12, y + 18, name, "end")], float(LEFT), float(WIDTH - RIGHT)
    for part in PARTS:
        width = min(profile.categories[part] / GIB * scale, edge - x)
        if width > 0.05:
            body.append(f'<rect class="{part}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}"/>')
            x += width
    if x >= edge - 0.5:
        mark = x - 22
        body.append(
            f'<path class="cut" d="M{mark:.1f} {y - 2}l8 10l-8 10l8 10M{mark + 8:.1f} {y - 2}l8 10l-8 10l8 10"/>'
        )
    body.append(text(x + 8, y + 18, f"{profile.peak_bytes / GIB:,.0f} GiB"))
    return body


def block_picture(title: str, rows: Sequence[tuple[str, float]], note: str) -> str:
    """Plain bars in GB."""
    scale = (WIDTH - LEFT - RIGHT) / max(value for _, value in rows)
    top, body = 56, [text(20, 30, title, "title")]
    for index, (name, value) in enumerate(rows):
        y = top + index * (BAR + GAP)
        kind = "loss" if index == 0 else "activations"
        body.append(text(LEFT - 12, y + 18, name, "end"))
        body.append(f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{value * scale:.1f}" height="{BAR}"/>')
        body.append(text(LEFT + value * scale + 8, y + 18, f"{value:.2f} GB"))
    bottom = top + len(rows) * (BAR + GAP)
    return document(bottom + 30, title, [*body, text(20, bottom + 12, note, "soft")])
