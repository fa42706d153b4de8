"""on_host: what is allocated and computed inside lies in host memory, beside the device.

In a real run a tensor says itself where it is. A rehearsal has host and device on one fake device, so the code that
works on the host says so, and the rehearsal leaves it out of the device's bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_depth = 0


@contextmanager
def on_host() -> Iterator[None]:
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def is_on_host() -> bool:
    return _depth > 0
