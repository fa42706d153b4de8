"""Windows read ahead: one at most, in order, with their own positions, in a thread that ends."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from trainfit.hardware import accelerator
from trainfit.train.prefetch import Prefetch
from trainfit.workload.batch import MicroBatch

CPU = accelerator("cpu")


def window(number: int) -> list[MicroBatch]:
    return [MicroBatch.of(torch.full((1, 4), number), torch.full((1, 4), number))]


class Source:
    """Windows 0, 1, ... with the positions after them; counts how many were begun."""

    def __init__(self, length: int = 10**9, seconds: float = 0.0, error: BaseException | None = None) -> None:
        self.begun, self.length, self.seconds, self.error = 0, length, seconds, error
        self.threads: set[str] = set()

    def __iter__(self):
        return self

    def __next__(self):
        if self.begun == self.length:
            raise self.error or StopIteration
        self.begun += 1
        number = self.begun - 1
        self.threads.add(threading.current_thread().name)
        time.sleep(self.seconds)
        return window(number), number + 1


def reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "trainfit prefetch"]


def settled(source: Source, begun: int) -> bool:
    """Whether so many windows are begun soon, and no more a little later."""
    limit = time.monotonic() + 5
    while source.begun < begun and time.monotonic() < limit:
        time.sleep(0.001)
    time.sleep(0.05)
    return source.begun == begun


def test_one_window_is_read_ahead_and_positions_are_those_of_the_window_that_trains():
    source = Source()
    with Prefetch(source, CPU) as windows:
        assert settled(source, 1)
        for number in range(4):
            batches, position = next(windows)
            assert batches[0].inputs.unique().item() == number
            assert position == number + 1
            assert settled(source, number + 2)
    assert source.threads == {"trainfit prefetch"}


def test_reading_and_training_take_the_longer_of_the_two_and_not_their_sum():
    source, step_seconds, steps = Source(seconds=0.1), 0.1, 8
    with Prefetch(source, CPU) as windows:
        next(windows)
        began = time.monotonic()
        for _ in range(steps):
            time.sleep(step_seconds)
            next(windows)
        seconds = time.monotonic() - began
    assert steps * step_seconds <= seconds < 1.6 * steps * step_seconds


def test_the_end_and_an_exception_of_the_source_arrive_after_the_windows_before_them():
    with Prefetch(Source(length=3), CPU) as windows:
        assert [position for _, position in windows] == [1, 2, 3]
        with pytest.raises(StopIteration):
            next(windows)
    with Prefetch(Source(length=2, error=OSError("disk gone")), CPU) as windows:
        assert [next(windows)[1] for _ in range(2)] == [1, 2]
        for _ in range(2):
            with pytest.raises(OSError, match="disk gone"):
                next(windows)
    assert not reader_threads()


@pytest.mark.parametrize("taken", [0, 1])
def test_no_thread_is_left_when_a_run_is_interrupted(taken):
    def run() -> None:
        with Prefetch(Source(seconds=0.01), CPU) as windows:
            for _ in range(taken):
                next(windows)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert not reader_threads()
