"""Training loops as one writes them by hand on PyTorch: DistributedDataParallel, ZeroRedundancyOptimizer, FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from peers.setting import BETAS, EPS, LEARNING_RATE, Setting, Step, Variant, WithLoss, local_tokens


def variants(setting: Setting) -> Iterator[Variant]:
    if setting.stage < 2:
        for view in (True, False):
            name = f"DDP{', buckets as gradients' if view else ''}"
            if setting.stage == 1:
                name = f"ZeroRedundancyOptimizer, {name}"
            yield Variant("beside" if setting.stage else "other", name, partial(ddp, setting, view))
    if setting.stage > 0:
        for each in sync_times(setting):
            name = "FSDP2" if setting.accumulation == 1 else f"FSDP2, reduced {'each time' if each else 'once'}"
            yield Variant("other", name, partial(fsdp2, setting, each))


def sync_times(setting: Setting) -> tuple[bool, ...]:
    """Whether gradients are reduced in each micro batch: a choice from stage 2 on, never at stage 1."""
    if setting.accumulation == 1 or setting.stage < 2:
        return (False,)
    return (True, False)


def ddp(setting: Setting, view: bool) -> Step:
    model = DistributedDataParallel(WithLoss(setting), gradient_as_bucket_view=view)
    settings: dict[str, Any] = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPS, "weight_decay": 0.0, "fused": True}
    optimizer: Any
    if setting.stage == 0:
        optimizer = AdamW(model.parameters(), **settings)
    else:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, **settings)
    return _loop(setting, model, optimizer, lambda is_last: nullcontext() if is_last else model.no_sync())


def fsdp2(setting: Setting, reduce_each: bool) -> Step:
    model = WithLoss(setting)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=setting.stage == 3)
    # The root is needed again as soon as backward begins.
    root: Any = fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True)

    def around(is_last: bool) -> Any:
        root.set_requires_gradient_sync(is_last or reduce_each)
        if setting.stage < 3:
            root.set_reshard_after_backward(is_last)
        return nullcontext()

    return _loop(setting, model, optimizer, around)


def _loop(setting: Setting, model: Any, optimizer: Any, around: Callable[[bool], Any]) -> Step:
    ids, labels = (tensor.chunk(setting.accumulation) for tensor in local_tokens())

    def step() -> Tensor:
        total = torch.zeros(())
        for index in range(setting.accumulation):
            with around(index == setting.accumulation - 1):
                loss = model(ids[index], labels[index]) / setting.accumulation
                loss.backward()
            total += loss.detach()
            del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step
