"""How settings are written: TOML, YAML, and comments."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from textwrap import wrap
from typing import Any

import yaml

_WIDTH = 110


def comments(title: str, lead: Iterable[str], notes: Iterable[str]) -> str:
    """A heading in "# " lines: what it is, how to use it, and what it does not say."""
    listed = list(notes)
    heading = [title, *lead, *(["What is lost, or only near:"] if listed else [])]
    lines = [part for line in heading for part in _wrapped(line)]
    lines += [part for note in listed for part in _wrapped(note, "- ")]
    return "".join(f"# {line}\n" for line in lines)


def _wrapped(text: str, bullet: str = "") -> list[str]:
    """Option names are not cut at their hyphens."""
    return wrap(
        text,
        _WIDTH,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_on_hyphens=False,
        break_long_words=False,
    )


def toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections of plain values."""
    blocks = [
        "\n".join([f"[{name}]", *(f"{key} = {_toml_value(value)}" for key, value in values.items())])
        for name, values in sections.items()
    ]
    return "\n\n".join(blocks) + "\n"


def _toml_value(value: bool | int | float | str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return "inf" if value > 0 else "-inf"
    return json.dumps(value)


def as_yaml(settings: Mapping[str, Any]) -> str:
    """In the order given."""
    return yaml.safe_dump(dict(settings), sort_keys=False, width=_WIDTH)
