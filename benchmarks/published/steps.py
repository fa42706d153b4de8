"""One training step of a run on fake tensors, on one rank, as its framework takes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from published.flat import FlatShards
from published.losses import loss_of
from published.model import DTYPES, Decoder, LoraLinear, adapters, gather_tokens, scatter_tokens, set_dtypes
from published.optimizers import after_gradient, optimizer_of
from published.records import Run
from published.splice import SHALLOW, Marks, NotAlikeError, spliced
from trainfit.hardware import Hardware
from trainfit.profile import AllocatorSettings, Mesh, Phase
from trainfit.rehearsal.allocator import DeviceFullError
from trainfit.rehearsal.events import Event, replay
from trainfit.rehearsal.operators import FakeKernels
from trainfit.rehearsal.rehearse import fake_ranks, fake_tensors, new_tracker
from trainfit.rehearsal.replay import START, reserved_memory
from trainfit.rehearsal.tracker import StorageTracker, local_tensor

_ATEN = torch.ops.aten
_SAVED = {_ATEN.mm.default, _ATEN._scaled_dot_product_flash_attention_for_cpu.default}


@dataclass(frozen=True)
class Rehearsed:
    """Bytes of one step, without workspaces.

    peak_bytes: live at once. before_bytes: live before the step. reserved_bytes: what the caching allocator holds
    where memory has no end. fits: whether what there is was enough. place: the operator at the peak.
    """

    peak_bytes: int
    before_bytes: int
    reserved_bytes: int
    fits: bool
    phases: dict[Phase, int]
    place: str


def rehearse_run(run: Run, hardware: Hardware, limit_bytes: int) -> Rehearsed:
    """limit_bytes: what the caching allocator can get. Blocks in the middle are repeated; see splice.py."""
    layers = run.dims.layers // run.pipeline
    if layers > SHALLOW:
        shallow = replace(run, dims=replace(run.dims, layers=SHALLOW), pipeline=1, stages=run.pipeline)
        try:
            return _outcome(*spliced(_watch(shallow, hardware), layers), run, limit_bytes)
        except NotAlikeError:
            pass  # all blocks then, at the price of time
    return _outcome(*spliced(_watch(run, hardware), layers, whole=True), run, limit_bytes)


def _watch(run: Run, hardware: Hardware) -> Marks:
    with ExitStack() as stack:
        ranks = None
        if run.wrap == "fsdp2":
            ranks = stack.enter_context(fake_ranks(Mesh(shard=run.shard), 0, hardware))
        stack.enter_context(fake_tensors())
        step = Step(run, ranks)
        with FakeKernels():
            step.prepare()
        tracker = new_tracker(hardware)
        marks = Marks(tracker.events)
        step.register(tracker, marks)
        with tracker:
            step.take(tracker.observe, marks)
    return marks


def _outcome(events: list[Event], late: frozenset[int], run: Run, limit_bytes: int) -> Rehearsed:
    phases, peak = replay(events)
    assert peak.event is not None
    settings = AllocatorSettings(expandable_segments=run.expandable)
    reserved = reserved_memory(events, settings, late=late).reserved_bytes
    fits = peak.total <= limit_bytes
    if fits and reserved > limit_bytes:  # the allocator gives cached blocks back before it gives up
        try:
            reserved_memory(events, settings, late=late, limit_bytes=limit_bytes)
        except DeviceFullError:
            fits = False
    before = sum(event.num_bytes for event in events if event.operator == START)
    return Rehearsed(peak.total, before, reserved, fits, dict(phases), peak.event.operator)


class Step:
    """Model, shards and optimizer of a run."""

    def __init__(self, run: Run, ranks: Any) -> None:
        self.run = run
        self.model = Decoder(run, first=run.stages == 1)
        storage = DTYPES[run.param_dtype]
        adapter = DTYPES[run.grad_dtype] if run.lora else storage
        set_dtypes(self.model, run, storage, adapter)
        self.ranks = run.tensor if run.sequence_parallel else 1
        self.flat: FlatShards | None = None
        self.blocks = list(self.model.blocks)
        self._wrap(ranks)
        self.trained = self.flat.parameters if self.flat else [p for p in self.model.parameters() if p.requires_grad]
        if self.flat and run.lora:
            self.trained += adapters(self.model)
        self.optimizer = optimizer_of(run, self.trained)
        for block in self.blocks:
            block.forward = _recomputed(block.forward, run)  # type: ignore[method-assign]

    def _wrap(self, ranks: Any) -> None:
        run = self.run
        if run.wrap in ("fsdp1", "zero3"):
            half = DTYPES[run.compute_dtype] if run.param_dtype == "fp32" else None
            ignored = [part for m in self.model.modules() if isinstance(m, LoraLinear) for part in (m.down, m.up)]
            root = [m for m in (self.model.embedding, self.model.positions, self.model.norm, self.model.head) if m is not None]
            self.flat = FlatShards(self.blocks, root, run.shard, half, ignored, reshard=run.reshard)
        if run.wrap == "fsdp2":
            policy = MixedPrecisionPolicy() if run.param_dtype != "fp32" else MixedPrecisionPolicy(
                param_dtype=DTYPES[run.compute_dtype], reduce_dtype=DTYPES[run.grad_dtype]
            )
            mesh = ranks.sub_mesh("shard")
            with unset_fake_temporarily():
                for index, block in enumerate(self.blocks):
                    fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=run.reshard and index < len(self.blocks) - 1)
                fully_shard(self.model, mesh=mesh, mp_policy=policy, reshard_after_forward=run.reshard)

    def prepare(self) -> None:
        """Optimizer states, which the first step makes, and FSDP's buffers."""
        for module in self.model.modules():
            if hasattr(module, "unshard"):
                module.unshard()
                module.reshard()
        self.optimizer.prepare()
        after_gradient(self.run, self.trained, self.optimizer)
        if self.run.accumulation > 1 and self.run.framework != "megatron":  # its buffers are always there
            for parameter in self.trained:
                parameter.grad = torch.zeros_like(parameter)

    def register(self, tracker: StorageTracker, marks: Marks) -> None:
        """What is there before the step begins, block by block."""
        of_blocks = [self._resident(index) for index in range(len(self.blocks))]
        owner = {id(tensor): index for index, tensors in enumerate(of_blocks) for tensor in tensors}
        self.marks = marks
        marks.owners = [owner.get(id(parameter), -1) for parameter in self.trained]
        known = {id(tensor) for tensors in of_blocks for tensor in tensors}
        marks.begin("shell")
        tracker.register([local_tensor(t) for t in self._resident(None) if id(t) not in known], "parameters")
        for index, tensors in enumerate(of_blocks):
            marks.begin("resident", index)
            tracker.register([local_tensor(t) for t in tensors], "parameters")
        for block in (-1, *range(len(self.blocks))):
            marks.begin("states", block)
            tracker.register(self._states(block), "optimizer")

    def _resident(self, index: int | None) -> list[Tensor]:
        """Of one block, or of the whole model."""
        part: nn.Module = self.model if index is None else self.blocks[index]
        held: list[Tensor] = [*part.parameters(), *part.buffers()]
        if self.flat:
            units = [*self.flat.units, self.flat.root] if index is None else [self.flat.units[index]]
            held = [*(t for unit in units for t in unit.tensors), *adapters(part)]
        inside = {id(p) for p in held}
        trained = [p for p in self.trained if id(p) in inside]
        return [*held, *(p.grad for p in trained if p.grad is not None)]

    def _states(self, block: int) -> list[Tensor]:
        """Optimizer states of one block, or of what is outside of them."""
        trained = [p for p, owner in zip(self.trained, self.marks.owners) if owner == block]
        return [local_tensor(value) for p in trained for value in self.optimizer.states(p)]

    def take(self, observe: Callable[[Phase], None], marks: Marks) -> None:
        run = self.run
        tokens = run.seq_len // run.context
        ids = torch.zeros(run.micro_batch, tokens, dtype=torch.long)
        labels = torch.zeros_like(ids)
        observe("forward")
        marks.begin("shell")
        if self.flat:
            self.flat.begin()
        loss, *held = self._loss(ids, labels)
        if run.framework in ("transformers", "torchtune"):
            held.clear()  # their trainers take the loss and let go of the other outputs
        observe("backward")
        loss.backward()
        del loss, held
        if self.flat:
            self.flat.finish()
        observe("optimizer")
        marks.begin("update")
        if not run.update_in_backward:
            self.optimizer.step()
        for parameter in self.trained:
            parameter.grad = None

    def _loss(self, ids: Tensor, labels: Tensor) -> Any:
        model, run = self.model, self.run
        with _autocast(run), _offload(run):
            if run.wrap == "fsdp2":
                return _through_root(model, lambda: self._forward(ids, labels))
            return self._forward(ids, labels)

    def _forward(self, ids: Tensor, labels: Tensor) -> Any:
        model, run = self.model, self.run
        if model.embedding is not None:
            hidden = model.embedding(ids)
            if model.positions is not None:
                hidden = hidden + model.positions(torch.zeros_like(ids))
        else:
            hidden = torch.empty(*ids.shape, run.dims.hidden, dtype=DTYPES[run.compute_dtype], requires_grad=True)
        hidden = scatter_tokens(hidden, self.ranks)
        if run.lora is not None:
            hidden = hidden.detach().requires_grad_()
        tables = model.tables(ids.shape[1])
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.marks.begin("shell"))
        for index, block in enumerate(self.blocks):
            self.marks.begin("forward", index)
            hidden = block(hidden, tables)
            hidden.register_hook(partial(self._backward_begins, index))
        self.marks.begin("shell")
        assert model.norm is not None and model.head is not None
        hidden = gather_tokens(model.norm(hidden), self.ranks)
        return loss_of(run)(hidden, model.head, labels)


    def _backward_begins(self, index: int, _: Tensor) -> None:
        self.marks.begin("backward", index)


