"""measure(): the same TrainStep, run for real, and what the device says it took."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainfit.errors import DeviceError
from trainfit.hardware import Accelerator
from trainfit.profile import CATEGORIES, Category, Collective, Moment, Profile
from trainfit.rehearsal.collectives import CollectiveCounter, tally
from trainfit.rehearsal.course import highs_and_lows
from trainfit.rehearsal.processes import run_on_ranks
from trainfit.rehearsal.recording import DevicePhases, Recording, StepRecorder, record_host
from trainfit.rehearsal.rehearse import optimizer_states, resident_parameters
from trainfit.rehearsal.tracker import local_tensor, storage_bytes
from trainfit.step import Strategy, TrainStep, build_step
from trainfit.workload import Workload
from trainfit.workload.batch import MicroBatch


def measure(
    workload: Workload,
    strategy: Strategy,
    device: Accelerator,
    *,
    steps: int = 3,
    max_grad_norm: float | None = 1.0,
    seed: int = 0,
) -> Profile:
    """Bytes of the second step and the median seconds of `steps` more (of itself for 0), on random tokens.

    With a mesh, of the rank with the highest peak; see measure_ranks.
    """
    if strategy.mesh.size > 1:
        profiles = measure_ranks(workload, strategy, device, steps=steps, max_grad_norm=max_grad_norm, seed=seed)
        return max(profiles, key=lambda profile: profile.peak_bytes)
    return measure_rank(device, workload, strategy, steps=steps, max_grad_norm=max_grad_norm, seed=seed)


def measure_ranks(
    workload: Workload,
    strategy: Strategy,
    device: Accelerator,
    *,
    steps: int = 3,
    max_grad_norm: float | None = 1.0,
    seed: int = 0,
) -> list[Profile]:
    """measure() on every rank of the strategy's mesh, by rank. Starts their processes on this machine.

    device: one of the kind to run on; each rank takes one of its own. Raises DeviceError in a process that is a rank
    already and where devices are missing, ModelError for a workload that cannot be pickled.
    """
    if dist.is_initialized():
        raise DeviceError("measure() starts its ranks itself; call it from a single process, not under torchrun")
    measure_this = partial(measure_rank, steps=steps, max_grad_norm=max_grad_norm, seed=seed)
    return run_on_ranks(measure_this, strategy.mesh.size, device.kind, workload, strategy)


def measure_rank(
    device: Accelerator,
    workload: Workload,
    strategy: Strategy,
    *,
    steps: int = 3,
    max_grad_norm: float | None = 1.0,
    seed: int = 0,
) -> Profile:
    """measure() on this process alone; with a mesh, all its ranks call this."""
    gc.collect()  # what dies of itself while the step is recorded would count as freed by it
    torch.manual_seed(seed)
    recorded = RecordedRun(device)
    with recorded:
        step = build_step(workload, strategy, device, max_grad_norm=max_grad_norm)
        batches = random_window(workload, strategy, seed=seed + step.ranks.data_index)
        step(batches)
        recorded.watch(step, lambda: step(batches))
    seconds = [_seconds(lambda: step(batches), device) for _ in range(steps)]
    profile = recorded.profile(step, step_seconds=statistics.median(seconds) if seconds else None)
    return replace(profile, compile_seconds=0.0 if step.compiled is None else step.compiled.seconds)


class RecordedRun:
    """Records one step of a run. Enter it before the model is made, call watch() once for the step to record."""

    def __init__(self, device: Accelerator) -> None:
        self.device = device
        self.recording = Recording()
        self._recorder = StepRecorder()
        self._on_host = device.kind == "cpu"
        self._collectives = CollectiveCounter(settles=self._on_host)
        self._entered = ExitStack()
        self.collectives: dict[str, Collective] = {}

    def __enter__(self) -> RecordedRun:
        with ExitStack() as entering:
            if self._on_host:
                entering.enter_context(record_host(self._recorder, self.recording))
            if dist.is_initialized():
                entering.enter_context(self._collectives)
            self._entered = entering.pop_all()
        return self

    def __exit__(self, *details: Any) -> None:
        self._entered.__exit__(*details)

    def watch(self, step: TrainStep, run: Callable[[], object]) -> None:
        """Run the step that is to be recorded."""
        phases = self._recorder if self._on_host else DevicePhases(self.device, self.recording)
        previous, step.observer = step.observer, phases.observe
        self._collectives.calls.clear()
        phases.start()
        try:
            run()
        finally:
            step.observer = previous
            phases.stop()
            self.collectives = tally(self._collectives.calls)

    def profile(self, step: TrainStep, *, step_seconds: float | None = None) -> Profile:
        """The recording as a Profile.

        Categories: parameters and optimizer are summed up from the model, gradients where they are complete; the rest,
        which no allocator can name, stands under temporary.
        """
        recording = self.recording
        return Profile(
            peak_bytes=recording.peak_bytes,
            peak_phase=recording.peak_phase,
            peak_place="",
            phases=recording.phases,
            categories=_categories(step, recording),
            resident_bytes=recording.end_bytes,
            step_seconds=step_seconds if step_seconds is not None else sum(recording.phase_seconds.values()),
            phase_seconds=recording.phase_seconds,
            rank=step.ranks.rank,
            collectives=self.collectives,
            timeline=_timeline(step, recording),
        )


def _timeline(step: TrainStep, recording: Recording) -> tuple[Moment, ...]:
    """The recorded course in few points; all but what stays stands under temporary."""
    stays: dict[Category, int] = {
        "parameters": storage_bytes(resident_parameters(step)),
        "optimizer": storage_bytes(optimizer_states(step)),
    }
    course = recording.course
    chosen = [course[position] for position in highs_and_lows([live for _, _, live in course])] if course else []
    return tuple(
        Moment(phase, "", seconds, {**stays, "temporary": live - sum(stays.values())})
        for phase, seconds, live in chosen
    )


def _categories(step: TrainStep, recording: Recording) -> dict[Category, int]:
    categories: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
    categories["parameters"] = storage_bytes(resident_parameters(step))
    categories["optimizer"] = storage_bytes(optimizer_states(step))
    if recording.peak_phase == "optimizer":
        categories["gradients"] = sum(local_tensor(p).nbytes for p in step.model.parameters() if p.requires_grad)
    categories["temporary"] = recording.peak_bytes - sum(categories.values())
    return categories


def random_window(workload: Workload, strategy: Strategy, *, seed: int) -> list[MicroBatch]:
    """accumulation_steps full micro batches of random tokens, on the host."""
    generator = torch.Generator().manual_seed(seed)
    shape = (strategy.micro_batch_size, workload.seq_len)

    def tokens() -> Tensor:
        return torch.randint(workload.vocab_size, shape, generator=generator)

    return [MicroBatch.of(tokens(), tokens()) for _ in range(strategy.accumulation_steps)]


def _seconds(run: Callable[[], object], device: Accelerator) -> float:
    device.synchronize()
    begin = time.perf_counter()
    run()
    device.synchronize()
    return time.perf_counter() - begin
