"""What one block saves for backward: what the planner's tracer counts, and the same bytes tensor by tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainfit.hardware import Hardware
from trainfit.hardware.runtime import rehearsed
from trainfit.profile import Precision, Tier
from trainfit.rehearsal.rehearse import fake_tensors
from trainfit.rehearsal.trace import Tracer
from trainfit.step import prepare
from trainfit.workload import Workload, run_model


@dataclass(frozen=True)
class BlockStory:
    """saved: bytes of one block by tier. hidden_bytes: one hidden tensor in half precision.

    kinds: of what `keep` saves, how many tensors by (shape, dtype).
    """

    saved: Mapping[Tier, int]
    hidden_bytes: int
    kinds: Mapping[tuple[tuple[int, ...], str], int]

    @property
    def listed_bytes(self) -> int:
        return sum(count * tensor_bytes(*kind) for kind, count in self.kinds.items())


def tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    kind: torch.dtype = getattr(torch, dtype)
    return math.prod(shape) * kind.itemsize


def block_story(workload: Workload, hardware: Hardware, batch: int, precision: Precision = "bf16") -> BlockStory:
    """One block at one micro batch; cast by block, so that no copy of a weight counts as an activation."""
    tracer = Tracer(workload, hardware, precision=precision, cast="block")
    blocks = tracer.trace(batch, precision, [1], accumulates=False).blocks
    return BlockStory(
        saved={tier: each.saved_bytes for (structure, tier), each in blocks.items() if structure == 0},
        hidden_bytes=batch * workload.seq_len * tracer.facts.dim * 2,
        kinds=saved_kinds(workload, hardware, batch, precision),
    )


def saved_kinds(
    workload: Workload, hardware: Hardware, batch: int, precision: Precision
) -> dict[tuple[tuple[int, ...], str], int]:
    """Tensors that autograd saves within the last block, each storage once, without weights and what blocks share."""
    found: dict[int, Tensor] = {}
    with fake_tensors():
        build = prepare(workload, rehearsed(hardware.spec.kind))
        weights = {tuple(p.shape) for p in build.model.parameters()}
        weights |= {shape[::-1] for shape in weights}
        with build.accelerator.autocast(precision), _watched(build.blocks[-1], found):
            run_model(build.model, torch.zeros(batch, workload.seq_len, dtype=torch.long))
    own = [
        each
        for each in found.values()
        if tuple(each.shape) not in weights and each.shape[0] in (batch, batch * workload.seq_len)
    ]
    return dict(Counter((tuple(each.shape), str(each.dtype).removeprefix("torch.")) for each in own))


def _watched(block: nn.Module, found: dict[int, Tensor]) -> Any:
    """Notes what is saved while the block runs, by storage."""

    def pack(tensor: Tensor) -> Tensor:
        found.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    class Watch:
        def __enter__(self) -> None:
            self.handles = [
                block.register_forward_pre_hook(lambda *_: hooks.__enter__()),
                block.register_forward_hook(lambda *_: hooks.__exit__(None, None, None)),
            ]

        def __exit__(self, *_: object) -> None:
            for handle in self.handles:
                handle.remove()

    return Watch()
