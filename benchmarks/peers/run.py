"""One setting on this rank: all variants side by side. torchrun --nproc-per-node 2 run.py STAGE ACCUMULATION
CHECKPOINT ROUNDS FILE [NAMES]: rank 0 writes what was found to FILE, as JSON; NAMES is a regular expression.

Both ranks stay up and every variant does two steps in turn, round after round, with a barrier before each, so that a
noisy neighbour hits all alike. A step takes as long as on the slower rank, and as much memory as on the fuller one.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from heap import Heap
from peers import deepspeed_engine, hand_written, planned
from peers.setting import Setting, Variant

WARM_UP, MEMORY_STEPS = 2, 2


def warm_up(variants: Sequence[Variant]) -> None:
    """One step of each kind, thrown away: what a process sets up once is no variant's own."""
    for group in {variant.group: variant for variant in reversed(variants)}.values():
        group.build()()


def measure_memory(variant: Variant, heap: Heap) -> None:
    """Build a variant, and read what it adds to what was live before."""
    before = heap.live()
    variant.step = variant.build()
    for _ in range(WARM_UP):
        variant.step()
    variant.base = heap.live() - before
    for _ in range(MEMORY_STEPS):
        dist.barrier()
        live = heap.live()
        heap.reset()
        variant.step()
        variant.peak = max(variant.peak, heap.peak() - live)


def measure_time(variant: Variant) -> None:
    """The second of two steps: in the first, pages and caches that the others had become this variant's again."""
    assert variant.step is not None
    variant.step()
    gc.collect()
    dist.barrier()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    loss = variant.step()
    variant.seconds.append(time.perf_counter() - begin)
    variant.cpu_seconds.append(time.process_time() - cpu_begin)
    dist.all_reduce(loss)
    variant.loss = float(loss) / dist.get_world_size()


def everyones(variant: Variant) -> dict[str, Any]:
    """The worse of the ranks, for each number."""
    found: list[Any] = [None] * dist.get_world_size()
    mine = {name: getattr(variant, name) for name in ("seconds", "cpu_seconds", "base", "peak")}
    dist.all_gather_object(found, {**mine, "total": variant.base + variant.peak})
    worst: dict[str, Any] = {"group": variant.group, "name": variant.name, "loss": variant.loss}
    for key, value in found[0].items():
        values = [rank[key] for rank in found]
        worst[key] = [max(each) for each in zip(*values)] if isinstance(value, list) else max(values)
    return worst


def main(stage: str, accumulation: str, checkpoint: str, rounds: str, path: str, names: str = "") -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    setting = Setting(int(stage), int(accumulation), bool(int(checkpoint)))
    heap = Heap("python benchmarks/zero_peers.py")
    makers = (hand_written, deepspeed_engine, planned)
    variants = [each for each in chain(*(maker.variants(setting) for maker in makers)) if re.search(names, each.name)]
    warm_up(variants)
    for variant in variants:
        measure_memory(variant, heap)
    for _ in range(int(rounds)):
        for variant in variants:
            measure_time(variant)
    results = [everyones(variant) for variant in variants]
    if dist.get_rank() == 0:
        with open(path, "w") as file:
            json.dump(results, file)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo and DeepSpeed's helpers may abort at a normal exit


if __name__ == "__main__":
    main(*sys.argv[1:])
