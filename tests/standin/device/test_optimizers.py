"""Optimizer variants on the npu: bytes by its own allocator, and states in host memory."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_step import LENGTH, NO_DROPOUT, build, on_this_npu, window, workload_of

from trainfit.hardware import Accelerator
from trainfit.profile import OptimizerVariant
from trainfit.rehearsal import measure, rehearse
from trainfit.step import Strategy, TrainStep, build_step
from trainfit.techniques.host_adamw import HostAdamW
from trainfit.techniques.optimizer import bytes_per_parameter
from trainfit.train.checkpoint import RunState, checkpoint_path
from trainfit.train.packing import Position
from trainfit.train.saving import Checkpoints
from trainfit.workload import MicroBatch, Workload, workload_from_config

HOST = OptimizerVariant(place="host")
HALF_HOST = OptimizerVariant(weights="bf16_master", place="host")
VARIANTS = [
    OptimizerVariant(),
    OptimizerVariant(kernel="foreach"),
    OptimizerVariant(states="bf16"),
    OptimizerVariant(states="int8"),
    OptimizerVariant(states="fp8"),
    OptimizerVariant(weights="bf16_master"),
    OptimizerVariant(weights="fp16_master"),
    OptimizerVariant(weights="bf16_residual"),
    OptimizerVariant(weights="bf16_residual", states="int8", gradients="half"),
    OptimizerVariant(weights="bf16_kahan"),
    OptimizerVariant(weights="bf16_stochastic"),
    OptimizerVariant(weights="bf16_stochastic", states="int8", gradients="half", update="backward"),
    OptimizerVariant(weights="bf16_residual", states="int8", gradients="half", update="backward"),
    OptimizerVariant("adafactor"),
    HOST,
    HALF_HOST,
    OptimizerVariant(weights="fp16_master", place="host"),
    OptimizerVariant(states="int8", place="host"),
]


def wide() -> Workload:
    """Rows of 1024 and more, as real models have, so that scales weigh what they do there."""
    config = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 8, "intermediate_size": 2048, "max_position_embeddings": LENGTH,
        "attn_implementation": "eager", "hidden_act": "gelu",
    }  # fmt: skip
    return workload_from_config(config, seq_len=8, name="wide")


def strategy_of(variant: OptimizerVariant, **knobs: Any) -> Strategy:
    precision: Any = variant.weights.partition("_")[0]
    return Strategy(1, precision=precision, tiers=("full",) * 2, optimizer=variant, **knobs)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(vars(v).values()))
def test_bytes_are_those_of_the_table_and_the_peak_is_predicted(npu: Accelerator, variant: OptimizerVariant):
    gc.collect()
    before = npu.memory.current_bytes()
    workload, strategy = wide(), strategy_of(variant)
    norm = None if variant.update == "backward" else 1.0
    predicted = rehearse(workload, strategy, on_this_npu(npu), max_grad_norm=norm)
    measured = measure(workload, strategy, npu, steps=0, max_grad_norm=norm)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)
    size = bytes_per_parameter(variant)
    resident = (size.weights + size.beside + size.moments) * workload.anatomy().num_parameters
    # Buffers for tokens and rotary tables are a few kilobytes.
    assert measured.resident_bytes - before == pytest.approx(resident, rel=0.01)
    step = build_step(workload, strategy, npu, max_grad_norm=None)
    batch = MicroBatch.of(*torch.zeros(2, 1, 8, dtype=torch.long))
    step.accumulate([batch])
    gradients = sum(p.grad.nbytes for p in step.model.parameters() if p.grad is not None)
    assert gradients == pytest.approx(size.gradients * workload.anatomy().num_parameters, rel=0.01)


# Tied weights and no biases, then biases as well, which do not decay: two groups of parameters.
OFFLOADED = {"llama": {"tie_word_embeddings": True}, "gpt2": NO_DROPOUT}
HOSTS = [HOST, HALF_HOST, OptimizerVariant(states="int8", place="host")]


@pytest.mark.parametrize("family", OFFLOADED)
@pytest.mark.parametrize("host", HOSTS, ids=lambda v: f"{v.weights}-{v.states}")
def test_of_01_states_on_the_host_see_the_whole_window(npu: Accelerator, host: OptimizerVariant, family: str):
    """Report OF-01: with offload only one micro batch's gradient survived. Four here: as on the device, to the bit."""
    workload = workload_of(family, **OFFLOADED[family])
    precision = "fp32" if host.weights == "fp32" else "bf16"
    variants = (host, replace(host, place="device"))
    steps = [build(workload, npu, optimizer=each, precision=precision, accumulation_steps=4) for each in variants]
    assert [len(step.optimizer.param_groups) for step in steps] == [2, 2]
    for seed in range(4):
        results = [step(window(workload, count=4, seed=seed)) for step in steps]
        assert torch.equal(results[0].loss, results[1].loss)
        assert torch.equal(results[0].gradient_norm, results[1].gradient_norm)
    for one, other in zip(steps[0].model.parameters(), steps[1].model.parameters()):
        assert one.device.type == "npu"
        assert torch.equal(one, other)
    states = [value for state in steps[0].optimizer.state.values() for value in state.values()]
    assert {value.device.type for value in states} == {"cpu"}


@pytest.mark.parametrize("host", HOSTS, ids=lambda v: f"{v.weights}-{v.states}")
def test_states_on_the_host_go_on_from_a_checkpoint_to_the_bit(
    npu: Accelerator, host: OptimizerVariant, tmp_path: Path
):
    workload = workload_of("gpt2", **NO_DROPOUT)
    precision = "fp32" if host.weights == "fp32" else "bf16"

    def new() -> TrainStep:
        return build(workload, npu, optimizer=host, precision=precision)

    unbroken, resumed = new(), new()
    for seed in range(2):
        unbroken(window(workload, seed=seed))
    with Checkpoints(tmp_path, unbroken.ranks, keep=1) as checkpoints:
        state = RunState(2, Position(0, 0), 0)
        checkpoints.save(state, unbroken.model, unbroken.optimizer, npu.rng.get_state())
    assert isinstance(resumed.optimizer, HostAdamW)
    with Checkpoints(tmp_path, resumed.ranks, keep=1) as checkpoints:
        checkpoints.load(checkpoint_path(tmp_path, 2), resumed.model, resumed.optimizer)
    for seed in range(2, 4):
        losses = [step(window(workload, seed=seed)).loss for step in (unbroken, resumed)]
        assert torch.equal(*losses)
    for (name, one), (_, other) in zip(unbroken.model.named_parameters(), resumed.model.named_parameters()):
        assert torch.equal(one, other), name
        mine, theirs = unbroken.optimizer.state[one], resumed.optimizer.state[other]
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert torch.equal(mine[key], theirs[key]), (name, key)


def test_small_pieces_through_two_buffers_change_nothing(npu: Accelerator, monkeypatch: pytest.MonkeyPatch):
    workload = workload_of("llama")
    whole = build(workload, npu, optimizer=HALF_HOST, precision="bf16")
    monkeypatch.setattr("trainfit.techniques.stored_adamw.MIN_PIECE", 256)
    pieces = build(workload, npu, optimizer=HALF_HOST, precision="bf16")
    for seed in range(3):
        assert torch.equal(whole(window(workload, seed=seed)).loss, pieces(window(workload, seed=seed)).loss)
    for one, other in zip(whole.model.parameters(), pieces.model.parameters()):
        assert torch.equal(one, other)
