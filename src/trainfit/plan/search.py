"""The search, by the fast model: every micro batch, precision, optimizer, number of chunks and split of blocks.

NOTE [ What accuracy is worth ]
Where a target lets the optimizer change, a variant that rounds more, or loses more, must be faster for it: candidates
are ordered by their seconds times MUST_WIN of what they do to what is learnt. What the target asks for is taken as it
is. So eight-bit moments are chosen where nothing more exact fits, or where what they free makes a step a tenth faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from trainfit.hardware import Hardware
from trainfit.plan.cost import BlockTable, Floats, Integers, peak_bytes, step_seconds
from trainfit.plan.layout import resident_of, shares_of
from trainfit.plan.target import Target
from trainfit.profile import TIERS, Accuracy, Layout, OptimizerVariant, Precision, Tier, WeightStorage
from trainfit.rehearsal.trace import ModelFacts, Tracer
from trainfit.step.strategy import Strategy
from trainfit.techniques.chunked_loss import auto_chunks
from trainfit.techniques.optimizer import accuracy_of

# From the least kept to the most. Early blocks keep less: their recompute runs when the logits are gone
# and most of what was saved is freed, while the last blocks' would come on top of everything.
_SMALLEST_FIRST: tuple[Tier, ...] = ("full", "attention", "pointwise", "keep")
_ID_BYTES = 16  # a token's input id and label


MUST_WIN: Mapping[Accuracy, float] = {"exact": 1.0, "rounding": 1.02, "lossy": 1.1}

Tracers = Callable[[OptimizerVariant], Tracer]


@dataclass(frozen=True)
class Candidate:
    """A strategy with the fast model's figures. weight: see NOTE [ What accuracy is worth ]."""

    strategy: Strategy
    peak_bytes: int
    step_seconds: float
    weight: float = 1.0

    @property
    def weighed_seconds(self) -> float:
        return self.step_seconds * self.weight


def search(
    tracer_of: Tracers, hardware: Hardware, target: Target, allowed_bytes: int, *, clips: bool = True
) -> list[Candidate]:
    """Candidates, the best first. Micro batches grow until not even the smallest strategy fits.

    clips: whether gradients are clipped by their norm, which an update in backward cannot know.

    Of each micro batch, precision and number of chunks only what no other assignment of tiers beats in both bytes and
    seconds.
    """
    found: list[Candidate] = []
    for layout in target.layouts:
        for precision, variant in _variants(hardware, target, layout, clips=clips):
            tracer = tracer_of(variant)
            for micro_batch_size in micro_batch_sizes(target.sequences_per_rank(layout)):
                batch = list(candidates(tracer, hardware, target, layout, micro_batch_size, precision))
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
) -> Iterator[Candidate]:
    """The best assignments of tiers for every number of chunks at one micro batch."""
    facts, sequences = tracer.facts, target.sequences_per_rank(layout)
    accumulation_steps = -(-sequences // micro_batch_size)
    if layout.mesh.pipeline > 1 and not layout.pipeline.fits(accumulation_steps, layout.mesh.pipeline):
        return  # stages would wait for each other
    if tracer.variant.update == "backward" and accumulation_steps > 1:
        return  # each micro batch would be a step
    weight = _weight(target, precision, tracer.variant)
    chunks = chunk_counts(facts, micro_batch_size * target.seq_len)
    accumulates = accumulation_steps > 1
    trace = tracer.trace(micro_batch_size, precision, chunks, accumulates=accumulates)
    table = BlockTable.of(facts.structures, trace.blocks, shares_of(layout))
    tiers = tier_splits(len(facts.structures))
    resident = resident_of(
        facts,
        layout,
        hardware,
        batch_bytes=sequences * target.seq_len * _ID_BYTES,
        shared_bytes=trace.shared_bytes,
        accumulates=accumulates,
    )
    for loss_chunks in chunks:
        shell = trace.shell[loss_chunks]
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
                tracer.variant,
                target.cast if precision != "fp32" else "operator",
                target.loss_scale if precision == "fp16" else None,
                target.frozen_weights,
                mesh=layout.mesh,
                zero=layout.zero,
                tensor=layout.tensor,
                pipeline=layout.pipeline,
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


def _variants(
    hardware: Hardware, target: Target, layout: Layout, *, clips: bool
) -> list[tuple[Precision, OptimizerVariant]]:
    """What the target asks for, then what it allows."""
    asked = target.optimizer
    found = [(target.precision, asked)]
    precisions: list[Precision] = [target.precision]
    if "precision" in target.may_change and target.precision == "fp32" and hardware.supports("bf16"):
        precisions.append("bf16")
        found.append(("bf16", asked))
    if "optimizer" in target.may_change:
        found += [
            (precision, variant)
            for precision in precisions
            for variant in variants_of(asked, precision, layout, on_host=hardware.is_host, clips=clips)
        ]
    return list(dict.fromkeys(found))


def variants_of(
    asked: OptimizerVariant, precision: Precision, layout: Layout, *, on_host: bool, clips: bool
) -> list[OptimizerVariant]:
    """Variants that save memory against the one that was asked for, as far as they work under a layout.

    on_host: whether the device computes in host memory, so that nothing is gained by moving states there.
    """
    if asked.kind != "adamw":
        return []
    kept = [asked]
    if precision == "bf16" and asked.weights == "fp32":
        halves: tuple[WeightStorage, ...] = ("bf16_residual", "bf16_stochastic")
        kept += [replace(asked, weights=weights, gradients=sums) for weights in halves for sums in ("fp32", "half")]
    if asked.states == "fp32":
        kept += [replace(variant, states="int8") for variant in list(kept)]
    if not clips and layout.mesh.replicate == 1 and asked.update == "step" and precision != "fp16":
        kept += [replace(variant, update="backward") for variant in list(kept)]
    if not on_host and asked.place == "device":
        kept += [replace(asked, place="host")]
        if precision == "bf16" and asked.weights == "fp32":
            kept += [replace(asked, weights="bf16_master", gradients="half", place="host")]
    return kept[1:]


def _weight(target: Target, precision: Precision, variant: OptimizerVariant) -> float:
    """See NOTE [ What accuracy is worth ]."""
    if (precision, variant) == (target.precision, target.optimizer):
        return 1.0
    return MUST_WIN[accuracy_of(variant, precision)]
