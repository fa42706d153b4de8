"""Checkpoints: all that a run needs to go on to the bit, in safetensors and JSON, from any number of ranks.

NOTE [ A checkpoint is whole or absent ]
checkpoints/step-00000120/ holds the files of all ranks, index.json (where each part of each tensor is) and, written
last, checkpoint.json with size and SHA-256 of each of them. It is made in a .partial- folder: every rank syncs its own
files and says so, then rank 0 writes index and manifest, syncs, and one rename gives the folder its name. So a folder
with the name is whole; a kill of any rank leaves only a .partial- folder, which nothing reads and the next save
removes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from trainfit.errors import ResumeError
from trainfit.profile import Mesh
from trainfit.train.index import Index, index_from_json, index_to_json
from trainfit.train.packing import Position
from trainfit.train.storage import FileFacts, facts_of, fsync_folder, write_json

CHECKPOINTS_FOLDER = "checkpoints"
VERSION = 3
_FORMAT_NAME = "trainfit-checkpoint"
_PARTIAL = ".partial-"
_MANIFEST, _INDEX = "checkpoint.json", "index.json"
_NOT_OURS = "not a trainfit checkpoint, or only a part of one; name a run_folder that trainfit train wrote"


@dataclass(frozen=True)
class RunState:
    """The numbers of a run beside its tensors.

    step: updates done, skipped ones included. tokens: valid tokens trained on so far. recipe: its plain values as
    written. skipped_steps: of those. loss_scaling: Scaling.state() of a run in fp16.
    """

    step: int
    position: Position
    tokens: int
    recipe: Mapping[str, Any] = field(default_factory=dict)
    recipe_hash: str = ""
    plan_hash: str = ""
    skipped_steps: int = 0
    loss_scaling: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Manifest:
    """checkpoint.json. ties: other names of tied parameters. mesh: of the ranks that wrote it."""

    state: RunState
    mesh: Mesh
    ties: Mapping[str, str]
    files: Mapping[str, FileFacts]


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def partial_path(final: Path) -> Path:
    """Where a checkpoint is made."""
    return final.with_name(f"{_PARTIAL}{final.name}")


def list_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, first to last step."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir()) if folder.is_dir() else []


def remove_partial(folder: Path) -> None:
    """Removes what a killed save left behind."""
    for path in folder.glob(f"{_PARTIAL}step-*"):
        shutil.rmtree(path, ignore_errors=True)


def finish_checkpoint(final: Path, manifest: Manifest, index: Index, *, keep: int) -> None:
    """Makes a checkpoint of its partial folder, in which all files of all ranks lie, and removes all but the last keep.

    See NOTE [ A checkpoint is whole or absent ].
    """
    partial = partial_path(final)
    files = {**manifest.files, _INDEX: write_json(partial / _INDEX, index_to_json(index))}
    values = {
        "format": _FORMAT_NAME,
        "version": VERSION,
        **asdict(manifest.state),
        "mesh": asdict(manifest.mesh),
        "ties": dict(manifest.ties),
        "files": {name: asdict(facts) for name, facts in sorted(files.items())},
    }
    write_json(partial / _MANIFEST, values, indent=2)
    fsync_folder(partial)
    _publish(partial, final)
    for old in list_checkpoints(final.parent)[:-keep]:
        shutil.rmtree(_set_aside(old))


def _publish(partial: Path, final: Path) -> None:
    before = _set_aside(final) if final.exists() else None  # the same step, saved again after a resume
    partial.rename(final)
    fsync_folder(final.parent)
    if before is not None:
        shutil.rmtree(before)


def _set_aside(checkpoint: Path) -> Path:
    # Renamed first, so that a kill in the middle of the removal leaves no half checkpoint under a good name.
    doomed = checkpoint.with_name(f"{_PARTIAL}{checkpoint.name}-old")
    checkpoint.rename(doomed)
    return doomed


def read_state(checkpoint: Path) -> RunState:
    """The numbers of a checkpoint. Raises ResumeError when it is partial, foreign or of another format."""
    return read_manifest(checkpoint).state


def read_manifest(checkpoint: Path) -> Manifest:
    """What a checkpoint says of itself. Raises ResumeError when it is partial, foreign or of another format."""
    values = _read_values(checkpoint)
    try:
        state = RunState(**{each.name: values[each.name] for each in fields(RunState)})
        state = replace(state, position=Position(**values["position"]))
        numbers = (state.step, state.tokens, state.position.epoch, state.position.index, state.skipped_steps)
        if min(int(number) for number in numbers) < 0 or not isinstance(state.recipe, dict):
            raise ValueError(f"step, tokens and position are {numbers}")
        files = {name: FileFacts(**facts) for name, facts in values["files"].items()}
        manifest = Manifest(state, Mesh(**values["mesh"]), dict(values["ties"]), files)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(checkpoint / _MANIFEST, error) from None
    if _INDEX not in files:
        raise ResumeError(f"{checkpoint / _MANIFEST} says nothing of {_INDEX}: {_NOT_OURS}")
    for name, facts in files.items():
        file = checkpoint / name
        found = file.stat().st_size if file.is_file() else 0
        if found != facts.num_bytes:
            raise ResumeError(
                f"{file} has {found} bytes, {facts.num_bytes} were saved; remove {checkpoint} to go on before it"
            )
    return manifest


def _read_values(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / _MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ResumeError(f"{checkpoint} has no {_MANIFEST}: {_NOT_OURS}") from None
    except (OSError, ValueError) as error:
        raise ResumeError(f"{path} cannot be read ({error}): {_NOT_OURS}") from None
    if not isinstance(values, dict) or values.get("format") != _FORMAT_NAME or type(values.get("version")) is not int:
        raise ResumeError(f"{path} is not of format {_FORMAT_NAME}: {_NOT_OURS}")
    if (version := values["version"]) != VERSION:
        move = "upgrade it" if version > VERSION else "go on with the trainfit that saved it"
        raise ResumeError(f"{checkpoint} is of format version {version}, this trainfit reads version {VERSION}; {move}")
    return values


def read_index(checkpoint: Path) -> Index:
    """Raises ResumeError when it is damaged."""
    try:
        return index_from_json(json.loads((checkpoint / _INDEX).read_text(encoding="utf-8")))
    except (OSError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise _damaged(checkpoint / _INDEX, error) from None


def check_files(checkpoint: Path, manifest: Manifest, *, only: slice = slice(None), kind: str = "") -> None:
    """Raises ResumeError for a file that is not, to the bit, what was saved.

    only: which of them, in order of their names: a rank reads its share. kind: files whose names begin so.
    """
    for name in [name for name in sorted(manifest.files) if name.startswith(kind)][only]:
        if facts_of(checkpoint / name) != manifest.files[name]:
            raise ResumeError(
                f"{checkpoint / name} is not what was saved (SHA-256 differs); remove {checkpoint} to go on before it"
            )


def _damaged(path: Path, error: Exception) -> ResumeError:
    return ResumeError(f"{path} is damaged ({error}); remove {path.parent} to go on before it")
