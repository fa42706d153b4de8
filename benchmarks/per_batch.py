"""Per-batch plans on lengths as text has them: benchmarks/fair.sh python benchmarks/per_batch.py [--batches 500]

Log-normal lengths of mean 400, at most 2048, the same batches for every variant in the same memory:
  static            the planner's best for the longest sequence, every sequence padded to it
  static + tokens   its tiers, micro batches put together by tokens: up to as many as its own have
  static + few      the same, up to the tokens that the table takes, which a static plan does not know
  per batch         the table: tiers by the tokens of each micro batch
Every batch goes through all variants in turn, so that a noisy neighbour hits all alike; the static plan, which takes as
long for every batch, only through each 10th. Speed is valid tokens a second over all batches, memory the heap's highest
peak above what is live between steps, with parameters and states; last, each row's own need and that of whole batches
against their rehearsals.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from heap import Heap
from trainfit.hardware import accelerator, this_machine
from trainfit.plan import Plan, Target, choose
from trainfit.plan.per_batch import choose_per_batch
from trainfit.rehearsal import rehearse
from trainfit.step import Strategy, build_step, format_tiers
from trainfit.train.variable import DocumentTokens
from trainfit.units import format_bytes
from trainfit.workload import MicroBatch, workload_from_config

LONGEST, MEAN = 2048, 400
STATIC_EVERY = 10
LEAST_OVER_STATIC, LEAST_OVER_TOKENS, MOST_ERROR = 1.2, 1.1, 0.01
CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": LONGEST,
    "tie_word_embeddings": True,
}
WORKLOAD = workload_from_config(CONFIG, seq_len=LONGEST, name="llama 6 x 256")
THIS_MACHINE = this_machine("cpu")
HEAP = Heap("python benchmarks/per_batch.py")


def documents(count: int, sigma: float) -> DocumentTokens:
    """Random tokens with log-normal lengths whose mean, before they are cut off, is MEAN."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(math.log(MEAN) - sigma**2 / 2, sigma, count).round().clip(2, LONGEST).astype(np.int64)
    ends = (lengths + 1).cumsum()
    tokens = rng.integers(CONFIG["vocab_size"], size=int(ends[-1]), dtype=np.uint16)
    return DocumentTokens.of(tokens, ends, LONGEST, update_tokens=0)


def padded_to_longest(data: DocumentTokens, indices: np.ndarray, size: int) -> list[MicroBatch]:
    """Micro batches of `size` sequences, each LONGEST long."""
    batches = []
    for start in range(0, len(indices), size):
        batch = data.rows(indices[start : start + size])
        room = (0, LONGEST - batch.inputs.shape[1])
        pad = torch.nn.functional.pad
        batches.append(MicroBatch(pad(batch.inputs, room), pad(batch.labels, room, value=-100), batch.num_tokens))
    return batches


def by_tokens(data: DocumentTokens, indices: np.ndarray, tokens: int) -> list[MicroBatch]:
    return [data.rows(group) for group in data.in_batches_of(tokens).groups(indices, 1)]


