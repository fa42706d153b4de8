"""Pipeline: ranks hold consecutive blocks, and a window's micro batches run through them one behind the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainfit.errors import ModelError
from trainfit.hardware.ranks import local_part
from trainfit.profile import Pipeline, Precision
from trainfit.techniques.base import Asked, Build, Draft, Observer, Stage
from trainfit.techniques.chunked_loss import ignore_phase, mark_backward
from trainfit.techniques.pipeline_cut import Part, Route, StageEndError, cut, divide
from trainfit.techniques.pipeline_stage import StageRunner, make_schedule, wire_tensor
from trainfit.techniques.pipeline_window import even_window
from trainfit.techniques.zero import ShardSync
from trainfit.workload.batch import MicroBatch
from trainfit.workload.flow import BlockFlow, trace_flow
from trainfit.workload.forward import run_model


class PipelineStages:
    """Cuts the model over the mesh's pipeline dimension."""

    stage: ClassVar[Stage] = Stage.MODULE
    setting: ClassVar[str] = "pipeline"

    def choices(self, so_far: Draft, asked: Asked) -> Iterable[Pipeline]:
        """Stages of as many blocks each, one to a rank."""
        ranks, blocks = so_far["mesh"].pipeline, len(asked.workload.anatomy().blocks)
        if ranks == 1 or (blocks and blocks % ranks == 0):
            yield Pipeline()

    def apply(self, build: Build, setting: Pipeline) -> None:
        """Raises ModelError for a model that cannot be cut, RecipeError for fewer blocks than stages."""
        ranks, anatomy = build.ranks.mesh.pipeline, build.anatomy
        if ranks == 1:
            return
        parts = divide(len(anatomy.blocks), ranks * setting.stages_per_rank)
        low: list[Precision] = [p for p in ("bf16", "fp16") if p in build.accelerator.precisions]
        autocast = build.accelerator.autocast(low[0] if low else "fp32")
        seq_len, device = build.workload.seq_len, build.accelerator.device
        flow = trace_flow(build.model, anatomy, seq_len=seq_len, device=device, autocast=autocast)
        mine = parts[build.ranks.index("pipeline") :: ranks]
        # What the first stage and the last one both have: a tied embedding.
        shared = sorted(flow.before & flow.after)
        trains = dict(build.model.named_parameters())
        shared = [name for name in shared if name in trains and trains[name].requires_grad]
        build.whole = anatomy
        route, build.anatomy = cut(build.model, anatomy, flow, mine, device)
        run = _PipelineRun(build, setting, flow, route, mine, shared)
        build.run_stage, build.run_window, build.evaluate = run.run_stage, run.run_window, run.evaluate
        if any(part.is_last for part in mine):
            build.counted_elsewhere = frozenset(shared)


