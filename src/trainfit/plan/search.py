"""The search, by the fast model: every micro batch, precision, number of chunks and split of blocks between tiers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

from trainfit.hardware import Hardware
from trainfit.plan.cost import Resident, peak_bytes, step_seconds
from trainfit.plan.target import Target
from trainfit.profile import Precision, Tier
from trainfit.rehearsal.trace import ModelFacts, ModelTrace, Tracer
from trainfit.step.strategy import Strategy
from trainfit.techniques.chunked_loss import auto_chunks

# From the least kept to the most. Early blocks get the first of a pair: their recompute runs when the logits are gone
# and most of what was saved is freed, while the last blocks' would come on top of everything.
_SMALLEST_FIRST: tuple[Tier, ...] = ("full", "attention", "pointwise", "keep")
_ID_BYTES = 16  # a token's input id and label


@dataclass(frozen=True)
class Candidate:
    """A strategy with the fast model's figures."""

    strategy: Strategy
    peak_bytes: int
    step_seconds: float


def search(tracer: Tracer, hardware: Hardware, target: Target, allowed_bytes: int) -> list[Candidate]:
    """All candidates, the fastest first. Micro batches grow until not even the smallest strategy fits."""
    found: list[Candidate] = []
    for precision in _precisions(hardware, target):
        for micro_batch_size in micro_batch_sizes(target.sequences_per_step):
            batch = list(candidates(tracer, target, micro_batch_size, precision))
            found += batch
            if min(candidate.peak_bytes for candidate in batch) > allowed_bytes:
                break
    return sorted(found, key=lambda candidate: (candidate.step_seconds, candidate.peak_bytes))


def candidates(tracer: Tracer, target: Target, micro_batch_size: int, precision: Precision) -> Iterator[Candidate]:
    """Every number of chunks and split of tiers at one micro batch."""
    sequences = target.sequences_per_step
    accumulation_steps = -(-sequences // micro_batch_size)
    chunks = chunk_counts(tracer.facts, micro_batch_size * target.seq_len)
    trace = tracer.trace(micro_batch_size, precision, chunks)
    for tiers in tier_splits(len(tracer.facts.structures)):
        for loss_chunks in chunks:
            strategy = Strategy(micro_batch_size, accumulation_steps, precision, tiers, loss_chunks)
            yield evaluate(tracer.facts, trace, strategy, sequences=sequences, seq_len=target.seq_len)


def evaluate(facts: ModelFacts, trace: ModelTrace, strategy: Strategy, *, sequences: int, seq_len: int) -> Candidate:
    """The fast model's word on one strategy."""
    blocks = [trace.blocks[structure, tier] for structure, tier in zip(facts.structures, strategy.tiers)]
    shell = trace.shell[strategy.loss_chunks]
    resident = Resident(
        model_bytes=facts.parameter_bytes + facts.optimizer_bytes,
        batch_bytes=sequences * seq_len * _ID_BYTES,
        shared_bytes=trace.shared_bytes,
        gradient_bytes=facts.gradient_bytes,
        optimizer_seconds=facts.optimizer_seconds,
    )
    peak = peak_bytes(resident, blocks, shell, accumulates=strategy.accumulation_steps > 1)
    seconds = step_seconds(resident, blocks, shell, micro_batches=sequences / strategy.micro_batch_size)
    return Candidate(strategy, peak, seconds)


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


def tier_splits(num_blocks: int) -> Iterable[tuple[Tier, ...]]:
    """All blocks alike, and every split into an early part that keeps less and a late part that keeps more."""
    if num_blocks == 0:
        return [()]
    uniform: list[tuple[Tier, ...]] = [(tier,) * num_blocks for tier in _SMALLEST_FIRST]
    mixed = [
        (early,) * count + (late,) * (num_blocks - count)
        for early, late in combinations(_SMALLEST_FIRST, 2)
        for count in range(1, num_blocks)
    ]
    return uniform + mixed


def _precisions(hardware: Hardware, target: Target) -> list[Precision]:
    allowed: list[Precision] = [target.precision]
    if "precision" in target.may_change and target.precision == "fp32" and hardware.supports("bf16"):
        allowed.append("bf16")
    return allowed
