"""Early recompute: a block's recompute begins on its own stream while the backward of the block after it runs.

NOTE [ Two streams, no race ]
When backward asks for the first slot of a block's region, which was started before or is recomputed there and then, the
region of the block before it is started on the side stream; backward goes on beside. Who may touch what:
  made before    The side stream first waits for all that is on the main one by now. It reads inputs, kept outputs,
                 weights and buffers; all but the weights are held until the main stream waits for it, so that nobody is
                 given their memory. A block's weights are written after its own backward at the earliest.
  made there     Backward waits for the side stream at the region's first slot, before it reads any. What it frees goes
                 back to blocks of the side stream, which the next start alone may take: that waits first for the
                 backward that read them. So allocators need not be told (record_stream), frees are not put off, and
                 reserved memory is what a rehearsal says.
  left alone     A region that backward never asks for waits for the side stream when it dies.
Random numbers: a generator's state is the host's, which launches one after the other, recompute and backward; a kernel
has its numbers from what the state was at its launch. So the recompute puts the state back as ever, and blocks with
dropout may start early too.
Only blocks that follow each other are a pair: one that keeps what it saves has no first slot, and starts nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from torch import nn

from trainfit.hardware import Accelerator
from trainfit.techniques.base import Asked, Build, Draft, Stage
from trainfit.techniques.offload import BlockOffload
from trainfit.techniques.parts import CoreForward
from trainfit.techniques.recompute import RecomputePlan, Region
from trainfit.techniques.switched import SwitchedForward


class RecomputeAhead:
    """Lets recomputed blocks that follow each other begin early. Apply it after the tiers."""

    stage: ClassVar[Stage] = Stage.BLOCK
    setting: ClassVar[str] = "recompute_ahead"

    def choices(self, so_far: Draft, asked: Asked) -> Iterable[int]:
        """As asked for; what it would win depends on tiers, so a plan tries it on its best: see plan/rehearsals.py."""
        yield asked.settings["recompute_ahead"]

    def apply(self, build: Build, setting: int) -> None:
        if setting == 0:
            return
        every = (build.whole or build.anatomy).blocks
        plans = {every.index(name): list(_plans(block)) for name, block in zip(build.anatomy.blocks, build.blocks)}
        if not build.accelerator.has_streams:
            build.notes.append("recompute_ahead 1 has no effect: a CPU has no streams")
        elif any(isinstance(vars(block).get("forward"), BlockOffload) for block in build.blocks):
            why = "what a block is recomputed from is brought back for the block alone that is next"
            build.notes.append(f"recompute_ahead 1 has no effect beside tiers that offload: {why}")
        elif not any(found and plans.get(number - 1) for number, found in plans.items()):
            build.notes.append("recompute_ahead 1 has no effect: no two blocks in a row are recomputed")
        else:
            side = SideStream(build.accelerator)
            for number, found in plans.items():
                for plan in found:
                    plan.beside, plan.number = side, number


def _plans(block: nn.Module) -> Iterator[RecomputePlan]:
    for module in block.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, CoreForward):
            yield forward.core
        elif isinstance(forward, RecomputePlan):
            yield forward
        elif isinstance(forward, SwitchedForward):
            yield from (plan for plan in forward.plans.values() if isinstance(plan, RecomputePlan))


class SideStream:
    """See NOTE [ Two streams, no race ]; a Beside for RecomputePlan."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._stream = accelerator.new_stream()
        self._last: weakref.ref[Region] | None = None

    def before(self, region: Region) -> weakref.ref[Region] | None:
        """The region made last, if it is the same block's or the one's before: another forward ends with the last."""
        last, self._last = self._last, weakref.ref(region)
        former = None if last is None else last()
        close = former is not None and former.plan.number in (region.plan.number, region.plan.number - 1)
        return last if close else None

    def start(self, region: Region) -> None:
        self._accelerator.stream_waits(self._stream)
        region.started = _Started(self._accelerator, self._stream, region)
        with self._accelerator.stream(self._stream):
            region.recompute()


class _Started:
    """Waits for the side stream when it is called, or when it dies; until then it holds what is read there."""

    def __init__(self, accelerator: Accelerator, stream: Any, region: Region) -> None:
        self._accelerator, self._stream = accelerator, stream
        self._held: Any = (region.inputs, [kept.tensors for kept in region.kept], region.buffers)

    def __call__(self) -> None:
        if self._held is not None:
            self._accelerator.wait_for(self._stream)
            self._held = None

    def __del__(self) -> None:
        self()
