"""Saved tensors that leave the device come back as they were: same gradients, peaks as predicted, nothing left."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import (
    CPU,
    assert_equal_to_the_bit,
    build,
    gradients,
    make_model,
    plain_gradients,
    planned_gradients,
    random_batch,
    small_workload,
    tiny_workload,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainfit.errors import OffloadError, RecipeError
from trainfit.hardware import this_machine
from trainfit.profile import Offload
from trainfit.rehearsal import measure, rehearse
from trainfit.rehearsal.recording import allocations
from trainfit.step import Strategy, TrainStep, parse_tiers
from trainfit.techniques import offload, offload_saved
from trainfit.techniques.activation import offload_block, recompute_block
from trainfit.techniques.offload_pool import Disk, DiskPlace, Pool, Slot, StagedDisk

DISK = Offload("disk")
MIXED = "1*offload,1*keep,1*offload_full,1*offload_pointwise"
TIERS = ("offload", "offload_pointwise", "offload_full", MIXED)
DROPOUT = {"attn_pdrop": 0.1, "resid_pdrop": 0.2, "embd_pdrop": 0.1}


@pytest.fixture(autouse=True)
def _small_tensors_leave_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALLEST", 256)


def pool_of(step: TrainStep) -> Pool:
    return vars(step.model.get_submodule(step.anatomy.blocks[0]))["forward"].stash.place.pool


# ---- the same gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_those_of_plain_training_to_the_bit(family: str, precision: str):
    """CK-12 as well: recomputation from what came back runs under the autocast of forward."""
    workload = tiny_workload(family, **(DROPOUT if family == "gpt2" else {"attention_dropout": 0.1}))
    batch = random_batch(workload)
    plain = plain_gradients(make_model(workload).train(), batch)
    if precision == "bf16":
        plain = planned_gradients(build(workload, "keep", precision="bf16"), [batch])
    for activation in TIERS:
        step = build(workload, activation, precision=precision, offload=DISK)
        for _ in range(2):
            assert_equal_to_the_bit(planned_gradients(step, [batch]), plain)
        assert pool_of(step).peak_bytes > 0


def test_of_01_every_micro_batch_of_a_window_counts():
    """With offload of activations too: four micro batches, as without."""
    workload = tiny_workload("llama")
    batches = [random_batch(workload, seed=seed) for seed in range(4)]
    kept = planned_gradients(build(workload, "keep", accumulation_steps=4), batches)
    for activation in TIERS:
        step = build(workload, activation, accumulation_steps=4, offload=DISK)
        assert_equal_to_the_bit(planned_gradients(step, batches), kept)


class LatePlace:
    """Host memory on a CPU, whose copies run late, at random, on a thread of their own: as a device's stream may."""

    name = "host"

    def __init__(self) -> None:
        self.pool = Pool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
        self._thread = ThreadPoolExecutor(1)
        self._random = random.Random(0)
        self.late = 0

    def _later(self, slot: Slot, at: int, num_bytes: int, *, out: bool) -> Any:
        if self._random.random() < 0.1:
            time.sleep(self._random.random() * 1e-3)
            self.late += 1
        # By address: what gave its memory up too early gives bytes of something else.
        here = torch.frombuffer((ctypes.c_char * num_bytes).from_address(at), dtype=torch.uint8)
        there = slot.segment[slot.offset : slot.offset + num_bytes]
        (there if out else here).copy_(here if out else there)

    def out(self, slot: Slot, source: Tensor) -> Any:
        return self._thread.submit(self._later, slot, source.data_ptr(), source.nbytes, out=True)

    def back(self, slot: Slot, destination: Tensor) -> Any:
        return self._thread.submit(self._later, slot, destination.data_ptr(), destination.nbytes, out=False)

    def wait(self, mark: Any) -> None:
        mark.result()


def test_of_02_copies_that_run_late_change_nothing(monkeypatch: pytest.MonkeyPatch):
    """50 steps of odd sizes, each bit-equal to a step without offload."""
    places = []

    def late(*_: object) -> LatePlace:
        places.append(LatePlace())
        return places[-1]

    monkeypatch.setattr(offload, "place_of", late)
    workload = tiny_workload("llama", seq_len=23)
    plain, step = build(workload, "keep"), build(workload, MIXED, offload=DISK)
    for seed in range(50):
        batch = random_batch(workload, rows=1 + seed % 3, seed=seed)
        assert torch.equal(step([batch]).loss, plain([batch]).loss)
    for one, other in zip(step.model.parameters(), plain.model.parameters()):
        assert torch.equal(one, other)
    assert places[0].late > 100


