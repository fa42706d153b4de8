"""Predicted against measured peak of the second step: python benchmarks/prediction.py [family ...]

Eight families, fp32 and bf16, four tier settings, loss chunked or not, accumulation 1 and 3. Prints a table; exits 1
if an error is above 1% or the median above 0.3%.
"""

from __future__ import annotations

import itertools
import statistics
import sys

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tiny_models import TINY_CONFIGS
from trainfit.hardware import accelerator, this_machine
from trainfit.rehearsal import measure, rehearse
from trainfit.step import Strategy, parse_tiers
from trainfit.units import format_bytes
from trainfit.workload import workload_from_config

ACTIVATIONS = ("keep", "pointwise", "full", "2*full,2*pointwise")
LIMIT, MEDIAN_LIMIT = 0.01, 0.003


def main(families: list[str]) -> int:
    torch.set_num_threads(1)
    combinations = list(itertools.product(families, ("fp32", "bf16"), ACTIVATIONS, (1, 4), (1, 3)))
    table = Table("model", "precision", "activation", "chunks", "accum.", "predicted", "measured", "phase", "error %")
    hardware, device = this_machine("cpu"), accelerator("cpu")
    errors = []
    for family, precision, activation, chunks, accumulation in track(combinations, console=Console(stderr=True)):
        workload = workload_from_config(TINY_CONFIGS[family], seq_len=256, name=family)
        strategy = Strategy(4, accumulation, precision, parse_tiers(activation, 4), chunks)
        predicted = rehearse(workload, strategy, hardware)
        measured = measure(workload, strategy, device, steps=0)
        error = predicted.peak_bytes / measured.peak_bytes - 1
        errors.append(abs(error))
        row = (family, precision, activation, chunks, accumulation, format_bytes(predicted.peak_bytes))
        style = "red" if abs(error) > LIMIT else ""
        phases = f"{predicted.peak_phase}/{measured.peak_phase}"
        table.add_row(*map(str, row), format_bytes(measured.peak_bytes), phases, f"{100 * error:+.3f}", style=style)
    Console(width=130).print(table)
    median, worst = statistics.median(errors), max(errors)
    print(f"{len(errors)} combinations: median error {median:.4%}, largest {worst:.4%}")
    return int(worst > LIMIT or median > MEDIAN_LIMIT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(TINY_CONFIGS)))
