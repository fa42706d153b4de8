"""Two clocks: what computes, and what the links carry meanwhile.

NOTE [ What hides communication ]
A device computes on one stream and communicates beside it. The links do one collective after another. Computation
waits for one when it needs the result:
  an all-gather, or a collective of tensor parallelism, when an operator touches its tensors;
  a gradient's reduction when FSDP is about to fill the next one's buffer (it keeps one at a time), the rest at the end
  of backward, since what touches reduced gradients before runs on the communication's own stream.
A host runs ahead of its device, so a gather that FSDP issues before a block begins has been waiting in the device's
queue since the last gathered parameters were copied out, which frees its buffer: it starts then, not at its call.
All that computation waits is exposed. A CPU has one stream for both: there everything is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from trainfit.profile import PHASES, Phase
from trainfit.rehearsal.collectives import Call
from trainfit.rehearsal.events import Entry, Event
from trainfit.rehearsal.links import Links
from trainfit.rehearsal.operator_cost import Bound

_COPY_OUT, _COPY_IN, _FSDP_GATHER = "fsdp::split_with_sizes_copy", "fsdp::chunk_cat", "c10d::_allgather_base_"
_REDUCTIONS = frozenset({"reduce_scatter", "all_reduce", "reduce"})


@dataclass
class Timeline:
    """Seconds since the step began. overlaps: whether the device communicates while it computes."""

    overlaps: bool = True
    compute: float = 0.0
    links: float = 0.0
    _copied_out: float = 0.0
    _needed: dict[int, float] = field(default_factory=dict)  # storage: when it is there
    _reduced: float = 0.0  # when the last reduce-scatter is done
    _pending: float = 0.0  # when all are done that nobody waits for before backward ends

    def runs(self, operator: str, storages: Iterable[int], seconds: float) -> float:
        """An operator computes. Returns the seconds that it waited before."""
        waited = 0.0
        if self._needed:
            for storage in storages:
                if (there := self._needed.pop(storage, None)) is not None:
                    waited += self._wait(there)
        if operator == _COPY_IN:
            waited += self._wait(self._reduced)
        self.compute += seconds
        if operator == _COPY_OUT:
            self._copied_out = self.compute
        return waited

    def communicates(
        self, kind: str, seconds: float, *, gathers_ahead: bool, storages: Iterable[int], in_backward: bool
    ) -> float:
        """A collective is called. Returns the seconds that computation waits for it at once.

        gathers_ahead: FSDP's own all-gather, which starts as soon as its buffer is free.
        in_backward: a gradient's reduction is waited for later than its first use.
        """
        begin = self._copied_out if gathers_ahead and self.overlaps else self.compute
        self.links = max(self.links, begin) + seconds
        if not self.overlaps:
            return self._wait(self.links)
        self._pending = self.links
        if in_backward and kind in _REDUCTIONS:
            self._reduced = self.links if kind == "reduce_scatter" else self._reduced
        else:
            self._needed.update(dict.fromkeys(storages, self.links))
        return 0.0

    def finish(self) -> float:
        """Backward has ended: wait for everything. Returns the seconds."""
        self._needed.clear()
        return self._wait(self._pending)

    def _wait(self, until: float) -> float:
        waited = max(0.0, until - self.compute)
        self.compute += waited
        return waited


@dataclass
class Tally:
    """What one stretch of a step took.

    exposed: seconds that computation waited; they are part of seconds too. by_bound: all seconds by what decides them.
    model_flops: of what the model asks for, recomputation left out.
    """

    seconds: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    exposed: float = 0.0
    calls: list[Call] = field(default_factory=list)
    by_bound: dict[Bound, float] = field(default_factory=dict)
    model_flops: float = 0.0

    def add(self, bound: Bound, seconds: float) -> None:
        self.by_bound[bound] = self.by_bound.get(bound, 0.0) + seconds


class StepClock:
    """Seconds and collectives of a step, a tally for each micro batch and one for the optimizer.

    links: between the devices; None where they are not known, so that collectives take no time.
    """

    def __init__(self, *, links: Links | None = None, overlaps: bool = True) -> None:
        self.links = links
        self.tallies = [Tally()]
        self._timeline = Timeline(overlaps)
        self._waits_for: Bound = "link"  # what the collectives that are under way are bound by

    def plays(self, log: Iterable[Entry]) -> None:
        """Go through a step; its events are told their seconds."""
        phase: Phase = "forward"
        for entry in log:
            if entry.phase != phase:
                self._enters(entry.phase, phase)
                phase = entry.phase
            if isinstance(entry, Event):
                entry.seconds = self._timeline.compute
            elif entry.call is not None:
                self._communicates(phase, entry.operator, entry.call, entry.touched)
            else:
                self._wait(phase, self._timeline.runs(entry.operator, entry.touched, entry.seconds))
                tally = self.tallies[-1]
                tally.seconds[phase] += entry.seconds
                tally.add(entry.bound, entry.seconds)
                tally.model_flops += entry.flops

    def _enters(self, phase: Phase, previous: Phase) -> None:
        if phase not in ("forward", "optimizer"):
            return
        if phase == "optimizer":
            self._wait(previous, self._timeline.finish())
        self.tallies.append(Tally())

    def _communicates(self, phase: Phase, operator: str, call: Call, storages: Iterable[int]) -> None:
        self.tallies[-1].calls.append(call)
        if self.links is None:
            return
        self._waits_for = self.links.bound(call.group_size, call.ranks)
        waited = self._timeline.communicates(
            call.kind,
            call.seconds(self.links),
            gathers_ahead=operator == _FSDP_GATHER,
            storages=storages,
            in_backward=phase == "backward" and operator.startswith("c10d::"),
        )
        self._wait(phase, waited)

    def _wait(self, phase: Phase, seconds: float) -> None:
        self.tallies[-1].seconds[phase] += seconds
        self.tallies[-1].exposed += seconds
        if seconds:
            self.tallies[-1].add(self._waits_for, seconds)

    def total(self, *, waiting: int = 0, like: int = 0) -> Tally:
        """All tallies; waiting: how often tally number `like` counts once more."""
        total = Tally()
        for tally in [*self.tallies, *[self.tallies[like]] * waiting]:
            for phase, seconds in tally.seconds.items():
                total.seconds[phase] += seconds
            for bound, seconds in tally.by_bound.items():
                total.add(bound, seconds)
            total.exposed += tally.exposed
            total.model_flops += tally.model_flops
            total.calls += tally.calls
        return total
