"""HTML and SVG from Python: elements whose text is escaped, whatever it holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

_VOID = frozenset({"meta", "br", "wbr", "path", "rect", "line", "polygon"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(tag: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """<tag attributes>children</tag>. Children that are no Markup are escaped.

    class_ and for_ stand for class and for, view_box for viewBox; other underscores are hyphens. None leaves out.
    """
    written = "".join(
        f' {_attribute(key)}="{escape(_number(value))}"' for key, value in attributes.items() if value is not None
    )
    if tag in _VOID and not children:
        return Markup(f"<{tag}{written}/>")
    return Markup(f"<{tag}{written}>{joined(children)}</{tag}>")


def joined(parts: Iterable[str]) -> Markup:
    """The parts one after another, escaped where they are plain text."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str, numbers: int = 1) -> Markup:
    """A table that scrolls within itself where it is too wide. Columns from number `numbers` on are aligned right."""

    def cells(row: Sequence[str], *, is_head: bool) -> Markup:
        made = []
        for position, cell in enumerate(row):
            kind = "n" if position >= numbers else None
            cell = cell if isinstance(cell, Markup) else _breakable(cell)
            if is_head:
                made.append(element("th", cell, class_=kind, scope="col"))
            else:
                made.append(element("td" if position else "th", cell, class_=kind, scope=None if position else "row"))
        return element("tr", *made)

    body = [cells(row, is_head=False) for row in rows]
    content = (
        element("caption", caption),
        element("thead", cells(head, is_head=True)),
        element("tbody", *body),
    )
    return element("div", element("table", *content), class_="scroll", tabindex="0", role="region", aria_label=caption)


def _breakable(text: str) -> Markup:
    """May go on in the next line after a comma without a space: in a list of tiers."""
    return Markup(f",{element('wbr')}".join(re.split(r",(?=\S)", escape(text))))


def _attribute(key: str) -> str:
    return {"view_box": "viewBox", "preserve_aspect_ratio": "preserveAspectRatio"}.get(
        key, key.rstrip("_").replace("_", "-")
    )


def _number(value: str | float | None) -> str:
    """Short: three decimals of a thousandth are less than a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
