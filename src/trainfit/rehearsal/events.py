"""Births and deaths of storages, and what was live at each of them.

NOTE [ Fake gradients are added in place ]
Autograd adds a second gradient of a tensor into the first one's memory when nobody else holds that (a view's base
counts as somebody), but never does so for tensor subclasses, which fake tensors are: there it makes a new tensor and
lets the old one die. The tracker recognises these additions (two tensors added inside backward, with grad mode off,
the first no view and dying before the next operator) and counts them as the in-place additions that real tensors get.
Source: can_accumulate_inplace in torch/csrc/autograd/input_buffer.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainfit.profile import PHASES, Phase


@dataclass(frozen=True)
class Event:
    """A storage is born (num_bytes > 0) or dies (num_bytes < 0).

    requested: what was asked for, before rounding. stream: where it was asked for; 0 is the one that computes.
    place: the block that ran. seconds: since the step began.
    """

    storage: int
    num_bytes: int
    phase: Phase
    operator: str
    in_place_of: int | None = None
    requested: int = 0
    stream: int = 0
    place: str = ""
    seconds: float = 0.0

    @property
    def where(self) -> str:
        """Such as "block 31, aten::mul"."""
        return f"{self.place}, {self.operator}" if self.place else self.operator


@dataclass
class Peak:
    """The most that was live; event, position: the birth that made it so."""

    total: int = 0
    event: Event | None = None
    position: int = -1


def in_place_additions(events: list[Event]) -> list[Event]:
    """Let a sum take the place of the addend that dies with it. See NOTE [ Fake gradients are added in place ]."""
    ordered = list(events)
    for index, event in enumerate(ordered):
        if event.in_place_of is None:
            continue
        for later in range(index + 1, len(ordered)):
            if ordered[later].num_bytes > 0:
                break
            if ordered[later].storage == event.in_place_of:
                ordered[index : later + 1] = [ordered[later], *ordered[index:later]]
                break
    return ordered


def replay(events: list[Event]) -> tuple[dict[Phase, int], Peak]:
    """The most that was live within each phase, its beginning included, and in all."""
    phases: dict[Phase, int] = {}
    live, peak = 0, Peak()
    for position, event in enumerate(events):
        before, live = live, live + event.num_bytes
        phases[event.phase] = max(phases.get(event.phase, 0), before, live)
        if live > peak.total:
            peak = Peak(live, event, position)
    return {phase: phases[phase] for phase in PHASES if phase in phases}, peak
