"""measure(): the same TrainStep, run for real, and what the device says it took."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from trainfit.hardware import Accelerator
from trainfit.profile import CATEGORIES, Category, Profile
from trainfit.rehearsal.recording import DevicePhases, Recording, StepRecorder, record_host
from trainfit.rehearsal.rehearse import optimizer_states, resident_parameters
from trainfit.rehearsal.tracker import storage_bytes
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
    """Bytes of the second step and the median seconds of `steps` more (of itself for 0), on random tokens."""
    gc.collect()  # what dies of itself while the step is recorded would count as freed by it
    torch.manual_seed(seed)
    recorded = RecordedRun(device)
    with recorded:
        step = build_step(workload, strategy, device, max_grad_norm=max_grad_norm)
        batches = random_window(workload, strategy, seed=seed)
        step(batches)
        recorded.watch(step, lambda: step(batches))
    seconds = [_seconds(lambda: step(batches), device) for _ in range(steps)]
    return recorded.profile(step, step_seconds=statistics.median(seconds) if seconds else None)


class RecordedRun:
    """Records one step of a run. Enter it before the model is made, call watch() once for the step to record."""

    def __init__(self, device: Accelerator) -> None:
        self.device = device
        self.recording = Recording()
        self._recorder = StepRecorder()
        on_host = device.kind == "cpu"
        self._host: AbstractContextManager[None] = (
            record_host(self._recorder, self.recording) if on_host else nullcontext()
        )

    def __enter__(self) -> RecordedRun:
        self._host.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._host.__exit__(*details)  # type: ignore[arg-type]

    def watch(self, step: TrainStep, run: Callable[[], object]) -> None:
        """Run the step that is to be recorded."""
        phases = self._recorder if self.device.kind == "cpu" else DevicePhases(self.device, self.recording)
        previous, step.observer = step.observer, phases.observe
        phases.start()
        try:
            run()
        finally:
            step.observer = previous
            phases.stop()

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
        )


def _categories(step: TrainStep, recording: Recording) -> dict[Category, int]:
    categories: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
    categories["parameters"] = storage_bytes(resident_parameters(step))
    categories["optimizer"] = storage_bytes(optimizer_states(step))
    if recording.peak_phase == "optimizer":
        categories["gradients"] = sum(p.nbytes for p in step.model.parameters() if p.requires_grad)
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
