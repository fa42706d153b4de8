"""Shards: a run's tensors in safetensors files by way of torch.distributed.checkpoint (DCP).

NOTE [ What DCP does here and what it does not ]
DCP says which part of which tensor a rank holds, checks that all parts make up the whole, finds for any other layout
what must be read from where, and carries a failure of one rank to all. The files are our own: nothing in them is
pickled, each is streamed and hashed as it is written, and one index says where every part is. Why not DCP's own
writers: docs/design/checkpoints.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from trainfit.train.index import Chunk, Index, SavedTensor, key_in_file
from trainfit.train.pieces import PieceKey, num_bytes
from trainfit.train.state import MODEL, OPTIMIZER, RNG, Kind
from trainfit.train.storage import DTYPE_NAMES, DTYPES_BY_NAME, Entry, FileFacts, write_safetensors

# One process needs no process group, which DCP would remark on at every save.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


@dataclass(frozen=True)
class _Written:
    """In a WriteResult: where a piece went, and what its file came to."""

    file: str
    facts: FileFacts


class ShardWriter(StorageWriter):
    """Writes a rank's pieces to one file for each of model, optimizer and rng."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        num_ranks: int,
        *,
        begin: Callable[[], None],
        finish: Callable[[Index, dict[str, FileFacts]], None],
    ) -> None:
        """begin is called on rank 0 before, finish on rank 0 after any rank has written anything."""
        self._folder, self._rank, self._num_ranks = folder, rank, num_ranks
        self._begin, self._finish = begin, finish

    def reset(self, checkpoint_id: Any = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self._begin()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for prefix in (MODEL, OPTIMIZER, RNG):
            items = [item for item in plan.items if item.index.fqn.startswith(prefix)]
            if items:
                results += self._write_file(self._file_name(prefix), items, planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _file_name(self, prefix: str) -> str:
        part = "" if self._num_ranks == 1 else f"-{self._rank + 1:05d}-of-{self._num_ranks:05d}"
        return f"{prefix[:-1]}{part}.safetensors"

    def _write_file(self, file: str, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        entries: dict[str, Entry] = {}
        for item in items:
            assert item.tensor_data is not None
            key, data = key_in_file(item.index.fqn), item.tensor_data
            assert key not in entries, "a rank has one part of a tensor"
            entries[key] = Entry(data.properties.dtype, tuple(data.chunk.sizes), partial(_resolve, planner, item))
        facts = write_safetensors(self._folder / file, entries)
        return [WriteResult(item.index, num_bytes(item), _Written(file, facts)) for item in items]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written: dict[PieceKey, _Written] = {}
        for result in (result for of_rank in results for result in of_rank):
            assert result.index.offset is not None
            written[result.index.fqn, tuple(result.index.offset)] = result.storage_data
        index: Index = {}
        for name, saved in metadata.state_dict_metadata.items():
            assert isinstance(saved, TensorStorageMetadata)
            chunks = [
                Chunk(written[name, tuple(chunk.offsets)].file, tuple(chunk.offsets), tuple(chunk.sizes))
                for chunk in saved.chunks
            ]
            kind = Kind(tuple(saved.size), DTYPE_NAMES[saved.properties.dtype])
            index[name] = SavedTensor(key_in_file(name), kind, tuple(chunks))
        self._finish(index, {where.file: where.facts for where in written.values()})


def _resolve(planner: SavePlanner, item: WriteItem) -> Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor)
    return tensor


class ShardReader(StorageReader):
    """Reads the parts that a rank wants, whoever wrote them."""

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder, self._index = folder, index

    def reset(self, checkpoint_id: Any = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: _metadata_of(saved) for name, saved in self._index.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[ReadItem, SavedTensor, Chunk]]] = {}
        for item in plan.items:
            saved = self._index[item.storage_index.fqn]
            assert item.storage_index.index is not None
            chunk = saved.chunks[item.storage_index.index]
            by_file.setdefault(chunk.file, []).append((item, saved, chunk))
        for name, wanted in by_file.items():
            with torch.no_grad(), safe_open(self._folder / name, framework="pt") as file:
                for item, saved, chunk in wanted:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_read_part(file, saved.key, chunk, item))
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _read_part(file: Any, key: str, chunk: Chunk, item: ReadItem) -> Any:
    if tuple(item.lengths) == chunk.sizes:
        return file.get_tensor(key)
    return file.get_slice(key)[tuple(slice(at, at + n) for at, n in zip(item.storage_offsets, item.lengths))]


def _metadata_of(saved: SavedTensor) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=DTYPES_BY_NAME[saved.kind.dtype]),
        torch.Size(saved.kind.shape),
        [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in saved.chunks],
    )
