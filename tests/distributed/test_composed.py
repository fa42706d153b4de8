"""Pipeline, tensor and shard together, on 4 and 8 gloo ranks, against plain training in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from pipeline_ranks import Case, Trained, run_cases, train_plainly
from ranks import run_ranks

from trainfit.hardware import find_device
from trainfit.profile import Mesh, Pipeline, Zero
from trainfit.rehearsal import rehearse
from trainfit.step import Strategy
from trainfit.workload import resolve_workload

INTERLEAVED = Pipeline("interleaved", 2)
FOUR, EIGHT = Mesh(pipeline=2, tensor=2), Mesh(pipeline=2, shard=2, tensor=2)
MIXED = "2*full,1*keep,1*pointwise,1*keep"
CASES = {
    4: [
        Case("two heads", FOUR),
        Case("experts", FOUR, pipeline=INTERLEAVED, accumulation=4, tiers="full", chunks=2),
        Case("two heads", FOUR, accumulation=4, tiers=MIXED, frozen=("embed", "layers.0.")),
    ],
    8: [
        Case("two heads", EIGHT, Zero(1), accumulation=2),
        Case("two heads", EIGHT, Zero(2), accumulation=4, tiers=MIXED, chunks=2),
        Case("two heads", EIGHT, Zero(3), accumulation=4, tiers="full", pipeline=INTERLEAVED),
        Case("experts", EIGHT, Zero(3), accumulation=2, tiers="full", steps=8),
    ],
}
NUMBERED = [(size, index) for size, cases in CASES.items() for index in range(len(cases))]


@cache
def trained(size: int) -> list[Any]:
    """By rank: what each case gave."""
    return [found for found, _ in run_ranks(run_cases, size, CASES[size], [])]


@cache
def plain(case: Case) -> Trained:
    return train_plainly(case)


@pytest.mark.parametrize(("size", "index"), NUMBERED)
def test_trains_as_one_process_does(size: int, index: int) -> None:
    case = CASES[size][index]
    expected = plain(Case(case.family, frozen=case.frozen, steps=case.steps))
    names: set[str] = set()
    for rank in trained(size):
        found = rank[index]
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
        assert found.norms == pytest.approx(expected.norms, rel=1e-5)
        assert found.evaluated == (pytest.approx(expected.evaluated[0], rel=1e-5), expected.evaluated[1])
        for name, weight in found.weights.items():
            largest = expected.weights[name].abs().max()
            assert (weight - expected.weights[name]).abs().max() / largest < 1e-5, name
        names |= found.weights.keys()
    assert names == expected.weights.keys()


def test_thirty_two_ranks_are_rehearsed() -> None:
    """4 x 4 x 2: a block's parameters are split over 4 tensor ranks and gathered from 2 shards, on each of 4 stages."""
    mesh = Mesh(pipeline=4, tensor=4, shard=2)
    workload, hardware = resolve_workload("llama-2-7b", 128), find_device("ascend-910b1")
    strategy = Strategy(1, 8, "bf16", ("full",) * 32, mesh=mesh, zero=Zero(2))
    profile = rehearse(workload, strategy, hardware, rank=mesh.size // 2)  # of the third stage
    assert profile.collectives["all_gather"].group_sizes == (2,)
    assert profile.collectives["reduce_scatter"].group_sizes == (2,)
    assert profile.collectives["all_reduce"].group_sizes == (2, 4)
    assert profile.collectives["send"].count == profile.collectives["recv"].count == 16
    # fp32 masters and two moments, of a half of a quarter of each of 8 blocks; norms are whole on tensor ranks.
    block = 4 * 4096**2 + 3 * 4096 * 11008
    assert profile.resident_bytes == pytest.approx(12 * 8 * (block / 8 + 2 * 4096 / 2), rel=1e-3)
