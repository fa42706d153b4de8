"""What the ranks of test_checkpoint.py run. Functions for run_ranks, and a run that is killed at the n-th moment."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import start_context
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import trainfit.train.checkpoint as checkpoint_module
import trainfit.train.storage as storage_module
from trainfit.errors import ResumeError, TrainfitError
from trainfit.hardware import Ranks, accelerator
from trainfit.hardware.ranks import ranks_of
from trainfit.hardware.together import is_of_collective
from trainfit.profile import MESH_DIMS, Mesh, Zero
from trainfit.step import Strategy, build_step
from trainfit.train.checkpoint import RunState
from trainfit.train.packing import Position
from trainfit.train.saving import Checkpoints
from trainfit.workload import MicroBatch, workload_from_module

CPU = accelerator("cpu")
VOCAB, SEQ_LEN, NUM_SEQUENCES = 29, 8, 12  # sequences that 1, 2, 3 and 4 ranks can share


class Block(nn.Module):
    """few has fewer rows than ranks, odd is uneven, frozen does not train, seen is a buffer, count one without dims."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.few = nn.Parameter(torch.randn(2, dim) * 0.1)
        self.odd = nn.Linear(dim, 7)
        self.back = nn.Linear(7, dim)
        self.frozen = nn.Parameter(torch.randn(dim), requires_grad=False)
        self.register_buffer("seen", torch.arange(3) + 5)
        self.register_buffer("count", torch.tensor(11))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.back(self.odd(hidden).relu()) * self.few.sum(0) + self.frozen


class Model(nn.Module):
    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def new_step(mesh: Mesh, stage: int, *, seed: int, dim: int = 6):
    def make() -> Model:
        torch.manual_seed(seed)
        return Model(dim)

    workload = workload_from_module(make, seq_len=SEQ_LEN, vocab_size=VOCAB)
    strategy = Strategy(NUM_SEQUENCES // mesh.data // 1, 1, tiers=("keep",) * 2, mesh=mesh, zero=Zero(stage))
    return build_step(workload, strategy, CPU, model=make())


def batch(number: int, ranks: Ranks) -> MicroBatch:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCAB, (NUM_SEQUENCES, SEQ_LEN + 1), generator=generator)
    mine = tokens[ranks.data_index :: ranks.mesh.data]
    return MicroBatch.of(mine[:, :-1].contiguous(), mine[:, 1:].contiguous())


def train(step, numbers) -> list[float]:
    return [step([batch(number, step.ranks)]).loss.item() for number in numbers]


def whole_tensors(step) -> dict[str, Tensor]:
    """Parameters, buffers and optimizer states, whole, by name."""
    tensors = dict(step.model.state_dict(keep_vars=True))
    names = {id(parameter): name for name, parameter in step.model.named_parameters()}
    for parameter, state in step.optimizer.state.items():
        tensors |= {f"{key}.{names[id(parameter)]}": value for key, value in state.items()}
    return {name: whole(tensor) for name, tensor in tensors.items()}


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


def state_at(step: int) -> RunState:
    return RunState(step, Position(0, 12 * step), 96 * step, {"seed": 3}, "recipe", "plan")


@contextmanager
def slow_writes(seconds: float):
    read = storage_module._bytes_of

    def slow(entry):
        time.sleep(seconds)
        return read(entry)

    storage_module._bytes_of = slow
    yield
    storage_module._bytes_of = read


def save_while_training(folder: Path) -> dict[str, Any]:
    """4 ranks, stage 3: trains, saves asynchronously, trains on while the files are being written."""
    step = new_step(Mesh(shard=4), 3, seed=0)
    train(step, range(3))
    step.evaluate(batch(50, step.ranks))  # leaves parameters gathered that a save must not take for whole
    tensors = whole_tensors(step)
    torch.manual_seed(100 + step.ranks.rank)
    saved: list[int] = []
    checkpoints = Checkpoints(
        folder, step.ranks, keep=1, asynchronous=True, on_saved=lambda number, path: saved.append(number)
    )
    with slow_writes(0.05), checkpoints:
        checkpoints.save(state_at(3), step.model, step.optimizer, (torch.get_rng_state(),))
        losses = train(step, (3, 4))
        under_way = not checkpoint_module.list_checkpoints(folder)
        checkpoints.wait()
    return {"tensors": tensors, "losses": losses, "under_way": under_way, "saved": saved, "rng": torch.get_rng_state()}


