"""The same runs by trainfit: with no technique but sharding, and with the loss in chunks as a plan would have it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch.distributed as dist
from torch import Tensor

from peers.hand_written import sync_times
from peers.setting import BETAS, CONFIG, EPS, LEARNING_RATE, Setting, Step, Variant, local_tokens, new_model
from trainfit.hardware import accelerator
from trainfit.profile import Mesh, Zero
from trainfit.step import Strategy, build_step, parse_tiers
from trainfit.techniques.chunked_loss import auto_chunks
from trainfit.workload import MicroBatch, workload_from_module
from trainfit.workload.workload import AdamWSettings

WORKLOAD = workload_from_module(new_model, seq_len=CONFIG.seq_len, vocab_size=CONFIG.vocab_size).copy(
    optimizer=AdamWSettings(LEARNING_RATE, BETAS, EPS, weight_decay=0.0)
)


def variants(setting: Setting) -> Iterator[Variant]:
    rows = CONFIG.batch_size // dist.get_world_size() // setting.accumulation
    auto = auto_chunks(rows * CONFIG.seq_len, CONFIG.vocab_size, CONFIG.dim)
    for each in sync_times(setting):
        when = "" if setting.accumulation == 1 or setting.stage < 2 else f", reduced {'each time' if each else 'once'}"
        for loss_chunks in sorted({1, max(1, auto // 4), auto}):
            loss = "full logits" if loss_chunks == 1 else f"loss in {loss_chunks}"
            yield Variant("trainfit", f"trainfit{when}, {loss}", partial(step, setting, each, rows, loss_chunks))


def step(setting: Setting, reduce_each: bool, rows: int, loss_chunks: int) -> Step:
    size = dist.get_world_size()
    strategy = Strategy(
        rows,
        setting.accumulation,
        tiers=parse_tiers("full" if setting.checkpoint else "keep", CONFIG.num_blocks),
        loss_chunks=loss_chunks,
        mesh=Mesh(shard=size) if setting.stage else Mesh(replicate=size),
        zero=Zero(setting.stage, "micro_batch" if reduce_each else "step"),
    )
    run = build_step(WORKLOAD, strategy, accelerator("cpu"), max_grad_norm=None, model=new_model())
    window = list(MicroBatch.of(*local_tokens()).split(rows))

    def once() -> Tensor:
        return run(window).loss

    return once