def _through_root(model: nn.Module, call: Callable[[], Any]) -> Any:
    """FSDP2's root gathers what no block has when its forward begins."""
    model.forward = call  # type: ignore[method-assign]
    return model()


@contextmanager
def _autocast(run: Run) -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16) if run.autocast else nullcontext():
        yield


@contextmanager
def _offload(run: Run) -> Iterator[None]:
    """Saved tensors go to host memory, and come back when they are asked for."""
    if not run.offload:
        yield
        return

    def to_host(tensor: Tensor) -> Any:
        # As torchtune: no parameters, nothing small.
        if isinstance(tensor, nn.Parameter) or tensor.numel() * tensor.element_size() < 1024:
            return tensor
        return tensor.shape, tensor.dtype

    def back(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else torch.empty(packed[0], dtype=packed[1])

    with torch.autograd.graph.saved_tensors_hooks(to_host, back):
        yield


def _recomputed(forward: Callable[..., Tensor], run: Run) -> Callable[..., Tensor]:
    if run.recompute == "none":
        return forward
    if run.recompute == "reentrant":
        return lambda *args: checkpoint(forward, *args, use_reentrant=True, preserve_rng_state=False)
    if run.recompute == "full":
        return lambda *args: checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)
    return lambda *args: checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_selective)


def _selective() -> Any:
    """torchtitan's rule: every second matmul is computed again, the others and attention are saved."""
    counts = {False: 0, True: 0}

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func is _ATEN.mm.default:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if func in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
