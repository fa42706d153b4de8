"""Safetensors files, written one tensor at a time and hashed on their way to the disk.

`safetensors.torch.save_file` wants all tensors of a file in memory at once. Here each is read when its turn comes, so
that neither a save nor an export holds more than one tensor beside what is there already.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainfit.errors import ModelError

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_ALIGNMENT = 8


@dataclass(frozen=True)
class Entry:
    """A tensor of a file to be written. read gives it when its turn comes, on any device."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileFacts:
    """What a file must be, to the bit."""

    num_bytes: int
    sha256: str


def write_safetensors(path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str] | None = None) -> FileFacts:
    """Writes and fsyncs a file. Raises OSError when it cannot, ModelError for a dtype the format lacks."""
    # The widest first, as the format's own writer does: each tensor then lies where its dtype wants it.
    order = sorted(entries, key=lambda name: (-entries[name].dtype.itemsize, name))
    header = _header({name: entries[name] for name in order}, metadata or {})
    digest, num_bytes = hashlib.sha256(header), len(header)
    with path.open("wb") as file:
        file.write(header)
        for name in order:
            data = _bytes_of(entries[name])
            file.write(data)
            digest.update(data)
            num_bytes += len(data)
            del data  # before the next is read
        file.flush()
        os.fsync(file.fileno())
    return FileFacts(num_bytes, digest.hexdigest())


def write_json(path: Path, values: Any, *, indent: int | None = None) -> FileFacts:
    """Writes and fsyncs a JSON file."""
    data = json.dumps(values, indent=indent).encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileFacts(len(data), hashlib.sha256(data).hexdigest())


def facts_of(path: Path) -> FileFacts:
    """What a file is; no bytes where there is none."""
    if not path.is_file():
        return FileFacts(0, "")
    with path.open("rb") as file:
        return FileFacts(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def fsync_folder(path: Path) -> None:
    """Makes the names in a folder last; each file's content is synced by whoever wrote it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _header(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    values: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, entry in entries.items():
        if entry.dtype not in DTYPE_NAMES:
            raise ModelError(f"{name} is {entry.dtype}, which safetensors files cannot hold; save it as another dtype")
        start, end = end, end + entry.num_bytes
        values[name] = {"dtype": DTYPE_NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(values, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(entry: Entry) -> memoryview:
    tensor = entry.read().detach()
    assert tensor.dtype == entry.dtype
    assert tuple(tensor.shape) == entry.shape
    # One dimension first: a 0-dim tensor cannot be viewed as bytes.
    return tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
