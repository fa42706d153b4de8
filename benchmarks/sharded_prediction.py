"""Predicted against measured peak of each rank's second step: python benchmarks/sharded_prediction.py [ranks ...]

2 and 4 ranks over gloo: stages 0 to 3, hybrid, tensor and pipeline alone and with shards, micro batches 1 to 4, three
tiers, loss chunked or not; not every product of them, but each value with each mesh. Prints a table; exits 1
if an error is above 2 %.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tiny_models import TINY_CONFIGS
from trainfit.hardware import Accelerator, this_machine
from trainfit.profile import Mesh, Profile, Zero
from trainfit.rehearsal import rehearse
from trainfit.rehearsal.measure import measure_rank
from trainfit.rehearsal.processes import run_on_ranks
from trainfit.step import Strategy, parse_tiers
from trainfit.step.strategy_text import describe_strategy
from trainfit.units import format_bytes
from trainfit.workload import Workload, workload_from_config

LIMIT = 0.02
ERR = Console(stderr=True)
LAYOUTS = (
    (Mesh(replicate=2), Zero(0)),
    (Mesh(shard=2), Zero(1)),
    (Mesh(shard=2), Zero(2)),
    (Mesh(shard=2), Zero(3)),
    (Mesh(shard=2), Zero(3, prefetch=2)),
    (Mesh(shard=2), Zero(3, gradient_sync="step")),
    (Mesh(tensor=2), Zero(0)),
    (Mesh(pipeline=2), Zero(0)),
    (Mesh(replicate=4), Zero(0)),
    (Mesh(shard=4), Zero(1)),
    (Mesh(shard=4), Zero(3)),
    (Mesh(shard=4), Zero(3, reshard_size=2)),
    (Mesh(replicate=2, shard=2), Zero(1)),
    (Mesh(replicate=2, shard=2), Zero(2)),
    (Mesh(replicate=2, shard=2), Zero(3)),
    (Mesh(shard=2, tensor=2), Zero(2)),
    (Mesh(shard=2, tensor=2), Zero(3)),
    (Mesh(pipeline=2, shard=2), Zero(1)),
    (Mesh(pipeline=2, shard=2), Zero(3)),
    (Mesh(pipeline=2, tensor=2), Zero(0)),
)
# accumulation, tier, loss chunks
KNOBS = ((1, "keep", 1), (3, "pointwise", 4), (3, "full", 1), (1, "full", 4))
PIPELINE_KNOBS = ((2, "keep", 1), (4, "pointwise", 4), (4, "full", 1), (2, "full", 4))  # micro batches for each stage


def measure_all(device: Accelerator, workload: Workload, strategies: Sequence[Strategy]) -> list[Profile]:
    return [measure_rank(device, workload, strategy, steps=0) for strategy in strategies]


def main(sizes: list[int]) -> int:
    workload = workload_from_config(TINY_CONFIGS["llama"], seq_len=128, name="llama")
    errors = []
    for size in sizes:
        strategies = [
            Strategy(2, accumulation, tiers=parse_tiers(tier, 4), loss_chunks=chunks, mesh=mesh, zero=zero)
            for mesh, zero in LAYOUTS
            if mesh.size == size
            # Four ranks on two cores take long: a half of the values with each mesh.
            for accumulation, tier, chunks in (PIPELINE_KNOBS if mesh.pipeline > 1 else KNOBS)[: 8 // size]
        ]
        predicted = [_rehearse_all(workload, strategy) for strategy in track(strategies, console=ERR)]
        measured = run_on_ranks(measure_all, size, "cpu", workload, strategies)
        table = Table("strategy", "rank", "predicted", "measured", "phase", "error %")
        for index, strategy in enumerate(strategies):
            errors.append(_compare(table, strategy, predicted[index], [ranks[index] for ranks in measured]))
        Console(width=150).print(table)
    print(f"{len(errors)} combinations: median error {statistics.median(errors):.4%}, largest {max(errors):.4%}")
    return int(max(errors) > LIMIT)


def _rehearse_all(workload: Workload, strategy: Strategy) -> list[Profile]:
    return [rehearse(workload, strategy, this_machine("cpu"), rank=rank) for rank in range(strategy.mesh.size)]


def _compare(table: Table, strategy: Strategy, predicted: Sequence[Profile], measured: Sequence[Profile]) -> float:
    """Adds a row for the rank whose prediction is furthest off; returns by how much."""
    errors = [each.peak_bytes / found.peak_bytes - 1 for each, found in zip(predicted, measured)]
    rank = max(range(len(errors)), key=lambda rank: abs(errors[rank]))
    each, found, error = predicted[rank], measured[rank], errors[rank]
    zero = [f"sync each {strategy.zero.gradient_sync}"] if strategy.zero.gradient_sync else []
    zero += [f"reshard {strategy.zero.reshard_size}"] if strategy.zero.reshard_size else []
    zero += [f"prefetch {strategy.zero.prefetch}"] if strategy.zero.prefetch > 1 else []
    table.add_row(
        ", ".join([describe_strategy(strategy), *zero]),
        str(rank),
        format_bytes(each.peak_bytes),
        format_bytes(found.peak_bytes),
        f"{each.peak_phase}/{found.peak_phase}",
        f"{100 * error:+.3f}",
        style="red" if abs(error) > LIMIT else "",
    )
    return abs(error)


if __name__ == "__main__":
    sys.exit(main([int(size) for size in sys.argv[1:]] or [2, 4]))
