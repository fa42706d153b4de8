"""verify(): passes what is plain training's, fails what is not, and is not fooled by what is not a number."""

from __future__ import annotations

import math

import pytest
import torch
from plain import tiny_workload

import trainfit.techniques.compression as compression
from trainfit.hardware import accelerator
from trainfit.rehearsal import verify
from trainfit.step import Strategy, TrainStep, parse_tiers

CPU = accelerator("cpu")


def strategy(activation: str = "pointwise", **knobs) -> Strategy:
    return Strategy(2, tiers=parse_tiers(activation, 4), **knobs)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tiers_are_plain_training_to_the_bit(precision: str):
    report = verify(tiny_workload("llama"), strategy(accumulation_steps=2, precision=precision), CPU)
    assert report.passed
    assert report.bit_equal
    assert report.tolerance == report.gradient_difference == 0.0


def test_chunks_are_within_their_tolerance_and_not_to_the_bit():
    report = verify(tiny_workload("llama"), strategy(loss_chunks=4), CPU)
    assert report.passed
    assert not report.bit_equal
    assert 0 < report.gradient_difference <= report.tolerance


@pytest.mark.parametrize(("tier", "precision"), [("keep_int8", "fp32"), ("keep_fp8", "bf16"), ("keep_bf16", "fp32")])
def test_what_compression_loses_is_reported_and_bounded(tier: str, precision: str):
    report = verify(tiny_workload("llama", seq_len=128), strategy(f"2*{tier},2*full", precision=precision), CPU)
    found = report.compression
    assert report.passed
    assert not report.bit_equal
    assert report.loss_difference <= 1e-6  # forward is not changed
    assert found is not None
    assert found.original_bytes > 1.9 * found.compressed_bytes
    assert 0 < found.gradient_error <= found.tolerance
    error = {"keep_int8": 0.0066, "keep_fp8": 0.026, "keep_bf16": 0.0017}[tier]  # of numbers of a normal distribution
    assert found.activation_error == pytest.approx(error, rel=0.1)


def test_an_error_that_compression_does_not_explain_fails(monkeypatch: pytest.MonkeyPatch):
    honest = compression.dequantise
    monkeypatch.setattr(compression, "dequantise", lambda *args, **settings: honest(*args, **settings) * 1.1)
    report = verify(tiny_workload("llama", seq_len=128), strategy("keep_int8"), CPU, steps=1)
    assert not report.passed
    assert report.compression is not None
    assert report.compression.gradient_error > report.compression.tolerance


@pytest.mark.parametrize("wrong", [0.999, math.nan, math.inf], ids=str)
def test_wrong_gradients_fail(wrong: float, monkeypatch: pytest.MonkeyPatch):
    honest = TrainStep.accumulate

    def accumulate(step: TrainStep, window):
        result = honest(step, window)
        with torch.no_grad():
            for parameter in step.model.parameters():
                parameter.grad.mul_(wrong)
        return result

    monkeypatch.setattr(TrainStep, "accumulate", accumulate)
    report = verify(tiny_workload("llama"), strategy(), CPU, steps=1)
    assert not report.passed
    assert not report.bit_equal
    assert report.gradient_difference > 9e-4  # 0.999 is off by a thousandth of the largest gradient
