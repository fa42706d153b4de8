"""ZeRO 1, 2 and 3 by FSDP2: one way to shard, and three times at which ranks talk.

NOTE [ Stages are times ]
fully_shard splits parameters, gradients and optimizer states over the mesh's shard dimension, in fp32. What differs
between stages is when parameters are whole and when gradients are reduced:
  stage 1   parameters are gathered before the first micro batch and dropped after the last; gradients stay whole and
            are reduced in the last backward: one all-gather and one reduce-scatter a step
  stage 2   parameters as in stage 1; gradients are reduced in each backward: k reduce-scatters in k micro batches
  stage 3   parameters are gathered for each block in forward, dropped after it, and gathered again in backward
With copies of the model (mesh.replicate) shards are summed over them in the last backward only.

Gradients are summed, never averaged: the loss is divided by the valid tokens of all ranks before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainfit.hardware import DTYPES
from trainfit.hardware.gloo import BroadcastAllGather, ExchangedReduceScatter
from trainfit.profile import Zero
from trainfit.techniques.base import Asked, Build, Draft, Observer, Stage
from trainfit.techniques.every_block import EveryBlock
from trainfit.techniques.replicas import ReplicaSync
from trainfit.workload.batch import MicroBatch


class ZeroStages:
    """Shards the model over the mesh, or keeps replicas in step."""

    stage: ClassVar[Stage] = Stage.SHARD
    setting: ClassVar[str] = "zero"

    def choices(self, so_far: Draft, asked: Asked) -> Iterable[Zero]:
        """Every stage, and stage 3 with whole gradients until the last micro batch."""
        if so_far["mesh"].shard == 1:
            yield Zero()
            return
        yield from (Zero(1), Zero(2), Zero(3), Zero(3, gradient_sync="step"))

    def apply(self, build: Build, setting: Zero) -> None:
        mesh = build.ranks.mesh
        if mesh.data == 1:
            return
        if setting.stage == 0:
            group = build.ranks.group("replicate")
            assert group is not None
            build.sync = ReplicaSync(build.model, build.blocks, group)
            return
        build.root = root = LossModule(build)
        shard(root, build, setting)
        root.every_block = EveryBlock(build.blocks)
        build.sync = ShardSync(root, setting)


class LossModule(nn.Module):
    """The model and its loss as one module, so that what lies outside of the blocks is gathered before either."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.model = build.model
        self._build = build
        self.every_block: EveryBlock | None = None

    def forward(self, batch: MicroBatch, scale: float, observe: Observer) -> Tensor:
        if self.every_block is None:
            return self._build.forward(batch, scale, observe)
        self.every_block.begin()
        return self.every_block.join(self._build.forward(batch, scale, observe))


def shard(root: nn.Module, build: Build, zero: Zero) -> None:
    """fully_shard each block, and the rest as one group, which stays whole from its first use to its last."""
    gathered_as = DTYPES[build.precision] if build.cast == "block" else None  # see block_cast.py
    dims = ("replicate", "shard") if build.ranks.mesh.replicate > 1 else ("shard",)
    settings: dict[str, Any] = {
        "mesh": build.ranks.sub_mesh(*dims),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=gathered_as, reduce_dtype=DTYPES[zero.reduce_dtype], cast_forward_inputs=False
        ),
    }
    reshard: bool | int = zero.reshard_size or True
    # In a rehearsal parameters are fake, but not the mesh that FSDP joins from those of shard and tensor.
    with unset_fake_temporarily():
        for block in build.blocks:
            fully_shard(block, reshard_after_forward=reshard if zero.stage == 3 else False, **settings)
        fully_shard(root, reshard_after_forward=False, **settings)
    for module in _sharded(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        # What this rank's tokens never reach must still take part in the others' reduction.
        module.set_reduce_scatter_unused_params(True, recurse=False)
        if build.ranks.backend == "gloo":
            module.set_custom_all_gather(BroadcastAllGather())  # type: ignore[arg-type]  # as its protocol has it
            module.set_custom_reduce_scatter(ExchangedReduceScatter())  # type: ignore[arg-type]  # as its protocol has it
    if zero.prefetch > 1:
        _prefetch(build.blocks, zero.prefetch)


def _prefetch(blocks: list[Any], depth: int) -> None:
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + depth])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - depth) : index][::-1])


def _sharded(root: nn.Module) -> list[FSDPModule]:
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


class ShardSync:
    """See NOTE [ Stages are times ]."""

    def __init__(self, root: Any, zero: Zero) -> None:
        self.root, self.zero = root, zero

    def before_micro_batch(self, *, is_last: bool) -> None:
        root = self.root
        root.set_requires_gradient_sync(is_last or self.zero.reduces_each_micro_batch)
        root.set_requires_all_reduce(is_last)
        if self.zero.stage < 3:
            root.set_reshard_after_backward(is_last)

    def finish(self) -> None: ...

    def abandon(self) -> None:
        if self.root._get_fsdp_state()._is_root is None:  # no forward has begun, so nothing is under way
            return
        self.root.reset_iter_state()
        # FSDP's reset leaves whole gradients that wait to be reduced; the next window would take them for its own.
        for module in _sharded(self.root):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None
