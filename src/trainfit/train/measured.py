"""The second update of a process, recorded: what the prediction is compared with."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import TracebackType

from trainfit.hardware import Accelerator
from trainfit.profile import Profile
from trainfit.rehearsal import RecordedRun
from trainfit.step import StepResult, TrainStep

MEASURED_UPDATE = 2  # of this process: the first warms caches and, on a device, compiles kernels


class MeasuredUpdate:
    """Open from before the model is made until the update was run, or until the run ends without it.

    On a CPU every allocation in between is recorded, because what was allocated before is not known.
    """

    def __init__(self, device: Accelerator) -> None:
        self._recorded: RecordedRun | None = RecordedRun(device)

    def __enter__(self) -> MeasuredUpdate:
        assert self._recorded is not None
        gc.collect()  # what dies of itself while the update is recorded would count as freed by it
        self._recorded.__enter__()
        return self

    def run(self, step: TrainStep, update: Callable[[], StepResult]) -> tuple[StepResult, Profile]:
        """Runs the update and gives its Profile; recording ends here."""
        assert self._recorded is not None, "an update is measured once"
        results: list[StepResult] = []
        self._recorded.watch(step, lambda: results.append(update()))
        recorded, self._recorded = self._recorded, None
        recorded.__exit__(None, None, None)
        return results[0], recorded.profile(step)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._recorded is None:
            return
        # Nothing was watched, so there is nothing to make a recording of: it is left as on an error.
        abandoned = error or KeyboardInterrupt()
        self._recorded.__exit__(type(abandoned), abandoned, traceback)
