"""Ranks: the processes of a run, one device each, and what they tell each other outside of training's collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from trainfit.errors import DeviceError
from trainfit.hardware.launch import Launch
from trainfit.hardware.runtime import Accelerator
from trainfit.profile import MESH_DIMS, Mesh, MeshDim


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, which is all of it where it is no DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among those of a run.

    backend: what carries the tensors of their devices; in a rehearsal, of the devices that are rehearsed.
    device_mesh: one dimension for each of MESH_DIMS, in that order, those of size 1 too; None for a single process.
    Make it with `ranks_of` before FakeTensorMode is entered.
    """

    mesh: Mesh = Mesh()
    device_mesh: DeviceMesh | None = None
    backend: str = "gloo"

    @property
    def rank(self) -> int:
        return 0 if self.device_mesh is None else dist.get_rank()

    def index(self, dim: MeshDim) -> int:
        """This rank's place along one dimension, from 0."""
        return 0 if self.device_mesh is None else self.device_mesh.get_local_rank(dim)

    @property
    def data_index(self) -> int:
        """Which of mesh.data shares of each window this rank takes."""
        return self.index("replicate") * self.mesh.shard + self.index("shard")

    def group(self, dim: MeshDim) -> dist.ProcessGroup | None:
        """The ranks that differ from this one along dim only; None where it is alone."""
        if self.device_mesh is None or getattr(self.mesh, dim) == 1:
            return None
        return self.device_mesh.get_group(dim)

    def sub_mesh(self, *dims: MeshDim) -> DeviceMesh:
        """The device mesh of some dimensions, as fully_shard and parallelize_module take it."""
        assert self.device_mesh is not None, "a single process has no mesh"
        return self.device_mesh[dims if len(dims) > 1 else dims[0]]

    @property
    def is_real(self) -> bool:
        """Whether the other ranks exist: not in a rehearsal."""
        return self.device_mesh is not None and dist.get_backend() != "fake"

    def everyones(self, numbers: Sequence[int]) -> list[list[int]]:
        """What each data-parallel rank has, by data_index; in a rehearsal what this one has, for each."""
        if self.mesh.data == 1 or not self.is_real:
            return [list(numbers)] * self.mesh.data
        gathered: list[list[int]] = self.gather_along(torch.tensor(numbers), "replicate", "shard").tolist()
        return gathered

    def sum(self, values: Tensor, *dims: MeshDim) -> Tensor:
        """values summed over the ranks along dims, in place; as they are in a single process."""
        for dim in dims:
            if (group := self.group(dim)) is not None:
                dist.all_reduce(values, group=group)
        return values

    def max(self, values: Tensor) -> Tensor:
        """The largest of values over all ranks of the run, in place; every rank asks."""
        if self.mesh.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def gather_along(self, values: Tensor, *dims: MeshDim) -> Tensor:
        """(ranks along dims in order, *values.shape): what each of them has."""
        gathered = values.unsqueeze(0)
        for dim in reversed(dims):
            if (group := self.group(dim)) is not None:
                parts = [torch.empty_like(gathered) for _ in range(dist.get_world_size(group))]
                dist.all_gather(parts, gathered.contiguous(), group=group)
                gathered = torch.cat(parts)
        return gathered

    def any(self, flag: bool) -> bool:
        """Whether it is true on any rank of the run; every rank asks."""
        if not self.is_real:
            return flag
        value = torch.tensor(int(flag))
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return bool(value)


def ranks_of(mesh: Mesh, device: Accelerator, *, backend: str | None = None) -> Ranks:
    """The ranks of a mesh over the process group that is up. Raises DeviceError when their numbers differ.

    backend: of the devices that a rehearsal stands for; None for those of this one.
    """
    if mesh.size == 1:
        return Ranks()
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size != mesh.size:
        raise DeviceError(
            f"the mesh {' x '.join(f'{dim} {n}' for dim, n in zip(MESH_DIMS, mesh.shape) if n > 1)} has {mesh.size} "
            f"ranks, {size} {'process is' if size == 1 else 'processes are'} running; start it with "
            f"torchrun --nproc-per-node {mesh.size} or change the mesh"
        )
    device_mesh = init_device_mesh(device.device.type, mesh.shape, mesh_dim_names=MESH_DIMS)
    return Ranks(mesh, device_mesh, backend or device.distributed_backend)


def process_group(device: Accelerator, *, timeout_seconds: float = 60.0) -> AbstractContextManager[None]:
    """The process group of the processes that environment variables name, as torchrun sets them."""
    return Launch.from_environment().process_group(device, timeout_seconds=timeout_seconds)


@contextmanager
def fake_process_group(size: int, rank: int = 0) -> Iterator[None]:
    """A process group in which only this rank exists: collectives return at once, so that a rank can be rehearsed."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise DeviceError("a rehearsal of several ranks needs a process without a process group; plan before it is up")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
