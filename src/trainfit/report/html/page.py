"""The pages: a plan, one rehearsed step, predicted beside measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from trainfit.profile import Category, Profile
from trainfit.report.compare import Comparison, comparison_rows
from trainfit.report.html.area import Line, area_chart, category_rows, phase_rows
from trainfit.report.html.markup import Markup, element, table
from trainfit.report.html.strategies import alternatives_section, policies_section
from trainfit.report.html.strip import tier_rows, tier_strip
from trainfit.report.html.style import CSS, SCRIPT
from trainfit.report.names import NAMES
from trainfit.report.peak_words import explain_peak
from trainfit.report.pieces import seconds_cell
from trainfit.report.plan_view import BUCKET_CAPTION, BUCKET_HEADS, bucket_rows, side_rows, what_binds
from trainfit.report.profile_view import reserved_words, speed_words
from trainfit.step.strategy import Strategy
from trainfit.step.strategy_text import describe_strategy
from trainfit.units import format_bytes, format_count

if TYPE_CHECKING:
    from trainfit.plan import Plan
    from trainfit.plan.compare import PolicyResult


def plan_page(plan: Plan, policies: Sequence[PolicyResult] = ()) -> Markup:
    """What was chosen, what it will need and when, what binds, and what lost. policies: those it was compared with."""
    title = f"{plan.workload} on {plan.devices}"
    verdict = _verdict(plan.fits, plan.allowed_bytes - plan.predicted.needed_bytes)
    facts = [
        ("memory needed", format_bytes(plan.predicted.needed_bytes)),
        ("allowed", f"{format_bytes(plan.allowed_bytes)} of {format_bytes(plan.budget_bytes)}"),
        ("time of a step", seconds_cell(plan.predicted.step_seconds)),
        ("tokens of a step", format_count(plan.target.tokens_per_step)),
        ("plain training", format_bytes(plan.plain.peak_bytes)),
    ]
    reason = element("p", f"{plan.reason[:1].upper()}{plan.reason[1:]}.")
    head = ("", "plain training", "chosen" if plan.fits else "smallest found")
    rows = [(name, plain, chosen) for name, plain, chosen in side_rows(plan)]
    body = [
        *_header(title, f"Plan {plan.hash}: {describe_strategy(plan.strategy)}", verdict, facts),
        reason,
        *_notes(plan.notes),
        *_speed(plan.predicted),
        *_memory_section(plan.predicted, plan.strategy, allowed_bytes=plan.allowed_bytes),
        *_binding_section(plan),
        *(_bucket_section(plan) if plan.buckets else _tier_section(plan.strategy)),
        *alternatives_section(plan),
        *policies_section(plan, policies),
        element("h2", "Beside plain training"),
        table(head, rows, caption="Every setting, and what it comes to"),
    ]
    return document(f"trainfit: {title}", body)


def profile_page(
    profile: Profile,
    strategy: Strategy,
    *,
    model: str,
    device: str,
    seq_len: int,
    budget_bytes: int,
    notes: Sequence[str] = (),
) -> Markup:
    """One rehearsed step."""
    left = budget_bytes - profile.needed_bytes
    facts = [
        ("memory needed", format_bytes(profile.needed_bytes)),
        ("usable", format_bytes(budget_bytes)),
        ("between steps", format_bytes(profile.resident_bytes)),
        ("time of a step", seconds_cell(profile.step_seconds)),
    ]
    about = f"One optimizer step, rehearsed: {describe_strategy(strategy)}, sequences of {seq_len} tokens"
    body = [
        *_header(f"{model} on {device}", about, _verdict(left >= 0, left), facts),
        *_notes(notes),
        *_speed(profile),
        *_memory_section(profile, strategy, allowed_bytes=budget_bytes, limit="usable"),
        *_tier_section(strategy),
    ]
    return document(f"trainfit: {model} on {device}", body)


def comparison_page(
    comparison: Comparison, strategy: Strategy, *, model: str, device: str, seq_len: int, notes: Sequence[str] = ()
) -> Markup:
    """A step as it was predicted and as it was measured."""
    predicted, measured = comparison.predicted, comparison.measured
    facts = [
        ("predicted peak", format_bytes(predicted.peak_bytes)),
        ("measured peak", format_bytes(measured.peak_bytes)),
        ("error of the prediction", f"{100 * comparison.relative_error:+.2f} %"),
    ]
    about = f"Predicted against measured: {describe_strategy(strategy)}, sequences of {seq_len} tokens"
    rows = [tuple(map(str, row)) for row in comparison_rows(comparison)]
    highest = max(predicted.peak_bytes, measured.peak_bytes)
    unnamed: Mapping[Category, str] = {**NAMES, "temporary": "all else"}
    pictures = [
        element("div", element("h3", name), area_chart(profile, [], title=name, highest=highest, names=names))
        for name, profile, names in (("Predicted", predicted, NAMES), ("Measured", measured, unnamed))
        if profile.timeline
    ]
    body = [
        *_header(f"{model} on {device}", about, Markup(""), facts),
        *_notes(notes),
        element("h2", "Predicted and measured"),
        table(("", "predicted", "measured", "error"), rows, caption="The same step, on the same scale below"),
        element("div", *pictures, class_="pair even"),
        element("p", "An allocator knows no names: what it cannot tell is one layer.", class_="note"),
        *(element("p", sentence) for sentence in explain_peak(predicted, strategy)),
        table(("", "bytes", "share"), category_rows(predicted.categories), caption="At the predicted peak"),
        *_tier_section(strategy),
    ]
    return document(f"trainfit: {model} on {device}", body)


def document(title: str, body: Iterable[str]) -> Markup:
    """A whole page that needs nothing beside itself."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width,initial-scale=1"),
        element("title", title),
        element("style", Markup(CSS)),
    )
    foot = element("footer", "Made by trainfit. This page needs no network and holds all its data.")
    content = element("body", element("main", *body, foot), element("script", Markup(SCRIPT)))
    return Markup(f"<!DOCTYPE html>\n{element('html', head, content, lang='en')}\n")


