"""Where offloaded tensors are: pinned host memory or a file, in pieces that are used again.

NOTE [ Pieces that are used again ]
Memory and file are taken in segments, which are never given back while the step lives: pinning takes milliseconds, and
the next micro batch wants as much. Within segments the first free extent that is large enough is taken, and freed
neighbours are joined, so other lengths find room as well. One stream, or one thread, makes all copies in their order:
what is written into an extent again comes after what was read from it.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trainfit.errors import OffloadError, RecipeError
from trainfit.hardware import Accelerator, host
from trainfit.hardware.transfers import TransferPlace, tell
from trainfit.profile import Offload
from trainfit.units import format_bytes

_ALIGNMENT = 512
_SEGMENT = 32 * 2**20
_STAGING = 256 * 2**20  # bytes between a device and a disk that may be under way
_HOST_RESERVE = 0.05  # of the host's memory is left to others


class Extents:
    """The free parts of a row of bytes: first fit, neighbours joined."""

    def __init__(self, num_bytes: int) -> None:
        self.free = [(0, num_bytes)]  # offset, bytes; ascending

    def take(self, num_bytes: int) -> int | None:
        """The offset of so many bytes; None where no part is large enough."""
        for index, (offset, size) in enumerate(self.free):
            if size >= num_bytes:
                self.free[index : index + 1] = [(offset + num_bytes, size - num_bytes)] if size > num_bytes else []
                return offset
        return None

    def give(self, offset: int, num_bytes: int) -> None:
        index = bisect_left(self.free, (offset, 0))
        if index < len(self.free) and self.free[index][0] == offset + num_bytes:
            num_bytes += self.free.pop(index)[1]
        if index and sum(self.free[index - 1]) == offset:
            before, size = self.free.pop(index - 1)
            offset, num_bytes, index = before, size + num_bytes, index - 1
        self.free.insert(index, (offset, num_bytes))


@dataclass(frozen=True, slots=True)
class Slot:
    """A piece of a segment; segment: what Pool's grow gave for it."""

    number: int
    segment: Any
    offset: int
    num_bytes: int


class Pool:
    """Segments and what of them is taken. See NOTE [ Pieces that are used again ].

    size_bytes: of all segments. taken_bytes, peak_bytes: of what is in use, and the most that was.
    """

    def __init__(self, grow: Callable[[int], Any], budget_bytes: int = 0) -> None:
        self._grow, self.budget_bytes = grow, budget_bytes
        self._segments: list[tuple[Any, Extents]] = []
        self._returned: deque[Slot] = deque()
        self.size_bytes = self._taken = self.peak_bytes = 0

    @property
    def taken_bytes(self) -> int:
        self._collect()
        return self._taken

    def take(self, num_bytes: int) -> Slot:
        """Raises RecipeError where the budget is used up, OffloadError where host or disk have no more."""
        self._collect()
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        slot = self._find(size)
        if slot is None:
            more = self._next_size(size)
            self._segments.append((self._grow(more), Extents(more)))
            self.size_bytes += more
            slot = self._find(size)
        assert slot is not None
        self._taken += size
        self.peak_bytes = max(self.peak_bytes, self._taken)
        return slot

    def give(self, slot: Slot) -> None:
        # Called as tensors die, which may be within take() or on another thread: only noted here.
        self._returned.append(slot)

    def _collect(self) -> None:
        while self._returned:
            slot = self._returned.popleft()
            self._segments[slot.number][1].give(slot.offset, slot.num_bytes)
            self._taken -= slot.num_bytes

    def _find(self, size: int) -> Slot | None:
        for number, (segment, extents) in enumerate(self._segments):
            if (offset := extents.take(size)) is not None:
                return Slot(number, segment, offset, size)
        return None

    def _next_size(self, size: int) -> int:
        # PyTorch's pinned memory comes in powers of two, so less would be no less.
        wanted = max(_SEGMENT, 1 << (size - 1).bit_length())
        if not self.budget_bytes:
            return wanted
        left = self.budget_bytes - self.size_bytes
        if left < size:
            raise RecipeError(
                f"offload.budget_bytes {format_bytes(self.budget_bytes)} is too little: {format_bytes(self._taken)} "
                f"are there, a tensor of {format_bytes(size)} comes; raise it, or give fewer blocks an offload tier"
            )
        return wanted if wanted <= left else left // _ALIGNMENT * _ALIGNMENT


