"""Index: which file holds which part of which tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from trainfit.train.state import Kind
from trainfit.train.storage import DTYPES_BY_NAME


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor in a file."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class SavedTensor:
    """Where a tensor is. key: its name in each file."""

    key: str
    kind: Kind
    chunks: tuple[Chunk, ...]


Index = dict[str, SavedTensor]


def index_to_json(index: Index) -> dict[str, Any]:
    files = sorted({chunk.file for saved in index.values() for chunk in saved.chunks})
    numbers = {file: number for number, file in enumerate(files)}
    tensors = {
        name: {
            "dtype": saved.kind.dtype,
            "shape": saved.kind.shape,
            "chunks": [[numbers[chunk.file], chunk.offsets, chunk.sizes] for chunk in saved.chunks],
        }
        for name, saved in index.items()
    }
    return {"files": files, "tensors": tensors}


def index_from_json(values: Mapping[str, Any]) -> Index:
    """The inverse of index_to_json. Raises KeyError, TypeError or ValueError for anything else."""
    files = values["files"]
    return {
        name: SavedTensor(
            key=key_in_file(name),
            kind=Kind(tuple(saved["shape"]), saved["dtype"]),
            chunks=tuple(Chunk(files[n], tuple(offsets), tuple(sizes)) for n, offsets, sizes in saved["chunks"]),
        )
        for name, saved in values["tensors"].items()
    }


def key_in_file(name: str) -> str:
    """A tensor's name without the kind that its file is of."""
    return name.partition("/")[2]


def read_tensor(folder: Path, saved: SavedTensor) -> Tensor:
    """A whole tensor on the host, put together from its parts."""
    if len(saved.chunks) == 1:
        with safe_open(folder / saved.chunks[0].file, framework="pt") as file:
            whole: Tensor = file.get_tensor(saved.key)
        return whole
    tensor = torch.empty(saved.kind.shape, dtype=DTYPES_BY_NAME[saved.kind.dtype])
    for chunk in saved.chunks:
        with safe_open(folder / chunk.file, framework="pt") as file:
            tensor[tuple(slice(at, at + n) for at, n in zip(chunk.offsets, chunk.sizes))] = file.get_tensor(saved.key)
    return tensor