def _header(title: str, about: str, verdict: Markup, facts: Sequence[tuple[str, str]]) -> list[Markup]:
    tiles = [element("div", element("dt", name), element("dd", value)) for name, value in facts]
    return [element("h1", title), element("p", about, class_="sub"), verdict, element("dl", *tiles, class_="facts")]


def _verdict(fits: bool, left: int) -> Markup:
    words = f"Fits, with {format_bytes(left)} to spare." if fits else f"Does not fit: {format_bytes(-left)} too much."
    return element("p", words, class_="good" if fits else "bad")


def _speed(profile: Profile) -> list[Markup]:
    """Times and rates with their ranges, where they were predicted."""
    words = speed_words(profile)
    return [] if words is None else [element("p", f"Predicted: {words}.")]


def _notes(notes: Iterable[str]) -> list[Markup]:
    return [element("p", f"Note: {note}", class_="note") for note in notes]


def _memory_section(
    profile: Profile, strategy: Strategy, *, allowed_bytes: int, limit: str = "allowed"
) -> list[Markup]:
    lines = [Line(limit, allowed_bytes, "allowed")]
    if profile.reserved_bytes:
        lines.append(Line("reserved by the allocator", profile.reserved_bytes, "reserved"))
    tables = [
        table(("at the peak", "bytes", "share"), category_rows(profile.categories), caption="What is live at the peak"),
        table(("phase", "highest", "time"), phase_rows(profile), caption="Each phase"),
    ]
    words = [element("p", sentence) for sentence in explain_peak(profile, strategy)]
    if profile.reserved is not None:
        words.append(element("p", f"{reserved_words(profile.reserved)}."))
    picture = [area_chart(profile, lines, title="Memory through the step by category")] if profile.timeline else []
    watched = _watched(profile, strategy) if profile.timeline else ""
    return [
        element("h2", "Memory through the step"),
        *words,
        element("div", element("div", *picture), element("div", *tables), class_="pair"),
        element("p", watched, class_="note") if watched else Markup(""),
    ]


def _watched(profile: Profile, strategy: Strategy) -> str:
    """What of a window the picture shows; see NOTE [ Micro batches that wait ] in rehearsal/rehearse.py."""
    steps = strategy.accumulation_steps
    forwards = sum(phase == "forward" for phase, _ in groupby(moment.phase for moment in profile.timeline))
    if steps == 1 or strategy.mesh.pipeline > 1 or forwards >= steps:
        return ""
    if forwards == 1:
        return f"The picture shows the last of {steps} micro batches and the update; no other needs more."
    return f"The picture shows {forwards} of {steps} micro batches, the first and the last among them, and the update."


def _binding_section(plan: Plan) -> list[Markup]:
    """The event that limits the plan, and what a little more memory would buy."""
    words = [element("p", sentence) for sentence in what_binds(plan)]
    if not words:
        return []
    rows = [
        (
            "as planned",
            describe_strategy(plan.strategy),
            format_bytes(plan.budget_bytes),
            seconds_cell(plan.predicted.step_seconds),
        )
    ]
    if (more := plan.more_memory) is not None:
        with_more = format_bytes(plan.budget_bytes + more.bytes)
        rows.append(("with more memory", more.how, with_more, seconds_cell(more.step_seconds)))
    made = table(("", "strategy", "budget", "step"), rows, caption="What more memory would buy, estimated", numbers=2)
    return [element("h2", "What binds"), *words, made]


def _bucket_section(plan: Plan) -> list[Markup]:
    """In the place of the tiers of a plan that has one for each block."""
    rows = table(BUCKET_HEADS, list(bucket_rows(plan)), caption=BUCKET_CAPTION)
    return [element("h2", "Activation tiers by the tokens of a micro batch"), rows]


def _tier_section(strategy: Strategy) -> list[Markup]:
    tiers = strategy.tiers
    if not tiers:
        return []
    rows = tier_rows(tiers, compiled=bool(strategy.compile.blocks))
    return [
        element("h2", "Activation tier of each block"),
        element("div", tier_strip(tiers), class_="stack"),
        table(
            ("blocks", "tier", "kept for backward", "computed again"), rows, caption="First to last block", numbers=9
        ),
    ]
