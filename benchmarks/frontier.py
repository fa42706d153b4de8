"""Speed against memory on the reference model: benchmarks/fair.sh python benchmarks/frontier.py [rounds]

Every variant runs one step in turn, round after round, so that a noisy neighbour hits all alike. Time is the median of
the rounds' ratios to the plain step of the same round; memory is the heap's peak above what is live between steps.
"""

from __future__ import annotations

import ctypes
import gc
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

from reference_model import ReferenceConfig, ReferenceModel
from trainfit.hardware import accelerator
from trainfit.step import Strategy, build_step, parse_tiers
from trainfit.workload import MicroBatch, workload_from_module

CONFIG = ReferenceConfig()
MAX_OVERHEAD = 0.02
# (activation, loss chunks, micro batch, most x plain, most MB). The bounds are what a prototype reached on the
# reference model. The plans are of the kinds that the search tries (micro batches, up to three runs of tiers), picked
# by hand below each bound's memory; all do the same step of 8 sequences. Full recompute of the whole batch peaks at
# 89.3 MB, as the prototype's own does, and is shown without a bound.
PLANS: tuple[tuple[str, int, int, float | None, float | None], ...] = (
    ("keep", 16, 8, 1.00, 378),
    ("7*pointwise,1*keep", 16, 8, 1.04, 253),
    ("1*full,3*attention,4*pointwise", 16, 8, 1.14, 156),
    ("4*full,2*attention,2*pointwise", 8, 8, 1.15, 108),
    ("attention", 8, 4, 1.19, 89),
    ("full", 8, 8, None, None),
)


class Heap:
    """The preloaded heap counter."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        if not hasattr(self._library, "heap_peak"):
            sys.exit("run it as: benchmarks/fair.sh python benchmarks/frontier.py")
        self._library.heap_live.restype = self._library.heap_peak.restype = ctypes.c_int64

    def live(self) -> int:
        return int(self._library.heap_live())

    def peak(self) -> int:
        return int(self._library.heap_peak())

    def reset(self) -> None:
        self._library.heap_reset()


@dataclass
class Variant:
    name: str
    step: Callable[[], object]
    max_ratio: float | None = None
    max_megabytes: float | None = None
    seconds: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)

    def run(self, heap: Heap) -> None:
        gc.collect()
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


def trainfit_step(activation: str, loss_chunks: int, micro_batch_size: int = CONFIG.batch_size) -> Callable[[], object]:
    accumulation_steps = CONFIG.batch_size // micro_batch_size
    tiers = parse_tiers(activation, CONFIG.num_blocks)
    strategy = Strategy(micro_batch_size, accumulation_steps, tiers=tiers, loss_chunks=loss_chunks)
    step = build_step(WORKLOAD, strategy, accelerator("cpu"), max_grad_norm=None, model=new_model())
    window = list(MicroBatch.of(*tokens()).split(micro_batch_size))
    return lambda: step(window)


WORKLOAD = workload_from_module(new_model, seq_len=CONFIG.seq_len, vocab_size=CONFIG.vocab_size)


def plan_name(activation: str, loss_chunks: int, micro_batch_size: int) -> str:
    times = (
        ""
        if micro_batch_size == CONFIG.batch_size
        else f", {micro_batch_size} x {CONFIG.batch_size // micro_batch_size}"
    )
    return f"{activation}, loss in {loss_chunks}{times}"


def main(rounds: int) -> int:
    torch.set_num_threads(1)
    heap = Heap()
    variants = [
        Variant("plain loop", plain_step()),
        Variant("plain loop, every block checkpointed", plain_step(checkpoint=True)),
        Variant("plain loop, fused AdamW", plain_step(fused=True)),
        Variant("TrainStep, no technique", trainfit_step("keep", 1)),
    ]
    variants += [
        Variant(plan_name(activation, chunks, size), trainfit_step(activation, chunks, size), ratio, megabytes)
        for activation, chunks, size, ratio, megabytes in PLANS
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
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 9))