class _PipelineRun:
    """This rank's stages at work."""

    def __init__(
        self, build: Build, setting: Pipeline, flow: BlockFlow, route: Route, parts: list[Part], shared: list[str]
    ) -> None:
        group = build.ranks.group("pipeline")
        assert group is not None
        self.build, self.setting, self.flow, self.route = build, setting, flow, route
        self.parts, self.shared, self.group = parts, shared, group
        self.device = build.accelerator.device
        self.param_dtype = next(build.model.parameters()).dtype
        self.stages = [StageRunner(part, self.device, group, self._forward, self._before_backward) for part in parts]
        self.schedules: dict[int, Any] = {}
        self.window: Sequence[MicroBatch] = ()
        self.scale = 1.0
        self.observer: Observer = ignore_phase
        self.backwards_left = 0

    # ---- a window of training --------------------------------------------------------------------------------------

    def run_window(self, batches: Sequence[MicroBatch], scale: float, observer: Observer) -> Tensor:
        """See WindowFunction; the sum is the same on all stages."""
        self.window = even_window(batches, partial(self.setting.fits, ranks=self.build.ranks.mesh.pipeline))
        self.scale, self.observer = scale, observer
        number = len(self.window)
        self.backwards_left = number * len(self.stages)
        for stage in self.stages:
            stage.begin(number, *(self._wire(stage.part, self.window[0], side) for side in ("in", "out")))
        if number not in self.schedules:
            self.schedules[number] = make_schedule(self.setting.schedule, self.stages, number)
        losses: list[Tensor] = []
        try:
            self.schedules[number].step(target=torch.zeros(number), losses=losses, return_outputs=False)
        except BaseException as error:
            # Schedules remember what is under way, and PyTorch wraps what was raised in a stage.
            self.schedules.clear()
            for stage in self.stages:
                stage.drop()
            raise _origin(error) from None
        finally:
            self.window = ()
        self.build.sync.finish()
        self._sum_shared()
        total = torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)
        return self.build.ranks.sum(total.detach(), "pipeline")

    def _forward(self, part: Part, number: int, received: Tensor | None) -> Tensor:
        output = self._run_model(part, self.window[number], received, self.scale, self.observer)
        if not part.is_last:
            self._check(part, output, self.window[number])
        return output

    def _run_model(
        self, part: Part, batch: MicroBatch, received: Tensor | None, scale: float, observer: Observer
    ) -> Tensor:
        call = self.build.root or self.build.forward
        with self.route.through(part, received), self.build.autocast():
            output: Tensor = call(batch.to(self.device), scale, observer)
        return output if part.is_last else output.contiguous()

    def run_stage(self, batch: MicroBatch, scale: float, observe: Observer) -> Tensor:
        """Inside of the root module's call: the loss, or the hidden states that the next stage gets."""
        if self.route.part.is_last:
            return self.build.compute_loss(batch, scale, observe)
        observe("forward")
        try:
            run_model(self.build.model, batch.inputs)
        except StageEndError as end:
            return mark_backward(end.hidden, observe)
        raise ModelError("the model's forward ended before the next pipeline stage's blocks; use mesh.pipeline 1")

    def _before_backward(self, part: Part, number: int) -> None:
        """Gradients are reduced stage by stage: each stage of a rank has a last micro batch of its own."""
        self.backwards_left -= 1
        is_last, sync, root = self.backwards_left == 0, self.build.sync, self.build.root
        if not isinstance(root, FSDPModule) or not isinstance(sync, ShardSync):
            sync.before_micro_batch(is_last=is_last)
            return
        sync.before_micro_batch(is_last=number == len(self.window) - 1)
        root.set_is_last_backward(is_last)
        if len(self.parts) > 1:
            self._hold_others(root, part, sync.zero.stage, is_last=is_last)

    def _hold_others(self, root: Any, part: Part, zero_stage: int, *, is_last: bool) -> None:
        """What this backward does not reach is not reduced: it would be zeros."""
        others = [number for other in self.parts if other is not part for number in other.blocks]
        assert self.build.whole is not None
        held: list[Any] = [self.build.model.get_submodule(self.build.whole.blocks[number]) for number in others]
        for block in held:
            block.set_requires_gradient_sync(False, recurse=False)
            if zero_stage < 3:
                block.set_reshard_after_backward(False, recurse=False)
        # Embedding and head are those of one stage, but every forward of root gathers them.
        if not (part.is_first or part.is_last):
            root.set_requires_gradient_sync(False, recurse=False)
        if zero_stage < 3:
            root.set_reshard_after_backward(is_last, recurse=False)

    def _sum_shared(self) -> None:
        """Gradients of weights that the first and the last stage both have: both add the same two, and stay equal."""
        if not self.shared or not any(part.is_first or part.is_last for part in self.parts):
            return
        peer = self.build.ranks.mesh.pipeline - 1 if self.parts[0].is_first else 0
        parameters = dict(self.build.model.named_parameters())
        for name in self.shared:
            _add_from(peer, self.group, parameters[name])

    # ---- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(self, batch: MicroBatch) -> Tensor:
        """Summed loss of a batch, through one stage after the other; the same on all of them."""
        ranks = self.build.ranks.mesh.pipeline
        total = torch.zeros((), device=self.device)
        for part in self.parts:
            received = None
            if not part.is_first:
                wire = self._wire(part, batch, "in")
                received = torch.empty(wire.shape, dtype=wire.dtype, device=self.device)
                dist.recv(received, group=self.group, group_src=(part.number - 1) % ranks)
            output = self._run_model(part, batch, received, 1.0, ignore_phase)
            if part.is_last:
                total = output
            else:
                self._check(part, output, batch)
                dist.send(output, group=self.group, group_dst=(part.number + 1) % ranks)
        return self.build.ranks.sum(total.detach().clone(), "pipeline")

    # ---- shapes ----------------------------------------------------------------------------------------------------

    @cached_property
    def _low_dtype(self) -> torch.dtype:
        """Of hidden states that autocast makes low."""
        kind = self.device.type
        with self.build.autocast():
            return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.param_dtype

    def _wire(self, part: Part, batch: MicroBatch, side: str) -> Any:
        """Hidden states that a stage receives ("in") or sends ("out")."""
        block = part.first if side == "in" else part.stop
        low = block < len(self.flow.low) and self.flow.low[block]
        shape = (*batch.inputs.shape[:2], *self.flow.token_shape)
        return wire_tensor(shape, self._low_dtype if low else self.param_dtype)

    def _check(self, part: Part, output: Tensor, batch: MicroBatch) -> None:
        """The other side has made room for what the trial at the start saw."""
        wire = self._wire(part, batch, "out")
        if output.shape != wire.shape or output.dtype != wire.dtype:
            raise ModelError(
                f"pipeline stage {part.number} returns hidden states {tuple(output.shape)} in {output.dtype}, the next "
                f"one waits for {tuple(wire.shape)} in {wire.dtype}; use mesh.pipeline 1"
            )


def _origin(error: BaseException) -> BaseException:
    return error.__cause__ if type(error) is RuntimeError and error.__cause__ is not None else error


def _add_from(peer: int, group: dist.ProcessGroup, parameter: nn.Parameter) -> None:
    """Add the other side's gradient to this one's, as the other side does. Takes a buffer of its size meanwhile."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    mine = local_part(parameter.grad)
    theirs = torch.empty_like(mine)
    pair = [
        dist.P2POp(dist.isend, mine, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    mine.add_(theirs)
