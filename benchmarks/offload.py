"""What offload of saved tensors saves and costs: offload.py [--device cpu|cuda|npu|standin] [--steps N]

A llama is trained under each tier, in turns, so that a machine that gets slower does so for all. Peaks are the
device's allocator's, on a cpu those of PyTorch's allocation events; what a rehearsal says of the same step stands
beside. On a cpu saved tensors go to a file, elsewhere to pinned host memory. On cuda and npu the copies' own time is
measured too, with nothing beside them; "hidden" is the share of it that a step does not take longer than the same tier
without offload. Losses must be equal to the bit. Exits 1 if they are not, or if a peak is more than 1 % off.

standin: the npu of tests/standin, whose copies nothing hides; for its bytes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from trainfit.hardware import Accelerator, Hardware, accelerator, this_machine
from trainfit.profile import Offload, OffloadPlace, Precision, Profile
from trainfit.rehearsal import measure, rehearse
from trainfit.rehearsal.measure import random_window
from trainfit.step import Strategy, TrainStep, build_step, parse_tiers
from trainfit.units import format_bytes
from trainfit.workload import Workload, workload_from_config

BLOCKS = 6
# tier: the one that recomputes as much and sends nothing away
TIERS = {
    "keep": "keep",
    "3*offload,3*keep": "keep",
    "offload": "keep",
    "pointwise": "pointwise",
    "offload_pointwise": "pointwise",
    "full": "full",
    "offload_full": "full",
}


@dataclass
class Row:
    """Of one tier: losses of all steps, their seconds, what was measured and what was predicted of bytes."""

    strategy: Strategy
    step: TrainStep
    measured: Profile
    predicted: Profile
    losses: list[float]
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds[1:])

    @property
    def error(self) -> float:
        return self.predicted.peak_bytes / self.measured.peak_bytes - 1


def workload_for(device: Accelerator) -> tuple[Workload, int]:
    """The model, and sequences in a micro batch: small on the host, where a step must not take minutes."""
    small = device.kind == "cpu" or (device.name == "Ascend910B3" and "npu_standin" in sys.modules)
    dim, length, rows = (256, 256, 4) if small else (2048, 2048, 8)
    config = {
        "model_type": "llama", "vocab_size": 4096, "hidden_size": dim, "num_hidden_layers": BLOCKS,
        "num_attention_heads": dim // 64, "num_key_value_heads": dim // 64, "intermediate_size": 3 * dim,
        "max_position_embeddings": length,
    }  # fmt: skip
    return workload_from_config(config, seq_len=length, name="llama"), rows


def rows_of(device: Accelerator, hardware: Hardware, steps: int) -> list[Row]:
    workload, rows = workload_for(device)
    precision: Precision = "fp32" if device.kind == "cpu" else "bf16"
    place: OffloadPlace = "disk" if device.shares_host_memory else "host"
    found: list[Row] = []
    for text in TIERS:
        setting = Offload(place) if "offload" in text else Offload()
        strategy = Strategy(rows, 1, precision, parse_tiers(text, BLOCKS), 8, offload=setting)
        predicted, measured = rehearse(workload, strategy, hardware), measure(workload, strategy, device, steps=0)
        torch.manual_seed(0)
        found.append(Row(strategy, build_step(workload, strategy, device), measured, predicted, [], []))
    batches = random_window(workload, found[0].strategy, seed=0)
    for _ in range(steps + 1):
        for row in found:
            device.synchronize()
            begin = time.perf_counter()
            row.losses.append(row.step(batches).loss.item())
            device.synchronize()
            row.seconds.append(time.perf_counter() - begin)
    return found


def copy_seconds(device: Accelerator, num_bytes: int) -> float:
    """Of so many bytes to pinned host memory and back, with nothing beside them."""
    host, here = (
        device.pinned((num_bytes,), torch.uint8),
        torch.empty(num_bytes, dtype=torch.uint8, device=device.device),
    )
    seconds = []
    for _ in range(4):
        device.synchronize()
        begin = time.perf_counter()
        host.copy_(here, non_blocking=True)
        here.copy_(host, non_blocking=True)
        device.synchronize()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda", "npu", "standin"])
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.device == "standin":
        sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "standin"))
        __import__("npu_standin")
    device = accelerator("npu" if arguments.device == "standin" else arguments.device)
    hardware = this_machine(device.kind)
    found = rows_of(device, hardware, arguments.steps)
    by_tier = dict(zip(TIERS, found))
    table = Table(
        "tier",
        "peak",
        "predicted",
        "off",
        "elsewhere",
        "ms a step",
        "x keep",
        "hidden",
        title=f"offload on {device.name}",
    )
    for text, row in by_tier.items():
        hidden, away = "", row.predicted.offloaded_bytes
        if away and device.is_beside_host and arguments.device != "standin":
            longer = row.median - by_tier[TIERS[text]].median
            hidden = f"{1 - longer / copy_seconds(device, away):.0%}"
        table.add_row(
            text, format_bytes(row.measured.peak_bytes), format_bytes(row.predicted.peak_bytes), f"{row.error:+.2%}",
            format_bytes(away), f"{row.median * 1e3:.1f}", f"{row.median / found[0].median:.2f}", hidden,
        )  # fmt: skip
    console = Console(width=110)
    console.print(table)
    equal = all(row.losses == found[0].losses for row in found)
    console.print(f"losses of {len(found[0].losses)} steps {'equal' if equal else 'DIFFER'} to the bit")
    return 0 if equal and all(abs(row.error) <= 0.01 for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
