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
from trainfit.train.index import Index
from trainfit.train.merge import merged_entries, write_adapter
from trainfit.train.model import recipe_workload
from trainfit.train.recipe import Recipe
from trainfit.train.run_folder import CONFIG_FILE
from trainfit.train.state import MODEL
from trainfit.train.storage import Entry, fsync_folder, write_json, write_safetensors
from trainfit.workload.names import base_name, is_adapter_name

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


def export_safetensors(
    checkpoint: Path, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES, *, adapter_only: bool = False
) -> Exported:
    """Writes model-0000x-of-0000y.safetensors with their index, config.json and tokenizer.json where they are known.

    One shard is model.safetensors without an index, as transformers has it. Holds one tensor at a time. Tied parameters
    are written once, under the name that transformers ties the others to. An adapter is merged into its weights;
    adapter_only writes it alone, as PEFT does. The folder is there when it is whole.
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
    try:
        entries, notes = _write(checkpoint, manifest.state.recipe, tensors, partial, max_shard_bytes, adapter_only)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    tokenizer = checkpoint.parent.parent / "data" / _TOKENIZER
    if tokenizer.is_file():
        shutil.copyfile(tokenizer, partial / _TOKENIZER)
    fsync_folder(partial)
    partial.replace(folder)
    return Exported(
        folder=folder,
        checkpoint=checkpoint,
        step=manifest.state.step,
        num_parameters=sum(torch.Size(entry.shape).numel() for entry in entries.values()),
        num_bytes=sum(path.stat().st_size for path in folder.iterdir()),
        files=tuple(sorted(path.name for path in folder.iterdir())),
        notes=notes,
    )


def _write(
    checkpoint: Path,
    written: Mapping[str, Any],
    tensors: Index,
    folder: Path,
    max_shard_bytes: int,
    adapter_only: bool,
) -> tuple[dict[str, Entry], tuple[str, ...]]:
    """The weights, or the adapter, and their config. written: the recipe as the checkpoint has it."""
    try:
        recipe = _with_own_config(Recipe.model_validate(written), checkpoint)
        workload = recipe_workload(recipe)
        model = workload.meta_model()
    except ValueError as error:  # pydantic's, and InputError: a path that was the training machine's
        if adapter_only:
            raise
        entries = merged_entries(checkpoint, tensors, None)
        _write_shards(entries, folder, max_shard_bytes)
        reason = " ".join(str(error).split())[:200]
        return entries, (f"without {_CONFIG}: {reason}; copy the model's own into the folder",)
    if adapter_only:
        return write_adapter(checkpoint, tensors, recipe, folder), ()
    entries = merged_entries(checkpoint, tensors, model)
    _write_shards(entries, folder, max_shard_bytes)
    return entries, _write_config(model, entries, folder)


def _with_own_config(recipe: Recipe, checkpoint: Path) -> Recipe:
    """The recipe with the config that the run kept, whose path does not depend on where the recipe was."""
    config = checkpoint.parent.parent / CONFIG_FILE
    return recipe.model_copy(update={"model": str(config.resolve())}) if config.is_file() else recipe


def _write_shards(entries: Mapping[str, Entry], folder: Path, max_shard_bytes: int) -> None:
    shards = _split(entries, max_shard_bytes)
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard, {"format": "pt"})
    if len(shards) > 1:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in sorted(shard)}
        total = sum(entry.num_bytes for entry in entries.values())
        write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": weight_map},
            indent=2,
        )


def _split(entries: Mapping[str, Entry], max_shard_bytes: int) -> list[dict[str, Entry]]:
    """Tensors in order, as many to a shard as it holds; one that is larger than a shard has its own."""
    shards: list[dict[str, Entry]] = [{}]
    size = 0
    for name, entry in entries.items():
        if shards[-1] and size + entry.num_bytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = entry
        size += entry.num_bytes
    return shards


def _write_config(model: torch.nn.Module, entries: Mapping[str, Entry], folder: Path) -> tuple[str, ...]:
    """config.json of the model, in the widest dtype that was written; a note where a tensor is missing."""
    config: Any = model.config
    config.architectures = [type(model).__name__]
    dtypes = [entry.dtype for entry in entries.values() if entry.dtype.is_floating_point]
    config.dtype = max(dtypes, key=lambda dtype: dtype.itemsize)
    (folder / _CONFIG).write_text(config.to_json_string(), encoding="utf-8")
    expected = {base_name(name) for name in model.state_dict() if not is_adapter_name(name)}
    missing = expected - entries.keys() - {base_name(name) for name in _tied(model)}
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
