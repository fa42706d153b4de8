"""The search, by the fast model: every micro batch, precision, optimizer, number of chunks and split of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from trainfit.hardware import Hardware
from trainfit.plan.cost import BlockTable, Floats, Integers, peak_bytes, step_seconds
from trainfit.plan.layout import resident_of, shares_of
from trainfit.plan.target import Target
from trainfit.plan.variants import Tracers, facts_of, gradient_share, variants_for, weight_of
from trainfit.profile import TIERS, AllocatorSettings, Cast, Layout, OptimizerVariant, Precision, Tier
from trainfit.rehearsal.trace import ModelFacts, Tracer
from trainfit.step.strategy import Strategy
from trainfit.techniques.chunked_loss import auto_chunks

# From the least kept to the most. Early blocks keep less: their recompute runs when the logits are gone
# and most of what was saved is freed, while the last blocks' would come on top of everything.
_SMALLEST_FIRST: tuple[Tier, ...] = ("full", "attention", "pointwise", "keep")
_ID_BYTES = 16  # a token's input id and label


@dataclass(frozen=True)
class Candidate:
    """A strategy with the fast model's figures. weight: see NOTE [ What accuracy is worth ] in variants.py."""

    strategy: Strategy
    peak_bytes: int
    step_seconds: float
    weight: float = 1.0

    @property
    def weighed_seconds(self) -> float:
        return self.step_seconds * self.weight


def search(
    tracers: Tracers, hardware: Hardware, target: Target, allowed_bytes: int, *, clips: bool = True
) -> list[Candidate]:
    """Candidates, the best first. Micro batches grow until not even the smallest strategy fits.

    clips: whether gradients are clipped by their norm, which an update in backward cannot know.

    Of each micro batch, precision and number of chunks only what no other assignment of tiers beats in both bytes and
    seconds.
    """
    found: list[Candidate] = []
    for layout in target.layouts:
        for precision, variant in variants_for(hardware, target, layout, clips=clips):
            tracer = tracers.of(variant)
            for micro_batch_size in micro_batch_sizes(target.sequences_per_rank(layout)):
                batch = list(candidates(tracer, hardware, target, layout, micro_batch_size, precision, variant))
                found += batch
                if batch and min(candidate.peak_bytes for candidate in batch) > allowed_bytes:
                    break
    return sorted(found, key=lambda candidate: (candidate.weighed_seconds, candidate.peak_bytes))


def candidates(
    tracer: Tracer,
    hardware: Hardware,
    target: Target,
    layout: Layout,
    micro_batch_size: int,
    precision: Precision,
    variant: OptimizerVariant | None = None,
) -> Iterator[Candidate]:
    """The best assignments of tiers for every number of chunks at one micro batch.

    variant: another than the tracer's, with weights of the same dtype.
    """
    variant = variant or tracer.variant
    facts, sequences = facts_of(tracer, variant), target.sequences_per_rank(layout)
    accumulation_steps = -(-sequences // micro_batch_size)
    if layout.mesh.pipeline > 1 and not layout.pipeline.fits(accumulation_steps, layout.mesh.pipeline):
        return  # stages would wait for each other
    if variant.update == "backward" and accumulation_steps > 1:
        return  # each micro batch would be a step
    # Half weights need no cast.
    cast: Cast = target.cast if precision != "fp32" and variant.weights == "fp32" else "operator"
    weight = weight_of(target, precision, variant)
    gradients = gradient_share(tracer.variant, variant)
    chunks = chunk_counts(facts, micro_batch_size * target.seq_len)
    accumulates = accumulation_steps > 1
    trace = tracer.trace(micro_batch_size, precision, chunks, accumulates=accumulates)
    table = BlockTable.of(facts.structures, trace.blocks, shares_of(layout), gradients=gradients)
    tiers = tier_splits(len(facts.structures))
    resident = resident_of(
        facts,
        layout,
        hardware,
        batch_bytes=sequences * target.seq_len * _ID_BYTES,
        shared_bytes=trace.shared_bytes,
        accumulates=accumulates,
        gathered=0.5 if cast == "block" else 1.0,
    )
    for loss_chunks in chunks:
        shell = trace.shell[loss_chunks]
        shell = replace(shell, gradient_bytes=int(shell.gradient_bytes * gradients))
        peaks = peak_bytes(resident, table, tiers, shell)
        seconds = step_seconds(resident, table, tiers, shell, micro_batches=sequences / micro_batch_size)
        for row in unbeaten(peaks, seconds):
            names = tuple(TIERS[tier] for tier in tiers[row])
            strategy = Strategy(
                micro_batch_size,
                accumulation_steps,
                precision,
                names,
                loss_chunks,
                variant,
                cast,
                target.loss_scale if precision == "fp16" else None,
                target.frozen_weights,
                mesh=layout.mesh,
                zero=layout.zero,
                tensor=layout.tensor,
                pipeline=layout.pipeline,
                allocator=target.allocator or AllocatorSettings(),
            )
            yield Candidate(strategy, int(peaks[row]), float(seconds[row]), weight)


def unbeaten(peaks: Integers, seconds: Floats) -> list[int]:
    """Rows that no other row beats in both; of equal rows the first."""
    kept: list[int] = []
    for row in np.lexsort((peaks, seconds)):
        if not kept or peaks[row] < peaks[kept[-1]]:
            kept.append(int(row))
    return kept


def micro_batch_sizes(sequences: int) -> list[int]:
    """1, 2, 4, ... and the whole step."""
    powers = [2**exponent for exponent in range(sequences.bit_length()) if 2**exponent < sequences]
    return [*powers, sequences]


def chunk_counts(facts: ModelFacts, tokens: int) -> list[int]:
    """One piece, what `auto` takes, and a quarter and four times as many; one where the head cannot be cut off."""
    if not facts.can_chunk:
        return [1]
    auto = auto_chunks(tokens, facts.vocab_size, facts.dim)
    return sorted({count for count in (1, auto // 4, auto, 4 * auto) if 1 <= count <= tokens})


def tier_splits(num_blocks: int) -> Integers:
    """Assignments (assignments, blocks) of indices into TIERS: up to three runs of blocks, each keeping more than the
    one before it."""
    order = [TIERS.index(tier) for tier in _SMALLEST_FIRST]
    if num_blocks == 0:
        return np.zeros((1, 0), dtype=np.int64)
    rows = [np.full(num_blocks, tier) for tier in order]
    for runs in (2, 3):
        for cuts in combinations(range(1, num_blocks), runs - 1):
            lengths = np.diff((0, *cuts, num_blocks))
            rows += [np.repeat(tiers, lengths) for tiers in combinations(order, runs)]
    return np.array(rows, dtype=np.int64)
