"""Tables of the page: rows in, aligned Markdown out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from llama_13b.cases import Case
from trainfit.plan import Plan
from trainfit.profile import Category, Collective, Profile
from trainfit.step.strategy_text import format_tiers
from trainfit.units import format_seconds

GIB = 2**30
# Headings of what lives at the peak, in the order in which the picture stacks them too.
PARTS: Mapping[Category, str] = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "states",
    "communication": "comm",
    "loss": "logits",
    "temporary": "other",
    "activations": "activations",
}


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Aligned columns, the first `left` of them to the left."""
    lines = [list(heads), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]

    def row(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths))]
        return f"| {' | '.join(padded)} |"

    rule = [f"{'-' * (w + 2)}" if i < left else f"{'-' * (w + 1)}:" for i, w in enumerate(widths)]
    return "\n".join([row(lines[0]), f"|{'|'.join(rule)}|", *map(row, lines[1:])])


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.1f}"


def fits(profile: Profile, allowed_bytes: int) -> str:
    return "fits" if profile.needed_bytes <= allowed_bytes else f"+{gib(profile.needed_bytes - allowed_bytes)}"


def needs(profile: Profile) -> list[str]:
    """The peak, and what the allocator holds where a rehearsal says that."""
    return [gib(profile.peak_bytes), gib(profile.needed_bytes)]


def memory_table(rows: Sequence[tuple[str, str, Profile]], allowed_bytes: int) -> str:
    """Rows of (batch, name, profile); GiB at the peak, by part."""
    heads = ["batch", "case", *PARTS.values(), "peak", "held", "fits?"]
    cells = [[batch, name, *part_cells(profile), fits(profile, allowed_bytes)] for batch, name, profile in rows]
    return table(heads, cells, left=2)


def part_cells(profile: Profile) -> list[str]:
    return [*(gib(profile.categories[part]) for part in PARTS), *needs(profile)]


def speed_table(rows: Sequence[tuple[str, str, Profile]], base: Mapping[str, Profile]) -> str:
    """base: what each batch's speed is relative to."""
    heads = ["batch", "case", "step", "speed", "gathers", "GiB", "reduces", "GiB", "sums", "bytes", "waits"]
    cells = []
    for batch, name, profile in rows:
        speed = base[batch].step_seconds / profile.step_seconds
        traffic = [
            cell for kind in ("all_gather", "reduce_scatter") for cell in _traffic(profile.collectives.get(kind))
        ]
        sums = profile.collectives.get("all_reduce") or Collective(0, 0, ())
        waits = format_seconds(profile.exposed_communication_seconds)
        step = format_seconds(profile.step_seconds)
        cells.append([batch, name, step, f"{speed:.2f}", *traffic, str(sums.count), _small(sums.bytes), waits])
    return table(heads, cells, left=2)


def _traffic(collective: Collective | None) -> tuple[str, str]:
    return (f"{collective.count:,}", gib(collective.bytes)) if collective else ("0", "0")


def _small(num_bytes: int) -> str:
    return str(num_bytes) if num_bytes < 1000 else f"{num_bytes / GIB:.1f} GiB"


def plan_rows(plans: Mapping[int, Plan]) -> str:
    heads = ["batch", "micro batch", "blocks, first to last", "loss in", "how", "peak", "held", "step"]
    cells = [
        [
            str(batch),
            f"{plan.strategy.micro_batch_size} x {plan.strategy.accumulation_steps}",
            format_tiers(plan.strategy.tiers),
            str(plan.strategy.loss_chunks),
            arrangement(plan),
            *needs(plan.predicted),
            format_seconds(plan.predicted.step_seconds),
        ]
        for batch, plan in plans.items()
    ]
    return table(heads, cells, left=5)


def arrangement(plan: Plan) -> str:
    """ZeRO stage and what differs from plain AdamW on the device."""
    strategy = plan.strategy
    variant = strategy.optimizer
    words = [f"ZeRO {strategy.zero.stage}"] if strategy.mesh.size > 1 else []
    words += [] if variant.weights == "fp32" else [variant.weights.replace("_", " + ")]
    words += [] if variant.gradients == "fp32" else ["half gradients"]
    words += [] if variant.states == "fp32" else [f"{variant.states} moments"]
    words += [] if variant.place == "device" else ["states on the host"]
    words += [] if variant.update == "step" else ["update in backward"]
    return ", ".join(words) or "plain AdamW"


def case_rows(cases: Iterable[Case], profiles: Mapping[Case, Profile], allowed_bytes: int) -> str:
    """One row a case, for cases that share a budget."""
    heads = ["what", "params", "grads", "states", "rest", "peak", "held", "fits?"]
    cells = []
    for case in cases:
        profile = profiles[case]
        states = [profile.categories[part] for part in ("parameters", "gradients", "optimizer")]
        rest = profile.peak_bytes - sum(states)
        cells.append([case.name, *map(gib, states), gib(rest), *needs(profile), fits(profile, allowed_bytes)])
    return table(heads, cells)
