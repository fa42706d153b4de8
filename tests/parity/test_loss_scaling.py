"""Scales change nothing but what fp16 can hold."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from plain import (
    assert_equal_to_the_bit,
    build,
    largest_difference,
    make_model,
    plain_gradients,
    planned_gradients,
    random_batch,
    small_workload,
    tiny_workload,
)

from deep_gradients import SETTINGS, train
from trainfit.profile import LossScale
from trainfit.step import TrainStep
from trainfit.workload import Workload

FAMILIES = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "gemma2": ("gemma2", {}),
    "qwen3_moe": ("qwen3_moe", {}),
}


def scaled_in_fp32(workload: Workload, scales: list[float], activation: str = "keep", **knobs) -> TrainStep:
    """Everything that per-block scales do, without fp16."""
    step = build(workload, activation, precision="fp16", loss_scale=LossScale(per_block=True), **knobs)
    step._autocast = nullcontext
    step.scaling.book.scales = list(scales)
    return step


@pytest.mark.parametrize("family", FAMILIES)
def test_any_scales_of_blocks_give_the_gradients_of_plain_fp32_to_the_bit(family: str):
    model_type, changes = FAMILIES[family]
    workload = tiny_workload(model_type, **changes)
    batch = random_batch(workload)
    expected = plain_gradients(make_model(workload).train(), batch)
    scales = [2.0**3, 2.0**-12, 2.0**20, 2.0**5, 2.0**30, 2.0**8]
    is_tied = bool(build(workload).anatomy.ties)
    if is_tied:
        scales[-1] = scales[0]
    for activation in ("keep", "full", "pointwise"):
        step = scaled_in_fp32(workload, scales, activation)
        assert_equal_to_the_bit(planned_gradients(step, [batch]), expected)
    assert step.scaling.book.tied == is_tied
    assert step.scaling._borders.largest[2] > 2.0**10  # scaled by 2**20 on the way


def test_accumulated_and_chunked_scales_are_those_of_the_step_without_to_the_bit():
    workload = tiny_workload("llama")
    window = [random_batch(workload, rows=1, seed=seed) for seed in (3, 4, 5)]
    expected = planned_gradients(build(workload, "full", loss_chunks=3), window)
    step = scaled_in_fp32(workload, [2.0**n for n in (3, -12, 20, 5, 30, 8)], "full", loss_chunks=3)
    assert_equal_to_the_bit(planned_gradients(step, window), expected)


@pytest.mark.parametrize("vocab_size", [1000, 128_000])
@pytest.mark.parametrize("head", ["linear", "biased", "capped"])
def test_chunks_in_fp16_are_as_near_to_fp32_as_one_piece_is(head: str, vocab_size: int):
    """A row's sum of 128 thousand is beyond fp16, its inverse below the normal numbers."""
    model_type = {"linear": "llama", "biased": "phi", "capped": "gemma2"}[head]
    changes = {"head_dim": 8, "final_logit_softcapping": 3.0} if head == "capped" else {}
    workload = small_workload(model_type, vocab_size=vocab_size, **changes)
    batch = random_batch(workload)
    exact = plain_gradients(make_model(workload).train(), batch)
    for init_scale in (2.0**6, 2.0**16):
        scale = LossScale(init_scale=init_scale)
        whole = planned_gradients(build(workload, precision="fp16", loss_scale=scale), [batch])
        chunked = planned_gradients(build(workload, precision="fp16", loss_scale=scale, loss_chunks=5), [batch])
        assert 1e-4 < largest_difference(whole, exact) < 0.01
        assert largest_difference(chunked, exact) < 1.5 * largest_difference(whole, exact)


def test_scales_by_block_train_what_one_scale_cannot():
    """Gradients of 1e-9 and of 1e2, both of which matter. Held to fp32 over 300 steps."""
    outcomes = {setting: train(setting) for setting in SETTINGS}
    expected = outcomes["fp32"].loss
    assert outcomes["fp16 by block"].loss == pytest.approx(expected, rel=0.01)
    for setting in ("fp16 unscaled", "fp16 one scale"):
        assert outcomes[setting].loss > 2 * expected
        assert outcomes[setting].underflow is None
    underflow = outcomes["fp16 by block"].underflow
    assert underflow is not None
    assert underflow.with_blocks < 0.01 < 0.5 < underflow.with_one
    assert outcomes["fp16 by block"].skips < 25
