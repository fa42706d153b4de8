"""The page: what is drawn in headless Chromium, and the small functions that draw it."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from chromium import Box, Drawn, draw, needs_chromium
from hypothesis import given
from hypothesis import strategies as st

from trainfit.plan import Alternative, Plan, Target
from trainfit.plan.compare import PLANNED, PolicyResult
from trainfit.plan.plan import MoreMemory
from trainfit.profile import CATEGORIES, TIERS, Moment, Profile
from trainfit.report import compare, comparison_page, plan_page, profile_page
from trainfit.report.html.axes import bytes_axis, seconds_axis, spread_axis
from trainfit.report.html.markup import Markup, element
from trainfit.report.html.palette import LAYERS, tier_colour
from trainfit.report.html.scatter import place_labels
from trainfit.report.html.strip import runs_of
from trainfit.report.html.style import CSS
from trainfit.report.names import NAMES, TIER_WORDS
from trainfit.report.profile_view import speed_words
from trainfit.step import Strategy
from trainfit.units import parse_bytes

GIB = 2**30
PHONE, DESKTOP = 390, 1280
SELECTORS = (".plot.area svg", ".plot.area .tick.y", ".plot.area .tick.x", ".plot.scatter svg")
SELECTORS += (".plot.scatter .tick.y", ".plot.scatter .tick.x", ".label", ".plot.strip svg", ".peaklabel", ".phase")
EVIL = "</script><img src=x onerror=alert(1)>&\"'"

# Three seconds: bytes at the peak, which lasts from second 1 to 2, in the order of the layers.
AT_PEAK = {"parameters": 3 * GIB, "optimizer": 2 * GIB, "gradients": GIB, "activations": 4 * GIB, "temporary": 2 * GIB}
BEFORE = {"parameters": 3 * GIB, "optimizer": 2 * GIB}
AFTER = {**BEFORE, "gradients": 2 * GIB}


def make_profile(**changes) -> Profile:
    peak = sum(AT_PEAK.values())
    timeline = (
        Moment("forward", "embedding, aten::embedding", 0.0, BEFORE),
        Moment("backward", "block 2, aten::mm", 1.0, AT_PEAK),
        Moment("backward", "block 1, aten::mm", 2.0, {**AT_PEAK, "temporary": 2 * GIB - 1}),
        Moment("optimizer", "aten::_fused_adamw_", 2.0, AFTER),
        Moment("optimizer", "aten::_fused_adamw_", 3.0, AFTER),
    )
    values = {
        "peak_bytes": peak,
        "peak_phase": "backward",
        "peak_place": "block 2, aten::mm",
        "phases": {"forward": 5 * GIB, "backward": peak, "optimizer": 7 * GIB},
        "categories": dict.fromkeys(CATEGORIES, 0) | AT_PEAK,
        "resident_bytes": 5 * GIB,
        "step_seconds": 3.0,
        "phase_seconds": {"forward": 1.0, "backward": 1.0, "optimizer": 1.0},
        "timeline": timeline,
    }
    return Profile(**{**values, **changes})


def make_plan(**changes) -> Plan:
    tiers = ("full",) * 6 + ("pointwise",) * 1 + ("keep",) * 3
    strategy, target = Strategy(2, 4, "bf16", tiers, 8), Target(16 * GIB, 8 * 128, 128, "bf16")
    plain = Alternative(Strategy(8, 1, "bf16", ("keep",) * 10), 24 * GIB, 2.2, True, "plain training")
    lost = [
        Alternative(Strategy(1, 8, "bf16", ("keep",) * 10), (11 + n % 3) * GIB, 3.1 + 0.05 * n, n < 2, f"{n} % slower")
        for n in range(9)
    ]
    lost.append(Alternative(Strategy(4, 2, "bf16", ("keep",) * 10), 19 * GIB, 2.6, False, EVIL))
    values = (15 * GIB, target, "h100", f"llama {EVIL}", strategy, make_profile(), plain, tuple(lost), "why so")
    return replace(Plan(*values), **changes)


def make_policies() -> tuple[PolicyResult, ...]:
    """The plan's own, one that fits, one that does not, one that does not apply."""
    strategy, profile = make_plan().strategy, make_profile()

    def row(name: str, seconds: float, size: int, **more) -> PolicyResult:
        predicted = replace(profile, step_seconds=seconds, peak_bytes=size * GIB)
        return PolicyResult(name, "words", strategy, predicted, size <= 15, seconds / 3.0 - 1, **more)

    return (
        row(PLANNED, 3.0, 12),
        row("every:2", 3.6, 10),
        row(EVIL, 2.5, 20),
        PolicyResult("torchtitan", "words", None, None, False, why=EVIL),
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    page = plan_page(make_plan())
    return {width: draw(page, folder / str(width), width=width, selectors=SELECTORS) for width in (PHONE, DESKTOP)}


def near(pixel, colour: str, tolerance: int = 12) -> bool:
    wanted = tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return all(abs(a - b) <= tolerance for a, b in zip(pixel, wanted))


def heights(drawn: Drawn, x: float, box: Box) -> dict[str, int]:
    """How many pixels of each layer a column has."""
    column = [drawn.at(x, y) for y in range(round(box.top), round(box.bottom))]
    return {name: sum(near(pixel, colour) for pixel in column) for name, colour in LAYERS.items()}


def scale(labels: list[Box], axis: int, value_of) -> tuple[float, float]:
    """(pixel of zero, pixels for each unit), from the labels alone. axis: 0 across, 1 up."""
    known = [(value_of(box.text), box.middle[axis]) for box in labels]
    (low, first), (high, last) = min(known), max(known)
    step = (last - first) / (high - low)
    return first - step * low, step


def bytes_of(text: str) -> int:
    return 0 if text.startswith("0 ") else parse_bytes(text)


def seconds_of(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}[unit]


@needs_chromium
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_layers_at_the_peak_are_as_high_as_their_bytes(pages, width):
    drawn = pages[width]
    (box,) = drawn.boxes[".plot.area svg"]
    assert box.right - box.left > (240 if width == PHONE else 500)
    zero, step = scale(drawn.boxes[".plot.area .tick.y"], 1, bytes_of)
    assert zero == pytest.approx(box.bottom, abs=1.5)
    found = heights(drawn, box.left + 0.5 * (box.right - box.left), box)  # second 1.5 of 3
    for name in CATEGORIES:
        assert found[name] == pytest.approx(AT_PEAK.get(name, 0) * -step, abs=3), name
    after = heights(drawn, box.left + 0.85 * (box.right - box.left), box)
    for name in CATEGORIES:
        assert after[name] == pytest.approx(AFTER.get(name, 0) * -step, abs=3), name


@needs_chromium
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_peak_is_marked_where_it_is(pages, width):
    drawn = pages[width]
    left, across = scale(drawn.boxes[".plot.area .tick.x"], 0, seconds_of)
    bottom, up = scale(drawn.boxes[".plot.area .tick.y"], 1, bytes_of)
    x, y = left + across * 1.0, bottom + up * 12 * GIB
    dark = [
        (a, b)
        for a in range(int(x) - 20, int(x) + 20)
        for b in range(int(y) - 12, int(y) + 4)
        if near(drawn.at(a, b), "#1a1f26") and a < x + 6
    ]
    middle = [sum(values) / len(dark) for values in zip(*dark)]
    assert middle == pytest.approx([x, y], abs=3)
    (label,) = drawn.boxes[".peaklabel"]
    assert label.text == "peak 12.0 GiB"
    assert label.bottom <= y + 1
    assert 0 < label.left - x < 20


@needs_chromium
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_what_is_allowed_is_a_line_at_its_bytes(pages, width):
    drawn = pages[width]
    for plot in ("area", "scatter"):
        (box,) = drawn.boxes[f".plot.{plot} svg"]
        zero, step = scale(drawn.boxes[f".plot.{plot} .tick.y"], 1, bytes_of)
        columns = range(round(box.left), round(box.right))
        rows = [
            y
            for y in range(round(box.top), round(box.bottom))
            if sum(near(drawn.at(x, y), "#b00020") for x in columns) > 0.3 * len(columns)
        ]
        assert rows, plot
        assert sum(rows) / len(rows) == pytest.approx(zero + step * 15 * GIB, abs=2), plot


@needs_chromium
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_dots_are_where_their_strategies_are(pages, width):
    drawn = pages[width]
    left, across = scale(drawn.boxes[".plot.scatter .tick.x"], 0, seconds_of)
    bottom, up = scale(drawn.boxes[".plot.scatter .tick.y"], 1, bytes_of)
    for seconds, size, colour in (
        (3.0, 12, "#00704f"),
        (2.2, 24, "#b3370a"),
        (2.6, 19, "#b3370a"),
        (3.1, 11, "#0059a8"),
    ):
        x, y = left + across * seconds, bottom + up * size * GIB
        around = [drawn.at(x + dx, y + dy) for dx in range(-8, 9) for dy in range(-8, 9)]
        assert sum(near(pixel, colour) for pixel in around) >= 20, (seconds, size)


@needs_chromium
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_letters_do_not_overlap_and_stay_inside(pages, width):
    drawn = pages[width]
    labels = drawn.boxes[".label"]
    assert [label.text for label in labels] == ["chosen", "plain", *"ABCDEFGHIJ"]
    for number, label in enumerate(labels):
        assert not any(label.overlaps(other) for other in labels[:number]), label.text
        assert 0 <= label.left < label.right <= width


@needs_chromium
@pytest.mark.parametrize("width", [320, PHONE, DESKTOP])
def test_policies_are_dots_with_the_numbers_of_their_table(tmp_path, width):
    plan = make_plan(alternatives=(), binds="backward of block 2", more_memory=MoreMemory(GIB, 2.5, EVIL))
    drawn = draw(plan_page(plan, make_policies()), tmp_path, width=width, selectors=(*SELECTORS, "tbody th"))
    assert (drawn.width, drawn.scroll) == (width, width)
    left, across = scale(drawn.boxes[".plot.scatter .tick.x"], 0, seconds_of)
    bottom, up = scale(drawn.boxes[".plot.scatter .tick.y"], 1, bytes_of)
    for seconds, size, colour in ((3.0, 12, "#00704f"), (3.6, 10, "#0059a8"), (2.5, 20, "#b3370a")):
        x, y = left + across * seconds, bottom + up * size * GIB
        around = [drawn.at(x + dx, y + dy) for dx in range(-8, 9) for dy in range(-8, 9)]
        assert sum(near(pixel, colour) for pixel in around) >= 20, (seconds, size)
    labels = drawn.boxes[".label"]
    assert [label.text for label in labels] == ["chosen", "1", "2"]
    numbers = [box for box in drawn.boxes["tbody th"] if box.text in ("1", "2")]
    (plot,) = drawn.boxes[".plot.scatter svg"]
    assert [box.text for box in numbers] == ["1", "2"]
    assert all(box.left > plot.right if width == DESKTOP else box.top > plot.bottom for box in numbers)


@needs_chromium
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_strip_has_a_cell_for_each_block(pages, width):
    drawn = pages[width]
    (box,) = drawn.boxes[".plot.strip svg"]
    y, cell = sum((box.top, box.bottom)) / 2, (box.right - box.left) / 10
    for number, tier in enumerate(make_plan().strategy.tiers):
        assert near(drawn.at(box.left + (number + 0.5) * cell, y), tier_colour(tier)), number


@needs_chromium
def test_nothing_is_wider_than_the_window(pages, tmp_path):
    for width, drawn in pages.items():
        assert (drawn.width, drawn.scroll) == (width, width)
    narrow = draw(plan_page(make_plan()), tmp_path, width=320, selectors=[".plot.area svg"])
    assert (narrow.width, narrow.scroll) == (320, 320)


@needs_chromium
def test_without_scripts_the_pictures_are_the_same(pages, tmp_path):
    drawn = draw(plan_page(make_plan()), tmp_path, width=DESKTOP, selectors=SELECTORS, scripts=False)
    (box,), (other,) = drawn.boxes[".plot.area svg"], pages[DESKTOP].boxes[".plot.area svg"]
    x = box.left + 0.5 * (box.right - box.left)
    assert heights(drawn, x, box) == heights(pages[DESKTOP], x, other)
    assert drawn.reading == ""  # hidden: it would promise what only a script can do
    assert [label.text for label in drawn.boxes[".label"]] == [label.text for label in pages[DESKTOP].boxes[".label"]]


@needs_chromium
def test_a_moment_can_be_read_off_with_the_pointer(tmp_path):
    act = """var plot=page.querySelector('.plot.area'),b=plot.getBoundingClientRect();
    plot.dispatchEvent(new view.PointerEvent('pointermove',{clientX:b.left+b.width*0.34,clientY:b.top+9}));"""
    drawn = draw(plan_page(make_plan()), tmp_path, width=DESKTOP, act=act)
    assert drawn.reading == "12.00 GiB in backward, block 2, aten::mm"


@needs_chromium
def test_dark_where_the_reader_wants_it_dark(tmp_path):
    drawn = draw(plan_page(make_plan()), tmp_path, width=DESKTOP, selectors=SELECTORS, dark=True)
    assert near(drawn.at(3, 3), "#14181d")
    (box,) = drawn.boxes[".plot.area svg"]
    assert heights(drawn, box.left + 0.5 * (box.right - box.left), box)["activations"] > 50


def variables(css: str) -> dict[str, str]:
    return dict(re.findall(r"--(\w+):(#[0-9a-f]+)", css))


def contrast(first: str, second: str) -> float:
    """WCAG 2's contrast ratio."""

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("number", [0, 1], ids=["light", "dark"])
def test_text_stands_out_from_its_background(number):
    colours = variables(re.findall(r":root\{([^}]*)\}", CSS)[number])
    for text in ("ink", "soft", "good", "bad", "accent"):
        assert contrast(colours[text], colours["bg"]) >= 4.5, text
    assert contrast(colours["soft"], colours["panel"]) >= 4.5
    assert contrast(colours["limit"], colours["bg"]) >= 3


class Reader(HTMLParser):
    """Tags in balance, and what they ask of the world outside."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.asks: list[str] = []
        self.captions = self.tables = self.pictures = self.titles = 0

    def handle_starttag(self, tag, attrs):
        self.asks += [f"{tag} {key}" for key, _ in attrs if key in ("src", "href", "srcset") or key.startswith("on")]
        self.asks += [tag] if tag in ("link", "img", "iframe", "object", "embed") else []
        self.tables += tag == "table"
        self.captions += tag == "caption"
        self.pictures += tag == "svg"
        self.titles += tag == "title" and self.open[-1:] == ["svg"]
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in ("meta", "br", "wbr", "path", "rect", "line", "polygon")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


def test_pages_ask_for_nothing_and_text_is_never_markup():
    strategy = make_plan().strategy
    about = {"model": EVIL, "device": EVIL, "seq_len": 128, "notes": (EVIL,)}
    odd = make_profile(timeline=(*make_profile().timeline, Moment("optimizer", EVIL, 3.0, AFTER)))
    pages = [
        plan_page(make_plan(binds=EVIL, more_memory=MoreMemory(GIB, 2.5, EVIL)), make_policies()),
        profile_page(odd, strategy, budget_bytes=16 * GIB, **about),
        comparison_page(compare(odd, make_profile()), strategy, **about),
    ]
    for page in pages:
        reader = read(page)
        assert reader.asks == []
        assert reader.tables == reader.captions >= 2
        assert reader.pictures == reader.titles >= 2
        assert "<img" not in page
        assert not re.search(r"https?:|url\(|@import", page)
        assert 'lang="en"' in page
        assert "viewport" in page


def cells(page: str, caption: str) -> list[list[str]]:
    """Text of the rows of one table."""
    (found,) = [part for part in re.findall(r"<table>.*?</table>", page) if f">{caption}<" in part]
    rows = re.findall(r"<tr>(.*?)</tr>", found)[1:]
    return [
        [re.sub(r"<br/>", " / ", re.sub(r"</?b>", "", cell)) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
        for row in rows
    ]


def test_what_binds_and_what_more_memory_buys_are_on_the_page():
    more = MoreMemory(GIB, 2.4, "micro batch 4 x 2")
    page = plan_page(make_plan(binds="the loss spike", more_memory=more))
    assert "<p>What binds: the loss spike.</p>" in page
    assert "<p>The next 1.0 GiB would buy 600.0 ms a step (20.0%): micro batch 4 x 2.</p>" in page
    now, then = cells(page, "What more memory would buy, estimated")
    assert now[2:] == ["16.0 GiB", "3.0 s"]
    assert now[:2] == ["as planned", "micro batch 2 x 4, 6*full,<wbr/>1*pointwise,<wbr/>3*keep, loss in 8 chunks, bf16"]
    assert then == ["with more memory", "micro batch 4 x 2", "17.0 GiB", "2.4 s"]
    assert "What binds" not in plan_page(make_plan())


def test_policies_are_a_table_of_the_page():
    page = plan_page(make_plan(), make_policies())
    own, every, over, other = cells(page, "In the plan&#x27;s step of 2 x 4 sequences of 128")
    assert own == ["", "trainfit / 6*full,1*pointwise,3*keep", "12.0 GiB", "3.0 s", "+0.0%"]
    assert every == ["1", "every:2 / 6*full,1*pointwise,3*keep", "10.0 GiB", "3.6 s", "+20.0%"]
    assert over[0] == "2"
    assert over[1].endswith("needs 5.0 GiB too much")
    assert other[0] == ""
    assert other[2:] == ["-", "-", "-"]
    assert "Policies people know" not in plan_page(make_plan())


def test_a_profile_without_a_course_still_has_its_tables():
    page = profile_page(
        make_profile(timeline=()), make_plan().strategy, model="m", device="d", seq_len=8, budget_bytes=16 * GIB
    )
    assert "plot area" not in page
    assert "saved activations" in page
    assert read(page).tables == 3


def test_a_comparison_has_both_pictures_on_one_scale():
    higher = make_profile(peak_bytes=12 * GIB)
    lower = make_profile(peak_bytes=6 * GIB, timeline=tuple(replace(m, categories=BEFORE) for m in higher.timeline))
    page = comparison_page(compare(higher, lower), Strategy(1), model="m", device="d", seq_len=8)
    ticks = re.findall(r'tick y" style="bottom:([\d.]+)%">([^<]+)<', page)
    assert ticks[: len(ticks) // 2] == ticks[len(ticks) // 2 :]


def test_reserved_memory_is_a_line_where_it_is_known():
    about = {"model": "m", "device": "d", "seq_len": 8, "budget_bytes": 16 * GIB}
    without = profile_page(make_profile(), Strategy(1), **about)
    page = profile_page(make_profile(reserved_bytes=14 * GIB), Strategy(1), **about)
    assert "limit reserved" in page
    assert "reserved by the allocator 14.0 GiB" in page
    assert "limit reserved" not in without


def test_speed_has_its_range_where_it_was_predicted():
    about = {"model": "m", "device": "d", "seq_len": 8, "budget_bytes": 16 * GIB}
    known = make_profile(step_seconds_low=2.0, step_seconds_high=6.0, tokens=1200)
    page = profile_page(known, Strategy(1), **about)
    assert "Predicted: step " in page
    assert speed_words(known) in page
    assert "Predicted: step " not in profile_page(make_profile(), Strategy(1), **about)


def test_a_budget_far_above_does_not_press_the_picture_flat():
    about = {"model": "m", "device": "d", "seq_len": 8}
    page = profile_page(make_profile(), Strategy(1), budget_bytes=1000 * GIB, **about)
    assert "limit allowed" not in page
    assert "usable 1000.0 GiB" in page


def test_every_category_and_tier_has_its_colour_and_words():
    assert set(LAYERS) == set(NAMES) == set(CATEGORIES)
    assert len(set(LAYERS.values())) == len(LAYERS)
    assert set(TIERS) <= set(TIER_WORDS)
    assert len({tier_colour(tier) for tier in TIERS}) == len(TIERS)


@given(st.text(), st.text())
def test_text_and_attributes_are_escaped(text, value):
    class Texts(HTMLParser):
        found, attributes = "", None

        def handle_data(self, data):
            self.found += data

        def handle_starttag(self, tag, attrs):
            self.attributes = attrs

    reader = Texts()
    reader.feed(element("p", text, title=value))
    reader.close()
    assert reader.found.replace("\r", "") == text.replace("\r", "")
    assert [(key, (said or "").replace("\r", "")) for key, said in reader.attributes] == [
        ("title", value.replace("\r", ""))
    ]
    assert element("p", Markup("<b>x</b>")) == "<p><b>x</b></p>"


@given(st.floats(16, 2**50))
def test_byte_ticks_say_where_they_stand(highest):
    axis, ticks = bytes_axis(highest)
    assert axis.high >= highest
    assert 2 <= len(ticks) <= 11
    for tick in ticks:
        assert bytes_of(tick.label) == pytest.approx(tick.at * axis.high, rel=1e-5, abs=1)
        assert -1e-9 <= tick.at <= 1 + 1e-9


@given(st.floats(1e-5, 1e5))
def test_second_ticks_are_in_one_unit_and_within(longest):
    _, ticks = seconds_axis(longest)
    assert 2 <= len(ticks) <= 11
    assert len({tick.label.split()[1] for tick in ticks}) == 1
    assert all(-1e-9 <= tick.at <= 1 + 1e-9 for tick in ticks)


@given(st.lists(st.floats(1e6, 1e13), min_size=1, max_size=20), st.booleans())
def test_a_spread_axis_holds_all_values(values, is_bytes):
    axis, ticks = spread_axis(values, is_bytes=is_bytes)
    assert all(0 <= axis.at(value) <= 1 for value in values)
    assert axis.at(max(values)) >= axis.at(min(values))
    assert all(-1e-9 <= tick.at <= 1 + 1e-9 for tick in ticks)
    assert ticks


@given(st.lists(st.tuples(st.floats(0.1, 0.9), st.floats(0.1, 0.9)), min_size=1, max_size=10))
def test_labels_find_free_places(dots):
    boxes = place_labels([(x, y, "A") for x, y in dots])
    for number, box in enumerate(boxes):
        assert not any(box.overlap(other) > 1e-9 for other in boxes[:number])
        assert box.x - box.width / 2 >= 0
        assert box.x + box.width / 2 <= 1 + 1e-9


def test_runs_of_tiers():
    assert runs_of(("full", "full", "keep")) == [("full", 0, 1), ("keep", 2, 2)]
