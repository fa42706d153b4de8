"""Plans against bounds, and TrainStep's cost: benchmarks/fair.sh python benchmarks/plan_bounds.py [rounds] [tiers]

Every variant runs one step in turn, round after round, so that a noisy neighbour hits all alike. Time is the median of
the rounds' ratios to the plain step of the same round; memory is the heap's peak above what is live between steps.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from heap import Heap
from reference_model import ReferenceConfig, ReferenceModel
from trainfit.hardware import accelerator, this_machine
from trainfit.plan import Target, choose
from trainfit.rehearsal import rehearse
from trainfit.step import Strategy, build_step, format_tiers, parse_tiers
from trainfit.workload import MicroBatch, workload_from_module

CONFIG = ReferenceConfig()
MAX_OVERHEAD = 0.02
# (most x plain, most MB): what a prototype reached on the reference model with tiers and a chunked loss. For each the
# planner is given that memory and picks the plan; all plans do the same step of 8 sequences.
BOUNDS: tuple[tuple[float, float], ...] = ((1.00, 378), (1.04, 253), (1.14, 156), (1.15, 108), (1.19, 89))
# (activation, loss chunks), the whole batch at once: what tiers do where no smaller micro batch helps. Not bounded.
TIERS_ALONE: tuple[tuple[str, int], ...] = (
    ("keep", 16),
    ("selective", 16),
    ("recompute_core", 16),
    ("7*pointwise,1*keep", 16),
    ("1*full,3*attention,4*pointwise", 16),
    ("4*full,2*attention,2*pointwise", 8),
    ("full", 8),
)


@dataclass
class Variant:
    name: str
    step: Callable[[], object]
    max_ratio: float | None = None
    max_megabytes: float | None = None
    seconds: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)

    def run(self, heap: Heap) -> None:
        base = heap.live()
        heap.reset()
        begin = time.perf_counter()
        self.step()
        self.seconds.append(time.perf_counter() - begin)
        self.megabytes.append((heap.peak() - base) / 1e6)


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return ReferenceModel(CONFIG)


def tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(CONFIG.vocab_size, (CONFIG.batch_size, CONFIG.seq_len + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def plain_step(*, checkpoint: bool = False, fused: bool = False) -> Callable[[], object]:
    """The loop as one writes it by hand: torch's AdamW as it comes, or the fused one that trainfit takes."""
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused or None)
    ids, labels = tokens()
    if checkpoint:
        for block in model.blocks:
            inner = block.forward
            block.forward = lambda *args, _inner=inner: torch.utils.checkpoint.checkpoint(
                _inner, *args, use_reentrant=False
            )

    def step() -> None:
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def trainfit_step(strategy: Strategy) -> Callable[[], object]:
    step = build_step(WORKLOAD, strategy, accelerator("cpu"), max_grad_norm=None, model=new_model())
    window = list(MicroBatch.of(*tokens()).split(strategy.micro_batch_size))
    return lambda: step(window)


def whole_batch(activation: str, loss_chunks: int) -> Strategy:
    return Strategy(CONFIG.batch_size, tiers=parse_tiers(activation, CONFIG.num_blocks), loss_chunks=loss_chunks)


def name_of(strategy: Strategy) -> str:
    size = f"{strategy.micro_batch_size} x {strategy.accumulation_steps}"
    return f"{size}, {format_tiers(strategy.tiers)}, loss in {strategy.loss_chunks}"


def planned(megabytes: float) -> Strategy:
    """The planner's choice for so much memory above what is live between steps."""
    budget = rehearse(WORKLOAD, whole_batch("keep", 1), THIS_MACHINE, max_grad_norm=None).resident_bytes
    target = Target(budget + int(megabytes * 1e6), CONFIG.batch_size * CONFIG.seq_len, CONFIG.seq_len)
    return choose(WORKLOAD, THIS_MACHINE, target, max_grad_norm=None).strategy


WORKLOAD = workload_from_module(new_model, seq_len=CONFIG.seq_len, vocab_size=CONFIG.vocab_size)
THIS_MACHINE = this_machine("cpu")


def main(rounds: int, *, plans: bool = True) -> int:
    """plans: whether the planner's choices are run, beside tiers alone."""
    torch.set_num_threads(1)
    heap = Heap("python benchmarks/plan_bounds.py")
    variants = [
        Variant("plain loop", plain_step()),
        Variant("plain loop, every block checkpointed", plain_step(checkpoint=True)),
        Variant("plain loop, fused AdamW", plain_step(fused=True)),
        Variant("TrainStep, no technique", trainfit_step(whole_batch("keep", 1))),
    ]
    for ratio, megabytes in BOUNDS if plans else ():
        strategy = planned(megabytes)
        variants.append(Variant(f"plan: {name_of(strategy)}", trainfit_step(strategy), ratio, megabytes))
    variants += [
        Variant(f"tiers alone: {name_of(strategy)}", trainfit_step(strategy))
        for strategy in (whole_batch(*each) for each in TIERS_ALONE)
    ]
    for variant in variants:
        variant.step()
    for _ in range(rounds):
        for variant in variants:
            variant.run(heap)
    return report(variants)


def report(variants: list[Variant]) -> int:
    table = Table("variant", "x plain", "bound", "peak MB", "bound", "seconds")
    failed = 0
    for variant in variants:
        ratio = statistics.median(a / b for a, b in zip(variant.seconds, variants[0].seconds))
        megabytes = statistics.median(variant.megabytes)
        missed = [variant.max_ratio is not None and ratio > variant.max_ratio]
        missed += [variant.max_megabytes is not None and megabytes > variant.max_megabytes]
        failed += any(missed)
        row = [variant.name, f"{ratio:.3f}", str(variant.max_ratio or ""), f"{megabytes:.1f}"]
        row += [str(variant.max_megabytes or ""), f"{statistics.median(variant.seconds):.3f}"]
        table.add_row(*row, style="red" if any(missed) else "")
    Console(width=110).print(table)
    by_name = {variant.name: variant for variant in variants}
    step, loop = by_name["TrainStep, no technique"], by_name["plain loop, fused AdamW"]
    overhead = statistics.median(a / b for a, b in zip(step.seconds, loop.seconds)) - 1
    failed += overhead > MAX_OVERHEAD
    print(f"TrainStep without any technique costs {overhead:+.1%} over the hand-written loop with the same optimizer")
    print(f"{len(variants[0].seconds)} rounds, {failed} bounds missed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 9, plans="tiers" not in sys.argv[2:]))
