"""Traces for the fast model: one block of each structure under each tier, and one loss, on fake tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from trainfit.hardware import Hardware, accelerator
from trainfit.profile import TIERS, BlockTrace, Precision, Tier
from trainfit.rehearsal.rehearse import fake_tensors, operator_cost
from trainfit.rehearsal.tracker import StorageTracker
from trainfit.step import prepare
from trainfit.techniques.activation import recompute_block
from trainfit.techniques.adamw import make_adamw
from trainfit.techniques.base import Build
from trainfit.techniques.chunked_loss import chunked_loss, cross_entropy_sum
from trainfit.workload import Workload, run_model


@dataclass(frozen=True)
class ModelTrace:
    """What the fast model knows of a workload at one micro batch and precision.

    blocks: by structure and tier.
    loss: by number of chunks. saved_bytes is 0; backward_peak_bytes is the most that head and loss need above the hidden
        states, forward and backward alike; gradient_bytes is what the head's parameters leave.
    outside_seconds: what runs before the first block, forward and backward.
    """

    blocks: Mapping[tuple[int, Tier], BlockTrace]
    loss: Mapping[int, BlockTrace]
    outside_seconds: float


@dataclass(frozen=True)
class ModelFacts:
    """What does not depend on the batch: sizes in bytes; structures has one entry per block."""

    structures: tuple[int, ...]
    parameter_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    optimizer_seconds: float
    dim: int
    vocab_size: int
    can_chunk: bool


class Tracer:
    """One fake model, traced at as many micro batches as the search asks for."""

    def __init__(self, workload: Workload, hardware: Hardware) -> None:
        self.workload, self.hardware = workload, hardware
        self._cost = operator_cost(hardware)
        with fake_tensors() as self._mode:
            self._build = prepare(workload, accelerator("cpu"))
            self.facts = self._facts()

    def trace(self, micro_batch_size: int, precision: Precision, chunks: Iterable[int]) -> ModelTrace:
        """Every tier of every structure, and the loss in each number of chunks."""
        with self._mode, torch.device("cpu"):
            captured, outside_seconds = self._block_inputs(micro_batch_size, precision)
            blocks = {
                (structure, tier): self._trace_block(block, tier, precision, inputs)
                for structure, (block, inputs) in captured.items()
                for tier in TIERS
            }
            loss = {count: self._trace_loss(micro_batch_size, precision, count) for count in chunks}
        return ModelTrace(blocks, loss, outside_seconds)

    def _facts(self) -> ModelFacts:
        build = self._build
        optimizer = make_adamw(build.model.named_parameters(), self.workload.optimizer)
        states = [value for state in optimizer.state.values() for value in state.values()]
        gradients = _bytes(p for p in build.model.parameters() if p.requires_grad)
        captured, _ = self._block_inputs(1, "fp32")
        hidden = next((leaf for _, inputs in captured.values() for leaf in _tensors(inputs)), None)
        return ModelFacts(
            structures=build.anatomy.structures,
            parameter_bytes=_bytes([*build.model.parameters(), *build.model.buffers()]),
            optimizer_bytes=_bytes(states),
            gradient_bytes=gradients,
            # AdamW reads parameters, gradients and both moments once, and writes all but the gradients.
            optimizer_seconds=7 * gradients / self._cost.bytes_per_second,
            dim=1 if hidden is None else hidden.shape[-1],
            vocab_size=self.workload.vocab_size,
            can_chunk=not isinstance(build.split, str),
        )

    @contextmanager
    def _autocast(self, precision: Precision) -> Iterator[None]:
        with self._build.accelerator.autocast(precision):
            yield

    def _tracker(self) -> StorageTracker:
        tracker = StorageTracker(
            rounding=self.hardware.spec.allocation_granularity,
            cost=self._cost,
            inside_operators=self.hardware.spec.kind == "cpu",
        )
        tracker.register([*self._build.model.parameters(), *self._build.model.buffers()], "parameters")
        return tracker

    def _block_inputs(
        self, micro_batch_size: int, precision: Precision
    ) -> tuple[dict[int, tuple[nn.Module, Any]], float]:
        """What the first block of each structure is called with, and the seconds that everything before takes."""
        captured: dict[int, tuple[nn.Module, Any]] = {}
        anatomy = self._build.anatomy
        first = {structure: index for index, structure in reversed(list(enumerate(anatomy.structures)))}

        def hook(structure: int) -> Any:
            def pre_forward(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                captured[structure] = block, (args, kwargs)
                if len(captured) == len(first):
                    raise _AllCaptured

            return pre_forward

        blocks = self._build.blocks
        handles = [
            blocks[index].register_forward_pre_hook(hook(structure), with_kwargs=True)
            for structure, index in first.items()
        ]
        tracker = self._tracker()
        ids = torch.zeros(micro_batch_size, self.workload.seq_len, dtype=torch.long)
        try:
            with tracker, torch.no_grad(), self._autocast(precision):
                run_model(self._build.model, ids)
        except _AllCaptured:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return captured, 3 * tracker.seconds["forward"]

    def _trace_block(self, block: nn.Module, tier: Tier, precision: Precision, inputs: Any) -> BlockTrace:
        if tier != "keep":
            recompute_block(block, tier, self._build.accelerator)
        try:
            args, kwargs = tree_map_only(Tensor, _as_leaf, inputs)
            return self._trace_call(lambda: block(*args, **kwargs), _tensors((args, kwargs)), precision)
        finally:
            block.__dict__.pop("forward", None)
            for parameter in block.parameters():
                parameter.grad = None

    def _trace_call(self, call: Any, inputs: list[Tensor], precision: Precision) -> BlockTrace:
        tracker = self._tracker()
        tracker.register(inputs, "activations")
        start = tracker.live_bytes()
        with tracker:
            with self._autocast(precision):
                output = call()
            output = output[0] if isinstance(output, tuple) else output
            forward_peak = tracker.peak_bytes()
            after_forward = tracker.live_bytes()
            end = _GradientSource.apply(output)  # type: ignore[no-untyped-call]
            del output
            before_backward = tracker.live_bytes()
            tracker.events.clear()
            tracker.phase = "backward"
            end.backward()
            backward_peak = tracker.peak_bytes(start=before_backward)
        gradients = sum(leaf.grad.nbytes for leaf in self._build.model.parameters() if leaf.grad is not None)
        return BlockTrace(
            saved_bytes=after_forward - start,
            forward_peak_bytes=forward_peak - start,
            backward_peak_bytes=backward_peak - before_backward,
            gradient_bytes=gradients,
            forward_seconds=tracker.seconds["forward"],
            backward_seconds=tracker.seconds["backward"],
        )

    def _trace_loss(self, micro_batch_size: int, precision: Precision, chunks: int) -> BlockTrace:
        """Head and loss over hidden states of one micro batch; over outputs, for a model that cannot be split."""
        build, tracker = self._build, self._tracker()
        shape = (micro_batch_size, self.workload.seq_len)
        labels = torch.zeros(shape, dtype=torch.long)
        hidden = self._before_loss(shape, precision).requires_grad_()
        tracker.register([hidden, labels], "activations")
        start = tracker.live_bytes()
        with tracker:
            tracker.phase = "loss"
            with self._autocast(precision):
                loss = _loss_of(build, hidden, labels, chunks)
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
        gradients = sum(p.grad.nbytes for p in build.model.parameters() if p.grad is not None)
        build.model.zero_grad(set_to_none=True)
        return BlockTrace(0, 0, tracker.peak_bytes() - start, gradients, 0.0, tracker.seconds["loss"])

    def _before_loss(self, shape: tuple[int, int], precision: Precision) -> Tensor:
        if not isinstance(self._build.split, str):
            return torch.empty(*shape, self.facts.dim)
        with torch.no_grad(), self._autocast(precision):
            return run_model(self._build.model, torch.zeros(shape, dtype=torch.long)).clone()


class _AllCaptured(Exception):  # noqa: N818
    """Every structure has been seen; the rest of the forward need not run."""


class _GradientSource(torch.autograd.Function):
    """Ends a graph without holding its output, and starts backward with a gradient of the output's size."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.like = output.shape, output.dtype
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        shape, dtype = ctx.like
        return torch.empty(shape, dtype=dtype)


def _loss_of(build: Build, hidden: Tensor, labels: Tensor, chunks: int) -> Tensor:
    if isinstance(build.split, str):
        return (build.workload.loss or cross_entropy_sum)(hidden, labels) * 1.0
    if chunks > 1:
        return chunked_loss(build.split, hidden, labels, chunks, 1.0)
    return cross_entropy_sum(build.split.logits(hidden), labels) * 1.0


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point() and tensor.dim() == 3)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
