"""A plan in the words of other systems. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING

from trainfit.errors import DoesNotFitError, RecipeError
from trainfit.export.accelerate import accelerate
from trainfit.export.base import Export, Job
from trainfit.export.deepspeed import deepspeed
from trainfit.export.megatron import megatron
from trainfit.export.mindspeed import mindspeed
from trainfit.export.torchtitan import torchtitan
from trainfit.export.trl import trl

if TYPE_CHECKING:
    from trainfit.hardware import Kind
    from trainfit.plan import Plan

SYSTEMS: Mapping[str, Callable[[Job], Export]] = {
    "deepspeed": deepspeed,
    "accelerate": accelerate,
    "torchtitan": torchtitan,
    "megatron": megatron,
    "mindspeed": mindspeed,
    "trl": trl,
}


def check_system(name: str) -> None:
    """Raises RecipeError for a system that is not known, with the nearest that is."""
    if name not in SYSTEMS:
        near = get_close_matches(name.lower(), SYSTEMS, n=1, cutoff=0.5)
        meant = f"did you mean {near[0]}? " if near else ""
        raise RecipeError(f"--export {name} is not known; {meant}there are {', '.join(SYSTEMS)}")


def export_plan(plan: Plan, system: str, kind: Kind, *, max_grad_norm: float | None = 1.0) -> Export:
    """The nearest settings of a system, with what they cannot express.

    kind: of the plan's device. Raises RecipeError for an unknown system, DoesNotFitError for a plan that does not fit.
    """
    check_system(system)
    if not plan.fits:
        raise DoesNotFitError(plan.reason)
    return SYSTEMS[system](Job.of_plan(plan, kind, max_grad_norm))


__all__ = ["SYSTEMS", "Export", "Job", "check_system", "export_plan"]
