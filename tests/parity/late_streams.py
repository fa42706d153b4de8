"""A CPU that has streams: what one of them makes comes late, and a race between them is an error.

Kernels run at once, but what was made on a side stream is hidden behind NaNs until the main one waits for it, or, by
chance, is there early, as on a device. Whether a wait would have been needed is known from who touched which storage
when: of an operator that reads what another stream wrote, that writes what another stream reads, or whose new memory
another stream may still be at, since the caching allocator gives freed blocks of a stream to that stream at once.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from trainfit.hardware import Accelerator

MAIN = 0


class RaceError(AssertionError):
    pass


@dataclass
class _Touched:
    """A storage. born, wrote: streams; times: by stream, when it was last there."""

    born: int
    reference: Any = None
    wrote: int = MAIN
    written: int = 0
    times: dict[int, int] = field(default_factory=dict)


class Races(TorchDispatchMode):
    """Sees every operator; see above. raises: whether it says what it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.raises = True
        self.current, self.times, self.seen = MAIN, {MAIN: 0}, {}
        self.knows: dict[tuple[int, int], int] = {}  # (waits, other): up to which operator of the other
        self.free: dict[int, list[_Touched]] = {MAIN: []}
        self.num_beside = 0

    def waits(self, stream: int, other: int) -> None:
        self.knows[stream, other] = self.times[other]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.is_view:
            return output
        self.times[self.current] += 1
        self.num_beside += self.current != MAIN
        given = {_key(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = {_key(leaf): leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)}
        written = made if func._schema.is_mutable else {key: leaf for key, leaf in made.items() if key not in given}
        for key, leaf in {**given, **made}.items():
            self._touches(func, self._of(key, leaf), writes=key in written, is_new=key not in given)
        return output

    def _of(self, key: int, tensor: Tensor) -> _Touched:
        if key not in self.seen:
            touched = self.seen[key] = _Touched(self.current)
            touched.reference = weakref.ref(tensor.untyped_storage(), lambda _: self._dies(key))
            self.seen[key] = touched
        return self.seen[key]

    def _touches(self, func: Any, touched: _Touched, *, writes: bool, is_new: bool) -> None:
        if is_new:
            for freed in self.free[self.current]:
                self._check(func, "is given memory", freed.times)
            self.free[self.current].clear()
        self._check(func, "reads", {touched.wrote: touched.written})
        if writes:
            self._check(func, "writes", touched.times)
            touched.wrote, touched.written = self.current, self.times[self.current]
        touched.times[self.current] = self.times[self.current]

    def _check(self, func: Any, what: str, times: dict[int, int]) -> None:
        for stream, time in times.items():
            if self.raises and stream != self.current and time > self.knows.get((self.current, stream), 0):
                raise RaceError(f"{func} {what} on stream {self.current} before stream {stream} is known to be done")

    def _dies(self, key: int) -> None:
        touched = self.seen.pop(key)
        self.free[touched.born].append(touched)


class LateStreams(Accelerator):
    """The CPU with streams. early: the share of recomputes that are done by the time anyone could look."""

    def __init__(self, early: float = 0.3) -> None:
        super().__init__(torch.device("cpu"), "cpu", None)
        self.races, self._early, self._random = Races(), early, random.Random(0)
        self._hidden: list[tuple[Any, Tensor]] = []

    @property
    def has_streams(self) -> bool:
        return True

    @property
    def shares_host_memory(self) -> bool:
        return False

    def new_stream(self) -> int:
        number = len(self.races.times)
        self.races.times[number], self.races.free[number] = 0, []
        return number

    @contextmanager
    def stream(self, stream: int) -> Iterator[None]:
        self.races.current, begin = stream, self.races.times[stream]
        try:
            yield
        finally:
            self.races.current = MAIN
            if self._random.random() >= self._early:
                self._hide(stream, begin)

    def _hide(self, stream: int, begin: int) -> None:
        with _disable_current_modes():
            for touched in list(self.races.seen.values()):
                storage = touched.reference()
                if touched.born == stream and touched.written > begin and storage is not None and storage.nbytes():
                    content = _bytes(storage)
                    self._hidden.append((touched.reference, content.clone()))
                    content.fill_(255)

    def stream_waits(self, stream: int) -> None:
        self.races.waits(stream, MAIN)

    def wait_for(self, stream: int) -> None:
        self.races.waits(MAIN, stream)
        with _disable_current_modes():
            for reference, content in self._hidden:
                if (storage := reference()) is not None:
                    _bytes(storage).copy_(content)
        self._hidden.clear()


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
