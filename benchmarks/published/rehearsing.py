"""rehearse_run(): one step of a run, watched; all of its blocks from the few that ran."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

from published.records import Run
from published.splice import SHALLOW, Marks, NotAlikeError, spliced
from published.steps import Step
from trainfit.hardware import Hardware
from trainfit.profile import AllocatorSettings, Mesh, Phase
from trainfit.rehearsal.allocator import DeviceFullError
from trainfit.rehearsal.events import Event, replay
from trainfit.rehearsal.operators import FakeKernels
from trainfit.rehearsal.rehearse import fake_ranks, fake_tensors, new_tracker
from trainfit.rehearsal.replay import START, reserved_memory


@dataclass(frozen=True)
class Rehearsed:
    """Bytes of one step, without workspaces.

    peak_bytes: live at once. before_bytes: live before the step. reserved_bytes: what the caching allocator holds
    where memory has no end. fits: whether what there is was enough. place: the operator at the peak.
    """

    peak_bytes: int
    before_bytes: int
    reserved_bytes: int
    fits: bool
    phases: dict[Phase, int]
    place: str


def rehearse_run(run: Run, hardware: Hardware, limit_bytes: int) -> Rehearsed:
    """limit_bytes: what the caching allocator can get. Blocks in the middle are repeated; see splice.py."""
    layers = run.dims.layers // run.pipeline
    if layers > SHALLOW:
        shallow = replace(run, dims=replace(run.dims, layers=SHALLOW), pipeline=1, stages=run.pipeline)
        try:
            return _outcome(*spliced(_watch(shallow, hardware), layers), run, limit_bytes)
        except NotAlikeError:
            pass  # all blocks then, at the price of time
    return _outcome(*spliced(_watch(run, hardware), layers, whole=True), run, limit_bytes)


def _watch(run: Run, hardware: Hardware) -> Marks:
    with ExitStack() as stack:
        ranks = None
        if run.wrap == "fsdp2":
            ranks = stack.enter_context(fake_ranks(Mesh(shard=run.shard), 0, hardware))
        stack.enter_context(fake_tensors())
        step = Step(run, ranks)
        with FakeKernels():
            step.prepare()
        tracker = new_tracker(hardware)
        marks = Marks(tracker.log)
        step.register(tracker, marks)
        with tracker:
            step.take(tracker.observe, marks)
    return marks


def _outcome(events: list[Event], late: frozenset[int], run: Run, limit_bytes: int) -> Rehearsed:
    phases, peak = replay(events)
    assert peak.event is not None
    settings = AllocatorSettings(expandable_segments=run.expandable)
    reserved = reserved_memory(events, settings, late=late).reserved_bytes
    fits = peak.total <= limit_bytes
    if fits and reserved > limit_bytes:  # the allocator gives cached blocks back before it gives up
        try:
            reserved_memory(events, settings, late=late, limit_bytes=limit_bytes)
        except DeviceFullError:
            fits = False
    before = sum(event.num_bytes for event in events if event.operator == START)
    return Rehearsed(peak.total, before, reserved, fits, dict(phases), peak.event.operator)
