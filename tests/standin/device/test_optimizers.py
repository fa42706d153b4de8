"""Optimizer variants on the npu: bytes by its own allocator, and states in host memory."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_step import LENGTH, build, on_this_npu, window, workload_of

from trainfit.hardware import Accelerator
from trainfit.profile import OptimizerVariant
from trainfit.rehearsal import measure, rehearse
from trainfit.step import Strategy
from trainfit.techniques.optimizer import bytes_per_parameter
from trainfit.workload import Workload, workload_from_config

HOST = OptimizerVariant(place="host")
HALF_HOST = OptimizerVariant(weights="bf16_master", place="host")
VARIANTS = [
    OptimizerVariant(),
    OptimizerVariant(kernel="foreach"),
    OptimizerVariant(states="int8"),
    OptimizerVariant(weights="bf16_master"),
    OptimizerVariant(weights="bf16_residual"),
    OptimizerVariant(weights="bf16_residual", states="int8", gradients="half"),
    OptimizerVariant(weights="bf16_stochastic"),
    OptimizerVariant(weights="bf16_residual", states="int8", gradients="half", update="backward"),
    HOST,
    HALF_HOST,
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
    precision = "fp32" if variant.weights == "fp32" else "bf16"
    return Strategy(1, precision=precision, tiers=("full",) * 2, optimizer=variant, **knobs)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v.weights}-{v.states}-{v.place}-{v.update}-{v.kernel}")
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


@pytest.mark.parametrize(
    ("host", "device"), [(HOST, OptimizerVariant()), (HALF_HOST, OptimizerVariant(weights="bf16_master"))]
)
def test_of_01_states_on_the_host_see_the_whole_window(
    npu: Accelerator, host: OptimizerVariant, device: OptimizerVariant
):
    """Report OF-01: with offload only one micro batch's gradient survived. Four here: as on the device, to the bit."""
    workload = workload_of("llama")
    precision = "fp32" if host.weights == "fp32" else "bf16"
    variants = (host, replace(host, place="device"))
    steps = [build(workload, npu, optimizer=each, precision=precision, accumulation_steps=4) for each in variants]
    for seed in range(4):
        results = [step(window(workload, count=4, seed=seed)) for step in steps]
        assert torch.equal(results[0].loss, results[1].loss)
        assert torch.equal(results[0].gradient_norm, results[1].gradient_norm)
    for one, other in zip(steps[0].model.parameters(), steps[1].model.parameters()):
        assert one.device.type == "npu"
        assert torch.equal(one, other)
    states = [value for state in steps[0].optimizer.state.values() for value in state.values()]
    assert {value.device.type for value in states} == {"cpu"}


def test_small_pieces_through_two_buffers_change_nothing(npu: Accelerator, monkeypatch: pytest.MonkeyPatch):
    workload = workload_of("llama")
    whole = build(workload, npu, optimizer=HALF_HOST, precision="bf16")
    monkeypatch.setattr("trainfit.techniques.stored_adamw.MIN_PIECE", 256)
    pieces = build(workload, npu, optimizer=HALF_HOST, precision="bf16")
    for seed in range(3):
        assert torch.equal(whole(window(workload, seed=seed)).loss, pieces(window(workload, seed=seed)).loss)
    for one, other in zip(whole.model.parameters(), pieces.model.parameters()):
        assert torch.equal(one, other)
