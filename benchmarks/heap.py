"""The preloaded heap counter; see heap_counter.c and fair.sh."""

from __future__ import annotations

import ctypes
import gc
import sys


class Heap:
    """Bytes of blocks of 32 KiB and more."""

    def __init__(self, command: str) -> None:
        """command: what to run by fair.sh where the counter is missing."""
        self._library = ctypes.CDLL(None)
        if not hasattr(self._library, "heap_peak"):
            sys.exit(f"run it as: benchmarks/fair.sh {command}")
        self._library.heap_live.restype = self._library.heap_peak.restype = ctypes.c_int64

    def live(self) -> int:
        """What is live once garbage has gone."""
        gc.collect()
        return int(self._library.heap_live())

    def peak(self) -> int:
        return int(self._library.heap_peak())

    def reset(self) -> None:
        self._library.heap_reset()