@dataclass
class Variant:
    """batches: of the sequences at some indices. every: of how many batches one is run."""

    name: str
    strategy: Strategy
    batches: Callable[[np.ndarray], list[MicroBatch]]
    every: int = 1
    tokens: int = 0
    padded: int = 0
    seconds: float = 0.0
    peak: int = 0
    ran: list[list[tuple[int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.step = build_step(WORKLOAD, self.strategy, accelerator("cpu"))
        states = [each for state in self.step.optimizer.state.values() for each in state.values()]
        if not states:  # made in the first step
            self.run(HEAP, np.arange(1), counts=False)
            states = [each for state in self.step.optimizer.state.values() for each in state.values()]
        self.stays = sum(each.nbytes for each in (*self.step.model.parameters(), *self.step.model.buffers(), *states))

    def run(self, heap: Heap, indices: np.ndarray, *, counts: bool = True) -> int:
        """One optimizer step; returns its peak, parameters and states included."""
        before = heap.live()
        batches = self.batches(indices)
        heap.reset()
        begin = time.perf_counter()
        self.step(batches)
        seconds, peak = time.perf_counter() - begin, heap.peak() - before
        if counts:
            self.seconds, self.peak = self.seconds + seconds, max(self.peak, peak + self.stays)
            self.tokens += sum(batch.num_tokens for batch in batches)
            self.padded += sum(batch.labels.numel() for batch in batches)
            self.ran.append([(batch.labels.shape[0], batch.labels.shape[1]) for batch in batches])
        return peak

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def plans(budget: int, sequences: int) -> tuple[Plan, Plan]:
    """The best static plan and the table, with the same bytes allowed to both."""
    target = Target(budget, sequences * LONGEST, LONGEST)
    static = choose(WORKLOAD, THIS_MACHINE, target)
    table = choose_per_batch(WORKLOAD, THIS_MACHINE, target, threshold=1.0)
    assert static.allowed_bytes == table.allowed_bytes
    return static, table


def least_bytes(sequences: int) -> int:
    """Of the longest sequence alone, with everything recomputed: a budget below this has no plan."""
    smallest = choose(WORKLOAD, THIS_MACHINE, Target(2**20, sequences * LONGEST, LONGEST))
    return math.ceil(smallest.predicted.needed_bytes / (smallest.allowed_bytes / smallest.budget_bytes))


def compare(budget: int, data: DocumentTokens, batches: int, sequences: int) -> int:
    """All variants in one budget; returns how many bounds they miss."""
    static, table = plans(budget, sequences)
    size, few = static.strategy.micro_batch_size, table.strategy.micro_batch_tokens
    variants = [
        Variant("static", static.strategy, lambda at: padded_to_longest(data, at, size), every=STATIC_EVERY),
        Variant("static + tokens", static.strategy, lambda at: by_tokens(data, at, size * LONGEST)),
        Variant("static + few", static.strategy, lambda at: by_tokens(data, at, few)),
        Variant("per batch", table.strategy, lambda at: by_tokens(data, at, few)),
    ]
    heap = HEAP
    for variant in variants:
        variant.run(heap, np.arange(sequences), counts=False)
    for number in range(batches):
        indices = np.arange(number * sequences, (number + 1) * sequences) % data.num_sequences
        turn = [variant for variant in variants if number % variant.every == 0]
        for variant in turn[number % len(turn) :] + turn[: number % len(turn)]:
            variant.run(heap, indices)
    missed = report(budget, static, table, variants, batches)
    return missed + check_rows(table, variants[-1], heap)


def report(budget: int, static: Plan, table: Plan, variants: Sequence[Variant], batches: int) -> int:
    own = variants[-1]
    title = f"budget {format_bytes(budget)}, {format_bytes(static.allowed_bytes)} allowed, {batches} batches"
    shown = Table("variant", "valid tokens/s", "per batch is", "of it padding", "peak", "tiers", title=title)
    for variant in variants:
        padding = f"{1 - variant.tokens / variant.padded:.0%}"
        tiers = "by tokens" if variant.strategy.tier_table else format_tiers(variant.strategy.tiers)
        times = f"{own.speed / variant.speed:.3f} x"
        shown.add_row(variant.name, f"{variant.speed:,.0f}", times, padding, format_bytes(variant.peak), tiers)
    Console(width=120).print(shown)
    loss = "in one piece" if static.strategy.loss_chunks == 1 else f"in {static.strategy.loss_chunks} chunks"
    print(f"static: micro batch {static.strategy.micro_batch_size} x {LONGEST}, loss {loss}")
    over_tokens = own.speed / max(each.speed for each in variants[1:-1])
    over_static = own.speed / variants[0].speed
    print(f"per batch: {over_static:.2f} x static, {over_tokens:.3f} x the better one of static with batches by tokens")
    return (over_static < LEAST_OVER_STATIC) + (over_tokens < LEAST_OVER_TOKENS)


def check_rows(table: Plan, variant: Variant, heap: Heap) -> int:
    """Each row's micro batch, twice in a step, and three whole batches, against what was rehearsed."""
    shown = Table("micro batches", "tiers", "predicted", "heap", "error")
    cases: list[tuple[str, str, list[tuple[int, int]]]] = []
    for row in table.strategy.tier_table:
        shape = (1, row.max_tokens) if row.max_tokens <= LONGEST else (row.max_tokens // LONGEST, LONGEST)
        cases.append((f"2 of {shape[0]} x {shape[1]}", format_tiers(row.tiers), [shape, shape]))
    for shapes in variant.ran[:3]:
        cases.append((f"batch of {len(shapes)}", "", shapes))
    worst = 0.0
    for name, tiers, shapes in cases:
        ids = [torch.zeros(shape, dtype=torch.long) for shape in shapes]
        whole = [MicroBatch(each, each.clone(), each.numel()) for each in ids]
        predicted = rehearse(WORKLOAD, table.strategy, THIS_MACHINE, micro_batches=whole).peak_bytes
        del ids, whole
        variant.batches = lambda _, shapes=shapes: [
            MicroBatch.of(*(torch.zeros(shape, dtype=torch.long) for _ in range(2))) for shape in shapes
        ]
        variant.run(heap, np.arange(0), counts=False)
        found = variant.run(heap, np.arange(0), counts=False) + variant.stays
        error = predicted / found - 1
        worst = max(worst, abs(error))
        shown.add_row(name, tiers, format_bytes(predicted), format_bytes(found), f"{error:+.2%}")
    Console(width=120).print(shown)
    return worst > MOST_ERROR


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--sequences", type=int, default=8, help="in a batch, one optimizer step")
    parser.add_argument("--sigma", type=float, default=0.8, help="of the logarithm of lengths")
    parser.add_argument("--over-least", type=float, nargs="+", default=[1.02, 1.2, 1.5], help="budgets, x the least")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    data = documents(asked.batches * asked.sequences, asked.sigma)
    mean, most = data.lengths.mean(), data.lengths.max()
    print(f"{WORKLOAD.name}, lengths log-normal (sigma {asked.sigma}): mean {mean:.0f}, most {most}")
    least = least_bytes(asked.sequences)
    missed = 0
    for over in asked.over_least:
        print(f"\nbudget {over:g} x the least that has a static plan ({format_bytes(least)})")
        missed += compare(math.ceil(over * least), data, asked.batches, asked.sequences)
    print(f"{missed} bounds missed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
