"""What a step did, in order: births and deaths of storages, and operators that ran.

NOTE [ Fake gradients are added in place ]
Autograd adds a second gradient of a tensor into the first one's memory when nobody else holds that (a view's base
counts as somebody), but never does so for tensor subclasses, which fake tensors are: there it makes a new tensor and
lets the old one die. The tracker recognises these additions (two tensors added inside backward, with grad mode off,
the first no view and dying before the next operator) and counts them as the in-place additions that real tensors get.
Source: can_accumulate_inplace in torch/csrc/autograd/input_buffer.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainfit.profile import PHASES, Phase
from trainfit.rehearsal.collectives import Call
from trainfit.rehearsal.operator_cost import Bound

SHELL = "model"  # the owner of what belongs to no block
JOIN = "trainfit::join"  # the operator of Work: the stream that computes waits for one beside it


@dataclass(slots=True)
class Event:
    """A storage is born (num_bytes > 0) or dies (num_bytes < 0).

    requested: what was asked for, before rounding. stream: where it was asked for; 0 is the one that computes.
    place: the block that ran. seconds: since the step began, once a clock has gone through all.
    owner: whose data it is where that is not the block that ran: before the step, and in the update.
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
    owner: str = ""

    @property
    def where(self) -> str:
        """Such as "block 31, aten::mul"."""
        return f"{self.place}, {self.operator}" if self.place else self.operator


@dataclass(slots=True)
class Work:
    """An operator runs, or a collective is called.

    touched: storages for which it may have to wait, where collectives run. flops: of those that the model asks for.
    place, owner: as an event's. beside: the number of the stream on which it runs beside the one that computes, or that
    a JOIN waits for; else 0.
    """

    phase: Phase
    operator: str
    seconds: float
    bound: Bound
    flops: float = 0.0
    touched: tuple[int, ...] = ()
    call: Call | None = None
    place: str = ""
    owner: str = ""
    beside: int = 0


Entry = Event | Work


@dataclass
class Peak:
    """The most that was live; event, position: the birth that made it so."""

    total: int = 0
    event: Event | None = None
    position: int = -1


def in_place_additions(log: Sequence[Entry]) -> list[Entry]:
    """Let a sum take the place of the addend that dies with it. See NOTE [ Fake gradients are added in place ]."""
    ordered = list(log)
    for index, entry in enumerate(ordered):
        if isinstance(entry, Work) or entry.in_place_of is None:
            continue
        for later in range(index + 1, len(ordered)):
            other = ordered[later]
            if isinstance(other, Work):
                continue
            if other.num_bytes > 0:
                break
            if other.storage == entry.in_place_of:
                ordered[index : later + 1] = [other, *ordered[index:later]]
                break
    return ordered


def replay(log: Sequence[Entry]) -> tuple[dict[Phase, int], Peak]:
    """The most that was live within each phase, its beginning included, and in all."""
    phases: dict[Phase, int] = {}
    live, peak = 0, Peak()
    for position, event in enumerate(log):
        if isinstance(event, Work):
            continue
        before, live = live, live + event.num_bytes
        phases[event.phase] = max(phases.get(event.phase, 0), before, live)
        if live > peak.total:
            peak = Peak(live, event, position)
    return {phase: phases[phase] for phase in PHASES if phase in phases}, peak
