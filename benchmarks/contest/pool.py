"""Rounds of all variants: each lives in its own process, one at a time is told to do a step."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from select import select
from typing import Any

from contest.variants import PLAIN, Variant

BENCHMARKS = Path(__file__).resolve().parent.parent
_RESERVE = 3 * 2**30  # bytes of this machine that are left to others
_ROOM_SECONDS = 30.0  # what has just ended, or its own children, may still hold memory
Row = dict[str, Any]
Case = dict[str, str]


class WorkerError(Exception):
    """The last line that a worker wrote before it ended."""


class Worker:
    """A variant's process, built and warm."""

    def __init__(self, case: Case, variant: Variant, python: str, log: Path, deadline: float) -> None:
        """deadline: when it must have done its first steps, or it is given up."""
        self._log = log
        command = [python, "-m", "contest.worker", json.dumps(case), json.dumps(variant.to_json())]
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command, env=_environment(python), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
            )
        if not self._speaks_before(deadline):
            self._process.kill()
            self._process.wait()
            raise WorkerError("given up: time was over before its first steps were done")
        self.about = self._answer()

    def step(self) -> Row:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: its last words say why
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    @property
    def peak_resident_bytes(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024

    def _speaks_before(self, deadline: float) -> bool:
        seconds = max(0.0, deadline - time.monotonic())
        return bool(select([self._process.stdout], [], [], None if seconds == math.inf else seconds)[0])

    def _answer(self) -> Row:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            found: Row = json.loads(line)
            return found
        self._process.wait()
        said = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        raise WorkerError(said[-1] if said else f"ended with {self._process.returncode} and no word")


def _environment(python: str) -> dict[str, str]:
    return os.environ | {
        "PATH": f"{Path(python).parent}:{os.environ['PATH']}",  # DeepSpeed calls ninja
        "PYTHONPATH": f"{BENCHMARKS}:{BENCHMARKS.parent / 'src'}",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of compilers beside
        "TOKENIZERS_PARALLELISM": "false",
    }


def python_of(variant: Variant, environments: Path) -> str:
    return sys.executable if variant.environment is None else str(environments / variant.environment / "bin" / "python")


@dataclass
class Contest:
    """One case.

    alive: processes at once beside plain's, where memory has room for so many.
    deadline: on time.monotonic's clock; after it no variant and no round is begun.
    keep: told the rows that there are, after each round: a run that is ended has lost nothing but the round.
    """

    case: Case
    environments: Path
    logs: Path
    rounds: int
    alive: int
    deadline: float
    say: Callable[[str], None]
    keep: Callable[[dict[str, Row]], None] = lambda rows: None
    rows: dict[str, Row] = field(default_factory=dict)

    def run(self, variants: Sequence[Variant]) -> dict[str, Row]:
        """A row for each variant: as many as memory has room for are alive at once, plain beside them."""
        left = list(variants)
        plain = self._start(PLAIN)
        if plain is None:
            raise WorkerError(self.rows[PLAIN.name]["error"])
        while left and time.monotonic() < self.deadline:
            if not (started := self._start_some(left, plain)):
                continue  # nor do those that were tried any more
            for _, worker in self._rounds([(PLAIN, plain), *started])[1:]:
                worker.close()
        plain.close()
        return self.rows

    def _start_some(self, left: list[Variant], plain: Worker) -> list[tuple[Variant, Worker]]:
        """Take variants off the list and start them, until another might not find room; all, where not one finds it."""
        started: list[tuple[Variant, Worker]] = []
        largest = plain.peak_resident_bytes
        while left and len(started) < self.alive and time.monotonic() < self.deadline:
            if not _has_room(largest + _RESERVE, wait=not started):
                if not started:
                    self._no_room(left, largest)
                break
            variant = left.pop(0)
            if (worker := self._start(variant)) is not None:
                started.append((variant, worker))
                largest = max(largest, worker.peak_resident_bytes)
        return started

    def _no_room(self, left: list[Variant], num_bytes: int) -> None:
        """What was measured until here counts; what is left says why it was not."""
        free = _available_bytes()
        why = (
            f"no room for one more process of {num_bytes / 1e9:.1f} GB: {free / 1e9:.1f} GB are free, of which "
            f"{_RESERVE / 1e9:.1f} are left to others; free some memory"
        )
        self.say(why)
        for variant in left:
            self.rows[variant.name] = {**_empty_row(variant), "error": why}
        left.clear()

    def _start(self, variant: Variant) -> Worker | None:
        """A warm worker; None where it cannot run, and the row says why."""
        row = self.rows[variant.name] = _empty_row(variant)
        python = python_of(variant, self.environments)
        if not Path(python).exists():
            row["error"] = f"no {python}; make it with benchmarks/peers/install.sh {self.environments} all"
            self.say(f"{variant.name}: {row['error']}")
            return None
        log = self.logs / f"{variant.name.replace(' ', '-').replace(',', '')}.log"
        try:
            worker = Worker(self.case, variant, python, log, self.deadline)
        except WorkerError as error:
            row["error"] = str(error)
            self.say(f"{variant.name} does not run: {error}")
            return None
        row |= worker.about
        self.say(f"{variant.name}: first step after {worker.about['first_seconds']:.1f} s")
        return worker

    def _rounds(self, alive: list[tuple[Variant, Worker]]) -> list[tuple[Variant, Worker]]:
        """Those that are still alive after them. Raises WorkerError where plain is not."""
        for number in range(self.rounds):
            if number and time.monotonic() > self.deadline:
                break
            self.say(f"round {number + 1} of {self.rounds}, {len(alive)} variants")
            plain_seconds = 0.0
            for variant, worker in list(alive):
                try:
                    found = worker.step()
                except WorkerError as error:
                    if variant is PLAIN:
                        raise
                    self.rows[variant.name] = {**_empty_row(variant), "error": str(error)}
                    self.say(f"{variant.name} died in round {number + 1}: {error}")
                    alive.remove((variant, worker))
                    continue
                row = self.rows[variant.name]
                plain_seconds = found["seconds"] if variant is PLAIN else plain_seconds
                row["seconds"].append(found["seconds"])
                row["plain_seconds"].append(plain_seconds)
                row["peaks"].append(found["peak"])
            self.keep(self.rows)
        return alive


def _empty_row(variant: Variant) -> Row:
    return {**variant.to_json(), "seconds": [], "plain_seconds": [], "peaks": []}


def _has_room(num_bytes: int, *, wait: bool) -> bool:
    """Whether so many bytes are free, or come to be within _ROOM_SECONDS."""
    until = time.monotonic() + (_ROOM_SECONDS if wait else 0.0)
    while _available_bytes() < num_bytes:
        if time.monotonic() >= until:
            return False
        time.sleep(0.5)
    return True


def _available_bytes() -> int:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024