# ---- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "activation", "knobs"), [
    ("llama", "offload", {}),
    ("gpt2", "offload", {"precision": "bf16", "accumulation_steps": 3}),
    ("llama", "offload_pointwise", {"precision": "bf16", "accumulation_steps": 3}),
    ("gpt2", "offload_full", {"loss_chunks": 4}),
    ("llama", MIXED, {"precision": "bf16", "loss_chunks": 4}),
])  # fmt: skip
def test_predicted_peak_is_the_measured_one(family: str, activation: str, knobs: dict[str, Any]):
    workload = tiny_workload(family, seq_len=128)
    strategy = Strategy(2, tiers=parse_tiers(activation, 4), offload=DISK, **knobs)
    predicted = rehearse(workload, strategy, this_machine("cpu"))
    measured = measure(workload, strategy, CPU, steps=0)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.001)
    assert predicted.resident_bytes == measured.resident_bytes


def saved_bytes(activation: str) -> int:
    """What a forward leaves in the heap, its loss and graph alive."""
    workload = tiny_workload("llama", seq_len=128, vocab_size=64)
    step = build(workload, activation, offload=DISK)
    batch = random_batch(workload, rows=4)

    def forward() -> Any:
        return step._compute_loss(batch, 1.0, lambda phase: None)

    forward()  # what is made once is there
    gc.collect()
    held: list[Any] = []
    changes = allocations(lambda: held.append(forward()))
    held.clear()
    return sum(changes)


def test_saved_bytes_fall_by_the_planned_share():
    """Half the blocks offload all that they save: half of what blocks save is gone, within 2 %."""
    keep, half, whole = (saved_bytes(activation) for activation in ("keep", "2*offload,2*keep", "offload"))
    assert keep - half == pytest.approx((keep - whole) / 2, rel=0.02)
    assert whole < 0.1 * keep


def test_file_and_pool_are_flat_over_200_steps():
    """OF-04: nothing outlives a step, and what is there is used again."""
    workload = small_workload("llama", seq_len=16)
    step = build(workload, "1*offload,1*offload_pointwise", offload=DISK)
    pool = pool_of(step)
    sizes = set()
    for seed in range(200):
        step([random_batch(workload, rows=1 + seed % 2, seed=seed)])
        sizes.add(pool.size_bytes)
        assert pool.taken_bytes == 0
    assert len(sizes) == 1


def test_of_04_weights_stay_and_views_share_a_copy():
    workload = tiny_workload("llama", seq_len=128)
    step = build(workload, "offload", precision="bf16", offload=DISK)
    batch = random_batch(workload)
    kept = build(workload, "keep", precision="bf16")
    parameters = sum(p.numel() for name, p in kept.model.named_parameters() if "layers" in name)
    profiles = [rehearse(workload, each.strategy, this_machine("cpu")) for each in (kept, step)]
    step.accumulate([batch])
    # All that the blocks save, but casts of their weights: two bytes a parameter.
    gone = profiles[0].phases["forward"] - profiles[1].phases["forward"]
    assert pool_of(step).peak_bytes < gone + profiles[1].phases["forward"]
    assert profiles[1].offloaded_bytes == pool_of(step).peak_bytes
    held = saved_by_hooks(kept, batch)
    assert pool_of(step).peak_bytes == pytest.approx(held - 2 * parameters, rel=0.02)


def saved_by_hooks(step: TrainStep, batch: Any) -> int:
    """Bytes of the storages that autograd saves in blocks, each once; parameters and shared tables not counted."""
    found: dict[int, int] = {}
    alive: list[Any] = []
    known = {p.untyped_storage()._cdata for p in step.model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if inside and storage._cdata not in known | shared and storage.nbytes() >= offload.SMALLEST:
            found[storage._cdata] = storage.nbytes()
        return tensor

    inside, shared = [], set()
    for name in step.anatomy.blocks:
        block = step.model.get_submodule(name)

        def enter(_: Any, args: Any, kwargs: Any) -> None:
            inside.append(True)
            shared.update(t.untyped_storage()._cdata for t in kwargs.get("position_embeddings", ()))

        block.register_forward_pre_hook(enter, with_kwargs=True)
        block.register_forward_hook(lambda *_: inside.clear())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), step._autocast():
        step._compute_loss(batch, 1.0, lambda phase: None)
    return sum(found.values())


# ---- what can go wrong ----------------------------------------------------------------------------------------------


def test_a_budget_that_is_too_small_is_refused_before_the_run():
    strategy = Strategy(2, tiers=("offload",) * 4, offload=Offload("disk", budget_bytes=2**16))
    with pytest.raises(RecipeError, match=r"offload\.budget_bytes 64\.0 KiB is too little: .* raise it, or give fewer"):
        rehearse(tiny_workload("llama", seq_len=128), strategy, this_machine("cpu"))


def test_host_memory_of_a_cpu_is_refused():
    with pytest.raises(
        RecipeError, match=r"would save nothing: this device's memory is the host's; set offload\.place"
    ):
        build(tiny_workload("llama"), "offload")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    step = build(tiny_workload("llama"), "offload", offload=Offload("disk", directory=str(tmp_path / "none")))
    with pytest.raises(
        RecipeError, match=r"offload\.directory .*/none takes no file \(No such file or directory\); give a folder"
    ):
        step([random_batch(tiny_workload("llama"))])


