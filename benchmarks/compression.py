"""Compressed activations: bytes, error, time and held-out loss, of the model of recipes/quickstart.yaml.

    benchmarks/fair.sh python benchmarks/compression.py [SETTING ...]
    python benchmarks/compression.py loss [STEPS [TIER ...]]

The first: in fp32, bf16 autocast and with bf16 weights, by tier what the model saves, by the heap counter; the peak of
a step, predicted and measured; processor seconds of a step, in rounds of all tiers; errors of saved tensors and of
gradients. The second trains the recipe for STEPS updates (80) under each tier that
compresses: held-out losses against keep's.
Exits 1 if int8 saves less than 3.5 times (from bf16 1.9 times), a peak is off by more than 1 % or a loss by 1 %.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table

from heap import Heap
from trainfit.hardware import accelerator, this_machine
from trainfit.profile import OptimizerVariant
from trainfit.rehearsal import measure, rehearse, verify
from trainfit.rehearsal.measure import random_window
from trainfit.step import Strategy, TrainStep, build_step, parse_tiers
from trainfit.train import load_recipe, recipe_workload, train
from trainfit.workload import Workload

CPU = accelerator("cpu")
RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
COMPRESSED = ("keep_bf16", "keep_int8", "keep_fp8")
TIERS = ("keep", *COMPRESSED, "discard", "pointwise", "attention", "full")
ROUNDS, MICRO_BATCH = 5, 2
SETTINGS = {
    "fp32": Strategy(MICRO_BATCH, loss_chunks=4),
    "bf16 autocast": Strategy(MICRO_BATCH, precision="bf16", loss_chunks=4),
    "bf16 weights": Strategy(MICRO_BATCH, 1, "bf16", (), 4, OptimizerVariant(weights="bf16_residual")),
}
LEAST = {"fp32": 3.5, "bf16 weights": 1.9}  # times fewer bytes in int8


@dataclass
class Row:
    """One tier. saved: bytes that are live after forward, blocks and what is around them."""

    tier: str
    strategy: Strategy
    step: TrainStep
    saved: int = 0
    seconds: list[float] = field(default_factory=list)


def main() -> int:
    torch.set_num_threads(1)
    arguments = sys.argv[1:]
    if arguments[:1] == ["loss"]:
        wrong = train_all(int(arguments[1]) if len(arguments) > 1 else 80, arguments[2:] or COMPRESSED)
    else:
        workload = recipe_workload(load_recipe(RECIPE, []))
        wrong = [problem for name in arguments or SETTINGS for problem in compare(workload, name)]
    print("\n".join(wrong) or "all bounds are kept")
    return int(bool(wrong))


def compare(workload: Workload, name: str) -> list[str]:
    heap, blocks = Heap("python benchmarks/compression.py"), len(workload.anatomy().blocks)
    rows = []
    for tier in TIERS:
        given = SETTINGS[name]
        strategy = Strategy(
            given.micro_batch_size, 1, given.precision, parse_tiers(tier, blocks), given.loss_chunks, given.optimizer
        )
        torch.manual_seed(0)
        rows.append(Row(tier, strategy, build_step(workload, strategy, CPU)))
    for row in rows:
        row.saved = saved_bytes(row, workload, heap)
    for number in range(ROUNDS):
        for row in rows:
            window = random_window(workload, row.strategy, seed=number)
            row.step(window) if number == 0 else None
            began = time.thread_time()
            row.step(window)
            row.seconds.append(time.thread_time() - began)
    for row in rows:
        del row.step
    gc.collect()
    return show(rows, workload, name)


def saved_bytes(row: Row, workload: Workload, heap: Heap) -> int:
    """The second time: the first one makes what stays."""
    (batch,) = random_window(workload, row.strategy, seed=0)
    backbone = row.step.model.get_submodule("model")
    for _ in range(2):
        gc.collect()
        before = heap.live()
        with CPU.autocast(row.strategy.precision):
            hidden = backbone(batch.inputs, use_cache=False).last_hidden_state
        gc.collect()
        saved = heap.live() - before - hidden.nbytes
        del hidden
    return saved


def show(rows: list[Row], workload: Workload, name: str) -> list[str]:
    wrong = []
    table = Table(title=f"quickstart's model, {name}, micro batch {MICRO_BATCH} x 256", title_justify="left")
    table.add_column("tier")
    for column in ("saved MB", "fewer", "x keep time", "peak MB", "predicted", "saved tensors' error", "gradients'"):
        table.add_column(column, justify="right")
    keep = rows[0]
    for row in rows:
        measured = measure(workload, row.strategy, CPU, steps=0)
        error = rehearse(workload, row.strategy, this_machine("cpu")).peak_bytes / measured.peak_bytes - 1
        ratio = statistics.median(own / base for own, base in zip(row.seconds, keep.seconds))
        found = None
        if row.tier in COMPRESSED and row.strategy.optimizer.weights == "fp32":
            report = verify(workload, row.strategy, CPU, steps=1)
            found = report.compression
            wrong += [] if report.passed else [f"{name} {row.tier}: verify fails"]
        fewer = keep.saved / row.saved
        table.add_row(
            row.tier,
            f"{row.saved / 1e6:.2f}",
            f"{fewer:.2f}",
            f"{ratio:.3f}",
            f"{measured.peak_bytes / 1e6:.1f}",
            f"{error:+.3%}",
            f"{found.activation_error:.2%}" if found else "",
            f"{found.gradient_error:.2%}" if found else "",
        )
        wrong += [f"{name} {row.tier}: peak is off by {error:+.2%}"] if abs(error) > 0.01 else []
        if row.tier == "keep_int8" and fewer < LEAST.get(name, 0.0):
            wrong.append(f"{name}: int8 saves {fewer:.2f} times less, {LEAST[name]} are wanted")
    Console(width=130).print(table)
    return wrong


def train_all(steps: int, tiers: Sequence[str]) -> list[str]:
    """Held-out loss of the recipe under each tier that compresses."""
    wrong, table = [], Table(title=f"recipes/quickstart.yaml, {steps} updates", title_justify="left")
    for column in ("tier", "held-out", "vs keep"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    at_end = [f"steps={steps}", f"evaluation.every={steps}", f"save.every={steps}"]
    kept = 0.0
    with TemporaryDirectory() as folder:
        for tier in ("keep", *tiers):
            print(f"training {tier} ...", file=sys.stderr, flush=True)
            recipe = load_recipe(RECIPE, [*at_end, f"run_folder={Path(folder) / tier}"])
            workload = recipe_workload(recipe)
            strategy = Strategy(2, 4, "fp32", parse_tiers(tier, len(workload.anatomy().blocks)), 2)
            loss = train(recipe, strategy, workload, CPU).held_out_loss
            assert loss is not None
            kept = kept or loss
            table.add_row(tier, f"{loss:.4f}", f"{loss / kept - 1:+.2%}")
            wrong += [f"{tier}: held-out loss is off by {loss / kept - 1:+.2%}"] if abs(loss / kept - 1) > 0.01 else []
    Console(width=100).print(table)
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
