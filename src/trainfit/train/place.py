"""Where a rank is: step, micro batch, phase and block, kept up to date by hooks that cost about a microsecond."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

TAIL = 128  # entries of a trace that are published: ranks of one step are a few blocks apart, not hundreds
_REMEMBERED_STEPS = 8
_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = f"{_TORCH}/distributed/distributed_c10d.py"


@dataclass(frozen=True)
class Place:
    """activity: what the loop does; phase, module and micro_batch (from 1) say where in it the rank is."""

    step: int = 0
    activity: str = "starting"
    phase: str = ""
    module: str = ""
    micro_batch: int = 0

    def __str__(self) -> str:
        inside = (f"the {self.phase} of {self.module}" if self.module else f"the {self.phase}") if self.phase else ""
        if self.activity == "training":
            batch = f", micro batch {self.micro_batch}" if self.micro_batch else ""
            return f"in {inside} (step {self.step}{batch})" if inside else f"at the start of step {self.step}"
        return f"{self.activity}{f', in {inside}' if inside else ''} (after step {self.step})"


@dataclass(frozen=True)
class Trace:
    """The blocks whose forward a rank has entered in one step: how many, and the last of them by their numbers."""

    step: int = 0
    length: int = 0
    tail: tuple[int, ...] = ()

    def at(self, position: int) -> int | None:
        """None where nothing was entered yet, or longer ago than the tail."""
        index = position - (self.length - len(self.tail))
        return self.tail[index] if 0 <= index < len(self.tail) else None


@dataclass(frozen=True)
class Report:
    """What a rank tells about itself.

    moves: grows with every change of place. longest_gap_seconds: between two moves, over the last steps but the first
    of the process. first_step: it has not ended yet. may_wait: it is in something that may take any time.
    state: "running", "done" or "failed". error: one line; by_others: it failed in a collective, so likely in
    consequence of another rank. traces: of this step and the one before. source: file and line of the main thread, if
    it has not moved for a while; in_collective: and there it waits for other ranks.
    """

    beat: int = 0
    moves: int = 0
    place: Place = field(default_factory=Place)
    traces: tuple[Trace, ...] = ()
    longest_gap_seconds: float = 0.0
    first_step: bool = True
    may_wait: bool = False
    source: str = ""
    in_collective: bool = False
    state: str = "running"
    error: str = ""
    by_others: bool = False
    heard_first_is_done: bool = False

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Report:
        known = {name: values[name] for name in (each.name for each in fields(cls))}
        known["place"] = Place(**known["place"])
        known["traces"] = tuple(Trace(t["step"], t["length"], tuple(t["tail"])) for t in known["traces"])
        return cls(**known)


class Whereabouts:
    """This rank's place. The main thread and autograd's threads write it, the watch's threads read it without a lock:
    each field is one assignment, and a report that mixes two neighbouring places harms nobody."""

    def __init__(self, blocks: Mapping[str, nn.Module], root: nn.Module | None = None) -> None:
        """blocks: named as the user knows them, first to last. root: what is called for a micro batch, if a module."""
        self.names = tuple(blocks)
        self.moves = 0
        self.may_wait = False
        self._blocks, self._root = list(blocks.values()), root
        self._activity, self._phase, self._block = "starting", "", -1
        self._step, self._steps_begun = 0, 0
        # Micro batches of the step, each counted by what there is: root, observer, the first block coming round again.
        self._roots = self._seen_forwards = self._rounds = 0
        self._entered: list[int] = []
        self._before = Trace()
        self._last_move = time.monotonic()
        self._gap = 0.0
        self._gaps: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._handles: list[Any] = []
        self._main_thread = threading.main_thread().ident or 0

    def attach(self) -> None:
        """Hooks on the blocks. They come before FSDP's own, which may wait for other ranks."""
        self._main_thread = threading.get_ident()
        if self._root is not None:
            self._handles.append(self._root.register_forward_pre_hook(self._enter_root, prepend=True))
        for index, block in enumerate(self._blocks):
            self._handles += [
                block.register_forward_pre_hook(partial(self._enter_forward, index), prepend=True),
                block.register_forward_hook(partial(self._leave_forward, partial(self._backward, index)), prepend=True),
            ]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin_step(self, number: int) -> None:
        self._before = self._trace()
        if self._steps_begun > 1:  # the first step compiles and warms up: its gaps say nothing
            self._gaps.append(self._gap)
        self._steps_begun += 1
        self._step, self._entered = number, []
        self._roots = self._seen_forwards = self._rounds = 0
        self.begin("training")
        self._gap = 0.0

    def begin(self, activity: str) -> None:
        self._activity, self._phase, self._block = activity, "", -1
        self._moved()

    @contextmanager
    def waiting_allowed(self, activity: str) -> Iterator[None]:
        before = self._activity
        self.may_wait = True
        self.begin(activity)
        try:
            yield
        finally:
            self._last_move = time.monotonic()  # how long it took says nothing about the next move
            self.may_wait = False
            self.begin(before)

    def observe(self, phase: str) -> None:
        self._seen_forwards += phase == "forward"
        self._phase, self._block = phase, -1
        self._moved()

    def place(self) -> Place:
        module = self.names[self._block] if self._block >= 0 else ""
        return Place(
            self._step, self._activity, self._phase, module, max(self._roots, self._seen_forwards, self._rounds)
        )

    def report(self, still_since: float, **others: Any) -> Report:
        """still_since: seconds without a move after which the line of source is worth a look."""
        is_still = time.monotonic() - self._last_move > still_since
        source, in_collective = self.source() if is_still else ("", False)
        return Report(
            moves=self.moves,
            place=self.place(),
            traces=(self._trace(), self._before),
            longest_gap_seconds=max(self._gaps, default=0.0),
            first_step=self._steps_begun < 2,
            may_wait=self.may_wait,
            source=source,
            in_collective=in_collective,
            **others,
        )

    def source(self) -> tuple[str, bool]:
        """File and line at which the main thread is, outside of PyTorch, and whether it is in torch.distributed."""
        frame, in_collective = sys._current_frames().get(self._main_thread), False
        while frame is not None and frame.f_code.co_filename.startswith((_TORCH, "<")):
            in_collective |= frame.f_code.co_filename == _COLLECTIVES
            frame = frame.f_back
        return (f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""), in_collective

    def _trace(self) -> Trace:
        length = len(self._entered)
        return Trace(self._step, length, tuple(self._entered[max(0, length - TAIL) : length]))

    def _moved(self) -> None:
        now = time.monotonic()
        self._gap = max(self._gap, now - self._last_move)
        self._last_move = now
        self.moves += 1

    def _enter_root(self, root: nn.Module, args: tuple[Any, ...]) -> None:
        self._roots += 1
        self._phase, self._block = "forward", -1
        self._moved()

    def _enter_forward(self, index: int, block: nn.Module, args: tuple[Any, ...]) -> None:
        self._entered.append(index)
        self._rounds += index == self._entered[0]
        self._phase, self._block = "forward", index
        self._moved()

    def _leave_forward(self, backward: Any, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # A hook on the output alone: a module's full backward hooks would put nodes into the graph.
        if not torch.is_grad_enabled():
            return
        leaves = (output,) if isinstance(output, Tensor) else tree_leaves(output)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(backward)
                return

    def _backward(self, index: int, gradient: Tensor) -> None:
        self._phase, self._block = "backward", index
        self._moved()
