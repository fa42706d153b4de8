"""Clocks: what computes, and what the links within a node and between nodes carry meanwhile.

NOTE [ What hides communication ]
A device computes on one stream and communicates beside it. The links of a node do one collective after another, and so
does the network between nodes; both at once, as groups of NCCL and HCCL have a stream each: tensor ranks talk over the
one while shards are gathered over the other. Computation waits for a collective when it needs the result:
  an all-gather, or a collective of tensor parallelism, when an operator touches its tensors;
  a gradient's reduction when FSDP is about to fill the next one's buffer (it keeps one at a time), the rest at the end
  of backward, since what touches reduced gradients before runs on the communication's own stream.
A host runs ahead of its device, so a gather that FSDP issues before a block begins has been waiting in the device's
queue since the last gathered parameters were copied out, which frees its buffer: it starts then, not at its call.
All that computation waits is exposed. A CPU has one stream for both: there everything is. A recompute that runs beside
has a clock of its own, see NOTE [ Two streams share one device ] in beside.py.

NOTE [ Copies beside computation ]
What blocks offload goes over a link of its own, to the host or a disk, one copy after another in the order in which
they were begun. A copy begins when it is called at the earliest, since it waits for what computation does until then.
Computation waits for one where the step says so. A CPU has a thread for it, so it overlaps there too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from trainfit.profile import PHASES, Phase
from trainfit.rehearsal.beside import SideWork
from trainfit.rehearsal.collectives import Call
from trainfit.rehearsal.events import JOIN, Entry, Event, Work
from trainfit.rehearsal.links import Links
from trainfit.rehearsal.operator_cost import Bound

_COPY_OUT, _COPY_IN, _FSDP_GATHER = "fsdp::split_with_sizes_copy", "fsdp::chunk_cat", "c10d::_allgather_base_"
TRANSFERS = ("offload::out", "offload::back", "offload::wait")
_REDUCTIONS = frozenset({"reduce_scatter", "all_reduce", "reduce"})


@dataclass
class Timeline:
    """Seconds since the step began. overlaps: whether the device communicates while it computes."""

    overlaps: bool = True
    compute: float = 0.0
    side: SideWork = field(default_factory=SideWork)
    _copied_out: float = 0.0
    _needed: dict[int, float] = field(default_factory=dict)  # storage: when it is there
    _reduced: float = 0.0  # when the last reduce-scatter is done
    _copying: float = 0.0  # when the last copy beside computation is done
    _copied: dict[int, float] = field(default_factory=dict)  # storage: when its copy is done
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
        self.compute = self.side.shares(self.compute, seconds)
        if operator == _COPY_OUT:
            self._copied_out = self.compute
        return waited

    def communicates(
        self,
        kind: str,
        seconds: float,
        *,
        gathers_ahead: bool,
        storages: Iterable[int],
        in_backward: bool,
        over: Bound = "link",
    ) -> float:
        """A collective is called. Returns the seconds that computation waits for it at once.

        gathers_ahead: FSDP's own all-gather, which starts as soon as its buffer is free.
        in_backward: a gradient's reduction is waited for later than its first use. over: "link" or "network".
        """
        is_reduced = in_backward and kind in _REDUCTIONS
        waited = 0.0 if is_reduced or gathers_ahead else self._waits_for(self.side.calls_all)
        begin = self._copied_out if gathers_ahead and self.overlaps else self.compute
        done = self.side.links_carry(over, begin, seconds)
        if not self.overlaps:
            return self._wait(done)
        self._pending = max(self._pending, done)
        if is_reduced:
            self._reduced = done if kind == "reduce_scatter" else self._reduced
        else:
            self._needed.update(dict.fromkeys(storages, done))
        return waited

    def joins(self) -> float:
        """Computation waits for what runs beside it. Returns the seconds that neither computes."""
        return self._waits_for(self.side.ends)

    def transfers(self, operator: str, storages: Iterable[int], seconds: float) -> float:
        """A copy beside computation is begun or waited for. Returns the seconds that computation waits."""
        if operator == "offload::wait":
            return sum(self._wait(self._copied.pop(storage, 0.0)) for storage in storages)
        self._copying = max(self._copying, self.compute) + seconds
        self._copied.update(dict.fromkeys(storages, self._copying))
        return 0.0

    def finish(self) -> float:
        """Backward has ended: wait for everything. Returns the seconds."""
        self._needed.clear()
        return self.joins() + self._wait(self._pending)

    def _wait(self, until: float) -> float:
        return self._waits_for(lambda now: self.side.alone(now, until)) if until > self.compute else 0.0

    def _waits_for(self, runs: Callable[[float], float]) -> float:
        """Let the side stream run alone, from now until what is returned. Seconds of it that the device idles."""
        begin, before = self.compute, self.side.seconds
        self.compute = runs(begin)
        return max(0.0, self.compute - begin - (self.side.seconds - before))


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

    links: between the devices; None where they are not known, so that collectives take no time. copies: whether those
    beside computation take time.
    """

    def __init__(self, *, links: Links | None = None, overlaps: bool = True, copies: bool = True) -> None:
        self.links, self.copies = links, copies
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
            elif entry.beside:
                self._goes_beside(phase, entry)
            elif entry.call is not None:
                self._communicates(phase, entry.operator, entry.call, entry.touched)
            elif entry.operator in TRANSFERS:
                if not self.copies:
                    continue
                waited = self._timeline.transfers(entry.operator, entry.touched, entry.seconds)
                self.tallies[-1].seconds[phase] += waited
                self.tallies[-1].add("host", waited)
            else:
                self._wait(phase, self._timeline.runs(entry.operator, entry.touched, entry.seconds))
                tally = self.tallies[-1]
                tally.seconds[phase] += entry.seconds
                tally.add(entry.bound, entry.seconds)
                tally.model_flops += entry.flops

    def _goes_beside(self, phase: Phase, entry: Work) -> None:
        """Its seconds count when the device has had them."""
        side, now = self._timeline.side, self._timeline.compute
        if entry.operator == JOIN:
            self._wait(phase, self._timeline.joins())
        elif entry.call is None:
            side.add(now, entry.seconds, entry.bound)
        else:
            self.tallies[-1].calls.append(entry.call)
            if self.links is not None:
                bound = self.links.bound(entry.call.group_size, entry.call.ranks)
                side.add(now, entry.call.seconds(self.links), bound, is_link=True)

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
            over=self._waits_for,
        )
        self._wait(phase, waited)

    def _wait(self, phase: Phase, seconds: float) -> None:
        self.tallies[-1].seconds[phase] += seconds
        self.tallies[-1].exposed += seconds
        if seconds:
            self.tallies[-1].add(self._waits_for, seconds)
        for bound, ran in self._timeline.side.takes_ran().items():
            self.tallies[-1].seconds[phase] += ran
            self.tallies[-1].add(bound, ran)

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
