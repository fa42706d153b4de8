"""A Plan: plain training beside what was chosen, why, and what lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainfit.report.pieces import bar, table
from trainfit.report.profile_view import short_tiers, strategy_line
from trainfit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from trainfit.plan import Alternative, Plan

MAX_ALTERNATIVES = 8
_TIERS_WIDTH = 34


def plan_view(plan: Plan) -> RenderableType:
    """Plain training and the chosen strategy side by side, then the reason."""
    title = Text.assemble(
        ("Plan ", "bold"), (plan.hash, "bold cyan"), f" for {plan.workload} on {plan.device}, within ",
        (format_bytes(plan.budget_bytes), "bold"),
    )  # fmt: skip
    reason = Text(plan.reason, style="" if plan.fits else "red")
    notes = [Text(f"note: {note}", style="yellow") for note in plan.notes]
    return Group(title, _sides(plan), reason, *notes)


def _sides(plan: Plan) -> Table:
    plain, chosen, seq_len = plan.plain.strategy, plan.strategy, plan.target.seq_len
    made = table("", "plain training", "chosen" if plan.fits else "smallest found")
    both = (plain, chosen)
    made.add_row("micro batch", *(f"{s.micro_batch_size} x {seq_len} tokens" for s in both))
    made.add_row("accumulation", *(str(s.accumulation_steps) for s in both))
    made.add_row("precision", *(s.precision for s in both))
    made.add_row("activation", *(_clip(short_tiers(s), _TIERS_WIDTH) for s in both))
    made.add_row("loss pieces", *(str(s.loss_chunks) for s in both))
    peaks = (plan.plain.peak_bytes, plan.predicted.peak_bytes)
    made.add_row("peak memory", *(_against(peak, plan.budget_bytes) for peak in peaks))
    made.add_row("", *(_budget_bar(peak, max(*peaks, plan.budget_bytes), plan.budget_bytes) for peak in peaks))
    seconds = (plan.plain.step_seconds, plan.predicted.step_seconds)
    made.add_row("step time", *(format_seconds(s) if s else "-" for s in seconds))
    return made


def _against(peak_bytes: int, budget_bytes: int) -> Text:
    return Text(format_bytes(peak_bytes), style="bold green" if peak_bytes <= budget_bytes else "bold red")


def _budget_bar(peak_bytes: int, longest: int, budget_bytes: int, width: int = 20) -> Text:
    """The peak as a bar with a mark where the budget ends."""
    mark = min(width - 1, round(width * budget_bytes / longest))
    marks = bar(peak_bytes / longest, width).ljust(width, "·")
    style = "green" if peak_bytes <= budget_bytes else "red"
    return Text.assemble((marks[:mark], style), ("|", "bold"), (marks[mark + 1 :], style))


def alternatives_table(plan: Plan) -> Table:
    """What lost, and why; the best few, those that were rehearsed marked with an asterisk."""
    made = Table(box=None, title="What lost (* rehearsed, others estimated)", title_justify="left", title_style="bold")
    made.pad_edge = False
    for name, justify in (("strategy", "left"), ("peak", "right"), ("step", "right"), ("why", "left")):
        made.add_column(name, justify=justify, header_style="dim", overflow="fold")  # type: ignore[arg-type]
    for alternative in plan.alternatives[:MAX_ALTERNATIVES]:
        made.add_row(*_alternative_row(alternative, plan.target.seq_len))
    return made


def _alternative_row(alternative: Alternative, seq_len: int) -> tuple[str, str, str, str]:
    mark = "*" if alternative.rehearsed else ""
    return (
        strategy_line(alternative.strategy, seq_len),
        format_bytes(alternative.peak_bytes) + mark,
        format_seconds(alternative.step_seconds) if alternative.step_seconds else "-",
        alternative.why,
    )


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