class Place(Protocol):
    """Copies out of the device's memory and back into it, beside computation.

    A copy begins when computation has done what it was given before. wait: computation goes on after it; until then
    the tensor's memory must stay its own.
    """

    name: TransferPlace
    pool: Pool

    def out(self, slot: Slot, source: Tensor) -> Any: ...

    def back(self, slot: Slot, destination: Tensor) -> Any: ...

    def wait(self, mark: Any) -> None: ...


def place_of(setting: Offload, device: Accelerator) -> Place:
    if device.is_rehearsed:
        return RehearsedPlace(setting)
    if setting.place == "host":
        return HostPlace(setting, device)
    return DiskPlace(setting) if device.shares_host_memory else StagedDisk(setting, device)


class RehearsedPlace:
    """Copies nothing; tells the rehearsal. Slots are counted as in a real run."""

    def __init__(self, setting: Offload) -> None:
        self.name: TransferPlace = setting.place
        self.pool = Pool(lambda num_bytes: None, setting.budget_bytes)

    def out(self, slot: Slot, source: Tensor) -> Any:
        tell("out", source, self.name)
        return source

    def back(self, slot: Slot, destination: Tensor) -> Any:
        tell("back", destination, self.name)
        return destination

    def wait(self, mark: Any) -> None:
        tell("wait", mark, self.name)


class HostPlace:
    """Pinned memory, over a stream of its own."""

    name: TransferPlace = "host"

    def __init__(self, setting: Offload, device: Accelerator) -> None:
        self._device, self._stream = device, device.new_stream()
        self.pool = Pool(lambda num_bytes: _pinned(device, num_bytes), setting.budget_bytes)

    def out(self, slot: Slot, source: Tensor) -> Any:
        return self._device.copy_beside(self._stream, _view(slot, source), source)

    def back(self, slot: Slot, destination: Tensor) -> Any:
        return self._device.copy_beside(self._stream, destination, _view(slot, destination))

    def wait(self, mark: Any) -> None:
        self._device.wait_event(mark)


def _pinned(device: Accelerator, num_bytes: int) -> Tensor:
    free, reserve = host.free_bytes(), int(_HOST_RESERVE * host.total_bytes())
    if free - num_bytes < reserve:
        raise OffloadError(
            f"the host has {format_bytes(free)} free, of which {format_bytes(reserve)} stay for others; offload needs "
            f"{format_bytes(num_bytes)} more: give fewer blocks an offload tier, or set offload.place: disk"
        )
    return device.pinned((num_bytes,), torch.uint8)


def _view(slot: Slot, like: Tensor) -> Tensor:
    """The slot as a tensor of that dtype and length."""
    piece: Tensor = slot.segment[slot.offset : slot.offset + like.nbytes]
    return piece.view(like.dtype)


def new_file(directory: str) -> Any:
    """Without a name, in the folder, or that for temporary files. Raises RecipeError where none can be made."""
    folder = directory or tempfile.gettempdir()
    try:
        return tempfile.TemporaryFile(dir=folder)
    except OSError as error:
        raise RecipeError(
            f"offload.directory {folder} takes no file ({error.strerror}); give a folder that can be written"
        ) from error


class Disk:
    """A file without a name, which is gone with the process however that ends; one thread writes and reads it."""

    def __init__(self, directory: str) -> None:
        self.directory = directory or tempfile.gettempdir()
        self._file: Any = None
        self._size = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload")

    def grow(self, num_bytes: int) -> int:
        """Where so many bytes more begin. The disk sets them aside: it cannot be full later."""
        if self._file is None:
            self._file = new_file(self.directory)
        try:
            os.posix_fallocate(self._file.fileno(), self._size, num_bytes)
        except OSError as error:
            free = os.statvfs(self.directory)
            raise OffloadError(
                f"{self.directory} has {format_bytes(free.f_bavail * free.f_frsize)} free, offload needs "
                f"{format_bytes(num_bytes)} more ({error.strerror}); give offload.directory on a larger disk, or fewer "
                "blocks an offload tier"
            ) from error
        self._size += num_bytes
        return self._size - num_bytes

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._thread.submit(work, *args)

    def write(self, address: int, num_bytes: int, offset: int) -> None:
        """From memory that stays what it is until this has ended. On the thread that runs it."""
        self._all(os.pwrite, address, num_bytes, offset, "wrote")

    def read(self, address: int, num_bytes: int, offset: int) -> None:
        self._all(lambda file, memory, at: os.preadv(file, [memory], at), address, num_bytes, offset, "read")

    def _all(self, call: Callable[..., int], address: int, num_bytes: int, offset: int, did: str) -> None:
        # Addresses, not tensors: the last reference must not be this thread's, whose frees no profiler sees.
        memory = memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
        done = 0
        while done < num_bytes:
            try:
                count = call(self._file.fileno(), memory[done:], offset + done)
            except OSError as error:
                raise self._failed(did, done, num_bytes, error.strerror or str(error)) from error
            if count == 0:
                raise self._failed(did, done, num_bytes, "the file ends there")
            done += count

    def _failed(self, did: str, done: int, num_bytes: int, why: str) -> OffloadError:
        return OffloadError(
            f"offload {did} {done} of {num_bytes} bytes in {self.directory}: {why}; check the disk, or give another "
            "offload.directory"
        )


