"""The outer search space: layouts, micro batches, and what each technique lets choose; see techniques/base.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainfit.errors import RecipeError
from trainfit.hardware import Hardware
from trainfit.plan.target import Target
from trainfit.profile import AllocatorSettings, Layout, Offload, Tier
from trainfit.rehearsal.attention_scores import attention_holds_scores
from trainfit.rehearsal.model_trace import ModelFacts
from trainfit.step.strategy import Strategy
from trainfit.techniques import TECHNIQUES
from trainfit.techniques.base import Asked
from trainfit.workload import Workload

_OF_LAYOUT = ("mesh", "zero", "tensor", "pipeline")
_MANY = 256  # sequences; of more not every size is tried


@dataclass(frozen=True)
class Point:
    """One point of the outer space: a strategy whose tiers are still open, and how many sequences a rank takes."""

    strategy: Strategy
    sequences: int

    @property
    def layout(self) -> Layout:
        return layout_of(self.strategy)

    @property
    def micro_batches(self) -> float:
        """Fractional when the last one is short; a pipeline pads it."""
        whole = self.strategy.mesh.pipeline > 1
        return self.strategy.accumulation_steps if whole else self.sequences / self.strategy.micro_batch_size

    @property
    def kind(self) -> tuple[object, ...]:
        """Points whose rehearsals differ from the fast model by about as much."""
        strategy = self.strategy
        return self.layout, strategy.precision, strategy.optimizer, strategy.compile, strategy.attention

    def with_tiers(self, tiers: Sequence[Tier]) -> Strategy:
        return replace(self.strategy, tiers=tuple(tiers))


def layout_of(strategy: Strategy) -> Layout:
    return Layout(strategy.mesh, strategy.zero, strategy.tensor, strategy.pipeline)


def asked_of(workload: Workload, hardware: Hardware, target: Target, facts: ModelFacts, *, clips: bool) -> Asked:
    """What techniques are told of a target."""
    settings = {
        "precision": target.precision,
        "optimizer": target.optimizer,
        "cast": target.cast,
        "loss_scale": target.loss_scale,
        "frozen_weights": target.frozen_weights,
        "recompute_ahead": target.recompute_ahead or 0,
        "compile": target.compile,
        "offload": target.offload or Offload(),
        "attention": target.attention,
    }
    holds = target.attention == "auto" and attention_holds_scores(workload, hardware)
    return Asked(workload, hardware, settings, target.may_change, clips, facts.can_chunk, facts.dim, holds)


def points_of(layout: Layout, micro_batch_size: int, target: Target, asked: Asked) -> Iterator[Point]:
    """Every combination of the techniques' choices that makes a strategy."""
    sequences = target.sequences_per_rank(layout)
    for draft in _drafts(_start(layout, micro_batch_size, target), asked, len(TECHNIQUES)):
        try:
            yield Point(Strategy(**draft), sequences)
        except RecipeError:
            continue  # choices that do not go together; Strategy says which


def refusal_of(layout: Layout, micro_batch_size: int, target: Target, asked: Asked) -> RecipeError | None:
    """Why there is no such point: what Strategy says of the first combination; None where one makes a strategy."""
    first: RecipeError | None = None
    for draft in _drafts(_start(layout, micro_batch_size, target), asked, len(TECHNIQUES)):
        try:
            Strategy(**draft)
        except RecipeError as error:
            first = first or error
        else:
            return None
    return first


def _start(layout: Layout, micro_batch_size: int, target: Target) -> dict[str, Any]:
    """What of a strategy is chosen before the techniques."""
    return {
        "micro_batch_size": micro_batch_size,
        "accumulation_steps": -(-target.sequences_per_rank(layout) // micro_batch_size),
        **{name: getattr(layout, name) for name in _OF_LAYOUT},
        "allocator": target.allocator or AllocatorSettings(),
    }


def _drafts(so_far: Mapping[str, Any], asked: Asked, left: int) -> Iterator[dict[str, Any]]:
    """so_far with every choice of the first `left` techniques, the last of them first."""
    if left == 0:
        yield dict(so_far)
        return
    technique = TECHNIQUES[left - 1]
    settings = [so_far[technique.setting]] if technique.setting in _OF_LAYOUT else technique.choices(so_far, asked)
    for setting in settings:
        yield from _drafts({**so_far, technique.setting: setting}, asked, left - 1)


def micro_batch_sizes(sequences: int) -> list[int]:
    """Sizes that share the sequences evenly, as far as they can, over each number of micro batches."""
    divisors = {size for size in range(1, min(sequences, 2 * _MANY) + 1) if sequences % size == 0}
    if sequences <= _MANY:
        return sorted({-(-sequences // count) for count in range(1, sequences + 1)} | divisors)
    halves = {-(-sequences // 2**exponent) for exponent in range(sequences.bit_length())}
    return sorted(halves | divisors)
