"""load_checkpoint: a checkpoint of any ranks and stage into this rank's part of a model and its optimizer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from trainfit.errors import ResumeError
from trainfit.hardware import Accelerator, Ranks
from trainfit.hardware.together import together
from trainfit.profile import Mesh
from trainfit.train.checkpoint import Manifest, RunState, check_files, read_index, read_manifest
from trainfit.train.index import Index
from trainfit.train.shards import ShardReader
from trainfit.train.state import RNG, Kind, check_same, check_ties, other_names, run_tensors, split_name
from trainfit.train.storage import DTYPES_BY_NAME


@dataclass(frozen=True)
class Restored:
    """What the caller sets after a load.

    rng: this rank's generators; None where the checkpoint has none for it, and seed takes their place.
    """

    rng: tuple[Tensor, ...] | None
    seed: int
    notes: tuple[str, ...]

    def set_rng(self, accelerator: Accelerator) -> None:
        """Raises DeviceError for generators of another kind of device."""
        if self.rng is None:
            torch.manual_seed(self.seed)
        else:
            accelerator.rng.set_state(self.rng)


@dataclass(frozen=True)
class _Look:
    """What a rank tells the others before anything is read: the step it sees, and what it wants."""

    state: RunState
    kinds: dict[str, Kind]
    ties: dict[str, str]


def load_checkpoint(
    checkpoint: Path, model: nn.Module, optimizer: Optimizer, ranks: Ranks, group: dist.ProcessGroup | None
) -> Restored:
    """Copies a checkpoint into model and optimizer, in place.

    Everything is compared before anything is written, on all ranks: ResumeError, the same on every rank, leaves all as
    they were. group: of these ranks, for host tensors; None for a single process.
    """
    opened: list[tuple[Manifest, Index, dict[str, Tensor]]] = []

    def look() -> _Look:
        manifest = read_manifest(checkpoint)
        # Each rank reads its share of the files once more than it must, and together they have read all.
        check_files(checkpoint, manifest, only=slice(ranks.rank, None, ranks.mesh.size))
        tensors, ties = run_tensors(model, optimizer)
        opened.append((manifest, read_index(checkpoint), tensors))
        return _Look(manifest.state, {name: Kind.of(tensor) for name, tensor in tensors.items()}, ties)

    looks = together(look, group, alone=group is None)
    manifest, index, tensors = opened[0]
    index = _agree(checkpoint, manifest, index, looks, ranks)
    rng = _rng_targets(index, _rng_source(manifest.mesh, ranks))
    try:
        load(
            {**tensors, **rng},
            storage_reader=ShardReader(checkpoint, index),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as failed:
        error = first_failure(failed)
        raise ResumeError(f"{checkpoint} cannot be read ({error}); remove it to go on before it") from error
    notes = _rng_notes(manifest.mesh, ranks.mesh)
    return Restored(tuple(rng.values()) or None, _seed(manifest.state, ranks.data_index), notes)


def first_failure(failed: CheckpointException) -> BaseException:
    """What went wrong on the lowest rank on which something did."""
    error, _ = failed.failures[min(failed.failures)]
    return error


def _agree(checkpoint: Path, manifest: Manifest, index: Index, looks: list[_Look], ranks: Ranks) -> Index:
    """The index under the names that are wanted here. Raises ResumeError on all ranks alike, from what all told."""
    for rank, look in enumerate(looks):
        if look.state != looks[0].state:
            raise ResumeError(
                f"rank 0 sees a checkpoint at step {looks[0].state.step}, rank {rank} another at step "
                f"{look.state.step}; set run_folder to a folder that all machines share"
            )
    kinds = {name: kind for look in looks for name, kind in look.kinds.items()}
    here = {alias: name for look in looks for alias, name in look.ties.items()}
    if manifest.mesh.pipeline == 1 and ranks.mesh.pipeline == 1:
        check_ties(checkpoint, manifest.ties, here)
    index = _renamed(index, {**manifest.ties, **here}, kinds)
    check_same(checkpoint, {name: saved.kind for name, saved in index.items()}, kinds)
    return index


def _renamed(index: Index, ties: Mapping[str, str], kinds: Mapping[str, Kind]) -> Index:
    """Tied parameters lie under their first name only, but stages of a pipeline keep one copy each under its own."""
    aliases = other_names(index, ties)
    index = index | {name: index[saved] for name, saved in aliases.items() if name in kinds and name not in index}
    return {name: saved for name, saved in index.items() if name in kinds or not _is_copy(name, ties, kinds)}


def _is_copy(name: str, ties: Mapping[str, str], kinds: Mapping[str, Kind]) -> bool:
    prefix, plain = split_name(name)
    return plain in ties and prefix + ties[plain] in kinds


def _rng_source(saved: Mesh, ranks: Ranks) -> int:
    """The rank whose generators this one takes: its own, or on another mesh that of its share of the data.

    Tensor ranks must draw the same numbers, so they take the same generators.
    """
    if _draw_alike(saved, ranks.mesh):
        return ranks.rank
    return ranks.data_index * saved.tensor if ranks.data_index < saved.data else saved.size


def _rng_targets(index: Index, rank: int) -> dict[str, Tensor]:
    """Empty tensors for this rank's generators, host first; none where it was not among those that saved."""
    targets: dict[str, Tensor] = {}
    while (name := f"{RNG}{rank}.{len(targets)}") in index:
        kind = index[name].kind
        targets[name] = torch.empty(kind.shape, dtype=DTYPES_BY_NAME[kind.dtype])
    return targets


def _draw_alike(saved: Mesh, now: Mesh) -> bool:
    """Whether ranks of the same number have the same stage, share of the data and part of each matrix."""
    return (saved.pipeline, saved.data, saved.tensor) == (now.pipeline, now.data, now.tensor)


def _rng_notes(saved: Mesh, now: Mesh) -> tuple[str, ...]:
    if _draw_alike(saved, now):
        return ()
    begin = f"{saved.size} {'rank' if saved.size == 1 else 'ranks'} saved, {now.size} go on: "
    if now.data > saved.data:
        several = f"shares {saved.data} to {now.data - 1} draw"
        shares = f"share {saved.data} draws" if now.data == saved.data + 1 else several
        return (f"{begin}data {shares} random numbers from the run's seed, step and share",)
    if now.data < saved.data:
        return (f"{begin}the random numbers of the other data shares are left unused",)
    return (f"{begin}ranks with the same share of the data go on from the same random numbers",)


def _seed(state: RunState, data_index: int) -> int:
    text = f"{state.recipe.get('seed')} {state.step} {data_index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
