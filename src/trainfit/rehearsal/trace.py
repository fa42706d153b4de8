"""Traces for the fast model, on fake tensors: one block of each structure under each tier, and the model around."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainfit.hardware import Hardware, Ranks
from trainfit.hardware.runtime import rehearsed
from trainfit.operators import BlockGraph, KeptOperators
from trainfit.profile import (
    SEARCH_TIERS,
    Attention,
    BlockTrace,
    Cast,
    Compile,
    FrozenStorage,
    Mesh,
    Offload,
    OptimizerVariant,
    Precision,
    ShellTrace,
    TensorParallel,
    Tier,
)
from trainfit.rehearsal.cut_off import (
    AllCaptured,
    GradientSource,
    carries_gradients,
    hidden_of,
    leaves_of,
    put_back,
    tensors_in,
)
from trainfit.rehearsal.events import Entry, Event
from trainfit.rehearsal.facts import model_facts
from trainfit.rehearsal.model_trace import ModelFacts, ModelTrace
from trainfit.rehearsal.op_graph import listen
from trainfit.rehearsal.rehearse import fake_ranks, fake_tensors, model_errors, new_tracker, operator_cost
from trainfit.rehearsal.shorten import shortened
from trainfit.rehearsal.timeline import TRANSFERS
from trainfit.rehearsal.tracker import StorageTracker, storage_bytes
from trainfit.step import prepare
from trainfit.techniques.activation import forget_recompute, offload_block, recompute_block, split_tier
from trainfit.techniques.attention import AttentionKind
from trainfit.techniques.block_cast import BlockCasts, cast_weights
from trainfit.techniques.chunked_loss import ChunkedLoss, ignore_phase
from trainfit.techniques.compiled import Graphs, compile_block, forget_compile
from trainfit.techniques.compression import CompressionPlan
from trainfit.techniques.frozen_weights import FrozenWeights
from trainfit.techniques.inductor import Compiled
from trainfit.techniques.offload import OFFLOADED, Stash, new_stash
from trainfit.techniques.optimizer import OptimizerStates
from trainfit.techniques.tensor_parallel import TensorSplit
from trainfit.workload import MicroBatch, Workload, run_model


class _Sent(NamedTuple):
    """What a block sends away: bytes, those of its inputs among them, and seconds one way.

    NOTE [ Blocks alike in a row ]
    A block that offloads is traced as one of several in a row. Then what the block before sent is still there in its
    forward, and comes back in its backward, which must last as long as the copies take. Its input goes too; blocks
    before it have counted that as their output.
    """

    num_bytes: int
    inputs: int
    seconds: float


def _sent(log: Iterable[Entry], inputs: set[int]) -> _Sent:
    sizes: dict[int, int] = {}
    seconds, sent = 0.0, set[int]()
    for entry in log:
        if isinstance(entry, Event):
            sizes[entry.storage] = max(sizes.get(entry.storage, 0), entry.num_bytes)
        elif entry.operator == TRANSFERS[0]:
            seconds += entry.seconds
            sent.update(entry.touched)
    return _Sent(sum(sizes[each] for each in sent), sum(sizes[each] for each in sent & inputs), seconds)


class Tracer:
    """One fake model with its optimizer, traced at as many micro batches as the search asks for."""

    def __init__(
        self,
        workload: Workload,
        hardware: Hardware,
        variant: OptimizerVariant | None = None,
        *,
        frozen_weights: FrozenStorage = "fp32",
        precision: Precision = "fp32",
        cast: Cast = "operator",
        tiers: Sequence[Tier] = SEARCH_TIERS,
        offload: Offload | None = None,
        attention: Attention = "model",
        split: tuple[Ranks, TensorParallel] | None = None,
        compiled: Compile = Compile(),
    ) -> None:
        """frozen_weights: how they are kept where the compute dtype is `precision`. cast, attention: see Strategy.

        tiers: those that are traced. compiled: how blocks are. offload: where some of the tiers send what they save.
        split: over which tensor ranks, and how; see split_trace().
        """
        self.compiled, self._offload = compiled, offload or Offload()
        self.settings: dict[str, Any] = {
            "frozen_weights": frozen_weights,
            "precision": precision,
            "cast": cast,
            "tiers": tiers,
            "offload": offload,
            "attention": attention,
        }
        self._graphs: dict[tuple[Any, ...], Graphs] = {}  # by what would make them be compiled once more
        self.tiers = tuple(tiers)
        self._is_split = split is not None
        self.workload, self.hardware = workload, hardware
        self.variant = variant or OptimizerVariant()
        self._cost = operator_cost(hardware)
        self._traces: dict[tuple[Any, ...], ModelTrace] = {}
        self._parts: dict[tuple[Any, ...], Any] = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}  # of earlier micro batches
        self._tuples = False  # whether blocks return tuples; known after the first one has run
        with fake_tensors() as self._mode, model_errors():
            self._build = prepare(workload, rehearsed(hardware.spec.kind))
            self._carries = carries_gradients(self._build)
            self._build.precision = self._precision = precision
            FrozenWeights().apply(self._build, frozen_weights)
            if split is not None:
                self._build.ranks = split[0]
                TensorSplit().apply(self._build, split[1])
            AttentionKind().apply(self._build, attention)
            BlockCasts().apply(self._build, cast)
            OptimizerStates().apply(self._build, self.variant)
            self._parameters = list(self._build.model.parameters())  # a deep model takes long to walk

    def trace(
        self,
        micro_batch_size: int,
        precision: Precision,
        chunks: Iterable[int],
        *,
        accumulates: bool,
    ) -> ModelTrace:
        """Every tier of every structure, and the shell with the loss in each number of chunks.

        accumulates: parameters hold the gradients of earlier micro batches already. The same call is traced once.
        """
        key = micro_batch_size, precision, tuple(chunks), accumulates
        if key not in self._traces:
            self._traces[key] = self._trace(*key)
        return self._traces[key]

    def _trace(
        self,
        micro_batch_size: int,
        precision: Precision,
        chunks: Iterable[int],
        accumulates: bool,
    ) -> ModelTrace:
        with fake_tensors(self._mode), model_errors(), self._earlier_gradients(accumulates):
            captured = self._block_inputs(micro_batch_size, precision)
            blocks = {
                (structure, tier): self._once(
                    (micro_batch_size, precision, accumulates, structure, tier),
                    partial(self._trace_block, block, tier, precision, inputs, micro_batch_size),
                )
                for structure, (block, inputs) in captured.items()
                for tier in self.tiers
            }
            shell = {
                count: self._once(
                    (micro_batch_size, precision, accumulates, count),
                    partial(self._trace_shell, micro_batch_size, precision, count),
                )
                for count in chunks
            }
        shared = [
            tensor
            for _, inputs in captured.values()
            for tensor in tensors_in(inputs)
            if tensor is not hidden_of(inputs)
        ]
        return ModelTrace(blocks, shell, storage_bytes(shared))

    def graph(self, structure: int, micro_batch_size: int, precision: Precision) -> BlockGraph:
        """The operators of a structure's block, priced as a recompute runs them."""
        with fake_tensors(self._mode), model_errors():
            block, inputs = self._block_inputs(micro_batch_size, precision)[structure]
            args, kwargs = leaves_of(inputs, carries=self._carries)

            def run() -> None:
                with self._autocast(precision):
                    block(*args, **kwargs)

            rounding = self.hardware.spec.allocation_granularity
            by_block = self.settings["cast"] == "block"
            given_up = [weight for _, _, weight in cast_weights(block)] if by_block else []
            with new_tracker(self.hardware):
                return listen(block, run, operator_cost(self.hardware), rounding, given_up)

    def trace_chosen(
        self,
        chosen: Mapping[tuple[int, Tier], KeptOperators | None],
        micro_batch_size: int,
        precision: Precision,
        *,
        accumulates: bool,
    ) -> dict[tuple[int, Tier], BlockTrace]:
        """Blocks by structure under chosen tiers, or under those of TIERS that trace() does not have."""
        with fake_tensors(self._mode), model_errors(), self._earlier_gradients(accumulates):
            captured = self._block_inputs(micro_batch_size, precision)
            return {
                (structure, tier): self._once(
                    (micro_batch_size, precision, accumulates, structure, each or tier),
                    partial(self._trace_block, block, tier, precision, inputs, micro_batch_size, each),
                )
                for (structure, tier), each in chosen.items()
                for block, inputs in (captured[structure],)
            }

    def split_trace(
        self,
        size: int,
        setting: TensorParallel,
        micro_batch_size: int,
        precision: Precision,
        chunks: Iterable[int],
        *,
        accumulates: bool,
    ) -> ModelTrace | None:
        """As trace(), of one of `size` tensor ranks, with what its collectives add to bytes and seconds.

        A model of few blocks is made for it, since the process group must be there when it is made and when it is
        traced: one of each structure between a first and a last one, which take and give whole sequences. None where a
        structure has no block between them.
        """
        key = (size, setting, micro_batch_size, precision, tuple(chunks), accumulates)
        if key not in self._traces:
            structures = self._build.anatomy.structures
            inner = {structure: index for index, structure in reversed(list(enumerate(structures))[1:-1])}
            if set(inner) != set(structures):
                return None
            short = shortened(self.workload, [0, *sorted(inner.values()), len(structures) - 1]) or self.workload
            with fake_ranks(Mesh(tensor=size), 0, self.hardware) as ranks:
                part = Tracer(short, self.hardware, self.variant, split=(ranks, setting), **self.settings)
                self._traces[key] = part.trace(micro_batch_size, precision, chunks, accumulates=accumulates)
        return self._traces[key]

    def learn(self, trace: ModelTrace, micro_batch_size: int, precision: Precision, *, accumulates: bool) -> None:
        """What a tracer like this one has traced in another process need not be traced here."""
        what = micro_batch_size, precision, accumulates
        self._parts |= {(*what, *key): block for key, block in trace.blocks.items()}
        self._parts |= {(*what, count): shell for count, shell in trace.shell.items()}

    def _once(self, key: tuple[Any, ...], trace: Callable[[], Any]) -> Any:
        """Each part is traced once, whatever it is asked for with."""
        if key not in self._parts:
            self._parts[key] = trace()
        return self._parts[key]

    @cached_property
    def facts(self) -> ModelFacts:
        """Of the whole model; a tensor rank's part is never asked for them."""
        with fake_tensors(self._mode), model_errors():
            captured = self._block_inputs(1, self._precision)
            hidden = next((hidden_of(inputs) for _, inputs in captured.values()), None)
            return model_facts(self._build, hidden, self._cost.memory_rate, self._tracker())

    @contextmanager
    def _earlier_gradients(self, accumulates: bool) -> Iterator[None]:
        self._gradients = {p: torch.empty_like(p, dtype=p.grad_dtype) for p in self._parameters if p.requires_grad}
        if not accumulates:
            self._gradients.clear()
        self._reset_gradients()
        try:
            yield
        finally:
            self._gradients.clear()
            self._reset_gradients()

    def _reset_gradients(self) -> None:
        """Gradients as they stand when the micro batch begins."""
        for parameter in self._parameters:
            if parameter.grad is not (gradient := self._gradients.get(parameter)):
                parameter.grad = gradient

    def _left_by(self, parameters: Iterable[nn.Parameter]) -> int:
        """Bytes of gradients that were not there when the micro batch began."""
        return sum(p.grad.nbytes for p in parameters if p.grad is not None and p not in self._gradients)

    @contextmanager
    def _autocast(self, precision: Precision) -> Iterator[None]:
        with self._build.accelerator.autocast(precision):
            yield

    def _tracker(self) -> StorageTracker:
        tracker = new_tracker(self.hardware)
        tracker.register([*self._parameters, *self._build.model.buffers()], "parameters")
        tracker.register(self._gradients.values(), "gradients")
        return tracker

    def _block_inputs(self, micro_batch_size: int, precision: Precision) -> dict[int, tuple[nn.Module, Any]]:
        """What the first block of each structure is called with."""
        captured: dict[int, tuple[nn.Module, Any]] = {}
        anatomy = self._build.anatomy
        numbered = list(enumerate(anatomy.structures))
        first = {structure: index for index, structure in reversed(numbered[1:-1] if self._is_split else numbered)}

        def hook(structure: int) -> Any:
            def pre_forward(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                captured[structure] = block, (args, kwargs)
                if len(captured) == len(first):
                    raise AllCaptured

            return pre_forward

        blocks = self._build.blocks
        handles = [
            blocks[index].register_forward_pre_hook(hook(structure), with_kwargs=True)
            for structure, index in first.items()
        ]
        ids = torch.zeros(micro_batch_size, self.workload.seq_len, dtype=torch.long)
        try:
            with self._autocast(precision):
                run_model(self._build.model, ids)
        except AllCaptured:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return captured

    def _trace_block(
        self,
        block: nn.Module,
        tier: Tier,
        precision: Precision,
        inputs: Any,
        micro_batch_size: int,
        chosen: KeptOperators | None = None,
    ) -> BlockTrace:
        before = vars(block).get("forward")
        accelerator = self._build.accelerator
        stash = new_stash(self._offload, accelerator) if tier in OFFLOADED else None
        around, told = split_tier(tier, compiles=bool(self.compiled.blocks))
        if around != "keep":
            recompute_block(block, around, accelerator, stash=stash, chosen=chosen)
        if stash is not None:
            offload_block(block, tier, stash)
        if self.compiled.blocks:
            key = micro_batch_size, precision, told
            if key not in self._graphs:
                self._graphs[key] = Graphs(told, self.compiled.budget, Compiled(), is_fake=True)
            compile_block(block, self._graphs[key])
        try:
            args, kwargs = leaves_of(inputs, carries=self._carries)
            trace = self._trace_call(lambda: block(*args, **kwargs), tensors_in((args, kwargs)), precision, stash)
            if isinstance(plan := vars(block).get("forward"), CompressionPlan) and plan.frees_input:
                # Here the input lives on, as what the block before it left; there nobody would hold it.
                hidden = hidden_of(inputs)
                assert hidden is not None
                trace = replace(trace, saved_bytes=trace.saved_bytes - hidden.nbytes)
            return trace
        finally:
            forget_compile(block)
            forget_recompute(block)
            put_back(block, before)
            self._reset_gradients()

    def _trace_call(
        self, call: Any, inputs: list[Tensor], precision: Precision, stash: Stash | None = None
    ) -> BlockTrace:
        tracker = self._tracker()
        tracker.register(inputs, "activations")
        start = tracker.live_bytes()
        with tracker:
            with self._autocast(precision):
                output = call()
            self._tuples = isinstance(output, tuple)
            output = output[0] if isinstance(output, tuple) else output
            forward_peak = tracker.peak_bytes()
            if stash is not None:
                stash.leave()
            after_forward = tracker.live_bytes()
            end = GradientSource.apply(output)  # type: ignore[no-untyped-call]
            del output
            before_backward, middle = tracker.live_bytes(), len(tracker.log)
            tracker.phase = "backward"
            if end.requires_grad:
                end.backward()
            backward_peak = tracker.peak_bytes(since=middle)
        gradients = self._left_by(self._parameters)
        seconds = tracker.seconds_of(copies=False)
        sent = _sent(tracker.log, {tracker.number_of(tensor) for tensor in inputs})
        return BlockTrace(
            saved_bytes=after_forward - start - sent.inputs,
            forward_peak_bytes=forward_peak - start + sent.num_bytes,
            backward_peak_bytes=backward_peak - before_backward + sent.num_bytes,
            gradient_bytes=gradients,
            forward_seconds=max(seconds["forward"], sent.seconds),
            backward_seconds=max(seconds["backward"], sent.seconds),
        )

    def _trace_shell(self, micro_batch_size: int, precision: Precision, chunks: int) -> ShellTrace:
        build, tracker = replace(self._build), self._tracker()
        ChunkedLoss().apply(build, chunks)
        shape = (micro_batch_size, self.workload.seq_len)
        batch = MicroBatch(
            torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long), shape[0] * shape[1]
        )
        tracker.register([batch.inputs, batch.labels], "activations")
        start = tracker.live_bytes()
        before = 0

        def gradient_enters_blocks(_: Tensor) -> None:
            nonlocal before
            before = tracker.peak_bytes()
            tracker.phase = "optimizer"  # any name for what comes after: the embedding's backward

        with tracker, self._empty_blocks(gradient_enters_blocks):
            with self._autocast(precision):
                loss = build.compute_loss(batch, 1.0, ignore_phase)
            loss.backward()
            del loss
        after = tracker.peak_bytes_of("optimizer")
        inside = {id(p) for block in build.blocks for p in block.parameters()}
        embedding = build.anatomy.embedding and build.model.get_submodule(build.anatomy.embedding)
        inside |= {id(p) for p in embedding.parameters()} if isinstance(embedding, nn.Module) else set()
        gradients = self._left_by(p for p in build.model.parameters() if id(p) not in inside)
        self._reset_gradients()
        before = before or tracker.peak_bytes()
        return ShellTrace(before - start, gradients, max(0, after - start), sum(tracker.seconds_of().values()))

    @contextmanager
    def _empty_blocks(self, gradient_enters_blocks: Callable[[Tensor], None]) -> Iterator[None]:
        """Every block returns the hidden states it is given."""
        blocks = self._build.blocks

        def empty(index: int) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                hidden = hidden_of((args, kwargs))
                assert hidden is not None
                if index == 0 and self._carries and not hidden.requires_grad:
                    hidden = hidden.detach().requires_grad_()  # as if what trains in the blocks were there
                if index == 0 and hidden.requires_grad:
                    hidden.register_hook(gradient_enters_blocks)
                return (hidden,) if self._tuples else hidden

            return forward

        before = [vars(block).get("forward") for block in blocks]
        for index, block in enumerate(blocks):
            block.forward = empty(index)
        try:
            yield
        finally:
            for block, forward in zip(blocks, before):
                put_back(block, forward)
