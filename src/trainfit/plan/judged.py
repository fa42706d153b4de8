"""judged(): the rehearsal by which a strategy is judged, of the ranks that need the most, over one window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainfit.hardware import Hardware
from trainfit.profile import Profile
from trainfit.rehearsal.rehearse import rehearse
from trainfit.second_process import SecondProcess, submit
from trainfit.step.strategy import Strategy
from trainfit.workload import Workload


def judged(
    workload: Workload,
    strategy: Strategy,
    hardware: Hardware,
    *,
    sequences: int | None = None,
    max_grad_norm: float | None = 1.0,
    allowed_bytes: int | None = None,
    beside: SecondProcess | None = None,
) -> Profile:
    """The profile of the rank that needs the most, with the time of the slowest.

    sequences: of a window on one data-parallel rank; None where all its micro batches are full. allowed_bytes: see
    rehearse(). beside: where all ranks but the first are rehearsed.
    """
    settings: dict[str, Any] = {"max_grad_norm": max_grad_norm, "allowed_bytes": allowed_bytes}
    first, *others = judged_ranks(strategy)
    asked = [submit(beside, rehearse, workload, strategy, hardware, rank=rank, **settings) for rank in others]
    profiles = [rehearse(workload, strategy, hardware, rank=first, **settings), *(answer() for answer in asked)]
    worst = _worst(profiles)
    return worst if sequences is None else _of_window(worst, strategy, sequences)


def judged_ranks(strategy: Strategy) -> tuple[int, ...]:
    """Ranks whose rehearsals say whether a strategy fits: the first of a pipeline's first and of its last stage.

    The first stage has the most micro batches under way and the embedding, the last one head and loss.
    """
    stages = strategy.mesh.pipeline
    return (0,) if stages == 1 else (0, (stages - 1) * (strategy.mesh.size // stages))


def _worst(profiles: list[Profile]) -> Profile:
    """The profile of the rank that needs the most, with the time of the slowest."""
    largest = max(profiles, key=lambda profile: profile.needed_bytes)
    slowest = max(profiles, key=lambda profile: profile.step_seconds)
    if slowest is largest:
        return largest
    return replace(
        largest,
        step_seconds=slowest.step_seconds,
        step_seconds_low=slowest.step_seconds_low,
        step_seconds_high=slowest.step_seconds_high,
        phase_seconds=slowest.phase_seconds,
        exposed_communication_seconds=slowest.exposed_communication_seconds,
    )


def _of_window(profile: Profile, strategy: Strategy, sequences: int) -> Profile:
    """Of a window whose last micro batch is short: a rehearsal's are full, and a pipeline's are."""
    full = strategy.micro_batch_size * strategy.accumulation_steps
    if strategy.mesh.pipeline > 1 or full == sequences:
        return profile
    share = sequences / full
    phases = {
        phase: seconds * share if phase in ("forward", "loss", "backward") else seconds
        for phase, seconds in profile.phase_seconds.items()
    }
    tokens, flops = round(profile.tokens * share), profile.model_flops * share
    return replace(profile.with_phase_seconds(phases), tokens=tokens, model_flops=flops)
