"""A point of the outer space with its figures: what the solver works on, stage by stage, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trainfit.hardware import Hardware
from trainfit.plan.cost import BlockTable, Resident, Shares, binding
from trainfit.plan.layout import StagePart, resident_of, shares_of, split_table, stage_parts, transfer
from trainfit.plan.solver import (
    Problem,
    Solution,
    fastest,
    knapsack_bound,
    peak_bound,
    relaxed_bound,
    smallest,
    solution_of,
)
from trainfit.plan.space import Point
from trainfit.plan.target import Target
from trainfit.profile import ALL_TIERS, Phase, ShellTrace, Tier
from trainfit.rehearsal.model_trace import ModelFacts, ModelTrace

_ID_BYTES = 16  # a token's input id and label


@dataclass(frozen=True)
class Stage:
    """One pipeline stage, or several that are alike: its blocks as the solver takes them, and what is beside them."""

    part: StagePart
    resident: Resident
    problem: Problem
    beside_seconds: float  # of a micro batch, beside the blocks'

    def room(self, allowed_bytes: int) -> int:
        return allowed_bytes - self.resident.floor_bytes

    def peak(self, solution: Solution) -> int:
        return max(self.resident.floor_bytes + solution.peak_bytes, self.resident.optimizer_peak_bytes)


@dataclass(frozen=True)
class Case:
    """A point's stages. See NOTE [ Stages take turns ].

    NOTE [ Stages take turns ]
    Each rank runs all micro batches, at the pace of the slowest stage, and waits until the first has come through all
    stages and the last back: (m - 1) times the slowest and once each of them. With several stages on a rank what is
    waited for is a part of a rank's stages.
    """

    point: Point
    stages: tuple[Stage, ...]

    def seconds(self, blocks: Sequence[float]) -> float:
        """Of the whole step; blocks: those of each stage's blocks in one micro batch."""
        each = [stage.beside_seconds + own for stage, own in zip(self.stages, blocks)]
        rest = max(stage.resident.step_seconds for stage in self.stages)
        slowest = max(each)
        through = sum(seconds * len(stage.part.ranks) for stage, seconds in zip(self.stages, each)) - slowest
        per_rank = self.point.strategy.pipeline.stages_per_rank
        return self.point.micro_batches * slowest + through / per_rank + rest

    def seconds_bound(self, allowed_bytes: int) -> float:
        """No tiers that fit take less; infinite where none seem to."""
        if max(stage.resident.optimizer_peak_bytes for stage in self.stages) > allowed_bytes:
            return float("inf")
        return self.seconds([knapsack_bound(stage.problem, stage.room(allowed_bytes)) for stage in self.stages])

    def relaxed_seconds(self, allowed_bytes: int) -> float:
        """A higher bound than seconds_bound, for some milliseconds: all events, with parts of blocks."""
        if max(stage.resident.optimizer_peak_bytes for stage in self.stages) > allowed_bytes:
            return float("inf")
        return self.seconds([relaxed_bound(stage.problem, stage.room(allowed_bytes)) for stage in self.stages])

    def peak_bound(self) -> int:
        """No tiers need less."""
        peaks = [
            max(stage.resident.floor_bytes + peak_bound(stage.problem), stage.resident.optimizer_peak_bytes)
            for stage in self.stages
        ]
        return max(peaks)

    def fastest(self, allowed_bytes: int, *, gap: float = 0.0) -> list[Solution] | None:
        """Of each stage; None where one does not fit. gap: see solver.fastest."""
        found = []
        for stage in self.stages:
            if stage.resident.optimizer_peak_bytes > allowed_bytes:
                return None
            if (solution := fastest(stage.problem, stage.room(allowed_bytes), gap=gap)) is None:
                return None
            found.append(solution)
        return found

    def smallest(self) -> list[Solution]:
        """Of each stage the lowest peak; the others the fastest within the highest of them."""
        lowest = [smallest(stage.problem) for stage in self.stages]
        peak = max(stage.peak(solution) for stage, solution in zip(self.stages, lowest))
        return [fastest(stage.problem, stage.room(peak)) or solution for stage, solution in zip(self.stages, lowest)]

    def uniform(self, tier: Tier) -> list[Solution] | None:
        """All blocks alike; None where one does not have the tier."""
        row = ALL_TIERS.index(tier)
        if not all(stage.problem.offered[row].all() for stage in self.stages):
            return None
        return [solution_of(stage.problem, np.full(stage.problem.num_blocks, row)) for stage in self.stages]

    def given(self, tiers: Sequence[Tier]) -> list[Solution]:
        """Tiers of all blocks of the model."""
        rows = [
            np.array([ALL_TIERS.index(tiers[block]) for block in stage.part.blocks], dtype=np.int64)
            for stage in self.stages
        ]
        return [solution_of(stage.problem, each) for stage, each in zip(self.stages, rows)]

    def peak(self, solutions: Sequence[Solution]) -> int:
        return max(stage.peak(solution) for stage, solution in zip(self.stages, solutions))

    def tiers(self, solutions: Sequence[Solution]) -> tuple[Tier, ...]:
        """Of all blocks of the model; stages that are alike have the same."""
        blocks = max((max(stage.part.blocks, default=-1) for stage in self.stages), default=-1) + 1
        found: dict[int, Tier] = {}
        for stage, solution in zip(self.stages, solutions):
            for offset, tier in enumerate(solution.tiers.tolist()):
                for block in stage.part.same_place(offset):
                    found[block] = ALL_TIERS[tier]
                    blocks = max(blocks, block + 1)
        return tuple(found[block] for block in range(blocks))

    def binding(self, solutions: Sequence[Solution], phase: Phase | None = None, stage: int | None = None) -> str:
        """The event that limits; stage: which of them, the one with the highest peak by default."""
        peaks = [each.peak(solution) for each, solution in zip(self.stages, solutions)]
        number = peaks.index(max(peaks)) if stage is None else stage
        one = self.stages[number]
        return binding(one.resident, one.problem, solutions[number].tiers, phase, one.part.blocks)


