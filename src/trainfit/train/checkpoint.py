"""Checkpoints: all that a run needs to go on to the bit, in safetensors and JSON.

NOTE [ A checkpoint is whole or absent ]
checkpoints/step-00000120/ holds model.safetensors, optimizer.safetensors, rng.safetensors and, written last,
checkpoint.json with the size of each. It is made in a .partial- folder, every file and the folder are fsynced, and one
rename gives it its name. So a folder with the name is whole; a kill leaves only a .partial- folder, which nothing reads
and the next save removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from trainfit.errors import ResumeError
from trainfit.train.packing import Position
from trainfit.train.state import check_same, copy_into, model_tensors, optimizer_tensors, read_tensors

CHECKPOINTS_FOLDER = "checkpoints"
VERSION = 1
_FORMAT_NAME = "trainfit-checkpoint"
_PARTIAL = ".partial-"
_MANIFEST = "checkpoint.json"
_FILES = ("model.safetensors", "optimizer.safetensors", "rng.safetensors")
_NOT_OURS = "not a trainfit checkpoint, or only a part of one; name a run_folder that trainfit train wrote"


@dataclass(frozen=True)
class RunState:
    """The numbers of a run beside its tensors.

    step: updates done. tokens: valid tokens trained on so far. recipe: its plain values as written.
    """

    step: int
    position: Position
    tokens: int
    recipe: Mapping[str, Any] = field(default_factory=dict)
    recipe_hash: str = ""
    plan_hash: str = ""


def save_checkpoint(
    folder: Path, state: RunState, model: nn.Module, optimizer: Optimizer, rng: tuple[Tensor, ...], *, keep: int
) -> Path:
    """Writes folder/step-N atomically, then removes all but the last keep. Returns the new folder.

    See NOTE [ A checkpoint is whole or absent ]. Raises OSError when the disk is full or not writable.
    """
    final = folder / f"step-{state.step:08d}"
    partial = folder / f"{_PARTIAL}{final.name}"
    remove_partial(folder)
    partial.mkdir(parents=True)
    tensors, ties = model_tensors(model)
    contents = (tensors, optimizer_tensors(model, optimizer), {str(i): part for i, part in enumerate(rng)})
    for name, content in zip(_FILES, contents, strict=True):
        save_file({key: tensor.detach().contiguous() for key, tensor in content.items()}, partial / name)
    manifest = {
        "format": _FORMAT_NAME,
        "version": VERSION,
        **asdict(state),
        "ties": ties,
        "file_bytes": {name: (partial / name).stat().st_size for name in _FILES},
        "file_sha256": {name: _sha256(partial / name) for name in _FILES},
    }
    (partial / _MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    for path in (*(partial / name for name in (*_FILES, _MANIFEST)), partial):
        _fsync(path)
    _publish(partial, final)
    for old in list_checkpoints(folder)[:-keep]:
        _discard(old)
    return final


def _publish(partial: Path, final: Path) -> None:
    if final.exists():  # the same step, saved again after a resume
        _discard(final)
    partial.rename(final)
    _fsync(final.parent)


def _discard(checkpoint: Path) -> None:
    # Renamed first, so that a kill in the middle of the removal leaves no half checkpoint under a good name.
    doomed = checkpoint.with_name(f"{_PARTIAL}{checkpoint.name}-old")
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def list_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, first to last step."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir()) if folder.is_dir() else []


def remove_partial(folder: Path) -> None:
    """Removes what a killed save left behind."""
    for path in folder.glob(f"{_PARTIAL}step-*"):
        shutil.rmtree(path, ignore_errors=True)


def read_state(checkpoint: Path) -> RunState:
    """The numbers of a checkpoint. Raises ResumeError when it is partial, foreign or of a newer format."""
    manifest = _read_manifest(checkpoint)
    try:
        state = RunState(**{each.name: manifest[each.name] for each in fields(RunState)})
        state = replace(state, position=Position(**manifest["position"]))
        numbers = (state.step, state.tokens, state.position.epoch, state.position.index)
        if min(int(number) for number in numbers) < 0 or not isinstance(state.recipe, dict):
            raise ValueError(f"step, tokens and position are {numbers}")
    except (TypeError, ValueError, AttributeError) as error:
        raise ResumeError(
            f"{checkpoint / _MANIFEST} is damaged ({error}); remove {checkpoint} to go on before it"
        ) from None
    return state


def load_checkpoint(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> tuple[Tensor, ...]:
    """Copies a checkpoint into model and optimizer, in place, and returns the RNG state for the caller to set.

    Everything is compared before anything is written: ResumeError leaves model and optimizer as they were.
    """
    manifest = _read_manifest(checkpoint)
    model_file, optimizer_file, rng_file = (checkpoint / name for name in _FILES)
    wanted, ties = model_tensors(model)
    states = optimizer_tensors(model, optimizer)
    check_same(model_file, wanted)
    check_same(optimizer_file, states)
    if ties != manifest["ties"]:
        raise ResumeError(
            f"{checkpoint} has {len(manifest['ties'])} tied parameters {_names(manifest['ties'])}, this model has "
            f"{len(ties)} {_names(ties)}; resume with the recipe that saved it, or use another run_folder"
        )
    rng = read_tensors(rng_file)
    if missing := [number for number in range(len(rng)) if str(number) not in rng]:
        raise ResumeError(f"{rng_file} lacks the state of generator {missing[0]}; use an older checkpoint")
    copy_into(model_file, wanted)
    copy_into(optimizer_file, states)
    return tuple(rng[str(number)] for number in range(len(rng)))


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / _MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ResumeError(f"{checkpoint} has no {_MANIFEST}: {_NOT_OURS}") from None
    except (OSError, ValueError) as error:
        raise ResumeError(f"{path} cannot be read ({error}): {_NOT_OURS}") from None
    if (
        not isinstance(manifest, dict)
        or manifest.get("format") != _FORMAT_NAME
        or not isinstance(manifest.get("version"), int)
    ):
        raise ResumeError(f"{path} is not of format {_FORMAT_NAME}: {_NOT_OURS}")
    if manifest["version"] > VERSION:
        raise ResumeError(
            f"{checkpoint} is of format version {manifest['version']}, this trainfit reads up to {VERSION}; upgrade it"
        )
    if missing := sorted({"ties", "file_bytes", "file_sha256", *(f.name for f in fields(RunState))} - manifest.keys()):
        raise ResumeError(f"{path} lacks {missing[0]}: {_NOT_OURS}")
    for name in _FILES:
        _check_file(checkpoint, name, manifest)
    return manifest


def _check_file(checkpoint: Path, name: str, manifest: Mapping[str, Any]) -> None:
    """Raises ResumeError for a file that is not, to the bit, what was saved."""
    file = checkpoint / name
    try:
        saved_bytes, saved_sha256 = manifest["file_bytes"][name], manifest["file_sha256"][name]
    except (KeyError, TypeError):
        raise ResumeError(f"{checkpoint / _MANIFEST} says nothing of {name}: {_NOT_OURS}") from None
    found = file.stat().st_size if file.is_file() else 0
    if found != saved_bytes:
        raise ResumeError(f"{file} has {found} bytes, {saved_bytes} were saved; remove {checkpoint} to go on before it")
    if _sha256(file) != saved_sha256:
        raise ResumeError(f"{file} is not what was saved (SHA-256 differs); remove {checkpoint} to go on before it")


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _names(ties: Mapping[str, str]) -> str:
    return f"({', '.join(sorted(ties)[:2])})" if ties else ""


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