def _result(future: Future[Any]) -> Any:
    """What the work gave, or an OffloadError of this thread's own: its traceback holds the step's graph, and the
    thread that worked may hold the other for as long as it waits to run on.
    """
    if (error := future.exception()) is not None:
        raise OffloadError(str(error)) from error
    return future.result()


class DiskPlace:
    """A file, straight from and to the memory that the device computes in: a CPU's."""

    name: TransferPlace = "disk"

    def __init__(self, setting: Offload) -> None:
        self.disk = Disk(setting.directory)
        self.pool = Pool(self.disk.grow, setting.budget_bytes)

    def out(self, slot: Slot, source: Tensor) -> Any:
        return self.disk.submit(self.disk.write, source.data_ptr(), source.nbytes, slot.segment + slot.offset)

    def back(self, slot: Slot, destination: Tensor) -> Any:
        return self.disk.submit(self.disk.read, destination.data_ptr(), destination.nbytes, slot.segment + slot.offset)

    def wait(self, mark: Any) -> None:
        _result(mark)


class StagedDisk:
    """A file, by way of pinned memory: from the device beside computation, from there by the thread that writes."""

    name: TransferPlace = "disk"

    def __init__(self, setting: Offload, device: Accelerator) -> None:
        self._device, self._stream = device, device.new_stream()
        self.disk = Disk(setting.directory)
        self.pool = Pool(self.disk.grow, setting.budget_bytes)
        self._staging = Pool(lambda num_bytes: _pinned(device, num_bytes))
        self._under_way: deque[Future[Any]] = deque()

    def out(self, slot: Slot, source: Tensor) -> Any:
        stage = self._stage(source.nbytes)
        event = self._device.copy_beside(self._stream, _view(stage, source), source)
        self._under_way.append(self.disk.submit(self._write, event, stage, source.nbytes, slot.segment + slot.offset))
        return event

    def back(self, slot: Slot, destination: Tensor) -> Any:
        stage = self._stage(destination.nbytes)
        self._device.stream_waits(self._stream)  # what had the destination's memory before is done with it
        future = self.disk.submit(self._read, stage, destination, slot.segment + slot.offset)
        self._under_way.append(future)
        return future

    def wait(self, mark: Any) -> None:
        self._device.wait_event(_result(mark) if isinstance(mark, Future) else mark)
        self._forget_done()  # of what was written before and could not be, wrong bytes have come back

    def _forget_done(self) -> None:
        """Raises what one of them raised."""
        while self._under_way and self._under_way[0].done():
            _result(self._under_way.popleft())

    def _stage(self, num_bytes: int) -> Slot:
        self._forget_done()
        while self._under_way and self._staging.taken_bytes + num_bytes > _STAGING:
            _result(self._under_way.popleft())
        return self._staging.take(num_bytes)

    def _write(self, event: Any, stage: Slot, num_bytes: int, offset: int) -> None:
        if event is not None:
            event.synchronize()
        self.disk.write(stage.segment.data_ptr() + stage.offset, num_bytes, offset)
        self._staging.give(stage)

    def _read(self, stage: Slot, destination: Tensor, offset: int) -> Any:
        self.disk.read(stage.segment.data_ptr() + stage.offset, destination.nbytes, offset)
        event = self._device.copy_beside(self._stream, destination, _view(stage, destination))
        if event is not None:
            event.synchronize()  # the stage may be read into again
        self._staging.give(stage)
        return event


def is_in_memory(directory: str) -> bool:
    """Whether a folder's files are in memory themselves (tmpfs)."""
    try:
        path = Path(directory or tempfile.gettempdir()).resolve()
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return False
    mounts = {Path(fields[1]): fields[2] for fields in (line.split() for line in lines)}
    kind = next((mounts[folder] for folder in (path, *path.parents) if folder in mounts), "")
    return kind in ("tmpfs", "ramfs")
