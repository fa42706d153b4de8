"""Two ranks with a device each and the process group `hccl`: they train, take and save what one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks_on_npu import (
    NUM_RANKS,
    Case,
    Trained,
    measured_workload,
    new_model,
    run_all,
    stage_of_zero,
    train_plainly,
)

from trainfit.hardware import Accelerator, find_device
from trainfit.profile import Mesh
from trainfit.rehearsal import rehearse
from trainfit.rehearsal.processes import run_on_ranks

TIMEOUT_SECONDS = 240.0
STAGES = Mesh(pipeline=NUM_RANKS)
PIPELINE = [Case(STAGES, tier="full"), Case(STAGES, family="gpt2")]
TRAINED = [*(stage_of_zero(stage, tier) for stage in (0, 1, 2, 3) for tier in ("keep", "full")), *PIPELINE]
MEASURED = [stage_of_zero(stage, tier) for stage in (1, 3) for tier in ("keep", "full")]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What run_all gave, by rank."""
    folder = tmp_path_factory.mktemp("saved")
    return run_on_ranks(run_all, NUM_RANKS, "npu", TRAINED, MEASURED, folder, timeout_seconds=TIMEOUT_SECONDS)


@pytest.fixture(scope="module")
def plains() -> dict[str, Trained]:
    return {family: train_plainly(family) for family in ("llama", "gpt2")}


def test_each_rank_has_a_device_of_its_own_and_gloo_beside_hccl(ranks: list[dict[str, Any]]):
    assert [rank["device"] for rank in ranks] == ["npu:0", "npu:1"]
    assert all(rank["backends"] == "cpu:gloo,npu:hccl" for rank in ranks)


@pytest.mark.parametrize("number", range(len(TRAINED)), ids=map(str, TRAINED))
def test_trains_as_one_process_on_the_cpu_does(ranks: list[dict[str, Any]], plains: dict[str, Trained], number: int):
    plain = plains[TRAINED[number].family]
    before = dict(new_model(TRAINED[number].family).named_parameters())
    assert all((plain.weights[name] - weight).abs().max() > 1e-4 for name, weight in before.items())
    assert max(plain.norms) > 0.5  # clipped
    names = set()
    for rank in ranks:
        found, _ = rank["trained"][number]
        assert found.devices == {rank["device"]}
        assert found.losses == pytest.approx(plain.losses, rel=1e-5)
        assert found.norms == pytest.approx(plain.norms, rel=1e-5)
        for name, weight in found.weights.items():
            expected = plain.weights[name]
            # Of the whole tensor: AdamW makes the rounding of a gradient that is nearly zero as large as any.
            assert (weight - expected).norm() / expected.norm() < 1e-5, name
        names |= found.weights.keys()
    assert names == plain.weights.keys()


def test_nothing_stays_on_the_device_of_a_step_that_is_gone(ranks: list[dict[str, Any]]):
    """Out of memory, a smaller step is made: it must find all of its device."""
    for rank in ranks:
        assert [left for _, left in rank["trained"]] == [0] * len(TRAINED)


def test_a_model_is_made_without_being_whole_on_the_device(ranks: list[dict[str, Any]]):
    """Not even at the start: it comes block by block, and a shard of each stays."""
    for rank in ranks:
        made = rank["made"]
        assert made["kept"] > made["whole"]  # shards of masters and two moments: 1.5 of the model
        assert made["peak"] - made["before"] < 1.1 * made["kept"]


@pytest.mark.parametrize("rank", range(NUM_RANKS))
@pytest.mark.parametrize("number", range(len(MEASURED)), ids=map(str, MEASURED))
def test_rehearsed_peak_is_that_of_the_ranks_allocator(
    npu: Accelerator, ranks: list[dict[str, Any]], number: int, rank: int
):
    predicted = rehearse(measured_workload(), MEASURED[number].strategy, find_device(npu.name), rank=rank)
    measured = ranks[rank]["measured"][number]
    assert (predicted.rank, measured.rank) == (rank, rank)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.02)
    assert predicted.resident_bytes == pytest.approx(measured.resident_bytes, rel=0.02)


def test_a_save_is_written_beside_training_and_resumes_to_the_bit(ranks: list[dict[str, Any]]):
    for rank in ranks:
        found = rank["saved"]
        assert found["early"] == 0
        assert found["written_from"] == {"cpu"}  # copies: the device's own are trained meanwhile
        saved, loaded = found["tensors"]
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)
        assert all(torch.equal(*pair) for pair in zip(*found["rng"], strict=True))
        assert found["resumed"] == found["expected"] != found["elsewhere"]
