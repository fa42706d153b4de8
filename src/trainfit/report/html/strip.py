"""The tier of each block as a strip, first block on the left."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from trainfit.profile import Tier
from trainfit.report.html.canvas import SIDE, drawing
from trainfit.report.html.markup import Markup, element
from trainfit.report.html.palette import tier_colour
from trainfit.report.names import COMPILED_TIER_WORDS, TIER_WORDS

_LABEL_SHARE = 0.025  # of the width, that a letter needs on a phone


def runs_of(tiers: Sequence[Tier]) -> list[tuple[Tier, int, int]]:
    """(tier, first block, last block) of neighbours with the same tier."""
    runs, first = [], 0
    for tier, group in groupby(tiers):
        count = len(list(group))
        runs.append((tier, first, first + count - 1))
        first += count
    return runs


def tier_strip(tiers: Sequence[Tier]) -> Markup:
    """One cell a block; runs that are wide enough have their tier's name below."""
    width = SIDE / len(tiers)
    cells = [
        element(
            "rect",
            element("title", f"block {number}: {tier}"),
            x=number * width,
            y=0.0,
            width=width,
            height=SIDE,
            fill=tier_colour(tier),
            data_tier=tier,
        )
        for number, tier in enumerate(tiers)
    ]
    words = "; ".join(f"{_blocks(first, last)} {tier}" for tier, first, last in runs_of(tiers))
    svg = drawing(f"Activation tier of each block: {words}", cells)
    names = [_name(run, len(tiers)) for run in runs_of(tiers)]
    legend = [
        element("li", element("i", class_="chip", style=f"background:{tier_colour(tier)}"), tier)
        for tier in dict.fromkeys(tiers)
    ]
    strip = element("div", svg, *names, class_="plot strip")
    return element("div", strip, element("ul", *legend, class_="legend"), class_="chart bare")


def _name(run: tuple[Tier, int, int], num_blocks: int) -> Markup:
    tier, first, last = run
    share = (last - first + 1) / num_blocks
    numbers = f"{first}-{last}" if last > first else str(first)
    room = share / _LABEL_SHARE
    shown = next((text for text in (f"{numbers} {tier}", numbers) if len(text) <= room), "")
    style = f"left:{100 * first / num_blocks:.2f}%;width:{100 * share:.2f}%"
    return element("span", shown, class_="run", style=style, title=f"{_blocks(first, last)}: {tier}")


def _blocks(first: int, last: int) -> str:
    return f"block {first}" if first == last else f"blocks {first} to {last}"


def tier_rows(tiers: Sequence[Tier], *, compiled: bool) -> list[tuple[str, str, str, str]]:
    """Blocks, tier, what it keeps, what it computes again."""
    words = {**TIER_WORDS, **COMPILED_TIER_WORDS} if compiled else TIER_WORDS
    return [(_blocks(first, last), tier, *words.get(tier, ("", ""))) for tier, first, last in runs_of(tiers)]
