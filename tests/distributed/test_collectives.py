"""Count and bytes of the collectives of a step are what each stage's theory says, rehearsed and run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from measured_steps import NUM_BLOCKS, frozen_workload, measure_steps, strategy_of, workload_of
from ranks import run_ranks

from trainfit.hardware import Hardware, find_device, this_machine
from trainfit.profile import Collective, Mesh, Profile, Zero
from trainfit.rehearsal import rehearse
from trainfit.rehearsal.collectives import Call
from trainfit.rehearsal.links import Links
from trainfit.step import Strategy
from trainfit.workload import Workload

CPU = this_machine("cpu")
GPU = find_device("h100")
TOKEN_COUNTS = 16  # bytes that each rank tells the others before a step: its valid tokens and its micro batches
TWO, REPLICAS, HYBRID = Mesh(shard=2), Mesh(replicate=2), Mesh(replicate=2, shard=2)


def groups_of(workload: Workload, *, trainable: bool, ranks: int = 1) -> list[int]:
    """Bytes of the parameters that are gathered together: of each block, and of what lies outside of blocks.

    A parameter's rows are padded until the ranks divide them.
    """
    with torch.device("meta"):
        model = workload.make_model()
    sizes = [0] * (NUM_BLOCKS + 1)
    for name, parameter in model.named_parameters():
        if trainable and not parameter.requires_grad:
            continue
        rows = -(-parameter.shape[0] // ranks) * ranks
        parts = name.split(".")
        block = int(parts[2]) if "layers" in parts else NUM_BLOCKS
        sizes[block] += rows * parameter[0].numel() * 4
    return sizes


def expected(workload: Workload, strategy: Strategy, *, on_host: bool = True) -> dict[str, tuple[int, int]]:
    """Calls and bytes by kind. Groups without a trainable parameter reduce nothing.

    Over gloo, FSDP gathers by a broadcast of each rank's share, and reduces and scatters by an all-to-all.
    """
    mesh, zero, k = strategy.mesh, strategy.zero, strategy.accumulation_steps
    losses = sum(size > 1 for size in (mesh.replicate, mesh.shard))
    reduced = (losses, 4 * losses)
    if zero.stage == 0:
        gradients = [size for size in groups_of(workload, trainable=True) if size]
        return {"all_reduce": (len(gradients) + reduced[0], sum(gradients) + reduced[1])}
    reduced = (reduced[0] + 1, reduced[1] + 8)  # norm: squares of gradients split over shard, over shard and tensor
    gathered = groups_of(workload, trainable=False, ranks=mesh.shard)
    gradients = [size for size in groups_of(workload, trainable=True, ranks=mesh.shard) if size]
    if mesh.replicate > 1:
        reduced = (reduced[0] + len(gradients), reduced[1] + sum(gradients) // mesh.shard)
    reductions = k if zero.reduces_each_micro_batch else 1
    # Stage 3 gathers a block for forward and for backward; the root once for both. Others once a step.
    times = [1] * (NUM_BLOCKS + 1) if zero.stage < 3 else [2 * k] * NUM_BLOCKS + [k]
    gather_bytes = sum(n * size for n, size in zip(times, gathered))
    # In backward a block is gathered from those among whom it was kept after forward.
    from_all, from_few = (sum(times), 0) if zero.stage < 3 else (k * (NUM_BLOCKS + 1), k * NUM_BLOCKS)
    broadcasts = mesh.shard * from_all + (zero.reshard_size or mesh.shard) * from_few
    scattered = (reductions * len(gradients), reductions * sum(gradients))
    if on_host:
        return {"broadcast": (broadcasts, gather_bytes), "all_to_all": scattered, "all_reduce": reduced}
    return {"all_gather": (sum(times), gather_bytes), "reduce_scatter": scattered, "all_reduce": reduced}


def counted(collectives: Mapping[str, Collective]) -> dict[str, tuple[int, int]]:
    return {kind: (each.count, each.bytes) for kind, each in collectives.items()}


STAGES = {
    "replicas": (REPLICAS, Zero(0)),
    "optimizer": (TWO, Zero(1)),
    "gradients": (TWO, Zero(2)),
    "parameters": (TWO, Zero(3)),
    "parameters, two ahead": (TWO, Zero(3, prefetch=2)),
    "optimizer, reduced each time": (TWO, Zero(1, gradient_sync="micro_batch")),
    "parameters, reduced once": (TWO, Zero(3, gradient_sync="step")),
    "hybrid 1": (HYBRID, Zero(1)),
    "hybrid 2": (HYBRID, Zero(2)),
    "hybrid 3": (HYBRID, Zero(3)),
    "three ranks": (Mesh(shard=3), Zero(3)),
    "kept within pairs": (Mesh(shard=4), Zero(3, reshard_size=2)),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulation", [1, 2, 5])
@pytest.mark.parametrize("hardware", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_rehearsal_counts_what_theory_says(stage: str, accumulation: int, hardware: Hardware):
    """GA-06: hybrid shards are summed over the copies once a step, however many micro batches there are."""
    mesh, zero = STAGES[stage]
    strategy = strategy_of(accumulation_steps=accumulation, mesh=mesh, zero=zero)
    workload = workload_of()
    found = counted(rehearse(workload, strategy, hardware).collectives)
    assert found == expected(workload, strategy, on_host=hardware is CPU)


def test_parameters_that_pairs_keep_are_gathered_again_within_pairs():
    mesh, zero = STAGES["kept within pairs"]
    profile = rehearse(workload_of(), strategy_of(mesh=mesh, zero=zero), CPU)
    assert profile.collectives["broadcast"].group_sizes == (2, 4)
    assert profile.collectives["all_to_all"].group_sizes == (4,)


@pytest.mark.parametrize("activation", ["full", "pointwise", "attention", "1*full,1*keep,1*pointwise"])
@pytest.mark.parametrize("stage", ["optimizer", "gradients", "parameters"])
def test_recomputation_gathers_nothing_more(activation: str, stage: str):
    """A block's backward gathers it once, for recomputing and for gradients; stages 1 and 2 still hold it."""
    mesh, zero = STAGES[stage]
    strategy = strategy_of(activation, accumulation_steps=3, mesh=mesh, zero=zero, loss_chunks=4)
    workload = workload_of()
    assert counted(rehearse(workload, strategy, CPU).collectives) == expected(workload, strategy)


