"""Metrics: metrics.jsonl for programs and TensorBoard events for people, as plain numbers.

A line of metrics.jsonl is one JSON object. After an update it has
    step (1 is the first), loss (nats per token), learning_rate, gradient_norm (before clipping; null when nothing is
    clipped), tokens (since the run began), tokens_per_second, step_seconds,
    memory_bytes (in use on the device; on a CPU, resident in the process),
    micro_batches (of rank 0), used_bytes and tier_level (with a tier table: the most that the update used on any rank,
    and how many rows of the table were given up for lack of memory; else null),
    loss_scale (null where losses are not scaled), skipped (it overflowed in fp16: no weight moved),
and after an evaluation step and held_out_loss; where blocks have loss scales of their own also
    underflow_with_blocks, underflow_with_one (shares of the blocks' gradient elements that are zero in fp16, with these
    scales and with one for all).
What is not finite, as the loss of a skipped step may be, is null.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from types import TracebackType

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

Value = float | int | None


class MetricsWriter:
    """Writes both files of a run folder; every line is flushed, so a killed run keeps what it logged.

    Only numbers go in and nothing is kept: a logged loss cannot hold on to a graph.
    """

    def __init__(self, folder: Path, *, after_step: int = 0) -> None:
        """after_step: the step that a resumed run goes on from; later lines, of updates about to be redone, go."""
        # Imported here so that reading metrics does not need TensorBoard.
        from torch.utils.tensorboard import SummaryWriter

        path = folder / METRICS_FILE
        _cut_after(path, after_step)
        self._file = path.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=after_step + 1, flush_secs=10)

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """One line, and one TensorBoard scalar for each number in it."""
        finite = {name: value if value is None or isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        for name, value in finite.items():
            if value is not None:
                self._events.add_scalar(name, float(value), step)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
        self._events.close()


class NoMetrics:
    """The metrics of a rank that another one writes for."""

    def write(self, step: int, values: Mapping[str, Value]) -> None: ...

    def __enter__(self) -> NoMetrics:
        return self

    def __exit__(self, *_: object) -> None: ...


def read_metrics(folder: Path) -> list[dict[str, Value]]:
    """Every whole line of a run's metrics.jsonl, in order."""
    path = folder / METRICS_FILE
    return _whole_lines(path) if path.exists() else []


def _whole_lines(path: Path) -> list[dict[str, Value]]:
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:  # the last line of a killed run may be cut short
            continue
    return entries


def _cut_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = [entry for entry in _whole_lines(path) if (entry.get("step") or 0) <= step]
    partial = path.with_name(f".partial-{path.name}")
    partial.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")
    os.replace(partial, path)
