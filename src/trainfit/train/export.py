"""export_safetensors: a checkpoint as a Hugging Face model folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trainfit.errors import InputError, ResumeError
from trainfit.train.checkpoint import CHECKPOINTS_FOLDER, check_files, list_checkpoints, read_index, read_manifest
from trainfit.train.index import Index, SavedTensor, read_tensor
from trainfit.train.model import recipe_workload
from trainfit.train.recipe import Recipe
from trainfit.train.state import MODEL
from trainfit.train.storage import DTYPES_BY_NAME, Entry, fsync_folder, write_json, write_safetensors

MAX_SHARD_BYTES = 5 * 10**9
_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"


@dataclass(frozen=True)
class Exported:
    """What was written. notes: what the folder lacks, and why."""

    folder: Path
    checkpoint: Path
    step: int
    num_parameters: int
    num_bytes: int
    files: tuple[str, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values with the documented keys of `export --json`."""
        return {**asdict(self), "folder": str(self.folder), "checkpoint": str(self.checkpoint)}


def find_checkpoint(run_or_checkpoint: Path) -> Path:
    """A checkpoint's own folder, or the last checkpoint of a run folder. Raises ResumeError when there is none."""
    folder = run_or_checkpoint / CHECKPOINTS_FOLDER
    if folder.is_dir() and (found := list_checkpoints(folder)):
        return found[-1]
    if folder.is_dir() or not run_or_checkpoint.is_dir():
        raise ResumeError(f"{run_or_checkpoint} has no checkpoint; name a run_folder that trainfit train wrote")
    return run_or_checkpoint


def export_safetensors(checkpoint: Path, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> Exported:
    """Writes model-0000x-of-0000y.safetensors with their index, config.json and tokenizer.json where they are known.

    One shard is model.safetensors without an index, as transformers has it. Holds one tensor at a time. Tied parameters
    are written once, under the name that transformers ties the others to. The folder is there when it is whole.
    Raises ResumeError for a checkpoint that is damaged, InputError for a folder that holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is there already; name a new folder")
    manifest = read_manifest(checkpoint)
    for kind in (MODEL[:-1], "index"):
        check_files(checkpoint, manifest, kind=kind)
    tensors = {name.removeprefix(MODEL): t for name, t in read_index(checkpoint).items() if name.startswith(MODEL)}
    partial = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_shards(checkpoint, tensors, partial, max_shard_bytes)
    notes = _write_config(manifest.state.recipe, tensors, partial)
    tokenizer = checkpoint.parent.parent / "data" / _TOKENIZER
    if tokenizer.is_file():
        shutil.copyfile(tokenizer, partial / _TOKENIZER)
    fsync_folder(partial)
    partial.replace(folder)
    return Exported(
        folder=folder,
        checkpoint=checkpoint,
        step=manifest.state.step,
        num_parameters=sum(torch.Size(tensor.kind.shape).numel() for tensor in tensors.values()),
        num_bytes=sum(path.stat().st_size for path in folder.iterdir()),
        files=tuple(sorted(path.name for path in folder.iterdir())),
        notes=notes,
    )


def _write_shards(checkpoint: Path, tensors: Index, folder: Path, max_shard_bytes: int) -> None:
    shards = _split(tensors, max_shard_bytes)
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        entries = {key: _entry(checkpoint, tensor) for key, tensor in shard.items()}
        write_safetensors(folder / name, entries, {"format": "pt"})
    if len(shards) > 1:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in sorted(shard)}
        total = sum(_num_bytes(tensor) for tensor in tensors.values())
        write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": weight_map},
            indent=2,
        )


def _split(tensors: Index, max_shard_bytes: int) -> list[Index]:
    """Tensors in order, as many to a shard as it holds; one that is larger than a shard has its own."""
    shards: list[Index] = [{}]
    size = 0
    for name, tensor in tensors.items():
        num_bytes = _num_bytes(tensor)
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += num_bytes
    return shards


def _entry(checkpoint: Path, tensor: SavedTensor) -> Entry:
    return Entry(DTYPES_BY_NAME[tensor.kind.dtype], tensor.kind.shape, lambda: read_tensor(checkpoint, tensor))


def _num_bytes(tensor: SavedTensor) -> int:
    return torch.Size(tensor.kind.shape).numel() * DTYPES_BY_NAME[tensor.kind.dtype].itemsize


def _write_config(recipe: Mapping[str, Any], tensors: Index, folder: Path) -> tuple[str, ...]:
    """config.json of the recipe's model; a note instead where it cannot be had."""
    try:
        with torch.device("meta"):
            model = recipe_workload(Recipe.model_validate(recipe)).make_model()
    except ValueError as error:  # pydantic's, and InputError: a path that was the training machine's
        return (f"without {_CONFIG}: {' '.join(str(error).split())[:200]}; copy the model's own into the folder",)
    config: Any = model.config
    config.architectures = [type(model).__name__]
    dtypes = [DTYPES_BY_NAME[tensor.kind.dtype] for tensor in tensors.values()]
    config.dtype = next(dtype for dtype in dtypes if dtype.is_floating_point)
    (folder / _CONFIG).write_text(config.to_json_string(), encoding="utf-8")
    missing = model.state_dict().keys() - tensors.keys() - _tied(model)
    if missing:
        return (f"{len(missing)} tensors of the model are not in the checkpoint, such as {min(missing)}",)
    return ()


def _tied(model: torch.nn.Module) -> set[str]:
    """Names whose tensor lies under another name."""
    seen: set[int] = set()
    tied: set[str] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in seen:
            tied.add(name)
        seen.add(id(value))
    return tied
