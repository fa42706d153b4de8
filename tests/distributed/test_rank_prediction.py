"""What a rehearsal of one rank predicts is what that rank measures, and what theory says of large models."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from measured_steps import measure_steps, strategy_of, workload_of
from ranks import run_ranks

from trainfit.errors import DeviceError, ModelError, RankError, RecipeError
from trainfit.hardware import Accelerator, accelerator, find_device, this_machine
from trainfit.hardware.ranks import fake_process_group
from trainfit.profile import Mesh, Offload, Profile, TensorParallel, Zero
from trainfit.rehearsal import measure, rehearse
from trainfit.rehearsal.collectives import CollectiveCounter
from trainfit.rehearsal.processes import run_on_ranks
from trainfit.rehearsal.recording import Recording, StepRecorder, record_host
from trainfit.rehearsal.workspaces import library_bytes
from trainfit.step import Strategy
from trainfit.workload import resolve_workload, workload_from_module

CPU = this_machine("cpu")
TWO, REPLICAS = Mesh(shard=2), Mesh(replicate=2)
STRATEGIES = {
    "replicas": strategy_of(accumulation_steps=3, mesh=REPLICAS),
    "optimizer": strategy_of("pointwise", accumulation_steps=3, mesh=TWO, zero=Zero(1)),
    "gradients": strategy_of("full", accumulation_steps=2, mesh=TWO, zero=Zero(2), loss_chunks=4),
    "parameters": strategy_of(mesh=TWO, zero=Zero(3)),
    "offload": strategy_of("1*offload,2*offload_pointwise", mesh=TWO, zero=Zero(3), offload=Offload("disk")),
    "parameters, full": strategy_of("full", rows=1, accumulation_steps=3, mesh=TWO, zero=Zero(3), loss_chunks=4),
    "reduced once": strategy_of("full", rows=1, accumulation_steps=3, mesh=TWO, zero=Zero(3, gradient_sync="step")),
}


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Profile]]:
    ranks = run_ranks(measure_steps, 2, workload_of(), list(STRATEGIES.values()))
    return [dict(zip(STRATEGIES, profiles)) for profiles in ranks]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", STRATEGIES)
def test_predicted_peak_is_the_measured_one(measured: list[dict[str, Profile]], name: str, rank: int):
    predicted, found = rehearse(workload_of(), STRATEGIES[name], CPU, rank=rank), measured[rank][name]
    assert predicted.peak_bytes == pytest.approx(found.peak_bytes, rel=0.002)
    assert predicted.resident_bytes == pytest.approx(found.resident_bytes, rel=0.002)
    for phase, size in predicted.phases.items():
        assert size == pytest.approx(found.phases[phase], rel=0.01), phase
    assert (predicted.rank, found.rank) == (rank, rank)
    assert sum(predicted.categories.values()) == predicted.peak_bytes
    assert predicted.categories["parameters"] > 0


def test_gradients_that_wait_for_the_last_micro_batch_are_whole(measured: list[dict[str, Profile]]):
    """GA-08: reducing once a step keeps whole gradients between backwards, also where parameters are sharded."""
    once = STRATEGIES["reduced once"]
    each = replace(once, zero=Zero(3))
    with torch.device("meta"):
        gradients = sum(p.nbytes for p in workload_of().make_model().parameters())
    kept, reduced = (rehearse(workload_of(), strategy, CPU) for strategy in (once, each))
    assert kept.phases["forward"] - reduced.phases["forward"] == pytest.approx(gradients / 2, rel=0.01)
    assert measured[0]["reduced once"].phases["forward"] == pytest.approx(kept.phases["forward"], rel=0.01)


def test_a_window_of_any_length_is_rehearsed_by_three_micro_batches():
    """Bytes but those of waiting token ids stay, the middle micro batch's time and collectives are added."""
    profiles = {
        k: rehearse(workload_of(), strategy_of(accumulation_steps=k, mesh=TWO, zero=Zero(3)), CPU) for k in (3, 4, 6)
    }
    tokens = 2 * 2 * 32 * 8
    assert profiles[6].peak_bytes - profiles[3].peak_bytes == 3 * tokens
    gathers = {k: profile.collectives["broadcast"].count / TWO.size for k, profile in profiles.items()}
    assert gathers[4] - gathers[3] == 7
    added = profiles[4].step_seconds - profiles[3].step_seconds
    assert profiles[6].step_seconds == pytest.approx(profiles[3].step_seconds + 3 * added)


@pytest.mark.parametrize("activation", ["keep", "discard", "pointwise", "attention", "full"])
def test_nothing_of_a_step_outlives_it_on_tensor_ranks(activation: str):
    """Between steps there are masters and moments: the whole model's, but what tensor ranks split is halved."""
    with torch.device("meta"):
        model = workload_of().make_model()
    split = sum(p.nbytes for name, p in model.named_parameters() if "_proj" in name)
    whole = sum(p.nbytes for p in model.parameters()) - split
    profile = rehearse(workload_of(), strategy_of(activation, mesh=Mesh(tensor=2)), CPU)
    assert profile.resident_bytes == pytest.approx(3 * (whole + split / 2), rel=0.005)


SPLIT_SEQUENCES = {
    activation: strategy_of(
        activation, rows=8, accumulation_steps=2, mesh=Mesh(tensor=2), tensor=TensorParallel(sequence=True)
    )
    for activation in ("keep", "discard", "pointwise", "full")
}


