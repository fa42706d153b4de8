"""Checkpoints: what a run's ranks do together to save and to resume.

NOTE [ Saving beside training ]
save() copies this rank's share of the pieces to the host and returns; a thread writes them while training goes on. All
that ranks say to each other about a checkpoint goes over a gloo group of its own: the training group's collectives
must come in one order on all ranks, and a thread has none. Nothing of that is looked at until the next save() or
wait(): the threads of all ranks end alike, so all ranks raise alike, and no rank leaves training alone.
Where the device's memory is the host's, the copy would be a second one of what is already there; there save() writes
the tensors as they are and returns when it is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from trainfit.errors import TrainfitError
from trainfit.hardware import Ranks
from trainfit.hardware.ranks import local_part
from trainfit.hardware.together import is_of_collective, together
from trainfit.train.checkpoint import (
    Manifest,
    RunState,
    checkpoint_path,
    finish_checkpoint,
    partial_path,
    remove_partial,
)
from trainfit.train.index import Index
from trainfit.train.loading import Restored, first_failure, load_checkpoint
from trainfit.train.pieces import PieceKey, PieceSavePlanner, num_bytes, pieces_of, share_out
from trainfit.train.shards import ShardWriter
from trainfit.train.state import RNG, run_tensors
from trainfit.train.storage import FileFacts

# A rank may have much more to write than another, on a slower disk; one that is gone is noticed at once.
TIMEOUT_SECONDS = 3600.0
# After a failure: what the thread is given to finish a save that can still succeed.
_GRACE_SECONDS = 20.0


@dataclass(frozen=True)
class _Job:
    state: RunState
    ties: dict[str, str]
    items: list[WriteItem]
    parts: dict[str, Tensor]


class Checkpoints:
    """The checkpoints of a run in progress. All ranks make one and call its methods in the same order.

    As a context it waits for the last save in the end.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        *,
        keep: int,
        asynchronous: bool = False,
        on_saved: Callable[[int, Path], None] = lambda step, path: None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """folder: one that all ranks see. on_saved: called by save() or wait() once a step is on the disk."""
        self.folder, self.ranks = folder, ranks
        self.latest: Path | None = None
        self._keep, self._asynchronous, self._on_saved = keep, asynchronous, on_saved
        self._group: dist.ProcessGroup | None = None
        if ranks.is_real:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self._thread: threading.Thread | None = None
        self._writing: int | None = None  # the step of a save that nobody has waited for
        self._error: BaseException | None = None

    def save(self, state: RunState, model: nn.Module, optimizer: Optimizer, rng: tuple[Tensor, ...]) -> None:
        """Writes folder/step-N, or begins to. See NOTE [ Saving beside training ].

        Raises TrainfitError when this save or the one before it failed on any rank, and what the collective raised when
        a rank is gone.
        """
        self.wait()
        job = self._prepare(state, model, optimizer, rng)
        if not self._asynchronous:
            self._writing = state.step
            self._write(job)
            self.wait()
            return
        parts = {name: part.detach().to("cpu", copy=True) for name, part in job.parts.items()}
        job = replace(job, parts=parts)
        self._writing = state.step
        # A daemon: a process that must end does not wait for a rank that hangs.
        self._thread = threading.Thread(target=self._write, args=(job,), name="save", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns when the last save is on the disk. Raises as save() does."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._writing is None:
            return
        step, self._writing = self._writing, None
        error, self._error = self._error, None
        if error is not None:
            raise self._explained(step, error) from error
        self.latest = checkpoint_path(self.folder, step)
        self._on_saved(step, self.latest)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif self._thread is not None:  # what failed is told already; a save under way may still become good
            self._thread.join(_GRACE_SECONDS)

    def load(self, checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> Restored:
        """See load_checkpoint; over the group of these ranks."""
        self.wait()
        restored = load_checkpoint(checkpoint, model, optimizer, self.ranks, self._group)
        self.latest = checkpoint
        return restored

    def _prepare(self, state: RunState, model: nn.Module, optimizer: Optimizer, rng: tuple[Tensor, ...]) -> _Job:
        """What this rank is to write: found out together, so that replicas share the work and the host's memory."""
        tensors: dict[str, Tensor] = {}
        ties: dict[str, str] = {}
        pieces: dict[PieceKey, WriteItem] = {}

        def look() -> tuple[dict[PieceKey, int], dict[str, str]]:
            named, tied = run_tensors(model, optimizer)
            tensors.update(named)
            tensors.update({f"{RNG}{self.ranks.rank}.{number}": part for number, part in enumerate(rng)})
            pieces.update(pieces_of(tensors))
            return {key: num_bytes(item) for key, item in pieces.items()}, tied

        answers = together(look, self._group, alone=self._group is None)
        for _, tied in answers:  # each stage of a pipeline knows its own
            ties |= tied
        mine = share_out([held for held, _ in answers], self.ranks.rank)
        items = [item for key, item in pieces.items() if key in mine]
        return _Job(state, ties, items, {item.index.fqn: local_part(tensors[item.index.fqn]) for item in items})

    def _write(self, job: _Job) -> None:
        final = checkpoint_path(self.folder, job.state.step)
        partial = partial_path(final)

        def begin() -> None:
            remove_partial(self.folder)
            partial.mkdir(parents=True)

        def finish(index: Index, files: dict[str, FileFacts]) -> None:
            finish_checkpoint(final, Manifest(job.state, self.ranks.mesh, job.ties, files), index, keep=self._keep)

        try:
            writer = ShardWriter(partial, self.ranks.rank, self.ranks.mesh.size, begin=begin, finish=finish)
            planner = PieceSavePlanner(job.items, job.parts)
            save({}, storage_writer=writer, planner=planner, process_group=self._group, no_dist=self._group is None)
        except BaseException as error:
            self._error = error

    def _explained(self, step: int, error: BaseException) -> BaseException:
        if isinstance(error, CheckpointException):
            error = first_failure(error)
        # A rank that is gone is named by those who watch, not by a save that missed it.
        if isinstance(error, TrainfitError) or not isinstance(error, Exception) or is_of_collective(error):
            return error
        what = " ".join(str(error).split()) or type(error).__name__
        move = "free some space there" if isinstance(error, OSError) else "go on from the last checkpoint with --resume"
        return TrainfitError(
            f"cannot save step {step} to {self.folder} ({what}); {move}; "
            f"the last checkpoint is {self.latest or 'not there'}"
        )
