"""build_step: from a workload and a strategy to the step that trains, and that the rehearsal runs.

NOTE [ Made on the host ]
A model that several ranks share may be larger than a device, and so may be one whose frozen weights are kept in fewer
bytes, before they are. So these are made on the host, cut there into what this
rank has of tensor and pipeline dimensions, and go to the device block by block, where fully_shard keeps a shard of
each before it takes the next. What the host needs is a whole model for each of its ranks. Weights are drawn from the
host's generator: those of one process on a device are others.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from trainfit.errors import ModelError, RecipeError
from trainfit.hardware import Accelerator, Ranks, ranks_of
from trainfit.step.strategy import Strategy
from trainfit.step.strategy_rules import settings_without_effect
from trainfit.step.train_step import TrainStep
from trainfit.techniques import TECHNIQUES, Build
from trainfit.techniques.base import LossFunction, Observer, Stage
from trainfit.techniques.chunked_loss import cross_entropy_sum, plain_loss
from trainfit.techniques.compiled import forget_compile
from trainfit.units import format_count
from trainfit.workload import HeadSplit, Workload, dissect, run_model, split_head
from trainfit.workload.batch import MicroBatch

LARGE_VOCABULARY = 1024  # over so many scores sums in 8 or 11 bits go wrong


def build_step(
    workload: Workload,
    strategy: Strategy,
    accelerator: Accelerator,
    *,
    max_grad_norm: float | None = 1.0,
    model: nn.Module | None = None,
    ranks: Ranks | None = None,
) -> TrainStep:
    """Make the model (or take the one given) and apply every technique that the strategy sets.

    A model that is made here ends up on the accelerator; see NOTE [ Made on the host ]. ranks: the processes of the
    strategy's mesh; by default those of the process group that is up. All of them call this, with the same weights: a
    model that is made here is the same where torch.manual_seed was.
    """
    _check_clipping(strategy, max_grad_norm)
    allocator_notes = accelerator.configure_allocator(strategy.allocator)  # before the model takes memory
    apart = strategy.mesh.size > 1 or strategy.frozen_weights != "fp32"
    on_host = model is None and apart and accelerator.is_beside_host
    build = prepare(workload, accelerator, model, on_host=on_host)
    build.precision, build.cast = strategy.precision, strategy.cast
    build.kept_operators, build.compiles = strategy.kept_operators, bool(strategy.compile.blocks)
    build.ranks = ranks or ranks_of(strategy.mesh, accelerator)
    build.notes += [*allocator_notes, *settings_without_effect(strategy)]
    for stage in Stage:
        for technique in TECHNIQUES:
            if technique.stage is stage and (setting := getattr(strategy, technique.setting)) is not None:
                technique.apply(build, setting)
        if stage is Stage.SHARD and on_host:
            build.model.to(accelerator.device)
    return TrainStep(build, strategy, max_grad_norm=max_grad_norm)


def _check_clipping(strategy: Strategy, max_grad_norm: float | None) -> None:
    if strategy.optimizer.update == "backward" and max_grad_norm is not None:
        raise RecipeError(
            f"optimizer.update backward has updated the last blocks before the norm of all gradients is known, which "
            f"max_grad_norm {max_grad_norm:g} clips by; set max_grad_norm: null (--max-grad-norm none), or "
            "optimizer.update: step"
        )


def prepare(
    workload: Workload, accelerator: Accelerator, model: nn.Module | None = None, *, on_host: bool = False
) -> Build:
    """The model taken apart, with no technique applied: what plain training would run."""
    if model is None:
        with torch.device("cpu") if on_host else accelerator.device:
            model = workload.make_model()
        if workload.start is not None and not _is_rehearsed(model):
            workload.start.load_into(model)
    model.train()
    anatomy = dissect(model, vocab_size=workload.vocab_size)
    for block in anatomy.blocks:
        forget_compile(model.get_submodule(block))
    split: HeadSplit | str = "the model has a loss of its own"
    if workload.loss is None:
        split = split_head(model, anatomy, seq_len=workload.seq_len)
    notes = [*workload.notes, *_frozen_notes(model)]
    loss = _whole_loss(workload, model, split)
    return Build(workload, accelerator, model, anatomy, split, compute_loss=loss, notes=notes)


def _frozen_notes(model: nn.Module) -> list[str]:
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if trained == total:
        return []
    return [f"{format_count(trained)} of {format_count(total)} parameters train ({trained / total:.2%})"]


def _is_rehearsed(model: nn.Module) -> bool:
    """Whether the model has no memory that weights could be read into."""
    return any(isinstance(parameter, FakeTensor) or parameter.is_meta for parameter in model.parameters())


def _whole_loss(workload: Workload, model: nn.Module, split: HeadSplit | str) -> LossFunction:
    """The loss in one piece: what plain training computes."""
    loss = workload.loss or cross_entropy_sum

    def of_model(batch: MicroBatch, scale: float, observe: Observer) -> Tensor:
        observe("forward")
        output = run_model(model, batch.inputs)
        observe("loss")
        summed = loss(output, batch.labels)
        _check_loss_dtype(summed, workload)
        return summed.float() * scale  # one that stayed in fp16 would overflow under its scale

    def of_split(batch: MicroBatch, scale: float, observe: Observer) -> Tensor:
        assert isinstance(split, HeadSplit)
        return plain_loss(split, batch, scale, observe)

    return of_model if isinstance(split, str) else of_split


def _check_loss_dtype(loss: Tensor, workload: Workload) -> None:
    if loss.dtype in (torch.bfloat16, torch.float16) and workload.vocab_size >= LARGE_VOCABULARY:
        raise ModelError(
            f"the loss of {workload.name} comes in {str(loss.dtype).removeprefix('torch.')}: summed over a micro batch "
            f"and a vocabulary of {workload.vocab_size} it keeps two or three digits; compute it from output.float()"
        )
