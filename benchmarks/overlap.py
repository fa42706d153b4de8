"""How much of the gathers of ZeRO 3 hides behind computation:
torchrun --standalone --nproc-per-node 2 benchmarks/overlap.py [cpu|cuda|npu] [steps]

Steps of the reference model are timed with gathers that run beside computation, and with gathers that are waited for
where they are called; the difference is what was hidden. gloo is too fast on one machine to show it, and has no
streams: on a cpu every gather is made 10 ms later by a clock, without taking any processor, and is waited for when its
parameters are used. On cuda and npu nothing is changed but the waiting. Losses must be equal to the bit. Exits 1 if
they are not, or if nothing was hidden with two blocks gathered ahead.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from late_gather import Delay, LateAllGather
from reference_model import ReferenceConfig, ReferenceModel
from trainfit.hardware import Accelerator, accelerator
from trainfit.hardware.ranks import process_group
from trainfit.profile import Mesh, Zero
from trainfit.step import Strategy, TrainStep, build_step
from trainfit.workload import MicroBatch, workload_from_module

CONFIG = ReferenceConfig()
LATE = Delay(0.01, 0.01)
ROWS = 2


class WaitedFor:
    """An all-gather that nothing runs beside: the device is idle before it returns."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self._device.synchronize()
        dist.all_gather_single(output_tensor, input_tensor, group=group)
        self._device.synchronize()


def new_model() -> ReferenceModel:
    torch.manual_seed(0)
    return ReferenceModel(CONFIG)


def build(device: Accelerator, prefetch: int, *, beside: bool) -> TrainStep:
    workload = workload_from_module(new_model, seq_len=CONFIG.seq_len, vocab_size=CONFIG.vocab_size)
    tiers = ("keep",) * CONFIG.num_blocks
    mesh = Mesh(shard=dist.get_world_size())
    step = build_step(workload, Strategy(ROWS, tiers=tiers, mesh=mesh, zero=Zero(3, prefetch=prefetch)), device)
    root: Any = step.root
    for module in root.modules():
        if not isinstance(module, FSDPModule):
            continue
        if device.shares_host_memory:
            module.set_custom_all_gather(LateAllGather(LATE))  # type: ignore[arg-type]  # as its protocol has it
        elif not beside:
            module.set_custom_all_gather(WaitedFor(device))  # type: ignore[arg-type]
    if device.shares_host_memory:
        root._set_unshard_async_op(beside)
    return step


def timed(device: Accelerator, run: Callable[[], Tensor]) -> tuple[float, float]:
    dist.barrier()
    device.synchronize()
    begin = time.perf_counter()
    loss = float(run())
    device.synchronize()
    return time.perf_counter() - begin, loss


def main(kind: str, num_steps: int) -> int:
    torch.set_num_threads(1)
    device = accelerator(kind, index=int(os.environ["LOCAL_RANK"]))
    with process_group(device):
        generator = torch.Generator().manual_seed(dist.get_rank())
        ids = torch.randint(CONFIG.vocab_size, (ROWS, CONFIG.seq_len + 1), generator=generator)
        batch = [MicroBatch.of(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())]
        table = Table("blocks gathered ahead", "seconds, waited for", "seconds, beside", "hidden ms", "same losses")
        failed = False
        for prefetch in (1, 2):
            steps = {beside: build(device, prefetch, beside=beside) for beside in (False, True)}
            runs: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
            for _ in range(num_steps):
                for beside, step in steps.items():
                    runs[beside].append(timed(device, lambda step=step: step(batch).loss))  # type: ignore[misc]
            waited, free = (statistics.median(seconds for seconds, _ in runs[beside][1:]) for beside in (False, True))
            same = [loss for _, loss in runs[False]] == [loss for _, loss in runs[True]]
            failed |= not same or (prefetch > 1 and free >= waited)
            table.add_row(str(prefetch), f"{waited:.3f}", f"{free:.3f}", f"{1e3 * (waited - free):.0f}", str(same))
        if dist.get_rank() == 0:
            Console(width=100).print(table)
    return int(failed)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(main(arguments[0] if arguments else "cpu", int(arguments[1]) if len(arguments) > 1 else 8))
