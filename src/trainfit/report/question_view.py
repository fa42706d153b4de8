"""Answers to questions, as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainfit.report.pieces import facts, seconds_cell, table
from trainfit.step.strategy_text import describe_strategy
from trainfit.units import format_bytes, format_count

if TYPE_CHECKING:
    from trainfit.plan.questions import Batch, Card, FewestDevices, LongestSequence, Trial
    from trainfit.plan.savings import Saving


def sequence_view(answer: LongestSequence) -> RenderableType:
    """The length, the step that has it, and why no longer one."""
    if answer.next is None:
        end = "all positions that the model has"
    else:
        end = f"{answer.next.seq_len} tokens need {format_bytes(answer.next.over_bytes)} more than allowed"
    return _answer(f"{answer.seq_len} tokens", answer.found, "why no more", end)


def devices_view(answer: FewestDevices) -> RenderableType:
    """The number, the step of one of them, and what one less would need."""
    if answer.fewer is None:
        end = "one is enough"
    else:
        fewer = answer.fewer.strategy.mesh.size
        end = f"{fewer} need {format_bytes(answer.fewer.over_bytes)} more each than allowed, at ZeRO 3"
    return _answer(f"{answer.devices} device{'s' * (answer.devices > 1)}", answer.found, "why no fewer", end)


def _answer(what: str, found: Trial, why: str, end: str) -> RenderableType:
    """why, end: the name and the words of what ends the search."""
    profile = found.predicted
    rows: list[tuple[str, str | Text]] = [
        ("answer", Text(what, style="bold green")),
        (why, end),
        ("leanest step", describe_strategy(found.strategy)),
        ("peak memory", f"{format_bytes(profile.needed_bytes)} of {format_bytes(found.allowed_bytes)} allowed"),
        ("step time", seconds_cell(profile.step_seconds)),
    ]
    return Group(facts(rows))


def batches_table(batches: Iterable[Batch]) -> Table:
    """The largest micro batch of each way, and what one more would need."""
    made = table("way", "micro batch", "tokens", "peak", "tokens/s", "one more needs", title="Largest micro batch")
    for batch in batches:
        if batch.found is None:
            over = "-" if batch.next is None else f"{format_bytes(batch.next.over_bytes)} over"
            made.add_row(batch.way, Text("none fits", style="red"), "-", "-", "-", over)
            continue
        found, strategy = batch.found, batch.found.strategy
        tokens = strategy.micro_batch_size * found.seq_len * strategy.mesh.data
        made.add_row(
            batch.way,
            Text(str(strategy.micro_batch_size), style="bold green"),
            format_count(tokens),
            format_bytes(found.predicted.needed_bytes),
            _rate(found.tokens_per_step, found.predicted.step_seconds),
            "-" if batch.next is None else f"{format_bytes(batch.next.over_bytes)} over",
        )
    made.caption, made.caption_justify = (
        "Any multiple of it makes a step: micro batches add up their gradients.",
        "left",
    )
    return made


def savings_table(plain: Trial, rows: Sequence[Saving]) -> Table:
    """Each change against plain training; what saves the most stands first."""
    title = f"Plain: {describe_strategy(plain.strategy)}"
    made = table("one change", "saves", "peak", "step", "against plain", "exactness", title=title)
    made.columns[5].justify, made.columns[5].no_wrap = "left", False
    peak, seconds = plain.predicted.needed_bytes, plain.predicted.step_seconds
    made.add_row("none", "-", _peak(plain), seconds_cell(seconds), "-", "")
    for row in sorted(rows, key=lambda row: -row.saved_bytes):
        if row.trial is None:
            made.add_row(row.change, "-", "-", "-", "-", Text(row.why, style="yellow"))
            continue
        made.add_row(
            row.change,
            f"{format_bytes(row.saved_bytes)} ({row.saved_bytes / peak:.0%})",
            _peak(row.trial),
            seconds_cell(row.trial.predicted.step_seconds),
            "-" if row.slowdown is None else f"{row.slowdown:+.1%}",
            row.accuracy,
        )
    return made


def _peak(trial: Trial) -> Text:
    return Text(format_bytes(trial.predicted.needed_bytes), style="green" if trial.fits else "red")


def cards_table(cards: Sequence[Card]) -> Table:
    """Devices side by side, the fastest first."""
    made = table("device", "plan", "peak", "of allowed", "step", "tokens/s", title="The best plan of each device")
    made.columns[1].justify, made.columns[1].no_wrap = "left", False
    for card in sorted(cards, key=lambda card: -(card.tokens_per_second or 0.0)):
        if card.plan is None or not card.fits:
            made.add_row(card.device, Text(card.why, style="red"), "-", "-", "-", "-")
            continue
        plan, profile = card.plan, card.plan.predicted
        made.add_row(
            card.device,
            describe_strategy(plan.strategy),
            format_bytes(profile.needed_bytes),
            format_bytes(plan.allowed_bytes),
            seconds_cell(profile.step_seconds),
            "-" if card.tokens_per_second is None else format_count(card.tokens_per_second),
        )
    return made


def _rate(tokens: int, seconds: float) -> str:
    return format_count(tokens / seconds) if seconds else "-"
