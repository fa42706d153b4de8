"""StallWatch: ranks of a run that keep an eye on each other, so that none waits for one that will never come.

NOTE [ Who watches whom ]
Each rank publishes its place and a heartbeat to the store of the process group, over a connection of its own: the main
thread may sit in a call of the other. Rank 0 watches all ranks and all watch rank 0, so the store serves as many reads
as there are ranks and not their square; a rank that sees rank 0 done watches all. Whoever finds a fault writes the
verdict once, in a key that is set if it is not there yet; every rank reads it, prints it, and ends with os._exit, since
its main thread sits in a collective that nothing wakes. All is judged by the reader's own clock from when it saw
something change, so clocks of machines need not agree.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from itertools import count
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn

from trainfit.hardware import Ranks
from trainfit.hardware.together import is_of_collective
from trainfit.step import TrainStep
from trainfit.train.place import Report, Whereabouts
from trainfit.train.verdict import Peers, Sighting, WatchSettings, divergence, failure_line, judge, places_of

DEFAULTS = WatchSettings()
_VERDICT = "verdict"
_WATCHES = count()  # of this process: every watch has its own keys


class StallWatch:
    """Open it around training; it does nothing in a single process.

    Leaving it in peace says that this rank is done; an exception is told to the others, which end with it.
    """

    def __init__(
        self,
        ranks: Ranks,
        blocks: Mapping[str, nn.Module],
        *,
        in_step: bool,
        root: nn.Module | None = None,
        settings: WatchSettings = DEFAULTS,
    ) -> None:
        """blocks by the names a user knows. in_step: all ranks with the same blocks must run them in the same order.
        root: the module that is called for each micro batch, if there is one around the model."""
        self.settings = settings
        self._here = Whereabouts(blocks, root)
        self._connection = _Connection(self._here, ranks, in_step, settings) if ranks.is_real else None

    @classmethod
    def of(cls, step: TrainStep, settings: WatchSettings = DEFAULTS) -> StallWatch:
        """The watch of a step's ranks and blocks."""
        modules = dict(step.model.named_modules())
        blocks = {name: modules[name] for name in step.anatomy.blocks if name in modules}  # a pipeline stage has some
        mesh = step.ranks.mesh
        in_step = mesh.tensor > 1 or (mesh.shard > 1 and step.strategy.zero.stage > 0)
        root = None if step.root is step.model else step.root  # a loss in pieces may call the model for each
        return cls(step.ranks, blocks, in_step=in_step, root=root, settings=settings)

    def begin_step(self, number: int) -> None:
        """An update begins; number: as the user counts them, from 1."""
        self._here.begin_step(number)

    def begin(self, activity: str) -> None:
        """What the loop does from here until the next step: "waiting for data", "evaluating"."""
        self._here.begin(activity)

    def observe(self, phase: str) -> None:
        """TrainStep's observer."""
        self._here.observe(phase)

    def waiting_allowed(self, activity: str) -> AbstractContextManager[None]:
        """Around what may take any time, also on some ranks only: "saving", "compiling". Heartbeats still count."""
        return self._here.waiting_allowed(activity) if self._connection else nullcontext()

    def __enter__(self) -> StallWatch:
        if self._connection:
            self._here.attach()
            self._connection.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._connection is None:
            return
        self._here.detach()
        if error is None:
            self._connection.finish()
        else:
            self._connection.fail(error)


