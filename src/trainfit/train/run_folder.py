"""RunFolder: where a run keeps plan.json, recipe.json, config.json, data/, metrics, checkpoints/ and summary.json."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainfit.errors import RecipeError, ResumeError
from trainfit.train.checkpoint import CHECKPOINTS_FOLDER, list_checkpoints
from trainfit.train.metrics import METRICS_FILE, TENSORBOARD_FOLDER

SUMMARY_FILE = "summary.json"
CONFIG_FILE = "config.json"
_OF_ONE_RUN = (
    "plan.json",
    "recipe.json",
    CONFIG_FILE,
    METRICS_FILE,
    TENSORBOARD_FOLDER,
    CHECKPOINTS_FOLDER,
    SUMMARY_FILE,
)


class RunFolder:
    """A run's folder, checked to be writable before anything long begins."""

    def __init__(self, path: Path) -> None:
        """Makes the folder where it is missing. Raises RecipeError when it cannot be written to."""
        self.path = path
        self._made = [parent for parent in (path, *path.parents) if not parent.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / f".partial-probe-{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            reason = error.strerror
            if self._made:
                nearest = next(parent for parent in path.absolute().parents if parent.exists())
                reason = f"{nearest} takes no new folder: {reason}"
            raise RecipeError(
                f"cannot write to run_folder {path} ({reason}); set run_folder= to a folder on a disk that you may "
                "write to, such as run_folder=runs/first"
            ) from None

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS_FOLDER

    def latest_checkpoint(self) -> Path:
        """Raises ResumeError when there is none."""
        if not (found := list_checkpoints(self.checkpoints)):
            raise ResumeError(f"{self.path} has no checkpoint to resume from; leave out --resume or set run_folder=")
        return found[-1]

    def refuse_before_planning(self) -> None:
        """What train() itself would refuse, early and without a trace: planning takes its time."""
        try:
            self.refuse_unfinished()
        finally:
            self.undo()

    def refuse_unfinished(self) -> None:
        """Raises ResumeError when the folder holds a run that can go on: nobody loses one by forgetting --resume."""
        found = list_checkpoints(self.checkpoints)
        if found and not (self.path / SUMMARY_FILE).exists():
            raise ResumeError(
                f"{self.path} holds an unfinished run, saved at {found[-1].name}; go on with --resume, "
                "or start anew in another run_folder="
            )

    def archive(self) -> Path | None:
        """Moves an earlier run to earlier-N/ and returns that folder; data/ stays, to be used again."""
        present = [name for name in _OF_ONE_RUN if (self.path / name).exists()]
        if not present:
            return None
        number = 1
        while (archive := self.path / f"earlier-{number}").exists():
            number += 1
        archive.mkdir()
        for name in present:
            (self.path / name).rename(archive / name)
        return archive

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Writes name whole or not at all."""
        partial = self.path / f".partial-{name}"
        partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, self.path / name)

    def begin(
        self, plan: Mapping[str, Any], recipe: Mapping[str, Any], config: Mapping[str, Any] | None = None
    ) -> None:
        """Writes what this run is about to do; a summary of an earlier part of it no longer holds.

        config: of a transformers model, so that an export need not find it where the recipe did.
        """
        self.write_json("plan.json", plan)
        self.write_json("recipe.json", recipe)
        if config is not None:
            self.write_json(CONFIG_FILE, config)
        (self.path / SUMMARY_FILE).unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else trains here meanwhile. Raises ResumeError when somebody does; a killed run's lock is free."""
        folder = os.open(self.path, os.O_RDONLY)  # the folder itself is locked: no file to forget
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise ResumeError(f"another run is writing to {self.path}; wait for it or set run_folder=") from None
        finally:
            os.close(folder)

    def undo(self) -> None:
        """Removes folders that this object made and that hold nothing: a run that never began leaves no trace."""
        for folder in self._made:
            if folder.exists() and not any(folder.iterdir()):
                shutil.rmtree(folder)
