"""Views and comparison: numbers in them are those of the profiles, bars are as long as the bytes."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from trainfit.hardware import find_device
from trainfit.plan import Alternative, Plan, Target
from trainfit.profile import CATEGORIES, Profile
from trainfit.rehearsal import VerifyReport
from trainfit.rehearsal.verify import CompressionReport
from trainfit.report import (
    alternatives_table,
    compare,
    comparison_view,
    devices_table,
    memory_bars,
    plan_view,
    profile_view,
    verify_view,
)
from trainfit.report.device_view import least_sure
from trainfit.report.pieces import BAR_WIDTH, bar
from trainfit.report.plan_view import MAX_ALTERNATIVES
from trainfit.step import Strategy

GIB = 2**30


def shown(renderable) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(renderable)
    return console.file.getvalue()


def make_profile(peak: int = 10 * GIB, **changes) -> Profile:
    categories = dict.fromkeys(CATEGORIES, 0) | {"parameters": peak // 2, "activations": peak - peak // 2}
    values = {
        "peak_bytes": peak,
        "peak_phase": "backward",
        "peak_place": "aten::mul",
        "phases": {"forward": peak // 2, "backward": peak, "optimizer": peak // 4},
        "categories": categories,
        "resident_bytes": peak // 4,
        "step_seconds": 2.0,
        "phase_seconds": {"forward": 0.5, "backward": 1.5},
    }
    return Profile(**{**values, **changes})


def make_plan(*, fits: bool = True, plain_peak: int = 40 * GIB) -> Plan:
    strategy, target = Strategy(2, 4, "bf16", ("full", "full", "keep"), 8), Target(16 * GIB, 8 * 128, 128, "bf16")
    plain = Alternative(Strategy(8, 1, "bf16", ("keep",) * 3), plain_peak, 1.0, False, "plain training")
    lost = Alternative(Strategy(1, 8, "bf16", ("keep",) * 3), 9 * GIB, 3.0, True, "50.0% slower")
    allowed = 15 * GIB if fits else 1 * GIB
    return Plan(allowed, target, "h100", "llama-x", strategy, make_profile(), plain, (plain, lost), "why so")


def test_compare_is_predicted_over_measured():
    comparison = compare(make_profile(11 * GIB), make_profile(10 * GIB, step_seconds=4.0))
    assert comparison.relative_error == pytest.approx(0.1)
    assert comparison.phase_errors == pytest.approx({"forward": 0.1, "backward": 0.1, "optimizer": 0.1})
    assert comparison.step_seconds_error == pytest.approx(-0.5)
    assert comparison.to_json()["predicted"]["peak_bytes"] == 11 * GIB


def test_compare_leaves_out_what_one_side_lacks():
    measured = make_profile(phases={"backward": 10 * GIB}, step_seconds=0.0)
    comparison = compare(make_profile(), measured)
    assert set(comparison.phase_errors) == {"backward"}
    assert comparison.step_seconds_error is None
    assert "step time" not in shown(comparison_view(comparison))


def test_comparison_view_has_both_figures_and_the_error():
    text = shown(comparison_view(compare(make_profile(11 * GIB), make_profile(10 * GIB))))
    line = next(line for line in text.splitlines() if "peak memory" in line)
    assert line.split() == ["peak", "memory", "11.0", "GiB", "10.0", "GiB", "+10.00", "%"]


@pytest.mark.parametrize(("fraction", "length"), [(0.0, 0), (0.5, BAR_WIDTH / 2), (1.0, BAR_WIDTH), (7.0, BAR_WIDTH)])
def test_bar_is_as_long_as_its_fraction(fraction, length):
    assert len(bar(fraction)) == length


def test_memory_bars_leave_out_what_is_empty_and_add_up():
    text = shown(memory_bars({"parameters": 3 * GIB, "gradients": GIB, "loss": 0}))
    assert text.index("parameters") < text.index("gradients")
    assert "75.0 %" in text
    assert "25.0 %" in text
    assert "loss" not in text


def test_profile_view_says_whether_it_fits():
    assert "fits, 2.0 GiB left" in shown(profile_view(make_profile(), budget_bytes=12 * GIB))
    assert "does not fit: 2.0 GiB too much" in shown(profile_view(make_profile(), budget_bytes=8 * GIB))
    text = shown(profile_view(make_profile()))
    for words in ("10.0 GiB", "backward", "aten::mul", "2.5 GiB between steps", "2.0 s a step"):
        assert words in text
    assert "in backward;" in shown(profile_view(make_profile(peak_place="")))


def test_plan_view_sets_plain_training_beside_the_choice():
    text = shown(plan_view(make_plan()))
    rows = {line.split("  ")[0].strip(): line for line in text.splitlines() if line.strip()}
    assert rows["peak memory"].split()[2:] == ["40.0", "GiB", "10.0", "GiB"]
    assert rows["micro batch"].split()[2:] == ["8", "x", "128", "tokens", "2", "x", "128", "tokens"]
    assert "2*full,1*keep" in rows["activation"]
    assert "Why so." in text
    assert "chosen" in text


def test_plan_view_of_what_does_not_fit_leaves_the_reason_to_the_error_line():
    text = shown(plan_view(make_plan(fits=False)))
    assert "smallest found" in text
    assert "why so" not in text.lower()


def test_budget_mark_stands_where_the_allowed_memory_ends():
    text = shown(plan_view(make_plan(plain_peak=30 * GIB)))
    line = next(line for line in text.splitlines() if "|" in line)
    plain, chosen = line.split()
    assert len(plain) == len(chosen) == 24
    assert plain.index("|") == chosen.index("|") == 12  # 15 of 30 GiB
    assert set(plain) == {"█", "|"}
    assert chosen.count("█") == 8  # 10 of 30 GiB


def test_alternatives_say_why_they_lost():
    text = shown(alternatives_table(make_plan()))
    assert "50.0% slower" in text
    assert "9.0 GiB*" in text
    assert "40.0 GiB*" not in text  # only estimated


def test_alternatives_that_are_not_shown_are_counted():
    plan = make_plan()
    assert "more" not in shown(alternatives_table(plan))
    many = replace(plan, alternatives=plan.alternatives * 5)
    assert f"and {len(many.alternatives) - MAX_ALTERNATIVES} more" in shown(alternatives_table(many))


def test_devices_show_what_they_lack_and_the_least_sure_figure():
    spec = find_device("ascend-910a").spec
    row = shown(devices_table([("ascend-910a", spec)])).splitlines()[-2].split()
    assert row[0] == "ascend-910a"
    assert "-" in row  # no bf16
    assert row[-1] == least_sure(spec) == "low"


@pytest.mark.parametrize(("passed", "words"), [(True, "learns what plain training learns"), (False, "NOT")])
def test_verify_view(passed, words):
    report = VerifyReport(1e-7, 2e-6, "model.w", not passed, 1e-5, passed, ((2.5, 2.5), (2.4, 2.3)))
    text = shown(verify_view(report))
    assert words in text
    assert "model.w" in text
    assert "2.400000" in text


def test_what_is_tolerated_of_compressed_activations_is_theirs():
    compression = CompressionReport(8, 4, 1e-3, 0.07, 0.1)
    report = VerifyReport(1e-3, 7e-2, "model.w", False, 0.0, True, ((2.5, 2.5),), compression)
    text = shown(verify_view(report))
    assert "the arithmetic is the same" not in text
    assert "tolerated up to 1.00e-01" in text
