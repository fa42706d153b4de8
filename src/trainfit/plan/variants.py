"""What other precisions and optimizers are to the fast model, and what they must be worth.

NOTE [ What accuracy is worth ]
Where a target lets the optimizer change, a variant that rounds more, or loses more, must be faster for it: candidates
are ordered by their seconds times MUST_WIN of what they do to what is learnt. What the target asks for is taken as it
is. So eight-bit moments are chosen where nothing more exact fits, or where what they free makes a step a tenth faster.
Tiers that round what autograd saves are weighed alike, block by block.

NOTE [ One trace for many variants ]
A micro batch can tell two variants apart by the dtype of weights and the bytes of gradients only. So there is one
traced model for weights as they were asked for and one for half ones; other variants' bytes are a table's, times the
number of parameters. That is for the order of candidates: those that may win are rehearsed as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainfit.hardware import Hardware
from trainfit.plan.cost import MUST_WIN
from trainfit.plan.target import Target
from trainfit.profile import COMPILED_TIERS, Attention, Compile, OptimizerVariant, Precision
from trainfit.rehearsal.model_trace import ModelFacts
from trainfit.rehearsal.operator_cost import ADAMW_BYTES
from trainfit.rehearsal.trace import Tracer
from trainfit.techniques.activation import searched_tiers
from trainfit.techniques.optimizer import accuracy_of, bytes_per_parameter, is_stored
from trainfit.workload import Workload

_PIECE_TRAFFIC = 48  # bytes a parameter: what is stored is read as fp32, updated and written back


class Tracers:
    """See NOTE [ One trace for many variants ]."""

    def __init__(self, workload: Workload, hardware: Hardware, target: Target) -> None:
        self.workload, self.hardware, self.target = workload, hardware, target
        self._made: dict[tuple[OptimizerVariant, Compile, Attention], Tracer] = {}
        self._usual: Attention = "blockwise" if target.attention == "blockwise" else "model"

    def of(
        self, variant: OptimizerVariant, compiled: Compile = Compile(), attention: Attention | None = None
    ) -> Tracer:
        """The tracer whose weights are of the variant's dtype, and whose blocks are compiled like that.

        attention: the target's where none is given.
        """
        traced, settings = self.settings_of(variant, compiled, attention)
        if (key := (traced, compiled, settings["attention"])) not in self._made:
            self._made[key] = Tracer(self.workload, self.hardware, traced, compiled=compiled, **settings)
        return self._made[key]

    def settings_of(
        self, variant: OptimizerVariant, compiled: Compile = Compile(), attention: Attention | None = None
    ) -> tuple[OptimizerVariant, dict[str, Any]]:
        """The variant that of() traces for it, and the tracer's settings."""
        is_half = variant.weights != "fp32"
        asked = self.target.optimizer
        traced = asked if is_half == (asked.weights != "fp32") else OptimizerVariant(weights="bf16_residual")
        tiers = searched_tiers(self.hardware, self.target.may_change, self.target.offload)
        return traced, {
            "frozen_weights": self.target.frozen_weights,
            "precision": self.target.precision,
            "cast": self.target.cast if not is_half else "operator",
            "tiers": COMPILED_TIERS if compiled.blocks else tiers,
            "attention": attention or self._usual,
            "offload": self.target.offload,
        }


def facts_of(tracer: Tracer, variant: OptimizerVariant) -> ModelFacts:
    """The tracer's facts with another variant's bytes, and the time of its update, roughly."""
    facts = tracer.facts
    if variant == tracer.variant:
        return facts
    old, new = bytes_per_parameter(tracer.variant), bytes_per_parameter(variant)
    kept, before = new.beside + new.moments, old.beside + old.moments
    spec = tracer.hardware.spec
    traffic: float
    if variant.place == "host":
        traffic, rate = ADAMW_BYTES + _PIECE_TRAFFIC * (variant.states != "fp32"), spec.host_bandwidth.value
    else:
        stored = _PIECE_TRAFFIC if is_stored(variant) else 0
        traffic, rate = 2 * (new.weights + kept) + new.gradients + stored, spec.memory_bandwidth.value
    clipping = 3 * new.gradients / spec.memory_bandwidth.value
    return replace(
        facts,
        optimizer_bytes=max(0, facts.optimizer_bytes + int((kept - before) * facts.num_trained)),
        gradient_bytes=int(new.gradients * facts.num_trained),
        optimizer_seconds=facts.num_trained * (traffic / rate + clipping),
    )


def gradient_share(traced: OptimizerVariant, variant: OptimizerVariant) -> float:
    """The bytes of a variant's gradients over those that were traced."""
    old = bytes_per_parameter(traced).gradients
    return bytes_per_parameter(variant).gradients / old if old else 1.0


def weight_of(target: Target, precision: Precision, variant: OptimizerVariant) -> float:
    """See NOTE [ What accuracy is worth ]."""
    if (precision, variant) == (target.precision, target.optimizer):
        return 1.0
    return MUST_WIN[accuracy_of(variant, precision)]