class _Connection:
    """The two threads of a watch. See NOTE [ Who watches whom ]."""

    def __init__(self, here: Whereabouts, ranks: Ranks, in_step: bool, settings: WatchSettings) -> None:
        mesh = ranks.mesh
        stage_size = mesh.size // mesh.pipeline
        keys = tuple(rank // stage_size for rank in range(mesh.size))  # pipeline is the mesh's first dimension
        self.here, self.settings, self.rank, self.size = here, settings, ranks.rank, mesh.size
        self.peers = Peers(keys, here.names, in_step)
        self._state: dict[str, Any] = {}  # what to publish besides the place
        self._beat = 0
        self._seen: dict[int, Sighting] = {}
        self._verdict: str | None = None
        self._answered_at = 0.0
        self._store_is_lost = False
        self._closed = threading.Event()
        self._exchange_lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def open(self) -> None:
        # The default group's own connection is locked while the main thread waits in it.
        base: Any = dist.distributed_c10d._get_default_store()
        self._store: Any = dist.distributed_c10d.PrefixStore(f"trainfit/watch/{next(_WATCHES)}", base.clone())
        self._exchange()
        for target in (self._keep_exchanging, self._keep_judging):
            self._threads.append(threading.Thread(target=target, name="trainfit watch", daemon=True))
            self._threads[-1].start()

    def finish(self) -> None:
        """This rank is done. Where the store lives in this process, it stays until the others know."""
        self._tell(state="done")
        until = time.monotonic() + self.settings.silent_seconds
        while self.rank == 0 and not self._all_know() and time.monotonic() < until:
            self._closed.wait(self.settings.beat_seconds / 4)
        self._close()

    def fail(self, error: BaseException) -> None:
        """This rank has an exception. One out of a collective is another rank's fault: wait for the verdict on that."""
        if is_of_collective(error):
            self._tell(state="failed", error=_one_line(error), by_others=True)
            # The threads end this process as soon as they know; otherwise the exception is all there is to say.
            time.sleep(self.settings.silent_seconds + 8 * self.settings.beat_seconds)
            others = places_of((rank, seen.report) for rank, seen in self._seen.items() if rank != self.rank)
            why = f"the others: {others}" if others else ""
        else:
            self._closed.set()  # this process ends by its own exception, whatever is found out about others
            why = self._disagreement()
        text = f"{_one_line(error)}; {why}" if why else _one_line(error)
        self._agree(failure_line(self.rank, self.here.place(), text))
        self._tell(state="failed", error=text)
        self._let_others_read()
        self._close()

    def _disagreement(self) -> str:
        """PyTorch may fail in any way where ranks do not run the same modules, before anybody has noticed."""
        if self.peers.in_step:
            time.sleep(2 * self.settings.beat_seconds)  # until the others have told how far they are
            _within(4 * self.settings.beat_seconds, self._exchange)
        return (self.peers.in_step and divergence(dict(self._seen), self.peers, self.rank)) or ""

    def _let_others_read(self) -> None:
        if self.rank == 0:  # the store may live in this process
            time.sleep(2 * self.settings.beat_seconds)

    def _close(self) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join(4 * self.settings.beat_seconds)

    def _tell(self, **state: Any) -> None:
        """Publishes at once, unless the store does not answer."""
        self._state = state
        _within(4 * self.settings.beat_seconds, self._exchange)

    def _first_is_done(self) -> bool:
        return 0 in self._seen and self._seen[0].report.state == "done"

    def _all_know(self) -> bool:
        others = [self._seen[rank].report for rank in range(1, self.size) if rank in self._seen]
        known = [report.state != "running" or report.heard_first_is_done for report in others]
        return len(known) == self.size - 1 and all(known)

    def _watched(self) -> list[int]:
        return list(range(self.size)) if self.rank == 0 or self._first_is_done() else [0]

    def _keep_exchanging(self) -> None:
        while not self._closed.wait(self.settings.beat_seconds):
            self._exchange()

    def _exchange(self) -> None:
        with self._exchange_lock:
            self._look_here()
            if self._store_is_lost:
                return
            try:
                self._publish()
                self._read()
            except dist.DistError:
                self._store_is_lost = True  # what that means is judged by who is no longer heard from
            else:
                self._answered_at = time.monotonic()

    def _look_here(self) -> None:
        self._beat += 1
        report = self.here.report(
            still_since=2 * self.settings.beat_seconds,
            beat=self._beat,
            heard_first_is_done=self._first_is_done(),
            **self._state,
        )
        self._see(self.rank, report)

    def _see(self, rank: int, report: Report) -> None:
        now = time.monotonic()
        self._seen.setdefault(rank, Sighting(report, now, now)).update(report, now)

    def _publish(self) -> None:
        self._store.set(str(self.rank), json.dumps(asdict(self._seen[self.rank].report)))

    def _read(self) -> None:
        if self._store.check([_VERDICT]):
            self._verdict = self._store.get(_VERDICT).decode()
        others = [rank for rank in self._watched() if rank != self.rank]
        ranks = [rank for rank in others if rank in self._seen or self._store.check([str(rank)])]
        if ranks:
            for rank, text in zip(ranks, self._store.multi_get([str(rank) for rank in ranks])):
                self._see(rank, Report.from_json(json.loads(text)))

    def _keep_judging(self) -> None:
        """A thread of its own: that of the exchange may hang in the store."""
        tick = self.settings.beat_seconds / 2
        last = time.monotonic()
        while not self._closed.wait(tick):
            now = time.monotonic()
            if now - last > 4 * tick + self.settings.beat_seconds:
                self._forgive(now)  # this process was stopped or starved itself: it cannot blame others for that time
            last = now
            if line := self._verdict or self._judge(now):
                self._end(line)

    def _forgive(self, now: float) -> None:
        self._answered_at = now
        for sighting in list(self._seen.values()):
            sighting.beat_at = sighting.moved_at = now

    def _judge(self, now: float) -> str | None:
        limit = self.settings.silent_seconds
        if self._first_is_done() and now - self._answered_at > 2 * self.settings.beat_seconds:
            return None  # the store has likely gone with rank 0, in peace: there is no news of the others any more
        if self.rank == 0 and now - self._answered_at > limit:
            return f"the store of the run has not answered rank 0 for {limit:g} s: its launcher or machine is gone"
        sees_all = len(self._watched()) == self.size
        return judge(dict(self._seen), now, self.settings, self.peers, own=self.rank, sees_all=sees_all)

    def _end(self, line: str) -> None:
        line = self._agree(line)
        if self._closed.is_set():
            return
        sys.stderr.flush()
        os.write(2, f"trainfit: {line}\n".encode())
        self._let_others_read()
        os._exit(self.settings.exit_code)

    def _agree(self, line: str) -> str:
        """The verdict of whoever was first, this one if nobody was or the store does not answer."""
        agreed = [line]

        def write() -> None:
            agreed.append(self._store.compare_set(_VERDICT, "", line).decode())

        if not self._store_is_lost:
            _within(2 * self.settings.beat_seconds, write)
        return agreed[-1]


def _within(seconds: float, call: Callable[[], None]) -> None:
    """Runs a call on the store for that long at most: one to a stopped machine does not return."""

    def run() -> None:
        with suppress(dist.DistError):
            call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)


def _one_line(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else text[:297] + "..."