@pytest.mark.parametrize("stage", ["replicas", "gradients", "parameters"])
def test_frozen_parameters_are_gathered_and_not_reduced(stage: str):
    mesh, zero = STAGES[stage]
    strategy = strategy_of(accumulation_steps=2, mesh=mesh, zero=zero)
    workload = frozen_workload()
    assert counted(rehearse(workload, strategy, CPU).collectives) == expected(workload, strategy)


REAL = [
    strategy_of(activation, accumulation_steps=accumulation, mesh=mesh, zero=zero)
    for mesh, zero in (STAGES[name] for name in ("replicas", "optimizer", "gradients", "parameters"))
    for activation, accumulation in (("keep", 1), ("1*full,2*pointwise", 3))
]


@pytest.fixture(scope="module")
def real_profiles() -> list[list[Profile]]:
    return run_ranks(measure_steps, 2, workload_of(), REAL)


@pytest.mark.parametrize("index", range(len(REAL)))
def test_two_real_ranks_do_what_was_rehearsed(real_profiles: list[list[Profile]], index: int):
    strategy, workload = REAL[index], workload_of()
    rehearsed = counted(rehearse(workload, strategy, CPU).collectives)
    # A rehearsed rank has nobody to compare token counts with.
    calls, num_bytes = rehearsed.get("all_gather", (0, 0))
    rehearsed["all_gather"] = (calls + 1, num_bytes + TOKEN_COUNTS * strategy.mesh.size)
    for of_rank in real_profiles:
        assert counted(of_rank[index].collectives) == rehearsed
        assert all(each.group_sizes == (2,) for each in of_rank[index].collectives.values())


def test_seconds_are_those_of_a_ring():
    gather, reduce = Call("all_gather", 800, 4), Call("all_reduce", 800, 4)
    assert gather.seconds(Links(100.0)) == pytest.approx(3 / 4 * 8)
    assert reduce.seconds(Links(100.0)) == pytest.approx(2 * 3 / 4 * 8)
    assert Call("send", 800, 4).seconds(Links(100.0)) == pytest.approx(8)


def test_exposed_time_is_part_of_the_step_and_all_of_it_where_nothing_overlaps():
    workload, strategy = workload_of(), strategy_of(mesh=Mesh(shard=8), zero=Zero(3))
    card = find_device("h100")
    at_once = replace(card.spec.link_latency, value=0.0)
    card = replace(card, spec=replace(card.spec, call_latency=at_once, link_latency=at_once))  # bytes alone take time
    on_cpu, on_gpu = (rehearse(workload, strategy, hardware) for hardware in (CPU, card))
    assert on_cpu.exposed_communication_seconds == pytest.approx(on_cpu.communication_seconds)
    assert 0 < on_gpu.exposed_communication_seconds < on_gpu.communication_seconds
    slow = replace(card.spec.link_bandwidth, value=card.spec.link_bandwidth.value / 1000)
    slowly = rehearse(workload, strategy, replace(card, spec=replace(card.spec, link_bandwidth=slow)))
    assert slowly.communication_seconds == pytest.approx(1000 * on_gpu.communication_seconds)
    slower = slowly.exposed_communication_seconds - on_gpu.exposed_communication_seconds
    assert slowly.step_seconds - on_gpu.step_seconds == pytest.approx(slower)
