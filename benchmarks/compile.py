"""What compiled blocks cost and gain on the reference model: benchmarks/fair.sh python benchmarks/compile.py [rounds]

Every variant runs one step in turn, as in plan_bounds.py. Compile seconds are those of an empty cache, beside what a
rehearsal expects. Bounds are the points of torch.compile over the whole model, of which a plan may take 0.85 of the
memory: 0.92 x plain's time at 353 MB.
"""

from __future__ import annotations

import statistics
import sys

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch._inductor.utils import fresh_cache

from heap import Heap
from plan_bounds import (
    CONFIG,
    THIS_MACHINE,
    WORKLOAD,
    Variant,
    name_of,
    new_model,
    plain_step,
    tokens,
    whole_batch,
)
from trainfit.hardware import accelerator
from trainfit.profile import Compile
from trainfit.rehearsal import rehearse
from trainfit.step import Strategy, TrainStep, build_step, parse_tiers
from trainfit.step.strategy_text import describe_compile
from trainfit.workload import MicroBatch

MAX_RATIO, MAX_MEGABYTES = 0.92, 0.85 * 353
# (micro batch, loss chunks, activation, compiled)
CASES: tuple[tuple[int, int, str, Compile], ...] = (
    (2, 4, "keep", Compile()),
    (8, 16, "keep", Compile(1)),
    (4, 8, "keep", Compile(1)),
    (2, 4, "keep", Compile(1)),
    (4, 8, "keep", Compile(1, 0.5)),
    (4, 8, "pointwise", Compile(1)),
    (4, 8, "attention", Compile(1)),
    (4, 8, "full", Compile(1)),
)


def whole_model_compiled() -> Variant:
    """The peer: torch.compile of the model with its loss, one batch."""
    torch._dynamo.reset()
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    ids, labels = tokens()
    loss_of = torch.compile(lambda: F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()))

    def step() -> None:
        loss_of().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Variant("whole model compiled, one batch", step)


def compiled_step(strategy: Strategy) -> tuple[Variant, TrainStep]:
    step = build_step(WORKLOAD, strategy, accelerator("cpu"), max_grad_norm=None, model=new_model())
    window = list(MicroBatch.of(*tokens()).split(strategy.micro_batch_size))
    words = ", ".join([name_of(strategy), *describe_compile(strategy.compile)])
    return Variant(words, lambda: step(window)), step


def main(rounds: int) -> int:
    torch.set_num_threads(1)
    heap = Heap("python benchmarks/compile.py")
    variants = [Variant("plain loop", plain_step()), whole_model_compiled()]
    expected: dict[str, tuple[float, float]] = {}
    steps: dict[str, TrainStep] = {}
    resident = rehearse(WORKLOAD, whole_batch("keep", 1), THIS_MACHINE, max_grad_norm=None).resident_bytes
    with fresh_cache():
        for size, chunks, activation, compiled in CASES:
            tiers = parse_tiers(activation, CONFIG.num_blocks)
            strategy = Strategy(size, CONFIG.batch_size // size, tiers=tiers, loss_chunks=chunks, compile=compiled)
            variant, step = compiled_step(strategy)
            profile = rehearse(WORKLOAD, strategy, THIS_MACHINE, max_grad_norm=None)
            expected[variant.name] = (profile.peak_bytes - resident) / 1e6, profile.compile_seconds
            steps[variant.name] = step
            variants.append(variant)
        for variant in variants:
            variant.step()
    for _ in range(rounds):
        for variant in variants:
            variant.run(heap)
    return report(variants, steps, expected)


def report(variants: list[Variant], steps: dict[str, TrainStep], expected: dict[str, tuple[float, float]]) -> int:
    table = Table("variant", "x plain", "peak MB", "rehearsed", "compile s", "expected")
    reached = False
    for variant in variants:
        ratio = statistics.median(a / b for a, b in zip(variant.seconds, variants[0].seconds))
        megabytes = statistics.median(variant.megabytes)
        row = [variant.name, f"{ratio:.3f}", f"{megabytes:.1f}"]
        if (step := steps.get(variant.name)) is not None:
            peak, seconds = expected[variant.name]
            took = 0.0 if step.compiled is None else step.compiled.seconds
            row += [f"{peak:.1f}", f"{took:.1f}", f"{seconds:.1f}"]
            reached |= ratio <= MAX_RATIO and megabytes <= MAX_MEGABYTES
        table.add_row(*row)
    Console(width=120).print(table)
    print(f"{len(variants[0].seconds)} rounds; at most {MAX_RATIO} x plain and {MAX_MEGABYTES:.0f} MB: {reached}")
    return int(not reached)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 9))
