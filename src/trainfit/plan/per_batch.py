"""choose_per_batch(): a table of tiers by the tokens of a micro batch, from one solution for each number of tokens.

NOTE [ A row for each number of tokens ]
A static plan has to hold the longest sequence in every micro batch. A table holds it where it is: what a micro batch
needs grows with its tokens, padding included, so each number of tokens is a problem of its own, the fastest tiers for
one sequence of as many tokens (several of the full length where that is not enough) beside the gradients of earlier
micro batches. No micro batch with as many tokens needs more: shorter sequences have the same tokens and smaller
scores. Neighbours that come out alike are one row.
  tokens of a micro batch   Those at which a token takes the least time, by a step of sequences a quarter as long as the
                            longest. Sequences are put together up to these; a longer one is alone.
  what stays                Layout, precision, optimizer and chunks of the loss are those of the static plan.
Rows are traced at three lengths and drawn as parabolas between them (scores grow with the square of the length),
solved, and then all rehearsed, the longest first: the longest micro batch is known before the run. As in the search,
what a rehearsal needs beside the fast model is taken off the room and the row is solved again.

NOTE [ Room above the plan ]
The table stays below `threshold` of the budget, and a run that measures more has found something that no prediction
knew. It then goes a row down for all micro batches (train/tightening.py), long before the budget is used up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from math import ceil
from typing import TypeVar

from trainfit.errors import DoesNotFitError, RecipeError
from trainfit.hardware import Hardware
from trainfit.plan.case import Case, case_of
from trainfit.plan.choose import choose
from trainfit.plan.judged import judged
from trainfit.plan.plan import Alternative, Bucket, Plan
from trainfit.plan.sketch import Sketch
from trainfit.plan.solver import Solution
from trainfit.plan.space import Point
from trainfit.plan.target import Target
from trainfit.plan.variants import Tracers, facts_of, gradient_share
from trainfit.profile import BlockTrace, Mesh, Profile, ShellTrace, Tier, TokenBucket
from trainfit.rehearsal.model_trace import ModelTrace
from trainfit.rehearsal.trace import Tracer
from trainfit.step.strategy import Strategy
from trainfit.units import format_bytes
from trainfit.workload import Workload
from trainfit.workload.batch import padded

DEFAULT_THRESHOLD = 0.85
_PARTS, _PARTS_IF_DEEP, _DEEP = 16, 8, 24  # of the longest sequence; blocks
_NOT_BY_ROW = frozenset({"activations", "compile"})  # of what may change
_TRIES = 4  # solutions of one row
_SLACK = 0.01  # of what is allowed; see rehearsals.py

T = TypeVar("T", BlockTrace, ShellTrace)
Progress = Callable[[str], None]


def choose_per_batch(
    workload: Workload,
    hardware: Hardware,
    target: Target,
    *,
    threshold: float = DEFAULT_THRESHOLD,
    max_grad_norm: float | None = 1.0,
    on_progress: Progress = lambda message: None,
) -> Plan:
    """A plan whose tiers follow the micro batch. See NOTE [ A row for each number of tokens ].

    target.seq_len: of the longest sequence. Raises DoesNotFitError where the longest does not stay below threshold of
    the budget, RecipeError where the static plan has pipeline stages or tensor ranks.
    """
    if target.offload is not None:
        raise RecipeError("per_batch does not work with offload yet: a table cannot switch it; leave one of them out")
    for layout in target.layouts:
        _check(layout.mesh)
    # Rows must give the same bits, blocks would be compiled for every tier and length, and what operators are worth
    # moves with the tokens.
    asked, target = target, replace(target, may_change=target.may_change - _NOT_BY_ROW, operators=False)
    static = choose(workload, hardware, target, max_grad_norm=max_grad_norm, on_progress=on_progress)
    if not static.fits:
        return static  # nor does its longest micro batch alone, and it says what would help
    _check(static.strategy.mesh)
    allowed = min(target.allowed_bytes(hardware.spec.kind), int(threshold * target.budget_bytes))
    table = _Rows(workload, hardware, target, static.strategy, allowed, max_grad_norm, on_progress).table()
    strategy = replace(
        static.strategy,
        micro_batch_size=1,
        accumulation_steps=_steps(target, static.strategy, table.tokens),
        tiers=table.rows[-1].tiers,
        tier_table=tuple(TokenBucket(row.tokens, row.tiers) for row in table.rows),
        micro_batch_tokens=table.tokens,
    )
    return replace(_plan_of(static, strategy, table, allowed, threshold), target=asked)


def _check(mesh: Mesh) -> None:
    if mesh.pipeline > 1 or mesh.tensor > 1:
        raise RecipeError(
            f"per_batch works with copies and shards of the model, the mesh has pipeline {mesh.pipeline} and tensor "
            f"{mesh.tensor}; use mesh.replicate and mesh.shard, or leave per_batch out"
        )


@dataclass(frozen=True)
class _Row:
    tokens: int
    tiers: tuple[Tier, ...]
    profile: Profile


@dataclass(frozen=True)
class _Table:
    """tokens: of a micro batch, unless it is one longer sequence."""

    rows: tuple[_Row, ...]
    tokens: int

    @property
    def usual(self) -> _Row:
        return next(row for row in self.rows if row.tokens >= self.tokens)


def _plan_of(static: Plan, strategy: Strategy, table: _Table, allowed: int, threshold: float) -> Plan:
    largest = max(table.rows, key=lambda row: row.profile.needed_bytes)
    usual = table.usual.profile
    predicted = replace(
        largest.profile,
        step_seconds=usual.step_seconds,
        step_seconds_low=usual.step_seconds_low,
        step_seconds_high=usual.step_seconds_high,
        phase_seconds=usual.phase_seconds,
        tokens=usual.tokens,
        model_flops=usual.model_flops,
    )
    beside = Alternative(
        static.strategy,
        static.predicted.needed_bytes,
        static.predicted.step_seconds,
        True,
        "static plan: the tiers of the longest sequence for every micro batch",
    )
    needs = format_bytes(largest.profile.needed_bytes)
    return replace(
        static,
        strategy=strategy,
        predicted=predicted,
        allowed_bytes=allowed,
        alternatives=(
            beside,
            *(replace(each, why=f"{each.why}, beside the static plan") for each in static.alternatives),
        ),
        reason=f"tiers by the tokens of each micro batch; the largest need is {needs}, of micro batches of "
        f"{largest.tokens} tokens",
        notes=(
            *static.notes,
            f"a table of tiers stays below {threshold:.0%} of the budget, the rest is room to tighten it at run time",
            f"step time is that of micro batches of {table.tokens} tokens; sequences that are longer take more",
        ),
        binds="",
        more_memory=None,
        buckets=tuple(
            Bucket(row.tokens, row.profile.needed_bytes, row.profile.step_seconds / max(1, row.profile.tokens))
            for row in table.rows
        ),
    )


def _steps(target: Target, strategy: Strategy, tokens: int) -> int:
    """Micro batches of a step, at least two: from the second on gradients live beside activations."""
    return max(2, ceil(target.tokens_per_step / strategy.mesh.data / tokens))


class _Rows:
    """Solves and rehearses rows. The cases of the fast model are kept by tokens."""

    def __init__(
        self,
        workload: Workload,
        hardware: Hardware,
        target: Target,
        strategy: Strategy,
        allowed: int,
        max_grad_norm: float | None,
        on_progress: Progress,
    ) -> None:
        self.workload, self.hardware, self.target = workload, hardware, target
        self.strategy, self.allowed = strategy, allowed
        self.max_grad_norm, self.on_progress = max_grad_norm, on_progress
        self.longest = target.seq_len
        self.excess = 0  # by how much rehearsals were above the fast model
        self._cases: dict[int, Case] = {}
        lengths = sorted({padded(ceil(self.longest / part)) for part in (4, 2)} | {self.longest})
        self._lengths = [length for length in lengths if length <= self.longest]
        self._sketches: dict[int, Sketch] = {}
        self._tracers: dict[int, Tracers] = {}
        self._facts = self._tracer(self.longest)

    def table(self) -> _Table:
        """All rows, ascending, and the tokens of a micro batch. Raises DoesNotFitError."""
        longest = self._rehearsed(self.longest)  # teaches what a rehearsal needs beside the fast model
        solved = {tokens: found for tokens in self._candidates() if (found := self._solved(tokens)) is not None}
        rows = {self.longest: longest}
        while True:
            usual = min(solved, key=lambda tokens: self._seconds_a_token(tokens, solved[tokens]))
            ends = self._ends(solved, usual)
            for tokens in [each for each in ends if each not in rows]:
                try:
                    rows[tokens] = self._rehearsed(tokens)
                except DoesNotFitError:  # the row after it serves its micro batches, or there are none so large
                    del solved[tokens]
                    break
            else:
                return _Table(tuple(rows[tokens] for tokens in ends), usual)

    def _candidates(self) -> list[int]:
        """Numbers of tokens, ascending: parts of the longest sequence, then several of these."""
        parts = _PARTS_IF_DEEP if len(self.strategy.tiers) > _DEEP else _PARTS
        own = {min(padded(ceil(self.longest * part / parts)), self.longest) for part in range(1, parts + 1)}
        window = self.target.sequences_per_rank(Point(self.strategy, 1).layout)
        several = [self.longest * 2**power for power in range(1, window.bit_length()) if 2**power <= window]
        return [*sorted(own), *several]

    def _solved(self, tokens: int) -> Solution | None:
        found = self._case(tokens).fastest(self.allowed - self.excess)
        return None if found is None else found[0]

    def _ends(self, solved: Mapping[int, Solution], usual: int) -> list[int]:
        """The last numbers of tokens of each run with the same tiers; what no micro batch can have is left out."""
        needed = [tokens for tokens in solved if tokens <= max(usual, self.longest)]
        tiers = {tokens: tuple(solved[tokens].tiers.tolist()) for tokens in needed}
        ends = [here for here, after in pairwise(needed) if tiers[here] != tiers[after]]
        return sorted({*ends, needed[-1], usual, self.longest} & set(needed) | {self.longest})

    def _rehearsed(self, tokens: int) -> _Row:
        """The fastest tiers whose rehearsal stays within what is allowed."""
        case, best = self._case(tokens), None
        room, tried = self.allowed - self.excess, set[tuple[Tier, ...]]()
        for _ in range(_TRIES):
            found = case.fastest(room) or case.smallest()
            if (tiers := case.tiers(found)) in tried:
                break
            tried.add(tiers)
            row = self._row(tokens, tiers)
            excess = row.profile.needed_bytes - case.peak(found)
            if row.profile.needed_bytes <= self.allowed:
                best = row if best is None or _faster(row, best) else best
                full = row.profile.needed_bytes > self.allowed * (1 - _SLACK)
                if full or self.allowed - excess <= room:
                    break
            elif best is not None:
                break  # what the last one left free is not enough for more
            room = self.allowed - excess
        if best is None:
            raise self._too_large(row)
        self.excess = max(self.excess, excess) if tokens < self.longest else excess
        return best

    def _row(self, tokens: int, tiers: tuple[Tier, ...]) -> _Row:
        self.on_progress(f"rehearsing micro batches of {tokens} tokens")
        size, length = shape_of(tokens, self.longest)
        steps = _steps(self.target, self.strategy, tokens)
        strategy = replace(self.strategy, micro_batch_size=size, accumulation_steps=steps, tiers=tiers)
        workload = self.workload if length == self.longest else self.workload.with_seq_len(length)
        profile = judged(
            workload, strategy, self.hardware, max_grad_norm=self.max_grad_norm, allowed_bytes=self.allowed
        )
        return _Row(tokens, tiers, profile)

    def _too_large(self, row: _Row) -> DoesNotFitError:
        needs, may = format_bytes(row.profile.needed_bytes), format_bytes(self.allowed)
        return DoesNotFitError(
            f"the longest micro batch, one sequence of {self.longest} tokens, needs {needs} at least; {may} of the "
            f"budget of {format_bytes(self.target.budget_bytes)} is for it: raise memory or per_batch.threshold, or "
            "lower seq_len"
        )

    # ---- the fast model --------------------------------------------------------------------------------------------

    def _seconds_a_token(self, tokens: int, solution: Solution) -> float:
        """Of micro batches whose sequences are a quarter as long as the longest."""
        length = self._lengths[0]
        trace = self._sketch(length).trace(tokens / length, self.strategy.loss_chunks)  # type: ignore[arg-type]
        case = self._case_of(tokens, trace)
        given = case.given(case.tiers([solution]))
        return (case.stages[0].beside_seconds + given[0].seconds) / tokens

    def _case(self, tokens: int) -> Case:
        if tokens not in self._cases:
            self._cases[tokens] = self._case_of(tokens, self._trace(tokens))
        return self._cases[tokens]

    def _trace(self, tokens: int) -> ModelTrace:
        chunks = self.strategy.loss_chunks
        size, length = shape_of(tokens, self.longest)
        if size > 1:
            return self._sketch(length).trace(size, chunks)
        if length in self._lengths:
            return self._traced(length)
        return between(length, {each: self._traced(each) for each in self._lengths}, chunks)

    def _traced(self, length: int) -> ModelTrace:
        tracer = self._tracer(length)
        return tracer.trace(1, self.strategy.precision, (self.strategy.loss_chunks,), accumulates=True)

    def _sketch(self, length: int) -> Sketch:
        if length not in self._sketches:
            tracer = self._tracer(length)
            self._sketches[length] = Sketch(tracer, self.strategy.precision, 2, length)
        return self._sketches[length]

    def _tracer(self, length: int) -> Tracer:
        if length not in self._tracers:
            workload = self.workload if length == self.longest else self.workload.with_seq_len(length)
            self._tracers[length] = Tracers(workload, self.hardware, replace(self.target, seq_len=length))
        return self._tracers[length].of(self.strategy.optimizer, attention=self.strategy.attention)

    def _case_of(self, tokens: int, trace: ModelTrace) -> Case:
        size, length = shape_of(tokens, self.longest)
        steps = _steps(self.target, self.strategy, tokens)
        strategy = replace(self.strategy, micro_batch_size=size, accumulation_steps=steps, tiers=())
        tracer, variant = self._facts, self.strategy.optimizer
        return case_of(
            Point(strategy, steps * size),
            trace,
            facts_of(tracer, variant),
            replace(self.target, seq_len=length),
            self.hardware,
            gradients=gradient_share(tracer.variant, variant),
        )


def _faster(row: _Row, other: _Row) -> bool:
    return row.profile.step_seconds < other.profile.step_seconds


def shape_of(tokens: int, longest: int) -> tuple[int, int]:
    """(sequences, length) of the micro batch by which a row is judged."""
    return (1, tokens) if tokens <= longest else (tokens // longest, longest)


def between(length: int, traces: Mapping[int, ModelTrace], chunks: int) -> ModelTrace:
    """The trace of one sequence of another length, by the parabola through those of some lengths."""
    lengths = sorted(traces)
    weights = [_weight(length, lengths, at) for at in range(len(lengths))]
    ordered = [traces[each] for each in lengths]
    blocks = {key: _mixed([trace.blocks[key] for trace in ordered], weights) for key in ordered[0].blocks}
    shell = {chunks: _mixed([trace.shell[chunks] for trace in ordered], weights)}
    shared = round(sum(weight * trace.shared_bytes for weight, trace in zip(weights, ordered)))
    return ModelTrace(blocks, shell, max(0, shared))


def _weight(x: float, points: Sequence[int], at: int) -> float:
    """Lagrange's polynomial of points[at]."""
    weight = 1.0
    for number, point in enumerate(points):
        if number != at:
            weight *= (x - point) / (points[at] - point)
    return weight


def _mixed(parts: Sequence[T], weights: Sequence[float]) -> T:
    kind, columns = type(parts[0]), list(zip(*(astuple(part) for part in parts)))
    values = [max(0.0, sum(weight * value for weight, value in zip(weights, column))) for column in columns]
    return kind(
        *(
            type(column[0])(round(value) if isinstance(column[0], int) else value)
            for value, column in zip(values, columns)
        )
    )
