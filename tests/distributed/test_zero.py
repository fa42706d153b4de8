"""Every stage on 2 and 4 ranks against one process: losses, norms and weights of 20 steps in fp32.

All runs have rows of any number of labels, none included, so that ranks and micro batches never have as many (GA-02).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from zero_ranks import MAX_NORM, Case, new_model, plain, plain_gradients, run_all, workload_of

EACH, ONCE = (("gradient_sync", "micro_batch"),), (("gradient_sync", "step"),)
ON_TWO = [
    *(Case("llama", stage, accumulation) for stage in (0, 1, 2, 3) for accumulation in (1, 4)),
    *(Case("gpt2", stage, 4, "full") for stage in (0, 1, 2, 3)),
    *(Case("qwen3_moe", stage, 4, "full") for stage in (0, 1, 2, 3)),
    *(Case("frozen", stage, 4, "full") for stage in (0, 1, 2, 3)),
    *(Case("lora", stage, 4, "full") for stage in (0, 2, 3)),
    *(Case("tied-5", stage, loss_chunks=chunks) for stage, chunks in ((0, 1), (1, 4), (2, 1), (3, 4))),
    *(Case("llama", 3, 4, tier) for tier in ("offload", "1*offload_full,1*offload_pointwise")),
    Case("gpt2", 2, 4, "offload_pointwise"),
    Case("llama", 1, 4, zero=EACH),
    Case("llama", 2, 4, loss_chunks=4, zero=ONCE),
    Case("llama", 3, 4, "pointwise", zero=ONCE),
    Case("llama", 3, 4, "pointwise", loss_chunks=4, zero=(("prefetch", 2),)),
]
ON_FOUR = [
    *(Case("llama", stage, 4) for stage in (0, 1, 2, 3)),
    *(Case("gpt2", stage, 4, "full", copies=2) for stage in (1, 2, 3)),
    Case("qwen3_moe", 3, 1, "full", copies=2),
    Case("frozen", 3, 4, "full", copies=2, zero=ONCE),
    Case("tied-5", 3, 4),
    Case("llama", 3, 4, "full", zero=(("reshard_size", 2),)),
]
# What a rank holds of gradients between micro batches
BETWEEN = {
    Case("llama", 1, 4): "whole",
    Case("llama", 2, 4): "sharded",
    Case("llama", 2, 4, zero=ONCE): "whole",
    Case("llama", 3, 4): "sharded",
}
ACCUMULATED = [Case("llama", stage, 4) for stage in (0, 2, 3)]
MIXED = [Case("llama", stage, precision="bf16") for stage in (0, 1, 3)]
FAILED = [Case("llama", stage, 4) for stage in (0, 1, 2, 3)] + [Case("llama", 3, 4, zero=ONCE)]
EMPTY_SHARD = Case("tied-5", 3)
LOW_REDUCE = Case("llama", 2, 4, zero=(("reduce_dtype", "bf16"),))


@cache
def runs(size: int) -> list[dict[tuple[str, Case], Any]]:
    """By rank, then by what was run on which case; everything in one start of processes."""
    if size == 4:
        return run_ranks(run_all, 4, [*(("train", case) for case in ON_FOUR), ("inf_on_one_rank", EMPTY_SHARD)])
    watched = [("gradients_between", case) for case in BETWEEN] + [("accumulated", case) for case in ACCUMULATED]
    trained = [("train", case) for case in (*ON_TWO, LOW_REDUCE)]
    rest = [("dtypes", case) for case in MIXED] + [("after_failures", case) for case in FAILED]
    return run_ranks(run_all, 2, trained + watched + rest)


@cache
def one_process(model: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    return plain(model)


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Over all parameters, relative to the largest entry of each."""
    assert found.keys() == expected.keys()
    return max(((found[key] - expected[key]).abs().max() / expected[key].abs().max()).item() for key in expected)


SIZED = [(2, case) for case in ON_TWO] + [(4, case) for case in ON_FOUR]


@pytest.mark.parametrize(("size", "case"), SIZED, ids=[f"{size}-{case}" for size, case in SIZED])
def test_trains_as_one_process_does(size: int, case: Case) -> None:
    """GA-02; SH-01 for tied-5; SH-03: the norm is that of all ranks; SH-08; CK-14 for frozen."""
    losses, norms, weights = one_process(case.model)
    for rank in runs(size):
        assert rank["train", case]["losses"] == pytest.approx(losses, rel=1e-5)
        assert rank["train", case]["norms"] == pytest.approx(norms, rel=1e-5)
        assert rank["train", case]["is_same"], "the optimizer holds parameters that are not the model's"
    assert largest_difference(runs(size)[0]["train", case]["weights"], weights) < 1e-5


def test_plain_training_moves_every_trained_weight_and_clips() -> None:
    """What the comparisons above rest on."""
    for model in ("llama", "gpt2", "qwen3_moe", "frozen", "lora", "tied-5"):
        _, norms, weights = one_process(model)
        assert max(norms) > MAX_NORM or model == "lora"  # two matrices of rank 4 a block: a small norm
        for name, before in new_model(workload_of(model)).named_parameters():
            assert torch.equal(weights[name], before) == (not before.requires_grad), name


def test_reduces_in_another_dtype() -> None:
    """Near, but not to fp32's rounding: bf16 is really used on the way."""
    _, _, weights = one_process("llama")
    difference = largest_difference(runs(2)[0]["train", LOW_REDUCE]["weights"], weights)
    assert 1e-5 < difference < 0.1


@pytest.mark.parametrize("case", BETWEEN, ids=str)
def test_ga08_gradients_are_sharded_or_whole_between_micro_batches(case: Case) -> None:
    """GA-08: reduced each time, a rank never holds more than its share between micro batches."""
    for rank in runs(2):
        moments, total, share = rank["gradients_between", case]
        assert share < total
        expected = (total, 0) if BETWEEN[case] == "whole" else (0, share)
        assert moments == [(0, 0), *[expected] * 3, (0, share)]


@pytest.mark.parametrize("case", ACCUMULATED, ids=str)
def test_ga07_all_ranks_have_the_same_gradients_after_accumulation(case: Case) -> None:
    """GA-07: no rank is left with its own; and a stage changes nothing about them."""
    first, second = (rank["accumulated", case] for rank in runs(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert largest_difference(first, plain_gradients(case.model)) < 1e-5


@pytest.mark.parametrize("case", FAILED, ids=str)
def test_a_window_that_failed_leaves_nothing_to_the_next(case: Case):
    """Out of memory half-way, say. To the bit: the same window runs again."""
    for rank in runs(2):
        told, (expected, *found) = rank["after_failures", case]
        assert told.startswith("none of the 4 micro batches has a valid label")
        for gradients in found:
            assert gradients.keys() == expected.keys()
            assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_mp07_all_ranks_see_what_one_found():
    """MP-07: an inf in rank 0's shard; the last rank has no row of that table."""
    found = [rank["inf_on_one_rank", EMPTY_SHARD] for rank in runs(4)]
    assert [rows for rows, _ in found] == [2, 2, 1, 0]
    assert all(norm == float("inf") for _, norm in found)


@pytest.mark.parametrize("case", MIXED, ids=str)
def test_mp08_masters_gradients_and_states_are_fp32_under_bf16(case: Case) -> None:
    """MP-08: an update below bf16's rounding must not vanish."""
    for rank in runs(2):
        assert rank["dtypes", case] == {name: {torch.float32} for name in ("parameters", "gradients", "states")}
