"""left_alone: a look at a step that leaves the run as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainfit.step.train_step import TrainStep


@contextmanager
def left_alone(step: TrainStep) -> Iterator[None]:
    """Random numbers, buffers and gradients are after it what they were before a forward and backward inside.

    Gradients are none, as they are between steps.
    """
    random = step.accelerator.rng.get_state()
    buffers = [(buffer, buffer.clone()) for buffer in step.model.buffers()]
    try:
        yield
    finally:
        step.optimizer.zero_grad(set_to_none=True)
        step.accelerator.rng.set_state(random)
        for buffer, before in buffers:
            buffer.copy_(before)
