"""The ledger of a plan's blocks: what each operator costs and makes, whether it is kept, and what that is worth."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from trainfit.errors import RecipeError
from trainfit.hardware import Hardware
from trainfit.operators import BlockGraph
from trainfit.plan.op_choice import best_choice, mixed_seconds
from trainfit.plan.op_tiers import Budget, budgets_of, trace_of
from trainfit.plan.target import Target
from trainfit.plan.variants import Tracers
from trainfit.profile import Tier
from trainfit.rehearsal.model_trace import ModelTrace
from trainfit.rehearsal.trace import Tracer
from trainfit.step.strategy import Strategy
from trainfit.workload import Workload

Fate = Literal["kept", "runs again", "left out"]


@dataclass(frozen=True)
class Entry:
    """One operator. operator: its key. place: the module, within the block. saved: whether backward asks for it.

    fate: "left out" where nobody asks for it. buys_seconds: of recompute, by which a block would take longer without
    what is kept, or less with it kept beside the others.
    """

    operator: str
    place: str
    seconds: float
    bytes: int
    saved: bool
    fate: Fate
    buys_seconds: float


@dataclass(frozen=True)
class Ledger:
    """One block of a structure at a plan's budget.

    blocks: those of the model that are alike. tiers: the plan's, of these. room_bytes: what such a block saves in the
    mean beside its input. kept_bytes: what the best choice of operators for every block keeps of it.
    best_seconds: that choice's recompute. mixed_seconds: where blocks mix the two choices around the room, as a plan
    with chosen tiers does. plan_seconds: of the plan's tiers, in the mean.
    """

    structure: int
    blocks: tuple[int, ...]
    tiers: tuple[Tier, ...]
    room_bytes: int
    kept_bytes: int
    best_seconds: float
    mixed_seconds: float
    plan_seconds: float
    entries: tuple[Entry, ...]

    def to_json(self) -> dict[str, Any]:
        """The documented keys of `explain --json`."""
        return asdict(self)


def ledgers_of(
    workload: Workload, hardware: Hardware, target: Target, strategy: Strategy, room_bytes: int | None = None
) -> list[Ledger]:
    """One for each structure of the model. room_bytes: instead of what the plan's blocks save in the mean.

    Raises RecipeError for a strategy whose tensor ranks split the block or whose blocks are compiled, and for a model
    without blocks.
    """
    if strategy.mesh.tensor > 1:
        raise RecipeError(
            f"explain looks at a whole block, mesh.tensor {strategy.mesh.tensor} splits it; explain a plan for fewer "
            "devices"
        )
    if strategy.compile.blocks:
        raise RecipeError("explain looks at single operators, of which a compiled block has none; leave compile out")
    tracer = Tracers(workload, hardware, target).of(strategy.optimizer, attention=strategy.attention)
    whole = trace_of(tracer, strategy)
    budgets = budgets_of(tracer, strategy, whole, room_bytes)
    if not budgets:
        raise RecipeError(f"{workload.name} has no block with operators that run again; there is nothing to explain")
    return [_ledger(budget, tracer, strategy, whole) for budget in budgets]


def _ledger(budget: Budget, tracer: Tracer, strategy: Strategy, trace: ModelTrace) -> Ledger:
    structures = tracer.facts.structures
    blocks = tuple(block for block, own in enumerate(structures) if own == budget.structure)
    tiers = tuple(strategy.tiers[block] for block in blocks)
    best = best_choice(budget.graph, max(0, budget.room_bytes))
    around = [(each.num_bytes, each.seconds) for each in (budget.low, budget.high)]
    return Ledger(
        structure=budget.structure,
        blocks=blocks,
        tiers=tiers,
        room_bytes=budget.room_bytes,
        kept_bytes=best.num_bytes,
        best_seconds=best.seconds,
        mixed_seconds=mixed_seconds(around, max(0, budget.room_bytes)),
        plan_seconds=sum(recompute_seconds(trace, budget.structure, tier) for tier in tiers) / len(tiers),
        entries=tuple(entries_of(budget.graph, best.kept)),
    )


def recompute_seconds(trace: ModelTrace, structure: int, tier: Tier) -> float:
    """What a block takes longer under a tier than where it keeps everything."""
    own, keep = trace.blocks[structure, tier], trace.blocks[structure, "keep"]
    return own.forward_seconds + own.backward_seconds - keep.forward_seconds - keep.backward_seconds


def entries_of(graph: BlockGraph, kept: frozenset[int]) -> list[Entry]:
    runs, seconds = graph.runs_again(kept), graph.seconds(kept)
    found = []
    for number, operator in enumerate(graph.operators):
        fate: Fate = "kept" if number in kept else "runs again" if number in runs else "left out"
        other = kept ^ {number} if operator.may_store else kept
        found.append(
            Entry(
                operator.key,
                operator.place,
                operator.seconds,
                operator.num_bytes,
                operator.is_saved,
                fate,
                abs(graph.seconds(other) - seconds),
            )
        )
    return found
