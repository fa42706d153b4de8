"""Sizes, counts and times: what is printed can be read, and is as near as its digits say."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainfit.errors import RecipeError
from trainfit.units import format_bytes, format_count, format_seconds, parse_bytes, parse_count

sizes = st.integers(1, 2**50)
BINARY, DECIMAL = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}, {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@given(st.integers(1, 2**63 - 1))
def test_plain_numbers_are_themselves(number: int):
    assert parse_bytes(number) == parse_bytes(str(number)) == parse_bytes(f" {number} B ") == number
    assert parse_count(number) == parse_count(f"{number}") == number


@given(st.integers(1, 2**20), st.sampled_from("kmgtKMGT"))
def test_units_scale_exactly(number: int, unit: str):
    assert parse_bytes(f"{number}{unit}iB") == number * BINARY[unit.lower()]
    assert parse_bytes(f"{number} {unit}b") == number * DECIMAL[unit.lower()]
    assert parse_count(f"{number}{unit}") == number * DECIMAL[unit.lower()]


@given(sizes)
def test_printed_bytes_are_read_back_within_their_digits(number: int):
    text = format_bytes(number)
    unit = text.split()[1]
    scale = 1 if unit == "B" else BINARY[unit[0].lower()]
    assert abs(parse_bytes(text) - number) <= 0.05 * scale + 1


@example(999_999_999)
@given(st.integers(1, 2**53))
def test_printed_counts_are_read_back_within_three_digits(number: int):
    text = format_count(number)
    assert parse_count(text) == pytest.approx(number, rel=0.0051)


@example(119.7)
@example(1.25)
@given(st.floats(1e-6, 1e6))
def test_printed_seconds_are_a_time(seconds: float):
    text = format_seconds(seconds)
    scales = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
    parts = [(float(value), unit) for value, unit in re.findall(r"([\d.]+) (us|ms|s|min|h)", text)]
    # Half of the last digit that is printed: as near as it comes.
    last = "rest" if text.endswith(" s") and len(parts) == 2 else parts[-1][1]
    off = {"us": 0.5e-6, "ms": 0.05e-3, "s": 0.05, "rest": 0.5, "min": 30.0}[last]
    found = sum(value * scales[unit] for value, unit in parts)
    assert found == pytest.approx(seconds, rel=1e-12, abs=off * (1 + 1e-6))
    assert all(value < 60 for value, unit in parts[1:])


@given(st.text(max_size=20))
def test_any_text_gives_a_number_or_a_recipe_error(text: str):
    for parse in (parse_bytes, parse_count):
        try:
            number = parse(text)
        except RecipeError:
            continue
        assert 1 <= number < 2**63


@pytest.mark.parametrize("text", ["", "0", "-1", "-3GiB", "1e9", "9999999TiB", "12 parsecs", "1,5GB", "nan", "inf"])
def test_absurd_sizes_are_refused(text: str):
    with pytest.raises(RecipeError):
        parse_bytes(text)
    with pytest.raises(RecipeError):
        parse_count(text)


@pytest.mark.parametrize("parse", [parse_bytes, parse_count])
def test_a_number_beyond_every_float_is_refused(parse: Callable[[str], int]):
    with pytest.raises(RecipeError):
        parse("1" + "0" * 400 + ".0")


def test_examples_of_the_docstrings():
    assert format_bytes(17.3 * 2**30) == "17.3 GiB"
    assert (format_count(1048576), format_count(524288), format_count(96)) == ("1.05M", "524k", "96")
    assert format_seconds(200) == "3 min 20 s"
    assert format_seconds(7500) == "2 h 05 min"
    assert math.isclose(parse_bytes("1.5 GB"), 1.5e9)
