"""Offload from the npu to host memory and to a disk: gradients, bytes by its own allocator, copies that run late."""

from __future__ import annotations

import ctypes
import gc
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from test_step import NO_DROPOUT, build, gradients, on_this_npu, window, workload_of
from torch import Tensor

from trainfit.hardware import Accelerator
from trainfit.profile import Offload
from trainfit.rehearsal import measure, rehearse
from trainfit.step import Strategy, TrainStep, parse_tiers
from trainfit.techniques import offload
from trainfit.techniques.offload_pool import Pool

MIXED = "1*offload,1*keep,1*offload_full,1*offload_pointwise"
COMPOSED = {"attn_implementation": "eager", "hidden_act": "gelu"}  # what has no kernel here is what no NPU would run
TIERS = ("offload", "offload_pointwise", "offload_full", MIXED)


@pytest.fixture(autouse=True)
def _small_tensors_leave_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALLEST", 256)
    gc.collect()


def pool_of(step: TrainStep) -> Pool:
    return vars(step.model.get_submodule(step.anatomy.blocks[0]))["forward"].stash.place.pool


@pytest.mark.parametrize("setting", [Offload(), Offload("disk")], ids=["host", "disk"])
def test_gradients_are_those_without_offload_to_the_bit(npu: Accelerator, setting: Offload):
    workload = workload_of("gpt2", resid_pdrop=0.2, embd_pdrop=0.1, attn_pdrop=0.1)
    for precision in ("fp32", "bf16"):
        expected = gradients(build(workload, npu, precision=precision, accumulation_steps=2), window(workload))
        for activation in TIERS:
            step = build(workload, npu, activation, precision=precision, accumulation_steps=2, offload=setting)
            for _ in range(2):
                found = gradients(step, window(workload))
                assert all(torch.equal(found[name], expected[name]) for name in expected), activation
            assert pool_of(step).peak_bytes > 0
            assert pool_of(step).taken_bytes == 0


def late_copies(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Makes copies beside computation run late, at random, on a thread of their own. Returns the delays.

    By address: what was given up before computation had waited has other bytes by then.
    """
    thread, numbers = ThreadPoolExecutor(1), random.Random(0)
    delays: list[float] = []

    def copy(destination: int, source: int, num_bytes: int) -> None:
        if numbers.random() < 0.1:
            delays.append(numbers.random() * 1e-3)
            time.sleep(delays[-1])
        ctypes.memmove(destination, source, num_bytes)

    def copy_beside(_: Accelerator, stream: Any, destination: Tensor, source: Tensor) -> Any:
        return thread.submit(copy, destination.data_ptr(), source.data_ptr(), source.nbytes)

    monkeypatch.setattr(Accelerator, "copy_beside", copy_beside)
    monkeypatch.setattr(Accelerator, "wait_event", lambda _, event: event.result())
    return delays


def test_of_02_fifty_steps_with_late_copies_are_those_without_offload(
    npu: Accelerator, monkeypatch: pytest.MonkeyPatch
):
    delays = late_copies(monkeypatch)
    workload = workload_of("llama")
    plain, step = build(workload, npu), build(workload, npu, MIXED)
    sizes = set()
    for seed in range(50):
        batches = window(workload, rows=1 + seed % 2, count=1, seed=seed)
        assert torch.equal(step(batches).loss, plain(batches).loss)
        sizes.add(pool_of(step).size_bytes)
    for one, other in zip(step.model.parameters(), plain.model.parameters()):
        assert torch.equal(one, other)
    assert len(sizes) == 1
    assert len(delays) > 100


def saved_bytes(npu: Accelerator, activation: str) -> int:
    """What a forward leaves on the device, by its allocator."""
    step = build(workload_of("llama", **COMPOSED), npu, activation)
    (batch,) = window(workload_of("llama", **COMPOSED), rows=8, count=1)
    batch = batch.to(npu.device)

    def forward() -> Tensor:
        return step._compute_loss(batch, 1.0, lambda phase: None)

    forward()
    before = npu.memory.current_bytes()
    loss = forward()
    saved = npu.memory.current_bytes() - before
    del loss
    return saved


def test_saved_bytes_fall_by_the_planned_share(npu: Accelerator):
    """Within 2 % of the share of blocks, and of what the rehearsal says of host memory."""
    keep, half, whole = (saved_bytes(npu, activation) for activation in ("keep", "2*offload,2*keep", "offload"))
    assert keep - half == pytest.approx((keep - whole) / 2, rel=0.02)
    strategy = Strategy(8, tiers=("offload",) * 4)
    predicted = rehearse(workload_of("llama", **COMPOSED), strategy, on_this_npu(npu))
    assert keep - whole == pytest.approx(predicted.offloaded_bytes, rel=0.02)


@pytest.mark.parametrize(("activation", "knobs"), [
    ("offload", {}),
    ("offload_pointwise", {"precision": "bf16", "loss_chunks": 4}),
    (MIXED, {"accumulation_steps": 3}),
])  # fmt: skip
def test_rehearsed_peak_is_the_allocators(npu: Accelerator, activation: str, knobs: dict[str, Any]):
    workload = workload_of("gpt2", attn_implementation="eager", **NO_DROPOUT)
    strategy = Strategy(2, tiers=parse_tiers(activation, 4), **knobs)
    predicted = rehearse(workload, strategy, on_this_npu(npu))
    measured = measure(workload, strategy, npu, steps=0)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


def test_a_device_that_is_full_leaves_nothing_behind(npu: Accelerator, set_limit: Callable[[int], None]):
    workload = workload_of("llama")
    step = build(workload, npu, "offload")
    expected = gradients(step, window(workload))
    step.model.zero_grad()
    set_limit(npu.memory.current_bytes() + 300_000)
    with pytest.raises(torch.OutOfMemoryError):
        step(window(workload))
    set_limit(2**36)
    gc.collect()
    assert pool_of(step).taken_bytes == 0
    found = gradients(step, window(workload))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
