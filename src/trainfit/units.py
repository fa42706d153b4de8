"""Bytes, counts and seconds: parse what people write, print what they read."""

from __future__ import annotations

import re

from trainfit.errors import RecipeError

_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_MAX = 2**63


def parse_bytes(text: str | int) -> int:
    """Bytes from "60GiB", "1.5 GB", "512MiB" or a plain number of bytes. GB is 10**9, GiB is 2**30.

    Raises RecipeError for anything else, and for sizes below one byte or beyond 2**63.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt]?)(i?)b)?\s*", str(text), re.IGNORECASE)
    if match is None:
        raise RecipeError(f"{text!r} is not a size in bytes; write it like 60GiB, 1.5GB or 268435456")
    scale = (_BINARY if match[3] else _DECIMAL)[(match[2] or "").lower()]
    return _in_range(float(match[1]) if "." in match[1] else int(match[1]), scale, text, "bytes")


def parse_count(text: str | int) -> int:
    """A count (tokens, steps) from "4M", "500k", "1.5B" or a plain number; k, M, B (or G) and T are decimal.

    Raises RecipeError for anything else, and for counts below one or beyond 2**63.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgbt]?)\s*", str(text), re.IGNORECASE)
    if match is None:
        raise RecipeError(f"{text!r} is not a count; write it like 4M, 500k or 1048576")
    return _in_range(float(match[1]) if "." in match[1] else int(match[1]), _DECIMAL[match[2].lower()], text, "")


def _in_range(value: float, scale: int, text: str | int, unit: str) -> int:
    if not 0.5 < value * scale < _MAX:
        raise RecipeError(f"{str(text)[:40]!r} is out of range; it must be at least 1 and below {_MAX} {unit}".rstrip())
    return round(value * scale)


def format_bytes(num_bytes: float) -> str:
    """Three or four significant digits in the unit people read: "17.3 GiB", "512.0 MiB", "96 B"."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_count(count: float) -> str:
    """Short decimal form: "1.05M", "524k", "96"."""
    count = float(f"{count:.3g}") if abs(count) >= 1000 else count  # 999,999 is 1M, not 1e+03k
    for scale, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if abs(count) >= scale:
            return f"{count / scale:.3g}{unit}" if count < 1e15 else f"{count / scale:.0f}{unit}"
    return f"{count:.0f}" if float(count).is_integer() else f"{count:.3g}"


def format_seconds(seconds: float) -> str:
    """ "850 us", "12.3 ms", "4.2 s", "3 min 20 s", "2 h 05 min"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"
