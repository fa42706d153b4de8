"""Tightening: a table of tiers goes a row down where a run uses more memory than was planned, and up again later.

NOTE [ Measured use ]
A table is planned to stay below a threshold of the budget (NOTE [ Room above the plan ] in plan/per_batch.py), so what
is above it is something that the rehearsals did not know: a kernel's temporaries, or what an allocator cannot give back
between micro batches of many sizes. Each update's peak is measured. Above the threshold every micro batch is given the
tiers of one row further down; after CALM updates in a row well below it, one row back. A row that was too much when it
was given back costs twice the calm the next time, so a run does not swing. Ranks go by the highest use of all. Tiers
give the same bits, so what is learnt does not depend on any of this, and a resumed run may begin at the planned table
again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainfit.hardware import Accelerator

CALM = 20  # updates well below the threshold, before a row is given back
RELAXED_BELOW = 0.9  # of the threshold
HOST_NOISE = 64 * 2**20  # bytes that a process comes to hold, one time or another, without tensors
_MOST_CALM = 20 * 2**6

Change = Literal["tightened", "relaxed"]


@dataclass
class Tightening:
    """limit_bytes: the threshold. max_level: at which there is nothing tighter. level: rows that are given up now."""

    limit_bytes: int
    max_level: int
    level: int = 0
    patience: int = CALM
    _calm: int = 0
    _since_relaxed: int | None = None

    def after(self, used_bytes: int) -> Change | None:
        """An update used so much at its peak: what is done about it."""
        self._since_relaxed = None if self._since_relaxed is None else self._since_relaxed + 1
        if used_bytes > self.limit_bytes:
            return self._tighten()
        self._calm = self._calm + 1 if used_bytes <= RELAXED_BELOW * self.limit_bytes else 0
        if self.level == 0 or self._calm < self.patience:
            return None
        self.level, self._calm, self._since_relaxed = self.level - 1, 0, 0
        return "relaxed"

    def _tighten(self) -> Change | None:
        self._calm = 0
        if self.level == self.max_level:
            return None
        if self._since_relaxed is not None and self._since_relaxed <= self.patience:
            self.patience = min(2 * self.patience, _MOST_CALM)
        self.level, self._since_relaxed = self.level + 1, None
        return "tightened"


class UseMeter:
    """The peak of each update, in bytes. See NOTE [ What a process holds ].

    NOTE [ What a process holds ]
    A budget is about what an allocator holds, not about the tensors in it: that is what runs out. A device's says so.
    What it caches it holds on to, so the cache is given back where updates shall need less from now on (shrink), and
    where evaluating or saving has left more than the update before did.
    A host tells only what the whole process holds, with Python, libraries and what malloc keeps. So there the recorded
    update (measured.py) says what tensors need, and the next one what the process holds then; from there on growth
    within updates counts, beyond HOST_NOISE, and what evaluating and saving leave behind does not.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._memory, self._on_host = accelerator.memory, accelerator.shares_host_memory
        self.works = self._memory.reset_peak()
        self._recorded: int | None = None  # peak of the recorded update
        self._held: int | None = None  # by the process at the peak of the update after it
        self._after: int | None = None  # when the last update ended

    def begin(self) -> None:
        """An update begins."""
        if self._after is not None:
            grown = self._memory.reserved_bytes() - self._after
            if not self._on_host and grown > 0:
                self.shrink()
            elif self._held is not None:
                self._held += grown
        self._memory.reset_peak()

    def shrink(self) -> None:
        """Updates need less from now on: what is only cached is none of it."""
        self._memory.release_cache(threshold=0.0)

    def recorded(self, peak_bytes: int) -> int:
        """The update was recorded, and this was the peak of its tensors. What it used."""
        self._recorded = peak_bytes
        return peak_bytes if self._on_host else self.used_bytes()

    def used_bytes(self) -> int:
        """Peak since begin(); 0 where it is not known yet."""
        peak = self._memory.peak_reserved_bytes()
        if not self._on_host:
            self._after = self._memory.reserved_bytes()
            return peak
        if self._recorded is None:
            return 0
        self._held = peak if self._held is None else self._held
        self._after = self._memory.reserved_bytes()
        growth = peak - self._held
        return self._recorded + (growth if growth > HOST_NOISE else 0)
