"""Sections of a plan's page that set strategies side by side: what lost, and the policies that people know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from trainfit.report.html.markup import Markup, element, joined, table
from trainfit.report.html.scatter import Kind, Point, scatter
from trainfit.report.pieces import seconds_cell
from trainfit.report.plan_view import letters
from trainfit.step.strategy_text import describe_strategy, format_tiers
from trainfit.units import format_bytes

if TYPE_CHECKING:
    from trainfit.plan import Alternative, Plan
    from trainfit.plan.compare import PolicyResult

_TALLEST = 3  # times what is allowed: a strategy beyond would press the others into one spot
_DOTS = "Each dot is a {what}: further left is faster, lower needs less. {names} are those of the table."


def alternatives_section(plan: Plan) -> list[Markup]:
    """The chosen strategy, plain training and what lost."""
    if not plan.alternatives:
        return []
    named = list(zip(letters(len(plan.alternatives)), plan.alternatives))
    points = [Point(letter, each.step_seconds, each.peak_bytes, _kind(each, plan)) for letter, each in named]
    plain = Point("plain", plan.plain.step_seconds, plan.plain.peak_bytes, _kind(plan.plain, plan))
    rows = [_row(letter, each) for letter, each in named]
    head, caption = ("", "strategy and why not", "peak", "step"), "* rehearsed, the others estimated"
    listed = table(head, rows, caption=caption, numbers=2)
    words = _DOTS.format(what="strategy", names="Letters")
    return _section("What lost", words, [_chosen(plan), plain, *points], listed, plan)


def policies_section(plan: Plan, policies: Sequence[PolicyResult]) -> list[Markup]:
    """The plan's own step under each policy, as `plan --compare` rehearsed them."""
    if not policies:
        return []
    strategy = plan.strategy
    numbered = list(zip(_numbers(policies), policies))
    points = []
    for number, row in numbered:
        if row.predicted is not None and number:
            kind: Kind = "fits" if row.fits else "large"
            points.append(Point(number, row.predicted.step_seconds, row.predicted.needed_bytes, kind))
    head = ("", "policy and its tiers", "peak", "step", "slower")
    caption = (
        f"In the plan's step of {strategy.micro_batch_size} x {strategy.accumulation_steps} sequences of "
        f"{plan.target.seq_len}"
    )
    rows = [_policy_row(number, row, plan.allowed_bytes) for number, row in numbered]
    listed = table(head, rows, caption=caption, numbers=2)
    words = _DOTS.format(what="policy", names="Numbers")
    return _section("Policies people know", words, [_chosen(plan), *points], listed, plan)


def _section(title: str, words: str, known: Sequence[Point], listed: Markup, plan: Plan) -> list[Markup]:
    """Dots of all whose time is known, the first of them the plan's, with their table beside."""
    highest = _TALLEST * max(plan.allowed_bytes, known[0].num_bytes)
    timed = [point for point in known if point.seconds > 0]
    shown = [point for point in timed if point.num_bytes <= highest]
    above = ", ".join(f"{point.label} {format_bytes(point.num_bytes)}" for point in timed if point not in shown)
    words += f" Far above the picture: {above}." if above else ""
    picture = scatter(shown, allowed_bytes=plan.allowed_bytes) if shown else Markup("")
    return [
        element("h2", title),
        element("p", words, class_="note"),
        element("div", element("div", picture), element("div", listed), class_="pair even"),
    ]


def _chosen(plan: Plan) -> Point:
    label, kind = ("chosen", "chosen") if plan.fits else ("smallest", "large")
    return Point(label, plan.predicted.step_seconds, plan.predicted.needed_bytes, kind)  # type: ignore[arg-type]


def _kind(each: Alternative, plan: Plan) -> Kind:
    return "fits" if each.peak_bytes <= plan.allowed_bytes else "large"


def _row(letter: str, each: Alternative) -> tuple[str, ...]:
    words = joined([describe_strategy(each.strategy), element("br"), element("b", each.why)])
    peak = format_bytes(each.peak_bytes) + ("*" if each.rehearsed else "")
    return letter, words, peak, seconds_cell(each.step_seconds)


def _numbers(policies: Sequence[PolicyResult]) -> Iterator[str]:
    """1, 2, ... of the policies with tiers; "" for the plan's own, which the picture calls chosen, and for the rest."""
    number = 0
    for row in policies:
        has_dot = row.predicted is not None and not row.is_plan
        number += has_dot
        yield str(number) if has_dot else ""


def _policy_row(number: str, row: PolicyResult, allowed_bytes: int) -> tuple[str, ...]:
    if row.strategy is None or row.predicted is None:
        return number, joined([row.policy, element("br"), element("b", row.why)]), "-", "-", "-"
    peak = row.predicted.needed_bytes
    over = [] if row.fits else [element("br"), element("b", f"needs {format_bytes(peak - allowed_bytes)} too much")]
    words = joined([row.policy, element("br"), format_tiers(row.strategy.tiers), *over])
    slower = "-" if row.slowdown is None else f"{row.slowdown:+.1%}"
    return number, words, format_bytes(peak), seconds_cell(row.predicted.step_seconds), slower