def test_a_full_disk_is_said_with_numbers(monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    step = build(tiny_workload("llama"), "offload", offload=DISK)
    with pytest.raises(OffloadError, match=r"free, offload needs 32\.0 MiB more \(No space left on device\); give"):
        step([random_batch(tiny_workload("llama"))])


def test_a_short_read_goes_on_and_an_end_of_file_is_said(monkeypatch: pytest.MonkeyPatch):
    workload = tiny_workload("llama")
    plain = planned_gradients(build(workload, "keep"), [random_batch(workload)])
    whole_read, whole_write = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda file, views, at: whole_read(file, [views[0][:1000]], at))
    monkeypatch.setattr(os, "pwrite", lambda file, view, at: whole_write(file, view[:3000], at))
    step = build(workload, "offload", offload=DISK)
    assert_equal_to_the_bit(planned_gradients(step, [random_batch(workload)]), plain)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(OffloadError, match=r"offload read 0 of \d+ bytes in .*: the file ends there; check the disk"):
        planned_gradients(step, [random_batch(workload)])


def test_after_a_failure_the_next_step_is_whole(monkeypatch: pytest.MonkeyPatch):
    # The thread that failed is slow to go on and drop what it raised: the step must not be held by that.
    set_exception = Future.set_exception
    monkeypatch.setattr(Future, "set_exception", lambda *args: (set_exception(*args), time.sleep(0.2)))
    workload = tiny_workload("llama")
    step = build(workload, "offload", offload=DISK)
    plain = planned_gradients(build(workload, "keep"), [random_batch(workload)])
    with monkeypatch.context() as broken:
        broken.setattr(Disk, "read", lambda *_: (_ for _ in ()).throw(OffloadError("gone")))
        with pytest.raises(OffloadError):
            step([random_batch(workload)])
    gc.collect()
    assert pool_of(step).taken_bytes == 0
    assert_equal_to_the_bit(planned_gradients(step, [random_batch(workload)]), plain)


_RUN = """
import sys
from plain import build, random_batch, tiny_workload
from trainfit.profile import Offload
step = build(tiny_workload("llama"), "offload", offload=Offload("disk", directory=sys.argv[1]))
while True:
    step([random_batch(tiny_workload("llama"))])
    print("step", flush=True)
"""


def test_a_killed_run_leaves_no_file(tmp_path: Path):
    folders = [str(Path(__file__).parent), *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-c", _RUN, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "step\n"
        run.send_signal(signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_is_changed_after_it_was_saved_is_refused():
    """Plain autograd refuses it too; here a copy may have caught either value."""
    place = DiskPlace(DISK)
    parcel = offload_saved.Parcel(place, tensor := torch.ones(1000))
    tensor.add_(1)
    with pytest.raises(OffloadError, match="changed in place"):
        parcel.leave()


class Tanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.tanh(self.one(x)))


@pytest.mark.parametrize("activation", list(offload.OFFLOADED))
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_that_a_model_recomputes_itself_stays_right(activation: Any, reentrant: bool):
    block, x = Tanh(), torch.randn(16, 32, requires_grad=True)
    block(x).sum().backward()
    expected = gradients(block)
    stash = offload.Stash(DiskPlace(DISK), CPU.device)
    recompute_block(block, activation, CPU, stash=stash)
    offload_block(block, activation, stash, is_last=True)
    block.zero_grad()
    output = checkpoint(block, x, use_reentrant=reentrant)
    assert isinstance(output, Tensor)
    output.sum().backward()
    assert_equal_to_the_bit(gradients(block), expected)


class Seen(nn.Module):
    """Shows what it has saved, which is too small to leave."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        self.seen = y.detach()
        return y


def test_what_stays_and_is_changed_after_it_was_saved_is_refused():
    block = Seen()
    offload_block(block, "offload", offload.Stash(DiskPlace(DISK), CPU.device))
    output = block(torch.ones(8, requires_grad=True))
    block.seen.zero_()
    with pytest.raises(OffloadError, match="changed in place before backward"):
        output.sum().backward()


def test_what_could_not_be_written_does_not_come_back_as_something_else(monkeypatch: pytest.MonkeyPatch):
    """It is read before anyone has heard of it: a last block's copies come back at once."""

    def fails(*_: object) -> None:
        time.sleep(0.1)
        raise OffloadError("gone")

    place = StagedDisk(DISK, CPU)
    monkeypatch.setattr(place.disk, "write", fails)
    slot, value = place.pool.take(4000), torch.empty(1000)
    place.out(slot, torch.ones(1000))
    mark = place.back(slot, value)
    with pytest.raises(OffloadError, match="gone"):
        place.wait(mark)


def test_a_graph_that_is_dropped_gives_everything_back():
    workload = tiny_workload("llama")
    step = build(workload, MIXED, offload=DISK)
    batch = random_batch(workload)
    loss = step._compute_loss(batch, 1.0, lambda phase: None)
    assert pool_of(step).taken_bytes > 0
    del loss
    gc.collect()
    assert pool_of(step).taken_bytes == 0
