"""What one block saves for backward: what the planner's tracer counts, and the same bytes tensor by tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.hardware import Hardware, Kind
from trainfit.hardware.runtime import rehearsed
from trainfit.profile import Precision, Tier
from trainfit.rehearsal.rehearse import fake_tensors
from trainfit.rehearsal.trace import Tracer
from trainfit.rehearsal.workspaces import kept_bytes
from trainfit.step import prepare
from trainfit.workload import Workload, run_model


@dataclass(frozen=True)
class BlockStory:
    """saved: bytes of one block by tier. hidden_bytes: one hidden tensor in half precision.

    kinds: of what `keep` saves, how many tensors by (shape, dtype). kernel_bytes: what the device's attention keeps
        more than PyTorch's list shows.
    """

    saved: Mapping[Tier, int]
    hidden_bytes: int
    kinds: Mapping[tuple[tuple[int, ...], str], int]
    kernel_bytes: int

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
    kinds, kernel_bytes = saved_kinds(workload, hardware, batch, precision)
    return BlockStory(
        saved={tier: each.saved_bytes for (structure, tier), each in blocks.items() if structure == 0},
        hidden_bytes=batch * workload.seq_len * tracer.facts.dim * 2,
        kinds=kinds,
        kernel_bytes=kernel_bytes,
    )


def saved_kinds(
    workload: Workload, hardware: Hardware, batch: int, precision: Precision
) -> tuple[dict[tuple[tuple[int, ...], str], int], int]:
    """Tensors that autograd saves within the last block, each storage once, without weights and what blocks share.

    And the bytes that the device's kernels keep beside them.
    """
    found: dict[int, Tensor] = {}
    kernels = KernelBytes(hardware.spec.kind)
    with fake_tensors():
        build = prepare(workload, rehearsed(hardware.spec.kind))
        weights = {tuple(p.shape) for p in build.model.parameters()}
        weights |= {shape[::-1] for shape in weights}
        with build.accelerator.autocast(precision), _watched(build.blocks[-1], found, kernels):
            run_model(build.model, torch.zeros(batch, workload.seq_len, dtype=torch.long))
    own = [
        each
        for each in found.values()
        if tuple(each.shape) not in weights and each.shape[0] in (batch, batch * workload.seq_len)
    ]
    kinds = Counter((tuple(each.shape), str(each.dtype).removeprefix("torch.")) for each in own)
    return dict(kinds), kernels.num_bytes


class KernelBytes(TorchDispatchMode):
    """Adds up what a device's kernels keep more than the CPU's, whose operators a rehearsal runs."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind, self.num_bytes = kind, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self.num_bytes += kept_bytes(self.kind, func, output)
        return output


@contextmanager
def _watched(block: nn.Module, found: dict[int, Tensor], kernels: KernelBytes) -> Iterator[None]:
    """Notes what is saved while the block runs, by storage."""

    def pack(tensor: Tensor) -> Tensor:
        found.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    inside = ExitStack()

    def enters(*_: object) -> None:
        inside.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        inside.enter_context(kernels)

    handles = [
        block.register_forward_pre_hook(enters),
        block.register_forward_hook(lambda *_: inside.close()),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
