"""Copies of a model kept in step: gradients of a window summed over the replicas once, while backward still runs.

NOTE [ One order on all ranks ]
Gradients are reduced in place, block by block, from the last block to the first, each as soon as it is complete in the
last backward. A block waits for those after it even if it is complete before them, and what a rank never used is
filled with zeros in the end: so all ranks reduce the same tensors in the same order whatever their data was.
DistributedDataParallel would copy every gradient into buckets, and cannot be rehearsed on fake tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainfit.hardware.ranks import local_part


class ReplicaSync:
    """Sums gradients over a group."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
        self.group = group
        self._buckets = _buckets(model, blocks)
        self._is_last = False
        self._next = 0
        self._missing: list[int] = []
        self._works: list[Any] = []
        for index, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(partial(_ready, weakref.ref(self), index))

    def before_micro_batch(self, *, is_last: bool) -> None:
        self._is_last = is_last
        self._next = 0
        self._missing = [len(bucket) for bucket in self._buckets]

    def finish(self) -> None:
        while self._next < len(self._buckets):
            self._reduce_next()
        for work in self._works:
            work.wait()
        self._works.clear()
        self._is_last = False

    def abandon(self) -> None:
        self._works.clear()
        self._is_last = False

    def _ready(self, index: int) -> None:
        if not self._is_last:
            return
        self._missing[index] -= 1
        while self._next < len(self._buckets) and self._missing[self._next] <= 0:
            self._reduce_next()

    def _reduce_next(self) -> None:
        gradients = []
        for parameter in self._buckets[self._next]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            gradients.append(local_part(parameter.grad))
        self._next += 1
        self._works.append(self.group.allreduce_coalesced(gradients))


def _ready(sync: weakref.ref[ReplicaSync], index: int, _: Tensor) -> None:
    """Holds no ReplicaSync: the collector does not see hooks, so parameters that lead to themselves would stay."""
    if (alive := sync()) is not None:
        alive._ready(index)


def _buckets(model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """Parameters that train, by the time at which backward completes them: what lies outside of the blocks last, since
    embeddings are, and tied heads with them."""
    known: set[int] = set()
    inside: list[list[nn.Parameter]] = []
    for block in blocks:  # what several share is complete with the first of them
        inside.insert(0, [p for p in block.parameters() if p.requires_grad and id(p) not in known])
        known |= {id(p) for p in inside[0]}
    outside = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    return [bucket for bucket in (*inside, outside) if bucket]