def resume(checkpoint: Path, shape: tuple[int, int, int, int], stage: int) -> dict[str, Any]:
    step = new_step(Mesh(*shape), stage, seed=1)
    checkpoints = Checkpoints(checkpoint.parent, step.ranks, keep=1)
    restored = checkpoints.load(checkpoint, step.model, step.optimizer)
    restored.set_rng(CPU)
    rng = torch.get_rng_state()
    one_object = step.model.head.weight is step.model.embedding.weight
    tensors = whole_tensors(step)
    return {"tensors": tensors, "losses": train(step, (3, 4)), "tied": one_object, "rng": rng, "notes": restored.notes}


def resume_many(checkpoint: Path, layouts: list[tuple[tuple[int, int, int, int], int]]) -> list[dict[str, Any]]:
    return [resume(checkpoint, shape, stage) for shape, stage in layouts]


def save_stages(folder: Path, layouts: list[tuple[tuple[int, int, int, int], int]]) -> list[dict[str, Tensor]]:
    """One checkpoint for each layout, of the same 2 updates."""
    saved = []
    for number, (shape, stage) in enumerate(layouts):
        step = new_step(Mesh(*shape), stage, seed=0)
        train(step, range(2))
        step.evaluate(batch(50, step.ranks))
        Checkpoints(folder / str(number), step.ranks, keep=1).save(
            state_at(2), step.model, step.optimizer, (torch.get_rng_state(),)
        )
        saved.append(whole_tensors(step))
    return saved


class TwoMatrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 9), nn.Linear(9, 4)


def on_two_dims(seed: int):
    """Tensor parallel and FSDP by hand: uneven shards of shards, which DTensor calls strided."""
    mesh = Mesh(shard=2, tensor=2)
    device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=MESH_DIMS)
    model = TwoMatrices()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(seed)
    parallelize_module(model, device_mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=device_mesh["shard"])
    return model, with_moments(model, seed + 2.0), Ranks(mesh, device_mesh)


def save_on_two_dims(folder: Path) -> dict[str, Any]:
    model, optimizer, ranks = on_two_dims(0)
    placements = str(model.up.weight.placements)
    checkpoints = Checkpoints(folder, ranks, keep=1)
    checkpoints.save(state_at(1), model, optimizer, (torch.get_rng_state(),))
    tensors = {name: whole(parameter) for name, parameter in model.named_parameters()}
    moments = {name: whole(optimizer.state[p]["exp_avg"]) for name, p in model.named_parameters()}
    other, other_optimizer, _ = on_two_dims(1)
    checkpoints.load(checkpoints.latest, other, other_optimizer)
    again = {name: whole(parameter) for name, parameter in other.named_parameters()}
    return {"placements": placements, "tensors": tensors, "moments": moments, "again": again}


