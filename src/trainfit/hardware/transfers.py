"""Copies that run beside computation, told to whoever watches.

A real run has streams, threads and events for them. A rehearsal has none: the code that copies says what it would copy
and where computation would wait for it, and the rehearsal's clock takes it from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

Transfer = Literal["out", "back", "wait"]
TransferPlace = Literal["host", "disk"]
# (what happens, the tensor on the device, where its copy is)
Watcher = Callable[[Transfer, Any, TransferPlace], None]

_watchers: list[Watcher] = []


@contextmanager
def watching_transfers(watcher: Watcher) -> Iterator[None]:
    """watcher hears of every transfer until the context ends."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def tell(what: Transfer, tensor: Any, place: TransferPlace) -> None:
    for watcher in _watchers:
        watcher(what, tensor, place)
