"""DeepSpeed's engine at each stage, tuned for a small model: its default buckets alone would take gigabytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from torch import Tensor
from torch.optim import AdamW

from peers.setting import BETAS, CONFIG, EPS, LEARNING_RATE, Setting, Step, Variant, WithLoss, local_tokens

# Elements reduced or gathered at once: for little memory, and for few collectives.
SMALL, LARGE = 2_000_000, 20_000_000


def variants(setting: Setting) -> Iterator[Variant]:
    for name, bucket in (("small buckets", SMALL), ("large buckets", LARGE)):
        yield Variant("deepspeed", f"DeepSpeed, {name}", partial(engine, setting, bucket))


def engine(setting: Setting, bucket: int) -> Step:
    deepspeed.init_distributed(dist_backend="gloo")
    model = WithLoss(setting)
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True)
    trained, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_config(setting, bucket))
    ids, labels = (tensor.chunk(setting.accumulation) for tensor in local_tokens())

    def step() -> Tensor:
        total = torch.zeros(())
        for each_ids, each_labels in zip(ids, labels):
            loss = trained(each_ids, each_labels)
            trained.backward(loss)
            total += loss.detach() / setting.accumulation
            del loss
            trained.step()
        return total

    return step


def _config(setting: Setting, bucket: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": CONFIG.batch_size // 2 // setting.accumulation,
        "gradient_accumulation_steps": setting.accumulation,
        "gradient_clipping": 0.0,
        "steps_per_print": 1_000_000,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": setting.stage,
            "overlap_comm": False,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket // 2,
            "stage3_param_persistence_threshold": 1000,
            "stage3_max_live_parameters": 2 * bucket,
            # A parameter that would be kept until backward needs it again was never dropped: that is stage 2.
            "stage3_max_reuse_distance": 0,
        },
    }
