"""Recording a real step: peaks from the device's own allocator, on a CPU from PyTorch's allocation events.

Both sources know nothing of StorageTracker, so that a prediction is never compared with itself.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.profiler import ProfilerActivity, profile

from trainfit.hardware import Accelerator
from trainfit.profile import Phase

_MEMORY = "[memory]"


@dataclass
class Recording:
    """What happened between start and stop, filled in when the recording ends.

    peak_bytes, phases: the highest live bytes, in all and by phase. end_bytes: live at the end. phase_seconds: wall.
    course: (phase, seconds since the step began, live bytes) through the step; on a device nobody knows it.
    """

    peak_bytes: int = 0
    end_bytes: int = 0
    phases: dict[Phase, int] = field(default_factory=dict)
    phase_seconds: dict[Phase, float] = field(default_factory=dict)
    course: list[tuple[Phase, float, int]] = field(default_factory=list)

    @property
    def peak_phase(self) -> Phase:
        return max(self.phases, key=lambda phase: self.phases[phase])


class StepRecorder:
    """Marks where a step begins, changes phase and ends; a backend turns the marks into bytes."""

    def __init__(self) -> None:
        self.marks: list[tuple[Phase, int]] = []
        self.started = False
        self.end_ns = 0

    def start(self) -> None:
        """Everything before this belongs to no step."""
        self.started = True

    def observe(self, phase: Phase) -> None:
        if self.started:
            self.marks.append((phase, time.time_ns()))

    def stop(self) -> None:
        self.started = False
        self.end_ns = time.time_ns()


@contextmanager
def record_host(recorder: StepRecorder, recording: Recording) -> Iterator[None]:
    """On a CPU: every allocation and free from here on, however deep inside an operator, as kineto reports it.

    What was allocated before is not known, so build the model inside.
    """
    with _memory_events() as changes:
        yield
    _fill(recording, recorder.marks, changes, recorder.end_ns)


def allocations(run: Callable[[], object]) -> list[int]:
    """Bytes that run allocates (positive) and frees (negative) on a CPU, in order; what it returns is kept alive."""
    with _memory_events() as changes:
        result = run()
    del result
    return [num_bytes for _, num_bytes in changes]


@contextmanager
def _memory_events() -> Iterator[list[tuple[int, int]]]:
    """(nanoseconds, bytes) of each allocation and free; the list is filled when the context ends."""
    changes: list[tuple[int, int]] = []
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _quiet_stderr():
        profiler.__enter__()
    try:
        yield changes
    finally:
        with _quiet_stderr():
            profiler.__exit__(None, None, None)
    assert profiler.profiler is not None
    events: Any = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes += sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == _MEMORY)


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Kineto writes a line to file descriptor 2 when it starts and stops, whatever its log level."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def _fill(recording: Recording, marks: list[tuple[Phase, int]], changes: list[tuple[int, int]], stop_ns: int) -> None:
    """Live bytes over time, cut at the marks."""
    live = 0
    position = 0
    while position < len(changes) and changes[position][0] < marks[0][1]:
        live += changes[position][1]
        position += 1
    ends = [time_ns for _, time_ns in marks[1:]] + [stop_ns]
    for (phase, begin_ns), end_ns in zip(marks, ends):
        highest = live
        recording.course.append((phase, (begin_ns - marks[0][1]) * 1e-9, live))
        while position < len(changes) and changes[position][0] < end_ns:
            live += changes[position][1]
            highest = max(highest, live)
            recording.course.append((phase, (changes[position][0] - marks[0][1]) * 1e-9, live))
            position += 1
        recording.phases[phase] = max(recording.phases.get(phase, 0), highest)
        recording.phase_seconds[phase] = recording.phase_seconds.get(phase, 0.0) + (end_ns - begin_ns) * 1e-9
    recording.peak_bytes = max(recording.phases.values())
    recording.end_bytes = live


class DevicePhases:
    """On a device: the allocator's peak, reset at every change of phase."""

    def __init__(self, device: Accelerator, recording: Recording) -> None:
        self.device, self.recording = device, recording
        self.phase: Phase | None = None
        self.since = 0.0

    def start(self) -> None:
        self.device.synchronize()

    def observe(self, phase: Phase) -> None:
        self._close()
        self.phase, self.since = phase, time.perf_counter()

    def stop(self) -> None:
        self._close()
        self.phase = None
        self.recording.end_bytes = self.device.memory.current_bytes()
        self.recording.peak_bytes = max(self.recording.phases.values())

    def _close(self) -> None:
        self.device.synchronize()
        if self.phase is not None:
            phases, seconds = self.recording.phases, self.recording.phase_seconds
            phases[self.phase] = max(phases.get(self.phase, 0), self.device.memory.peak_bytes())
            seconds[self.phase] = seconds.get(self.phase, 0.0) + time.perf_counter() - self.since
        self.device.memory.reset_peak()
