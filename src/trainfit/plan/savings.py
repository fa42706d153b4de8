"""savings(): what each technique saves and costs here, one change at a time against plain training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from trainfit.errors import InputError
from trainfit.plan.policies import Situation, parse_policy
from trainfit.plan.questions import PLAIN, Setting, Trial
from trainfit.profile import Accuracy, Mesh, OptimizerVariant, Zero
from trainfit.step.strategy import Strategy
from trainfit.step.strategy_text import describe_variant
from trainfit.techniques.optimizer import accuracy_of

_POLICIES = ("pointwise", "attention", "full", "torchtitan")
# Of each way to keep weights and states one; those that a precision or a device does not take are left out.
_VARIANTS: tuple[OptimizerVariant, ...] = (
    OptimizerVariant(states="int8"),
    OptimizerVariant(weights="bf16_residual", gradients="half"),
    OptimizerVariant(weights="bf16_stochastic", gradients="half", states="int8"),
    OptimizerVariant(update="backward"),
    OptimizerVariant(place="host"),
)


@dataclass(frozen=True)
class Saving:
    """One change. trial: None where the step does not take it, and why then says so.

    saved_bytes: of the peak, against plain training; below zero for what takes more. slowdown: step seconds over plain
    training's, less one. accuracy: what it does to what is learnt, against the same precision without it.
    """

    change: str
    trial: Trial | None
    saved_bytes: int = 0
    slowdown: float | None = None
    accuracy: Accuracy = "exact"
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "change": self.change,
            "saved_bytes": self.saved_bytes,
            "slowdown": self.slowdown,
            "accuracy": self.accuracy,
            "why": self.why,
            "step": None if self.trial is None else self.trial.to_json(),
        }


def savings(setting: Setting, micro_batch_size: int = 1) -> tuple[Trial, tuple[Saving, ...]]:
    """Plain training, and each change to it, all rehearsed. Several devices: plain training has a copy on each."""
    plain = setting.try_out(_plain(setting, micro_batch_size))
    rows = []
    for change, fields in _changes(setting, plain.strategy):
        try:
            rows.append(_row(change, setting.try_out(replace(plain.strategy, **fields)), plain, setting))
        except InputError as error:
            rows.append(Saving(change, None, why=str(error)))
    return plain, tuple(rows)


def _plain(setting: Setting, micro_batch_size: int) -> Strategy:
    copies = replace(setting, layout=replace(setting.layout, mesh=_copies(setting), zero=Zero()))
    return copies.strategy(PLAIN, micro_batch_size)


def _copies(setting: Setting) -> Mesh:
    return Mesh(replicate=setting.layout.mesh.size)


def _row(change: str, trial: Trial, plain: Trial, setting: Setting) -> Saving:
    saved = plain.predicted.needed_bytes - trial.predicted.needed_bytes
    before = plain.predicted.step_seconds
    slowdown = trial.predicted.step_seconds / before - 1 if before else None
    asked = setting.target
    same = (trial.strategy.optimizer, trial.strategy.precision) == (asked.optimizer, asked.precision)
    accuracy = "exact" if same else accuracy_of(trial.strategy.optimizer, trial.strategy.precision)
    return Saving(change, trial, saved, slowdown, accuracy)


def _changes(setting: Setting, plain: Strategy) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of each change, and the fields of the strategy that it sets; the cheapest to try first."""
    blocks = Situation(len(plain.tiers))
    if plain.tiers:
        for policy in _POLICIES:
            yield f"activation {policy}", {"tiers": parse_policy(policy).tiers(blocks)}
    if (chunks := setting.auto_chunks(plain.micro_batch_size * setting.workload.seq_len)) > 1:
        yield f"loss in {chunks} chunks", {"loss_chunks": chunks}
    if setting.attention == "blockwise":
        yield "blockwise attention", {"attention": "blockwise"}
    if (size := plain.micro_batch_size) > 1:
        steps = plain.accumulation_steps * size
        yield f"micro batch 1 x {steps}", {"micro_batch_size": 1, "accumulation_steps": steps}
    if plain.precision == "fp32" and setting.hardware.supports("bf16"):
        yield "precision bf16", {"precision": "bf16"}
    if plain.precision != "fp32" and plain.cast == "operator" and plain.optimizer.weights == "fp32":
        yield "cast block", {"cast": "block"}
    yield from _variants(setting, plain)
    if (devices := setting.layout.mesh.size) > 1:
        for stage in (1, 2, 3):
            yield f"ZeRO {stage}", {"mesh": Mesh(shard=devices), "zero": Zero(stage)}


def _variants(setting: Setting, plain: Strategy) -> Iterator[tuple[str, dict[str, Any]]]:
    if setting.workload.make_optimizer is not None or plain.optimizer != OptimizerVariant():
        return
    for variant in _VARIANTS:
        on_host = variant.place == "host" and setting.hardware.is_host
        other_dtype = variant.weights != "fp32" and plain.precision != "bf16"
        accumulated = variant.update == "backward" and (plain.accumulation_steps > 1 or plain.mesh.replicate > 1)
        if not on_host and not other_dtype and not accumulated:
            yield ", ".join(describe_variant(variant)), {"optimizer": variant}
