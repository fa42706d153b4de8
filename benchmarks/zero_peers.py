"""trainfit against DDP, DeepSpeed and hand-written FSDP2, on 2 ranks of one thread each.

    benchmarks/peers/install.sh FOLDER
    benchmarks/fair.sh FOLDER/bin/python benchmarks/zero_peers.py --rounds 9 --json FILE

All variants of a setting live in one pair of processes and do two steps in turn, of which the second is timed; see
peers/run.py. All update by fused AdamW. Of a setting:
  x best    the largest, over DDP (stage 0), DeepSpeed and FSDP2 (same stage), of the median over rounds of a variant's
            seconds / that peer's in that round. ZeroRedundancyOptimizer, which keeps all parameters, is shown beside.
  total MB  live between steps + the peak above that, on the fuller rank, beyond what was live before it was built
Bounds: x best at most 1.05, and total MB at most that of DeepSpeed's leanest variant. Where a stage can reduce
gradients once a step or each time, peers do both and so does trainfit, and each is held against all. A setting is met
when one row of trainfit's meets both bounds, as a plan would choose; a row that misses one is red. Losses must agree
to 1e-5.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
MAX_RATIO, MAX_LOSS_DIFFERENCE = 1.05, 1e-5
SETTINGS = [(stage, *rest) for stage in (0, 1, 2, 3) for rest in ((1, 0), (4, 0), (1, 1))]
Row = dict[str, Any]


def run(setting: tuple[int, int, int], rounds: int, names: str) -> list[Row]:
    """Every variant of a setting, as peers/run.py found it on both ranks."""
    binaries = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{binaries}:{os.environ['PATH']}",  # DeepSpeed calls ninja
        "PYTHONPATH": f"{HERE.parent / 'src'}:{HERE}",
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [str(HERE / "peers" / "run.py"), *map(str, setting), str(rounds), str(path), names]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if not path.exists():
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        found: list[Row] = json.loads(path.read_text())
        return found


def ratio(row: Row, peer: Row) -> float:
    return statistics.median(a / b for a, b in zip(row["seconds"], peer["seconds"]))


def report(title: str, rows: Sequence[Row], console: Console) -> bool:
    """Print a setting's table. Returns whether one row of trainfit's meets both bounds."""
    peers = [row for row in rows if row["group"] in ("deepspeed", "other")]
    bound = min((row["total"] for row in rows if row["group"] == "deepspeed"), default=float("inf"))
    table = Table("variant", "seconds", "x best", "base MB", "peak MB", "total MB", "bound MB", title=title)
    met = False
    for row in rows:
        worst = max(ratio(row, peer) for peer in peers)
        is_ours = row["group"] == "trainfit"
        good = worst <= MAX_RATIO and row["total"] <= bound
        met |= is_ours and good
        sizes = [f"{row[key] / 1e6:.1f}" for key in ("base", "peak", "total")]
        numbers = [f"{statistics.median(row['seconds']):.3f}", f"{worst:.3f}", *sizes]
        style = ("bold" if good else "red") if is_ours else ""
        table.add_row(row["name"], *numbers, f"{bound / 1e6:.1f}" if is_ours else "", style=style)
    console.print(table)
    return met


def losses_agree(rows: Sequence[Row]) -> bool:
    losses = [row["loss"] for row in rows]
    return max(losses) - min(losses) <= MAX_LOSS_DIFFERENCE * max(losses)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--settings", nargs="*", help="those to run, as stage,accumulation,checkpointed: 1,4,0")
    parser.add_argument("--names", default="", help="regular expression: variants to run")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    options = parser.parse_args()
    console, missed, everything = Console(width=118), [], {}
    for setting in SETTINGS:
        stage, accumulation, checkpoint = setting
        if options.settings and ",".join(map(str, setting)) not in options.settings:
            continue
        title = f"stage {stage}, accumulation {accumulation}{', every block checkpointed' if checkpoint else ''}"
        everything[title] = rows = run(setting, options.rounds, options.names)
        if options.json:
            options.json.write_text(json.dumps(everything, indent=1))
        if not report(title, rows, console):
            missed.append(title)
        if not losses_agree(rows):
            missed.append(f"{title}: losses differ, {[row['loss'] for row in rows]}")
    print(f"{options.rounds} rounds, {len(everything)} settings, {len(missed)} missed: {'; '.join(missed) or 'none'}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
