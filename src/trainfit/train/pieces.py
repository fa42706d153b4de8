"""Pieces: the parts of tensors that a rank holds, and which of them it writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from trainfit.errors import ModelError
from trainfit.hardware.ranks import local_part

PieceKey = tuple[str, tuple[int, ...]]  # name of the tensor, offsets of the piece in it


def pieces_of(tensors: Mapping[str, Tensor]) -> dict[PieceKey, WriteItem]:
    """The parts that this rank holds. Raises ModelError for a tensor that is not where its placements say."""
    pieces: dict[PieceKey, WriteItem] = {}
    for item in create_default_local_save_plan(dict(tensors), is_coordinator=True).items:
        assert item.tensor_data is not None
        chunk, size = item.tensor_data.chunk, item.tensor_data.size
        if tuple(local_part(tensors[item.index.fqn]).shape) != tuple(chunk.sizes):
            raise ModelError(
                f"{item.index.fqn} holds {tuple(local_part(tensors[item.index.fqn]).shape)} on this rank where its "
                f"placements say {tuple(chunk.sizes)}; it cannot be saved"
            )
        # More ranks than rows: a rank without a row has nothing to write, unless there is no row at all.
        if prod(chunk.sizes) or not prod(size):
            pieces[item.index.fqn, tuple(chunk.offsets)] = item
    return pieces


def num_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def share_out(held: Sequence[Mapping[PieceKey, int]], rank: int) -> set[PieceKey]:
    """Which pieces a rank writes. held: by rank, the bytes of each piece that it has.

    Each piece is written once, by that of its holders which has the least to write so far; all ranks come to the same
    answer. DCP would find out at the time of writing, when each replica had copied the whole model to its host.
    """
    holders: dict[PieceKey, list[int]] = {}
    for number, pieces in enumerate(held):
        for key in pieces:
            holders.setdefault(key, []).append(number)
    loads = [0] * len(held)
    mine: set[PieceKey] = set()
    # Those without a choice first, then the largest: what comes last evens out the rest.
    for key in sorted(holders, key=lambda key: (len(holders[key]), -held[holders[key][0]][key], key)):
        writer = min(holders[key], key=loads.__getitem__)
        loads[writer] += held[writer][key]
        if writer == rank:
            mine.add(key)
    return mine


class PieceSavePlanner(DefaultSavePlanner):
    """Plans the pieces given; the check that all ranks' pieces make up whole tensors is DCP's own."""

    def __init__(self, items: Iterable[WriteItem], parts: Mapping[str, Tensor]) -> None:
        """parts: this rank's part of each tensor that items name, on any device."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._items, self._parts = list(items), parts

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._parts[write_item.index.fqn]