def test_nothing_of_split_sequences_outlives_a_step_nor_seems_to():
    """To the byte, but for a scalar: a hidden state is 64 KiB, and half of one is a reduce-scatter's output."""
    ranks = run_ranks(measure_steps, 2, workload_of(), list(SPLIT_SEQUENCES.values()))
    for rank, profiles in enumerate(ranks):
        for (activation, strategy), found in zip(SPLIT_SEQUENCES.items(), profiles):
            predicted = rehearse(workload_of(), strategy, CPU, rank=rank)
            assert found.resident_bytes == pytest.approx(predicted.resident_bytes, abs=16), (rank, activation)
            assert found.peak_bytes == pytest.approx(predicted.peak_bytes, abs=16), (rank, activation)


def reduce_scatters(number: int) -> int:
    """Bytes that are live after them, of 1 MiB that each copies and half that each gives."""
    recorder, recording = StepRecorder(), Recording()
    with record_host(recorder, recording), CollectiveCounter(settles=True):
        recorder.start()
        recorder.observe("forward")
        for _ in range(number):
            # Rank 0 waits for rank 1: a thread that waits must not be taken for one that is done.
            time.sleep(0.002 * dist.get_rank())
            functional_collectives.reduce_scatter_tensor(torch.ones(2**18), "sum", 0, dist.group.WORLD).wait()
        recorder.stop()
    return recording.end_bytes


def test_no_reduce_scatter_looks_live_after_it():
    assert run_ranks(reduce_scatters, 2, 200) == [0, 0]


# ---- Llama-2-7B on eight ranks --------------------------------------------------------------------------------------

RANKS = 8


def llama_groups() -> list[int]:
    """Parameters of each block, and of what lies outside of them. Eight ranks divide all rows, so nothing is padded."""
    with torch.device("meta"):
        model = resolve_workload("llama-2-7b", 8).make_model()
    assert all(p.shape[0] % RANKS == 0 for p in model.parameters())
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.model.layers]
    return [*blocks, sum(p.numel() for p in model.parameters()) - sum(blocks)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_model_states_of_llama_2_7b_on_eight_ranks_equal_theory(stage: int):
    """Bytes at the peak of P fp32 parameters, their gradients and two moments, on each of n ranks, in three micro
    batches of eight tokens; 16P/n when the optimizer runs.

    stage 0   4P, 4P, 8P
    stage 1   4P/n and 4P gathered, 4P, 8P/n
    stage 2   4P/n and 4P gathered, 4P/n and whole ones of the head and a block, 8P/n
    stage 3   4P/n and those of the root and a block, gradients and moments as in stage 2

    The root is what lies outside of blocks, head included: gathered once, reduced last.
    """
    groups = llama_groups()
    total, root, block, head = sum(groups), groups[-1], groups[0], 32000 * 4096
    mesh = Mesh(replicate=RANKS) if stage == 0 else Mesh(shard=RANKS)
    shard = total / (1 if stage == 0 else RANKS)
    gathered = {0: 0, 1: total, 2: total, 3: root + block}[stage]
    whole = {0: 0, 1: total - shard, 2: head + block, 3: head + block}[stage]
    strategy = Strategy(1, 3, tiers=("keep",) * 32, mesh=mesh, zero=Zero(stage))
    profile = rehearse(resolve_workload("llama-2-7b", 8), strategy, find_device("h100"), max_grad_norm=None)
    states = {"parameters": 4 * (shard + gathered), "gradients": 4 * (shard + whole), "optimizer": 8 * shard}
    for category, size in states.items():
        assert profile.categories[category] == pytest.approx(size, rel=1e-3), category
    libraries = sum(library_bytes(find_device("h100").spec))
    assert profile.phases["optimizer"] - libraries == pytest.approx(16 * shard, rel=1e-3)
    assert profile.resident_bytes - libraries == pytest.approx(12 * shard, rel=1e-3)


# ---- what cannot be done --------------------------------------------------------------------------------------------


def test_a_rank_that_is_not_there_and_a_process_that_is_a_rank_are_refused():
    strategy = strategy_of(mesh=TWO, zero=Zero(3))
    with pytest.raises(RecipeError, match="rank 2 of 2 is not there"):
        rehearse(workload_of(), strategy, CPU, rank=2)
    with fake_process_group(2):
        with pytest.raises(DeviceError, match="without a process group"):
            rehearse(workload_of(), strategy, CPU)
        with pytest.raises(DeviceError, match="single process"):
            measure(workload_of(), strategy, accelerator("cpu"))


def test_a_model_that_no_other_process_can_make_is_refused():
    workload = workload_from_module(lambda: torch.nn.Linear(1, 1), seq_len=4, vocab_size=4)
    with pytest.raises(ModelError, match="top of a module") as refused:
        measure(workload, Strategy(1, mesh=TWO, zero=Zero(3)), accelerator("cpu"))
    assert "\n" not in str(refused.value)


def test_a_rank_that_fails_is_named():
    with pytest.raises(RankError, match="rank 1 of 2 failed: ZeroDivisionError"):
        run_on_ranks(fail_on_rank_1, 2, "cpu")
    with pytest.raises(RecipeError, match="rank 1 of 2: no such knob"):
        run_on_ranks(refuse_on_rank_1, 2, "cpu")


def fail_on_rank_1(device: Accelerator) -> None:
    if dist.get_rank() == 1:
        raise ZeroDivisionError("of rank 1")


def refuse_on_rank_1(device: Accelerator) -> None:
    if dist.get_rank() == 1:
        raise RecipeError("no such knob")
