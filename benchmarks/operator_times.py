"""Which operators of a step take longer or shorter than predicted: where an error of step_time.py comes from.

    benchmarks/fair.sh python benchmarks/operator_times.py MODEL [--micro-batch N] [--tier TIER] [--precision P]

A step of a model of step_time.py runs operator by operator with a clock around each, the processor's of this thread,
and the least of five runs is set beside what `trainfit devices --calibrate` has stored of its kernel. What a step takes
around kernels is in neither column but for the beginning of each call, so small operators look longer than they are.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from step_time import MODELS, SEQUENCES, workload_of
from trainfit.hardware import accelerator, this_machine
from trainfit.hardware.overheads import part_of_step
from trainfit.rehearsal.measure import random_window
from trainfit.rehearsal.operator_cost import kernel_prices
from trainfit.step import Strategy, build_step
from trainfit.step.strategy_text import parse_tiers

RUNS = 5


class Clocked(TorchDispatchMode):
    """Operators in their order: part of the step, name, seconds; price is told each call."""

    def __init__(self, price: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.price = price
        self.rows: list[tuple[str, str, float, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        begin = time.thread_time()
        output = func(*args, **kwargs)
        seconds = time.thread_time() - begin
        self.rows.append((part_of_step(), str(func), seconds, self.price(func, args, kwargs, output)))
        return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--micro-batch", type=int, default=1, choices=(1, 2, 4))
    parser.add_argument("--tier", default="keep")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    calibration = this_machine("cpu").spec.calibration
    if calibration is None:
        parser.exit(2, "calibrate first: benchmarks/fair.sh python -m trainfit devices --calibrate\n")
    workload = workload_of(arguments.model)
    tiers = parse_tiers(arguments.tier, len(workload.anatomy().blocks))
    size = arguments.micro_batch
    strategy = Strategy(size, SEQUENCES // size, arguments.precision, tiers)
    torch.manual_seed(0)
    step = build_step(workload, strategy, accelerator("cpu"))
    window = random_window(workload, strategy, seed=0)
    step(window)
    runs = []
    for _ in range(RUNS):
        with Clocked(kernel_prices(calibration)) as clocked:
            step(window)
        runs.append(clocked.rows)
    Console(width=120).print(_table(runs))


def _table(runs: list[list[tuple[str, str, float, float]]]) -> Table:
    found: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for calls in zip(*runs, strict=True):
        part, name, _, priced = calls[0]
        row = found[part, name]
        row[0] += 1
        row[1] += priced
        row[2] += min(seconds for _, _, seconds, _ in calls)
    table = Table("part", "operator", "calls", "predicted ms", "measured ms", "difference ms")
    for (part, name), (count, priced, seconds) in sorted(found.items(), key=lambda each: -abs(each[1][1] - each[1][2])):
        figures = (f"{1e3 * figure:.2f}" for figure in (priced, seconds))
        table.add_row(part, name, f"{count:.0f}", *figures, f"{1e3 * (priced - seconds):+.2f}")
    return table


if __name__ == "__main__":
    main()
