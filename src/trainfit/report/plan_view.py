"""A Plan: plain training beside what was chosen, why, and what lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainfit.report.peak_words import explain_peak
from trainfit.report.pieces import bar, seconds_cell, table
from trainfit.report.profile_view import speed_words
from trainfit.step.strategy import Strategy
from trainfit.step.strategy_text import (
    describe_compile,
    describe_mesh,
    describe_strategy,
    describe_variant,
    format_tiers,
)
from trainfit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from trainfit.plan import Plan

MAX_ALTERNATIVES = 8
_TIERS_WIDTH = 30


BUCKET_HEADS = ("tokens of a micro batch", "peak", "a token", "activation")
BUCKET_CAPTION = "* sequences are put together up to these; a longer one is alone"


def plan_view(plan: Plan) -> RenderableType:
    """Plain training and the chosen strategy side by side, then the reason; that of a plan which fails is an error."""
    left_free = format_bytes(plan.budget_bytes - plan.allowed_bytes)
    title = Text.assemble(
        ("Plan ", "bold"), (plan.hash, "bold cyan"), f" for {plan.workload} on {plan.devices} within ",
        (format_bytes(plan.budget_bytes), "bold"), f", {left_free} of it left free",
    )  # fmt: skip
    speed = [Text(said)] if (said := speed_words(plan.predicted)) else []
    reason = [Text(f"{plan.reason[:1].upper()}{plan.reason[1:]}.")] if plan.fits else []
    reason += [Text(line) for line in what_binds(plan)]
    notes = [Text(f"note: {note}", style="yellow") for note in plan.notes]
    words = Text(" ".join(explain_peak(plan.predicted, plan.strategy)))
    rows = [buckets_table(plan)] if plan.buckets else []
    return Group(title, _sides(plan), *rows, *speed, *reason, words, *notes)


def buckets_table(plan: Plan) -> Table:
    """The tiers of micro batches by their tokens, and what the largest of each row need."""
    made = table(*BUCKET_HEADS)
    for row in bucket_rows(plan):
        made.add_row(*row)
    made.caption, made.caption_justify = BUCKET_CAPTION, "left"
    return made


def bucket_rows(plan: Plan) -> Iterator[tuple[str, str, str, str]]:
    for row, bucket in zip(plan.strategy.tier_table, plan.buckets):
        own = f"{row.max_tokens:,}" + ("*" if row.max_tokens == plan.strategy.micro_batch_tokens else " ")
        yield own, format_bytes(bucket.peak_bytes), seconds_cell(bucket.token_seconds), format_tiers(row.tiers)


def what_binds(plan: Plan) -> Iterator[str]:
    """Which event limits the plan, and what a little more memory would buy."""
    if plan.binds:
        yield f"What binds: {plan.binds}."
    if (more := plan.more_memory) is not None:
        saved = plan.predicted.step_seconds - more.step_seconds
        share = f"({saved / plan.predicted.step_seconds:.1%})"
        bought = f"{format_seconds(saved)} a step {share}" if saved > 0 else "nothing"
        yield f"The next {format_bytes(more.bytes)} would buy {bought}" + (f": {more.how}." if saved > 0 else ".")


def side_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """What is set and what it comes to: name, plain training, chosen."""
    both, seq_len = (plan.plain.strategy, plan.strategy), plan.target.seq_len
    peaks, seconds = (plan.plain.peak_bytes, plan.predicted.needed_bytes), (plan.plain, plan.predicted)
    rows: list[tuple[str, Iterable[str]]] = [
        ("micro batch", (_micro_batch(s, seq_len) for s in both)),
        ("accumulation", (str(s.accumulation_steps) for s in both)),
        ("precision", (s.precision for s in both)),
        ("optimizer", (variant_words(s) or "AdamW" for s in both) if any(map(variant_words, both)) else ()),
        ("devices", (", ".join(describe_mesh(s)) or "copies" for s in both) if both[1].mesh.size > 1 else ()),
        ("activation", (format_tiers(s.tiers) if not s.tier_table else "by tokens" for s in both)),
        ("compiled", (_compiled(s) for s in both) if plan.strategy.compile.blocks else ()),
        ("loss chunks", (str(s.loss_chunks) for s in both)),
        ("peak memory", (format_bytes(peak) for peak in peaks)),
        ("of it allocated", ("-", format_bytes(plan.predicted.peak_bytes)) if plan.predicted.reserved_bytes else ()),
        ("step time", (seconds_cell(each.step_seconds) for each in seconds)),
    ]
    found = ((name, tuple(values)) for name, values in rows)
    return [(name, values[0], values[1]) for name, values in found if values]


def _compiled(strategy: Strategy) -> str:
    return ", ".join(describe_compile(strategy.compile)) or "no"


def _micro_batch(strategy: Strategy, seq_len: int) -> str:
    if strategy.tier_table:
        return f"up to {strategy.micro_batch_tokens} tokens"
    return f"{strategy.micro_batch_size} x {seq_len} tokens"


def _sides(plan: Plan) -> Table:
    made = table("", "plain training", "chosen" if plan.fits else "smallest found")
    peaks = (plan.plain.peak_bytes, plan.predicted.needed_bytes)
    for name, *values in side_rows(plan):
        if name == "peak memory":
            made.add_row(name, *(Text(v, style=f"bold {_colour(p, plan)}") for v, p in zip(values, peaks)))
            made.add_row("", *(_budget_bar(peak, max(*peaks, plan.allowed_bytes), plan) for peak in peaks))
        else:
            made.add_row(
                name,
                *(
                    _clip(value, 2 * _TIERS_WIDTH if name in ("optimizer", "devices") else _TIERS_WIDTH)
                    for value in values
                ),
            )
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
    made = table("", "peak", "step", "strategy, and why not", title="What lost (* rehearsed, the others estimated)")
    last = made.columns[-1]
    last.justify, last.no_wrap = "left", False
    shown = plan.alternatives[:MAX_ALTERNATIVES]
    for letter, alternative in zip(letters(len(shown)), shown):
        seconds = seconds_cell(alternative.step_seconds)
        peak = format_bytes(alternative.peak_bytes) + ("*" if alternative.rehearsed else " ")
        words = Text.assemble(describe_strategy(alternative.strategy), "\n", (alternative.why, "yellow"))
        made.add_row(letter, peak, seconds, words)
    if (more := len(plan.alternatives) - MAX_ALTERNATIVES) > 0:
        made.caption, made.caption_justify = f"and {more} more: --json and --html have them all", "left"
    return made


def letters(count: int) -> list[str]:
    """A, B, ... Z, AA, AB, ...: names for the strategies that lost, in the table and in the picture."""
    single = [chr(ord("A") + number) for number in range(26)]
    return [*single, *(first + second for first in single for second in single)][:count]


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
