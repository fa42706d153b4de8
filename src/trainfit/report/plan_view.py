"""A Plan: plain training beside what was chosen, why, and what lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainfit.report.pieces import bar, table
from trainfit.report.profile_view import speed_words
from trainfit.step.strategy import Strategy, describe_variant, format_tiers
from trainfit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from trainfit.plan import Alternative, Plan

MAX_ALTERNATIVES = 8
_TIERS_WIDTH = 30


def plan_view(plan: Plan) -> RenderableType:
    """Plain training and the chosen strategy side by side, then the reason; that of a plan which fails is an error."""
    left_free = format_bytes(plan.budget_bytes - plan.allowed_bytes)
    title = Text.assemble(
        ("Plan ", "bold"), (plan.hash, "bold cyan"), f" for {plan.workload} on {plan.device} within ",
        (format_bytes(plan.budget_bytes), "bold"), f", {left_free} of it left free",
    )  # fmt: skip
    speed = [Text(words)] if (words := speed_words(plan.predicted)) else []
    reason = [Text(f"{plan.reason[:1].upper()}{plan.reason[1:]}.")] if plan.fits else []
    notes = [Text(f"note: {note}", style="yellow") for note in plan.notes]
    return Group(title, _sides(plan), *speed, *reason, *notes)


def _sides(plan: Plan) -> Table:
    both, seq_len = (plan.plain.strategy, plan.strategy), plan.target.seq_len
    made = table("", "plain training", "chosen" if plan.fits else "smallest found")
    made.add_row("micro batch", *(f"{s.micro_batch_size} x {seq_len} tokens" for s in both))
    made.add_row("accumulation", *(str(s.accumulation_steps) for s in both))
    made.add_row("precision", *(s.precision for s in both))
    if any(map(variant_words, both)):
        made.add_row("optimizer", *(_clip(variant_words(s) or "AdamW", 2 * _TIERS_WIDTH) for s in both))
    made.add_row("activation", *(_clip(format_tiers(s.tiers), _TIERS_WIDTH) for s in both))
    made.add_row("loss chunks", *(str(s.loss_chunks) for s in both))
    peaks = (plan.plain.peak_bytes, plan.predicted.peak_bytes)
    made.add_row("peak memory", *(Text(format_bytes(peak), style=f"bold {_colour(peak, plan)}") for peak in peaks))
    made.add_row("", *(_budget_bar(peak, max(*peaks, plan.allowed_bytes), plan) for peak in peaks))
    seconds = (plan.plain.step_seconds, plan.predicted.step_seconds)
    made.add_row("step time", *(format_seconds(s) if s else "-" for s in seconds))
    return made


def variant_words(strategy: Strategy) -> str:
    """How the optimizer keeps things, "" where nothing is special."""
    return ", ".join(describe_variant(strategy.optimizer))


def _colour(peak_bytes: int, plan: Plan) -> str:
    return "green" if peak_bytes <= plan.allowed_bytes else "red"


def _budget_bar(peak_bytes: int, longest: int, plan: Plan, width: int = 24) -> Text:
    """The peak as a bar, with a mark where the allowed memory ends."""
    mark = min(width - 1, round(width * plan.allowed_bytes / longest))
    marks = bar(peak_bytes / longest, width).ljust(width, "·")
    colour = _colour(peak_bytes, plan)
    return Text.assemble((marks[:mark], colour), ("|", "bold"), (marks[mark + 1 :], colour))


def alternatives_table(plan: Plan) -> Table:
    """What lost, and why; peaks that were rehearsed and not only estimated have an asterisk."""
    columns = ("batch", "activation", "chunks", "dtype and optimizer", "peak", "step", "why not")
    made = table(*columns, title="What lost (* rehearsed, the others estimated)")
    for name in ("activation", "dtype and optimizer", "why not"):
        column = made.columns[columns.index(name)]
        column.justify, column.no_wrap = "left", name == "activation"
    for alternative in plan.alternatives[:MAX_ALTERNATIVES]:
        made.add_row(*_alternative_row(alternative))
    if (more := len(plan.alternatives) - MAX_ALTERNATIVES) > 0:
        made.caption, made.caption_justify = f"and {more} more: --json has them all", "left"
    return made


def _alternative_row(alternative: Alternative) -> tuple[str, ...]:
    strategy = alternative.strategy
    return (
        f"{strategy.micro_batch_size} x {strategy.accumulation_steps}",
        _clip(format_tiers(strategy.tiers), _TIERS_WIDTH),
        str(strategy.loss_chunks),
        ", ".join(filter(None, [strategy.precision, variant_words(strategy)])),
        format_bytes(alternative.peak_bytes) + ("*" if alternative.rehearsed else " "),
        format_seconds(alternative.step_seconds) if alternative.step_seconds else "-",
        alternative.why,
    )


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
