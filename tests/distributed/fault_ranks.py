"""What the ranks of test_faults.py run: a few updates under a StallWatch, and the fault of each case."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from checkpoint_ranks import state_at
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainfit.hardware import accelerator
from trainfit.hardware.ranks import process_group
from trainfit.profile import Mesh, Zero
from trainfit.step import Strategy, build_step
from trainfit.train.saving import Checkpoints
from trainfit.train.verdict import WatchSettings
from trainfit.train.watch import StallWatch
from trainfit.workload import workload_from_module
from trainfit.workload.batch import MicroBatch

STALL_SECONDS = 1.5
SETTINGS = WatchSettings(stall_seconds=STALL_SECONDS, silent_seconds=3.0, beat_seconds=0.25, exit_code=17)
VOCAB, SEQ_LEN, STEPS, FAULTY_STEP = 31, 8, 5, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.up(hidden).relu())


class Model(nn.Module):
    """skip: the block that this rank leaves out. ignore: the block that runs, though its output is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, VOCAB)
        self.skip = self.ignore = -1
        self.on_block = lambda index: None

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for index, block in enumerate(self.blocks):
            if index == self.skip:
                continue
            self.on_block(index)
            out = block(hidden)
            if index != self.ignore:
                hidden = out
        return self.head(hidden)


def micro_batches(count: int, seed: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (count, 2, SEQ_LEN + 1), generator=generator)
    return [MicroBatch.of(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in ids]


class Rank:
    """One rank of a case."""

    def __init__(
        self, case: str, rank: int, step: object, model: Model, watch: StallWatch, folder: Path = Path()
    ) -> None:
        self.case, self.rank, self.step, self.model, self.watch = case, rank, step, model, watch
        self.folder = folder
        self.fault = case.split(" ")[0]
        self.is_faulty = rank == int(case.split(" ")[1])

    def train(self) -> None:
        self.step.observer = self.watch.observe
        for number in range(1, STEPS + 1):
            self.watch.begin("waiting for data")
            if self.is_faulty and number == FAULTY_STEP:
                if self.fault == "ends_early":
                    return
                if self.fault == "hangs_in_data":
                    time.sleep(60)
            window = micro_batches(2, 10 * number + self.rank)
            self.watch.begin_step(number)
            self.before_update(number, window)
            self.step(window)
            if self.fault == "killed_saving" and number == FAULTY_STEP:
                self.save(number)
        self.after_training()

    def before_update(self, number: int, window: list[MicroBatch]) -> None:
        if self.fault == "fewer":
            self.step._count_tokens = lambda window: 64  # as a loop of one's own that does not compare them
        if not self.is_faulty:
            return
        self.model.skip = 2 if self.fault == "skips" else -1
        self.model.ignore = 2 if self.fault == "ignores" else -1
        if number != FAULTY_STEP:
            return
        if self.fault in ("killed", "stopped"):
            number = signal.SIGKILL if self.fault == "killed" else signal.SIGSTOP
            self.model.on_block = lambda index: self.stop_with(number) if index == 2 else None
        if self.fault == "raises":
            self.model.on_block = lambda index: 1 / 0 if index == 1 else None
        if self.fault == "fewer_counted":
            del window[1:]
        if self.fault == "fewer":
            del window[1:]

    def save(self, number: int) -> None:
        """The faulty rank dies before the others' first collective about the checkpoint, which then fails."""
        checkpoints = Checkpoints(self.folder / "saves", self.step.ranks, keep=1)
        with self.watch.waiting_allowed("saving"):
            if self.is_faulty:
                self.stop_with(signal.SIGKILL)
            checkpoints.save(state_at(number), self.model, self.step.optimizer, (torch.get_rng_state(),))

    def stop_with(self, number: int) -> None:
        time.sleep(3 * SETTINGS.beat_seconds)  # so that its place is known: in the block before
        os.kill(os.getpid(), number)

    def after_training(self) -> None:
        if self.fault == "clean" and self.is_faulty:
            time.sleep(STALL_SECONDS / 2)  # the others are done by now
            with self.watch.waiting_allowed("saving"):
                time.sleep(2 * STALL_SECONDS)
        if self.fault == "long_together":
            time.sleep(2.5 * STALL_SECONDS)


def run(case: str, rank: int, size: int, port: int, folder: str) -> None:
    """The body of a process. Its stderr goes to a file of the folder, the weights it ends with to another."""
    log = os.open(f"{folder}/stderr{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = accelerator("cpu")
    stage = int(case.split(" ")[2])
    mesh = Mesh(shard=size) if stage else Mesh(replicate=size)
    model = Model()
    with process_group(device):
        workload = workload_from_module(Model, seq_len=SEQ_LEN, vocab_size=VOCAB)
        step = build_step(workload, Strategy(2, 2, mesh=mesh, zero=Zero(stage)), device, model=model)
        Path(folder, f"ready{rank}").touch()
        with StallWatch.of(step, SETTINGS) as watch:
            Rank(case, rank, step, model, watch, Path(folder)).train()
        assert all(not block._forward_hooks or stage for block in model.blocks)
        weights = {name: whole(p) for name, p in model.named_parameters()} if case.startswith("ignores") else {}
        if rank == 0:
            torch.save(weights, f"{folder}/weights")
    Path(folder, f"clean{rank}").touch()


def train_under_torchrun(case: str) -> None:
    """The fault comes in the first life; after a restart there is none."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device, model, life = accelerator("cpu"), Model(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    with process_group(device):
        workload = workload_from_module(Model, seq_len=SEQ_LEN, vocab_size=VOCAB)
        mesh = Mesh(shard=int(os.environ["WORLD_SIZE"]))
        step = build_step(workload, Strategy(2, 2, mesh=mesh, zero=Zero(3)), device, model=model)
        with StallWatch.of(step, SETTINGS) as watch:
            Rank(case if life == "0" else "none 0 3", int(os.environ["RANK"]), step, model, watch).train()
    os.write(1, f"rank {os.environ['RANK']} ended life {life}\n".encode())


def whole(parameter: Tensor) -> Tensor:
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def in_one_process(*, ignored_by: int, ranks: int) -> dict[str, Tensor]:
    """The weights after all steps of a case, from one process that runs the micro batches of every rank."""
    torch.manual_seed(0)
    model = Model()
    workload = workload_from_module(Model, seq_len=SEQ_LEN, vocab_size=VOCAB)
    step = build_step(workload, Strategy(2, 2 * ranks), accelerator("cpu"), model=model)
    for number in range(1, STEPS + 1):
        windows = [micro_batches(2, 10 * number + rank) for rank in range(ranks)]
        ignored = iter([2 if rank == ignored_by else -1 for rank in range(ranks) for _ in windows[rank]])
        model.embedding.register_forward_pre_hook(
            lambda *_, ignored=ignored: setattr(model, "ignore", next(ignored, -1))
        )
        step([batch for window in windows for batch in window])
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


if __name__ == "__main__":
    train_under_torchrun(sys.argv[1])
