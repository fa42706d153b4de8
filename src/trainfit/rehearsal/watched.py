"""Watched: a step that a tracker has seen, and the profile that follows from it."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from trainfit.hardware import Hardware
from trainfit.hardware.allocator import COLLECTING_FRACTION
from trainfit.hardware.runtime import allocation_padding_of
from trainfit.profile import AllocatorSettings, Profile, Reserved
from trainfit.rehearsal.allocator import DeviceFullError
from trainfit.rehearsal.certainty import with_certainty
from trainfit.rehearsal.events import Event
from trainfit.rehearsal.links import Links
from trainfit.rehearsal.record import StepRecord
from trainfit.rehearsal.replay import reserved_memory
from trainfit.rehearsal.splice import Cut, spliced
from trainfit.rehearsal.timeline import StepClock
from trainfit.step import Strategy


@dataclass(frozen=True)
class Watched:
    """A step that a tracker has seen; what follows from it needs no fake tensors.

    waiting: micro batches that did not run, but take memory, and time as batch number `like` does. num_ids: tokens of
    all on one rank.
    """

    record: StepRecord
    strategy: Strategy
    rank: int
    num_ids: int
    waiting: int = 0
    like: int = 0
    cut: Cut | None = None
    compile_seconds: float = 0.0

    def profile(self, hardware: Hardware, *, late_states: bool = False, allowed_bytes: int | None = None) -> Profile:
        """late_states: whether a run's optimizer makes its states in its first update, in what forward and backward
        left behind. allowed_bytes: expandable segments are looked at only where nothing else keeps the step from
        fitting into these. Raises NotAlikeError where the cut does not hold."""
        with _no_collection():
            profile = self._profile(hardware, late_states=late_states, allowed_bytes=allowed_bytes)
        return replace(profile, compile_seconds=self.compile_seconds)

    def _profile(self, hardware: Hardware, *, late_states: bool, allowed_bytes: int | None) -> Profile:
        record, spec, mesh = self.record.settled(), hardware.spec, self.strategy.mesh
        if self.cut is not None:
            record = spliced(record, self.cut)
        clock = StepClock(links=Links.of(spec), overlaps=not hardware.is_host)
        in_turns = mesh.pipeline > 1  # several micro batches are under way
        counted = {"waiting": self.waiting, "like": self.like}
        profile = record.profile(clock, rank=self.rank, follow_all=in_turns, **counted)
        tokens = self.num_ids * mesh.data
        profile = with_certainty(profile, clock.total(**counted), spec, self.strategy.precision, tokens=tokens)
        if not hardware.is_host:
            late = record.storages("optimizer") if late_states else frozenset()
            profile = _with_reserved(profile, record.events, self.strategy.allocator, hardware, late, allowed_bytes)
        return _with_turns(profile, self.strategy) if in_turns else profile


def _with_reserved(
    profile: Profile,
    events: Sequence[Event],
    settings: AllocatorSettings,
    hardware: Hardware,
    late: frozenset[int],
    allowed_bytes: int | None,
) -> Profile:
    reserved, expandable = _reserved(events, settings, hardware, late), None
    may_help = allowed_bytes is None or profile.peak_bytes <= allowed_bytes < reserved.reserved_bytes
    if may_help and not settings.expandable_segments:
        expandable = _reserved(events, replace(settings, expandable_segments=True), hardware, late)
    return replace(profile, reserved_bytes=reserved.reserved_bytes, reserved=reserved, expandable=expandable)


def _reserved(
    events: Sequence[Event], settings: AllocatorSettings, hardware: Hardware, late: frozenset[int]
) -> Reserved:
    """What the device's allocator holds. Garbage is collected by what the device has; any other limit would hide how
    much too large a step is."""
    padding = allocation_padding_of(hardware.spec.kind)
    if settings.garbage_collection_threshold:
        limit = int(COLLECTING_FRACTION * hardware.total_bytes)
        try:
            return reserved_memory(events, settings, padding=padding, limit_bytes=limit, late=late)
        except DeviceFullError:
            pass  # it does not fit, and by how much is seen without a limit
    return reserved_memory(events, settings, padding=padding, late=late)


def _with_turns(profile: Profile, strategy: Strategy) -> Profile:
    """With the time that a stage waits for others, which are taken to be as slow as this one.

    The first micro batch has to come through all stages, and the last back: (stages - 1) / (micro batches) of what its
    own take, a v-th of it with v stages on a rank.
    """
    waits = (strategy.mesh.pipeline - 1) / (strategy.accumulation_steps * strategy.pipeline.stages_per_rank)
    phases = {
        phase: seconds * (1 + waits) if phase in ("forward", "loss", "backward") else seconds
        for phase, seconds in profile.phase_seconds.items()
    }
    return profile.with_phase_seconds(phases)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Logs hold a hundred thousand entries and no cycles, which the collector would go through again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