class Stage(nn.Module):
    """A stage of a pipeline; the first has the embedding, the last a copy of it as its head."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        if first:
            self.embedding = nn.Embedding(5, 3, _weight=torch.randn(5, 3, generator=generator))
            self.early = nn.Linear(3, 3)
        if last:
            self.late = nn.Linear(3, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight if first else nn.Parameter(torch.randn(5, 3, generator=generator))


def with_moments(model: nn.Module, fill: float):
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moments = {key: parameter.detach() * fill for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(fill), **moments}
    return optimizer


def pipeline_stages(folder: Path, whole_checkpoint: Path) -> dict[str, Any]:
    """2 stages save what only they have, then load what one process saved with its tie."""
    rank = dist.get_rank()
    model = Stage(rank == 0, rank == 1)
    optimizer = with_moments(model, 2.0)
    checkpoints = Checkpoints(folder, ranks_of(Mesh(pipeline=2), CPU), keep=1)
    checkpoints.save(state_at(1), model, optimizer, (torch.get_rng_state(),))
    mine = {name: value.clone() for name, value in model.state_dict().items()}
    checkpoints.load(whole_checkpoint, model, optimizer)
    moments = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
    return {"saved": mine, "loaded": dict(model.state_dict()), "moments": moments}


def refused(damaged: Path, good: Path) -> list[tuple[str, bool]]:
    """The line on this rank, and whether the model is as it was: a damaged file, another model on rank 1 only,
    another checkpoint on rank 1."""
    answers = []
    rank = dist.get_rank()
    moved = good.parent / "other" / good.name
    for checkpoint, dim in ((damaged, 6), (good, 6 + rank), (good if rank == 0 else moved, 6)):
        ranks = ranks_of(Mesh(replicate=2), CPU)
        torch.manual_seed(7)
        model = Model(dim)
        optimizer = torch.optim.AdamW(model.parameters())
        before = {name: value.clone() for name, value in model.state_dict().items()}
        try:
            Checkpoints(good.parent, ranks, keep=1).load(checkpoint, model, optimizer)
            line = "loaded"
        except ResumeError as error:
            line = str(error)
        same = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        answers.append((line, same))
    return answers


def full_disk(folder: Path) -> tuple[str, str, list[str]]:
    """Rank 1's disk is full in the second save, asynchronous: what each rank is told, at the third."""
    rank = dist.get_rank()
    model = nn.Linear(3, 3)
    optimizer = with_moments(model, 1.0)
    checkpoints = Checkpoints(folder, ranks_of(Mesh(replicate=2), CPU), keep=2, asynchronous=True)
    rng = (torch.get_rng_state(),)
    checkpoints.save(state_at(1), model, optimizer, rng)
    checkpoints.wait()
    write = storage_module._bytes_of

    def full(entry):
        raise OSError(28, "No space left on device")

    storage_module._bytes_of = full if rank == 1 else write
    checkpoints.save(state_at(2), model, optimizer, rng)  # returns: the thread fails
    try:
        checkpoints.save(state_at(3), model, optimizer, rng)
        line = "saved"
    except TrainfitError as error:
        line = str(error)
    storage_module._bytes_of = write
    checkpoints.save(state_at(3), model, optimizer, rng)
    checkpoints.wait()
    return line, str(checkpoints.latest), [path.name for path in checkpoint_module.list_checkpoints(folder)]


class Moments:
    """Kills this process at the n-th moment from now: before and after every change that a save makes to the disk."""

    def __init__(self, fatal: int) -> None:
        self.fatal, self.passed = fatal, 0

    def watch(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            result = inner(*args, **kwargs)
            self.tick()
            return result

        setattr(owner, name, watched)

    def tick(self) -> None:
        if self.passed == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        self.passed += 1


def killed_save(rank: int, store: str, folder: Path, victim: int, fatal: int, asynchronous: bool) -> None:
    """Exit codes: 0 saved, 3 told that another rank is gone, -9 killed."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = with_moments(model, 1.0)
    checkpoints = Checkpoints(folder, ranks_of(Mesh(replicate=2), CPU), keep=2, asynchronous=asynchronous)
    rng = (torch.get_rng_state(),)
    checkpoints.save(state_at(1), model, optimizer, rng)
    checkpoints.wait()
    with torch.no_grad():
        model.weight.fill_(2.0)
    moments = Moments(fatal if rank == victim else -1)
    moments.watch(storage_module, "_bytes_of")
    moments.watch(storage_module.os, "fsync")
    moments.watch(Path, "mkdir")
    moments.watch(Path, "rename")
    try:
        checkpoints.save(state_at(2), model, optimizer, rng)
        checkpoints.wait()
        code = 0
    except (TrainfitError, RuntimeError) as error:  # gloo's own is left as it is, for the watch to explain
        code = 3 if isinstance(error, TrainfitError) or is_of_collective(error) else 1
    os._exit(code)


def run_killed(folder: Path, victim: int, fatal: int, *, asynchronous: bool) -> list[int | None]:
    """Exit codes of 2 ranks, the victim killed at its fatal moment of the second save."""
    context = start_context()
    store = folder / "store"
    processes = [
        context.Process(
            target=killed_save, args=(rank, str(store), folder / "saves", victim, fatal, asynchronous), daemon=True
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes
