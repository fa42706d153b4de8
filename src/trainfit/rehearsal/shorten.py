"""The same model with fewer blocks: what a rehearsal runs of a deep one, and what a tensor rank's trace needs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from trainfit.workload import Workload


def shortened(workload: Workload, kept: Sequence[int]) -> Workload | None:
    """The workload with some of its blocks; None where they are not one list that could be cut."""
    name = workload.anatomy().block_list
    return None if name is None else workload.changed(partial(_keep, name, tuple(kept)), f"{len(kept)}-blocks")


def _keep(container: str, indices: Sequence[int], model: nn.Module) -> None:
    parent, _, name = container.rpartition(".")
    blocks = model.get_submodule(container)
    assert isinstance(blocks, nn.ModuleList)
    setattr(model.get_submodule(parent), name, nn.ModuleList(blocks[index] for index in indices))
