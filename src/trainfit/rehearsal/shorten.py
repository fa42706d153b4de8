"""The same model with fewer blocks, for rehearsals that only have to say how far the fast model is off.

NOTE [ Short rehearsals ]
A rehearsal takes as long as the model has blocks and micro batches; with 80 blocks over 64 ranks that is half a minute.
What the fast model does not know (buffers of collectives, what is gathered ahead) is the same whatever the number of
blocks of one kind in a row. So candidates of large models are compared with a few blocks of each run, fast model and
rehearsal of the same short model, and only what is chosen is rehearsed whole.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from itertools import groupby

from torch import nn

from trainfit.workload import Workload


def shortened(workload: Workload, kept: Sequence[int]) -> Workload | None:
    """The workload with some of its blocks; None where they are not all in one list that could be cut."""
    names = workload.anatomy().blocks
    containers = {name.rpartition(".")[0] for name in names}
    if len(containers) != 1 or not all(name.rpartition(".")[2].isdecimal() for name in names):
        return None
    container = containers.pop()
    if not isinstance(workload.meta_model().get_submodule(container), nn.ModuleList):
        return None
    indices = [int(names[block].rpartition(".")[2]) for block in kept]
    return workload.changed(partial(_keep, container, indices), f"{len(kept)}-blocks")


def _keep(container: str, indices: Sequence[int], model: nn.Module) -> None:
    parent, _, name = container.rpartition(".")
    blocks = model.get_submodule(container)
    assert isinstance(blocks, nn.ModuleList)
    setattr(model.get_submodule(parent), name, nn.ModuleList(blocks[index] for index in indices))


def sample(kinds: Sequence[Hashable], parts: Sequence[Sequence[int]]) -> list[int]:
    """Blocks that stand for all: of each pipeline stage as many, two of each run of one kind where there are two.

    kinds: of each block. parts: the blocks of each stage. All blocks where stages cannot be made equal.
    """
    runs = [[list(run) for _, run in groupby(part, key=lambda block: kinds[block])] for part in parts]
    count = max(max(sum(min(2, len(run)) for run in part) for part in runs), 3)
    if any(len(part) < count for part in parts):
        return [block for part in parts for block in part]
    return [block for part in runs for block in _take(part, count)]


def _take(runs: Sequence[Sequence[int]], count: int) -> list[int]:
    """So many blocks, two of each run first, then more of the longest."""
    taken = [min(2, len(run)) for run in runs]
    while sum(taken) < count:
        longest = max(range(len(runs)), key=lambda number: len(runs[number]) - taken[number])
        taken[longest] += 1
    return [block for run, number in zip(runs, taken) for block in run[:number]]
