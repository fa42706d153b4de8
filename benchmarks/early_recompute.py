"""What early recompute is worth, predicted and on a device.

python benchmarks/early_recompute.py                 predicted, for devices of the catalogue: no device is needed
[torchrun --standalone --nproc-per-node T] benchmarks/early_recompute.py --device cuda|npu|cpu [--steps N]

On a device, steps of a llama are timed with recompute_ahead 0 and 1, round-robin, split over T devices, and beside them
what the rehearsal says of this device. Losses must be equal to the bit, and on one device the second stream must not
cost more than 2 %. Exits 1 where they are not or it does. A cpu has no streams: both are the same step there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from trainfit.errors import DeviceError
from trainfit.hardware import Accelerator, accelerator, find_device, this_machine
from trainfit.hardware.ranks import process_group
from trainfit.profile import Mesh, TensorParallel
from trainfit.rehearsal import rehearse
from trainfit.step import Strategy, TrainStep, build_step, parse_tiers
from trainfit.units import format_bytes
from trainfit.workload import MicroBatch, Workload, workload_from_config

DEVICES = ("h100", "a100-80gb", "ascend-910b3")
TIERS = ("full", "pointwise")
LARGEST_LOSS = 1.02  # of a step, where there is nothing to win


def llama(dim: int, blocks: int, seq_len: int, heads: int, vocab_size: int = 32000) -> Workload:
    config = {
        "model_type": "llama", "vocab_size": vocab_size, "hidden_size": dim, "intermediate_size": 11 * dim // 4,
        "num_hidden_layers": blocks, "num_attention_heads": heads, "num_key_value_heads": heads,
        "max_position_embeddings": seq_len,
    }  # fmt: skip
    return workload_from_config(config, seq_len=seq_len, name=f"llama {dim} x {blocks}")


def strategy_of(blocks: int, tier: str, tensor: int, *, sequence: bool) -> Strategy:
    split = TensorParallel(sequence=sequence)
    tiers = parse_tiers(tier, blocks)
    return Strategy(1, 1, "bf16", tiers, 8, mesh=Mesh(tensor=tensor), tensor=split)


def predicted(console: Console) -> int:
    """Blocks of Llama-2-7B: what a device idles inside of a block's backward is what can be won."""
    blocks = 8
    workload = llama(4096, blocks, 4096, 32)
    table = Table("device", "tensor", "tier", "ms", "ms ahead", "ratio", "idle ms", "idle ahead", "more memory")
    for name in DEVICES:
        hardware = find_device(name)
        for tensor, sequence in ((1, False), (4, True), (8, False), (8, True)):
            for tier in TIERS:
                late = strategy_of(blocks, tier, tensor, sequence=sequence)
                one, other = (rehearse(workload, each, hardware) for each in (late, replace(late, recompute_ahead=1)))
                assert one.reserved_bytes is not None
                assert other.reserved_bytes is not None
                seconds = [f"{1e3 * each.step_seconds:.1f}" for each in (one, other)]
                idle = [f"{1e3 * each.exposed_communication_seconds:.1f}" for each in (one, other)]
                more = format_bytes(max(0, other.reserved_bytes - one.reserved_bytes))
                words = f"{tensor}{', sequences' if sequence else ''}"
                ratio = f"{other.step_seconds / one.step_seconds:.3f}"
                table.add_row(name, words, tier, *seconds, ratio, *idle, more)
    console.print(table)
    return 0


def timed(step: TrainStep, batch: list[MicroBatch]) -> tuple[float, float]:
    step.accelerator.synchronize()
    begin = time.perf_counter()
    loss = float(step(batch).loss)
    step.accelerator.synchronize()
    return time.perf_counter() - begin, loss


def measured(console: Console, kind: str, num_steps: int) -> int:
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = accelerator(kind, index=int(os.environ.get("LOCAL_RANK", "0")))
    workload = llama(256, 4, 128, 8, 1000) if kind == "cpu" else llama(4096, 8, 2048, 32)
    blocks = len(workload.anatomy().blocks)
    try:
        hardware = this_machine("cpu") if kind == "cpu" else find_device(device.name)
    except DeviceError:
        hardware = this_machine(device.kind)
    ids = torch.randint(workload.vocab_size, (1, workload.seq_len + 1), generator=torch.Generator().manual_seed(0))
    batch = [MicroBatch.of(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())]
    table = Table("tier", "ms", "ms ahead", "ratio", "predicted ratio", "peak", "peak ahead", "same losses")
    failed = False
    for tier in TIERS:
        late = strategy_of(blocks, tier, ranks, sequence=ranks > 1)
        strategies = [late, replace(late, recompute_ahead=1)]
        # Before there are processes: a rehearsal brings a process group of its own.
        foreseen = [rehearse(workload, each, hardware).step_seconds for each in strategies] if rank == 0 else [1.0, 1.0]
        seconds, losses, peaks = _rounds(workload, strategies, device, batch, num_steps, ranks)
        same, ratio = losses[0] == losses[1], seconds[1] / seconds[0]
        failed |= not same or (ranks == 1 and device.has_streams and ratio > LARGEST_LOSS)
        words = [f"{1e3 * each:.1f}" for each in seconds]
        sizes = map(format_bytes, peaks)
        table.add_row(tier, *words, f"{ratio:.3f}", f"{foreseen[1] / foreseen[0]:.3f}", *sizes, str(same))
    if rank == 0:
        console.print(f"{device.name} x {ranks}, torch {torch.__version__}, {workload.name}", table)
    return int(failed)


def _rounds(
    workload: Workload,
    strategies: list[Strategy],
    device: Accelerator,
    batch: list[MicroBatch],
    num_steps: int,
    ranks: int,
) -> tuple[list[float], list[list[float]], list[int]]:
    """Median seconds, losses and peaks of each strategy; one after the other in each round."""
    with process_group(device) if ranks > 1 else nullcontext():
        steps = []
        for strategy in strategies:
            torch.manual_seed(0)
            steps.append(build_step(workload, strategy, device))
        runs: list[list[tuple[float, float]]] = [[] for _ in steps]
        peaks = [0 for _ in steps]
        for _ in range(num_steps):
            for number, step in enumerate(steps):
                device.memory.reset_peak()
                runs[number].append(timed(step, batch))
                peaks[number] = device.memory.peak_bytes()
    seconds = [statistics.median(each for each, _ in run[1:]) for run in runs]
    return seconds, [[loss for _, loss in run] for run in runs], peaks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "npu", "cpu"])
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    console = Console(width=120)
    return predicted(console) if options.device is None else measured(console, options.device, options.steps)


if __name__ == "__main__":
    sys.exit(main())