def case_of(
    point: Point,
    trace: ModelTrace,
    facts: ModelFacts,
    target: Target,
    hardware: Hardware,
    *,
    gradients: float = 1.0,
    is_split: bool = False,
) -> Case:
    """gradients: the bytes of the variant's gradients over those that were traced. is_split: whether what was traced is
    a tensor rank's part already."""
    strategy, layout = point.strategy, point.layout
    hidden_bytes = strategy.micro_batch_size * target.seq_len * facts.dim * (4 if strategy.precision == "fp32" else 2)
    whole = BlockTable.of(facts.structures, trace.blocks, gradients=gradients)
    shares = shares_of(layout)
    if is_split:
        shares = Shares(gradients=shares.gradients // layout.mesh.tensor)
        table = BlockTable.of(facts.structures, trace.blocks, shares, gradients=gradients)
    else:
        table = BlockTable.of(facts.structures, trace.blocks, shares, gradients=gradients)
        table = split_table(table, whole, layout, hidden_bytes, hardware)
    shell = trace.shell[strategy.loss_chunks]
    share = layout.mesh.shard if layout.zero.stage and layout.zero.reduces_each_micro_batch else 1
    shell = ShellTrace(
        shell.before_blocks_peak_bytes,
        int(shell.gradient_bytes * gradients) // share,
        shell.after_blocks_peak_bytes,
        shell.seconds,
    )
    parts = stage_parts(facts.structures, layout, strategy.accumulation_steps)
    stage = _stage_maker(point, table, facts, shell, target, hardware, hidden_bytes, trace.shared_bytes)
    return Case(point, tuple(stage(part) for part in parts))


def _stage_maker(
    point: Point,
    table: BlockTable,
    facts: ModelFacts,
    shell: ShellTrace,
    target: Target,
    hardware: Hardware,
    hidden_bytes: int,
    shared_bytes: int,
) -> Callable[[StagePart], Stage]:
    strategy, layout = point.strategy, point.layout
    stages = range(0, layout.mesh.size, layout.mesh.size // layout.mesh.pipeline)
    sent = 2 * transfer(hardware, "send", hidden_bytes, stages[:2])  # there and back

    def stage(part: StagePart) -> Stage:
        problem = table.problem(part.shell(shell, hidden_bytes), list(part.blocks), part.waiting)
        compute = float(np.where(problem.offered, problem.seconds, np.inf).min(0).sum()) if part.blocks else 0.0
        resident = resident_of(
            facts,
            layout,
            hardware,
            part,
            batch_bytes=point.sequences * target.seq_len * _ID_BYTES,
            shared_bytes=shared_bytes,
            accumulates=strategy.accumulation_steps > 1,
            gathered=0.5 if strategy.cast == "block" else 1.0,
            compute_seconds=compute,
        )
        beside = part.shell(shell, hidden_bytes).seconds + resident.micro_batch_seconds + sent
        return Stage(part, resident, problem, beside)

    return stage
