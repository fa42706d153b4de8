"""One training step of a run on fake tensors, on one rank, as its framework takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from published.flat import FlatShards
from published.losses import loss_of
from published.model import DTYPES, Decoder, LoraLinear, adapters, gather_tokens, scatter_tokens, set_dtypes
from published.optimizers import after_gradient, optimizer_of
from published.records import Run
from published.saving import autocast, offloaded, recomputed
from published.splice import Marks
from trainfit.profile import Phase
from trainfit.rehearsal.tracker import StorageTracker, local_tensor


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
            block.forward = recomputed(block.forward, run)

    def _wrap(self, ranks: Any) -> None:
        run, model = self.run, self.model
        if run.wrap in ("fsdp1", "zero3"):
            half = DTYPES[run.compute_dtype] if run.param_dtype == "fp32" else None
            ignored = [part for m in model.modules() if isinstance(m, LoraLinear) for part in (m.down, m.up)]
            root = [m for m in (model.embedding, model.positions, model.norm, model.head) if m is not None]
            self.flat = FlatShards(self.blocks, root, run.shard, half, ignored, reshard=run.reshard)
        if run.wrap == "fsdp2":
            _fully_shard(model, self.blocks, run, ranks.sub_mesh("shard"))

    def prepare(self) -> None:
        """Optimizer states, which the first step makes, and FSDP's buffers."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
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
        with autocast(run), offloaded(run):
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
        hidden = gather_tokens(model.norm(hidden), self.ranks)
        return loss_of(run)(hidden, model.head, labels)

    def _backward_begins(self, index: int, _: Tensor) -> None:
        self.marks.begin("backward", index)


def _through_root(model: nn.Module, call: Callable[[], Any]) -> Any:
    """FSDP2's root gathers what no block has when its forward begins."""
    model.forward = call
    return model()


def _fully_shard(model: nn.Module, blocks: Sequence[nn.Module], run: Run, mesh: Any) -> None:
    """FSDP2 as torchtitan applies it: the last block stays whole from forward to backward, and so does the root."""
    dtypes: dict[str, Any] = {}
    if run.param_dtype == "fp32":
        dtypes = {"param_dtype": DTYPES[run.compute_dtype], "reduce_dtype": DTYPES[run.grad_dtype]}
    shard = partial(fully_shard, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes))
    with unset_fake_temporarily():
        for block in blocks:
            shard(block, reshard_after_forward=run.reshard and block is not blocks[-1])
        shard(model, reshard_after_forward=run.reshard)
