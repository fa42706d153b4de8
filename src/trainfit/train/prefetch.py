"""Prefetch: the next window is read, packed and copied to the device while this one trains."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

from trainfit.hardware import Accelerator
from trainfit.workload.batch import MicroBatch

Position = TypeVar("Position")
_JOIN_SECONDS = 10.0  # a reader that hangs must not keep an interrupted run from ending


class Prefetch(Generic[Position]):
    """Iterator over the windows of a source, on the device, at most one of them ahead of the one that was taken.

    The source runs in one background thread and nowhere else. A window comes with the position that the source gave
    it, so what is saved after training it is never that of a window read ahead. What the source raises comes out of
    next(). Open it with `with`: leaving it ends the thread.

    Extra memory: the inputs and labels of one window on the device, and pinned on the host while they are copied.
    """

    def __init__(self, source: Iterator[tuple[list[MicroBatch], Position]], accelerator: Accelerator) -> None:
        self._source, self._accelerator = source, accelerator
        self._stream = accelerator.new_stream()
        self._read: queue.SimpleQueue[tuple[list[MicroBatch], Position, Any] | BaseException] = queue.SimpleQueue()
        self._may_read = threading.Semaphore(1)
        self._closed = threading.Event()
        self._end: BaseException | None = None
        self._thread = threading.Thread(target=self._keep_reading, name="trainfit prefetch", daemon=True)

    def __enter__(self) -> Prefetch[Position]:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed.set()
        self._may_read.release()
        self._thread.join(_JOIN_SECONDS)

    def __iter__(self) -> Prefetch[Position]:
        return self

    def __next__(self) -> tuple[list[MicroBatch], Position]:
        """The next window and the position after it. Raises StopIteration or what the source raised, every time."""
        if self._end is None:
            read = self._read.get()
            if not isinstance(read, BaseException):
                self._may_read.release()  # from now on this window trains
                window, position, copied = read
                self._wait_for(window, copied)
                return window, position
            self._end = read
        raise self._end

    def _keep_reading(self) -> None:
        while True:
            self._may_read.acquire()
            if self._closed.is_set():
                return
            try:
                window, position = next(self._source)
                window, copied = self._copy(window)
            except BaseException as error:
                self._read.put(error)
                return
            self._read.put((window, position, copied))

    def _copy(self, window: list[MicroBatch]) -> tuple[list[MicroBatch], Any]:
        """The window on the device, and the event after which it is there; None where copies need no stream."""
        if self._stream is None:
            return [batch.to(self._accelerator.device) for batch in window], None
        # The host's allocator keeps pinned memory until the copies that it knows of are done.
        pinned = [
            MicroBatch(batch.inputs.pin_memory(), batch.labels.pin_memory(), batch.num_tokens) for batch in window
        ]
        with self._accelerator.stream(self._stream):
            moved = [batch.to(self._accelerator.device) for batch in pinned]
            return moved, self._stream.record_event()

    def _wait_for(self, window: list[MicroBatch], copied: Any) -> None:
        """The training stream waits for the copy; the allocator waits for that stream before it reuses the memory."""
        if copied is None:
            return
        training = self._accelerator.current_stream()
        training.wait_event(copied)
        for batch in window:
            batch.inputs.record_stream(training)
            batch.labels.record_stream(training)
