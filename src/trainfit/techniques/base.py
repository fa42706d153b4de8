"""Technique: one way to save memory, applied by the one build that training and rehearsal share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainfit.hardware import Accelerator, Hardware, Ranks
from trainfit.operators import KeptOperators
from trainfit.profile import Cast, LossScale, Offload, Phase, Precision, Tier
from trainfit.techniques.inductor import Compiled
from trainfit.techniques.switched import TierSwitch
from trainfit.workload import Anatomy, HeadSplit, Workload
from trainfit.workload.batch import MicroBatch

Observer = Callable[[Phase], None]
LossFunction = Callable[[MicroBatch, float, Observer], Tensor]
# (micro batches, scale, observer) -> sum of their scaled losses, detached; gradients have been added to parameters
WindowFunction = Callable[[Sequence[MicroBatch], float, Observer], Tensor]


class GradientSync(Protocol):
    """Makes the gradients of all data-parallel ranks one sum, in time with the micro batches."""

    def before_micro_batch(self, *, is_last: bool) -> None:
        """Called before each forward; is_last: of the window."""

    def finish(self) -> None:
        """Called after the last backward: gradients are those of the whole window when it returns."""

    def abandon(self) -> None:
        """Called when a window failed half-way: whatever is under way is dropped."""


class NoSync:
    """One process: gradients are whole as they are."""

    def before_micro_batch(self, *, is_last: bool) -> None: ...

    def finish(self) -> None: ...

    def abandon(self) -> None: ...


class Scaling(Protocol):
    """Loss scaling of a step. See NOTE [ One scale a window ] in loss_scaling.py.

    scale: that the next window's loss will have. tensors: that stay between steps.
    """

    kind: ClassVar[str]
    setting: LossScale
    skips_in_a_row: int

    @property
    def scale(self) -> float: ...

    @property
    def tensors(self) -> list[Tensor]: ...

    def begin(self) -> float:
        """A window begins: what its losses are multiplied by."""

    def unscale(self, optimizer: Optimizer) -> None:
        """After the last backward, once: true gradients, looked at on all ranks."""

    def step(self, optimizer: Optimizer) -> bool:
        """Step or skip, and choose the next scale. Whether it was skipped."""

    def state(self) -> dict[str, Any]:
        """All that goes on in the next step, as plain numbers."""

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of state. Raises KeyError, TypeError or ValueError for another's."""


class Stage(IntEnum):
    """When a technique is applied; the order is data."""

    MODULE = 0
    BLOCK = 1
    SHARD = 2
    OPTIMIZER = 3
    STEP = 4


@dataclass
class Build:
    """A step under construction. Techniques change the model in place and fill in the rest.

    split: how the model is cut before its head, or the reason why it cannot be.
    ranks: the processes that run this step together; one, unless the strategy has a mesh.
    whole: the whole model's anatomy, where model and anatomy are this rank's part of a pipeline.
    precision, cast: the strategy's, for techniques that cast. offload: for tiers that offload.
    kept_operators: the strategy's, for its chosen tiers. compiles: whether it compiles blocks. graph_tiers: what
        each block's graph is told, by name; see split_tier().
    compute_loss: (micro batch on the device, scale, observer) -> scale * summed loss, ready for backward.
    run_stage: replaces compute_loss in a forward that may end before the loss, with hidden states for the next stage.
    root: the module whose call computes the same loss with what the model's ranks need around it; None where forward()
        is enough.
    run_window: replaces the loop over micro batches; None runs forward and backward on one after another.
    evaluate: (micro batch) -> its summed loss, where that takes more than a forward of root.
    counted_elsewhere: parameters that another pipeline stage has too, and counts in the gradient norm.
    sync: what is done about other ranks' gradients.
    gradient_dtype: in which gradients of half weights add up; None for the weights' own.
    updates_in_backward: parameters are updated one by one, and hold no gradients after backward.
    scaling: of the loss, where fp16 needs it.
    tier_switch: of a table, told of each micro batch before its forward.
    autocast: entered around forward and loss of every micro batch.
    compiled: what was compiled so far, in the course of the step; None where nothing is.
    notes: sentences for the user about what was chosen instead of what was asked.
    """

    workload: Workload
    accelerator: Accelerator
    model: nn.Module
    anatomy: Anatomy
    split: HeadSplit | str
    compute_loss: LossFunction
    precision: Precision = "fp32"
    cast: Cast = "operator"
    offload: Offload = Offload()
    kept_operators: tuple[KeptOperators, ...] = ()
    compiles: bool = False
    graph_tiers: Mapping[str, Tier] = field(default_factory=dict)
    ranks: Ranks = field(default_factory=Ranks)
    whole: Anatomy | None = None
    run_stage: LossFunction | None = None
    root: nn.Module | None = None
    run_window: WindowFunction | None = None
    evaluate: Callable[[MicroBatch], Tensor] | None = None
    counted_elsewhere: frozenset[str] = frozenset()
    sync: GradientSync = field(default_factory=NoSync)
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    optimizer: Optimizer | None = None
    gradient_dtype: torch.dtype | None = None
    updates_in_backward: bool = False
    scaling: Scaling | None = None
    tier_switch: TierSwitch | None = None
    compiled: Compiled | None = None
    notes: list[str] = field(default_factory=list)

    def forward(self, batch: MicroBatch, scale: float, observe: Observer) -> Tensor:
        """What this rank computes of a micro batch: the loss, or what its pipeline stage hands on."""
        return (self.run_stage or self.compute_loss)(batch, scale, observe)

    @property
    def blocks(self) -> list[nn.Module]:
        return [self.model.get_submodule(name) for name in self.anatomy.blocks]


@dataclass(frozen=True)
class Asked:
    """What a search is asked for, and what it may choose from.

    settings: what the target asks for, by field of Strategy. may_change: "precision", "optimizer".
    clips: whether gradients are clipped by their norm. can_chunk, dim: whether the head can be cut off, and the width
    of the hidden states that it takes. attention_holds_scores: whether the model's attention holds all its scores, and
    blockwise attention could be put in its place.
    """

    workload: Workload
    hardware: Hardware
    settings: Mapping[str, Any]
    may_change: frozenset[str] = frozenset()
    clips: bool = True
    can_chunk: bool = True
    dim: int = 1
    attention_holds_scores: bool = False

    @cached_property
    def model(self) -> nn.Module:
        """Without memory: for looking at its modules."""
        return self.workload.meta_model()


Draft = Mapping[str, Any]  # fields of a Strategy that have been chosen so far


class Technique(Protocol):
    """One file, one line in TECHNIQUES, its tests and its page.

    NOTE [ What a search may set ]
    A search chooses a mesh, a micro batch, and then, from the last technique to the first, for each technique one of
    its choices, so that a choice may depend on the mesh and on later techniques': `so_far`. No choice at all means that
    the draft cannot be. Choices need not repeat the rules of Strategy: a draft that breaks one is dropped. Tiers are
    the exception: they are the solver's. Mesh, zero, tensor and pipeline are chosen first, since they make a layout.
    """

    stage: ClassVar[Stage]
    setting: ClassVar[str]  # the field of Strategy that it reads

    def choices(self, so_far: Draft, asked: Asked) -> Iterable[Any]:
        """The values of its setting that may be taken, what was asked for first."""

    def apply(self, build: Build, setting: Any) -> None:
        """The real thing, in place."""
