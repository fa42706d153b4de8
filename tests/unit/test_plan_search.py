"""The outer search: every mesh is looked at, the best comes first, and techniques bring their own choices."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tiny_models import TINY_CONFIGS
from trainfit.hardware import find_device, this_machine
from trainfit.plan import Target
from trainfit.plan import layout as layout_module
from trainfit.plan.judged import judged, judged_ranks
from trainfit.plan.layout import meshes, stage_parts
from trainfit.plan.search import Search
from trainfit.plan.sketch import Sketch
from trainfit.plan.variants import Tracers
from trainfit.profile import Layout, Mesh, Pipeline, TensorParallel, Zero
from trainfit.rehearsal.rehearse import fake_tensors, operator_cost
from trainfit.rehearsal.shorten import shortened
from trainfit.rehearsal.trace import Tracer
from trainfit.rehearsal.traffic import traffic_bytes
from trainfit.step import Strategy
from trainfit.techniques import TECHNIQUES
from trainfit.workload import workload_from_config

LLAMA = workload_from_config(TINY_CONFIGS["llama"], seq_len=128, name="tiny-llama")
CPU = this_machine("cpu")


def search_for(device, target: Target, allowed: int = 2**30) -> Search:
    return Search(Tracers(LLAMA, device, target), device, target, allowed)


@pytest.fixture(scope="module")
def tight() -> Search:
    return search_for(CPU, Target(2**30, 6 * 128, 128), 22 * 10**6)


def test_the_first_candidate_is_the_best_of_all_points(tight: Search):
    best = next(tight.best_first())
    solved_first = tight.solved
    every = [tight.solve(bounded.point, tight.allowed_bytes) for bounded in tight.points]
    seconds = [candidate.weighed_seconds for candidate in every if candidate is not None]
    assert best.weighed_seconds == pytest.approx(min(seconds))
    assert solved_first < len(tight.points)
    assert best.peak_bytes <= tight.allowed_bytes


def test_bounds_of_sizes_that_were_traced_hold(tight: Search):
    """Other sizes' are straight lines; those of one and two sequences have nothing to be wrong about."""
    for bounded in tight.points:
        if bounded.point.strategy.micro_batch_size <= 2 and bounded.point.strategy.loss_chunks == 1:
            candidate = tight.solve(bounded.point, tight.allowed_bytes)
            assert candidate is None or bounded.seconds <= candidate.weighed_seconds * (1 + 1e-9)
            assert bounded.peak_bytes <= tight.smallest_of(bounded.point).peak_bytes


def test_what_another_process_has_traced_is_not_traced_again(monkeypatch: pytest.MonkeyPatch):
    tracer = Tracer(LLAMA, CPU)
    Sketch(tracer, "fp32", 2, 128, beside=_Beside())
    own, asked = Tracer(LLAMA, CPU).trace(2, "fp32", (1, 2), accumulates=True), []
    monkeypatch.setattr(Tracer, "_trace_block", lambda *args: asked.append(args))
    monkeypatch.setattr(Tracer, "_trace_shell", lambda self, size, precision, chunks: own.shell[chunks])
    assert tracer.trace(2, "fp32", (1, 2), accumulates=True) == own
    assert not asked


class _Beside:
    """As a SecondProcess, but here."""

    def submit(self, function, *args, **kwargs):
        return lambda: function(*args, **kwargs)


def test_meshes_are_all_factorisations():
    for number in (1, 6, 8, 12):
        found = list(meshes(number))
        by_hand = [
            (p, r, s, number // (p * r * s))
            for p in range(1, number + 1)
            for r in range(1, number + 1)
            for s in range(1, number + 1)
            if number % (p * r * s) == 0
        ]
        assert sorted(mesh.shape for mesh in found) == sorted(by_hand)
        assert all(math.prod(mesh.shape) == number for mesh in found)


def test_layouts_are_those_that_the_model_can_have():
    """Tiny Llama has 4 blocks and 2 key-value heads."""
    search = search_for(find_device("ascend-910b3", 8), Target(2**30, 64 * 128, 128, "bf16", layouts=()))
    found = {layout.mesh for layout in search.layouts}
    assert {mesh.tensor for mesh in found} == {1, 2}
    assert {mesh.pipeline for mesh in found} == {1, 2, 4}
    assert {layout.zero.stage for layout in search.layouts if layout.mesh.shard > 1} == {1, 2, 3}
    assert all(layout.tensor.sequence for layout in search.layouts if layout.mesh.tensor > 1)
    assert all(bounded.point.strategy.mesh.size == 8 for bounded in search.points)


def test_tensor_ranks_are_those_of_one_node():
    assert find_device("ascend-910b3", 16).node_size == 8
    assert find_device("ascend-910b3", 4).node_size == 4
    assert find_device("cpu", 16).node_size == 16


def test_every_technique_has_choices(tight: Search):
    draft = {"mesh": Mesh(), "micro_batch_size": 1, "accumulation_steps": 6}
    for technique in reversed(TECHNIQUES):
        choices = list(technique.choices(draft, tight.asked))
        assert choices
        draft[technique.setting] = choices[0]
    assert Strategy(**draft)


@pytest.mark.parametrize(("stages", "waiting"), [(2, [1, 0]), (4, [3, 2, 0])])
def test_stages_have_their_part_of_the_model_and_others_under_way(stages: int, waiting: list[int]):
    parts = stage_parts((0,) * 8, Layout(Mesh(pipeline=stages), pipeline=Pipeline()), 16)
    assert [part.waiting for part in parts] == waiting
    blocks = [block for part in parts for offset in range(len(part.blocks)) for block in part.same_place(offset)]
    assert sorted(blocks) == list(range(8))
    assert [part.has_embedding for part in parts].count(True) == 1
    assert [part.has_head for part in parts].count(True) == 1


def test_the_first_and_the_last_stage_are_judged():
    assert judged_ranks(Strategy(1, mesh=Mesh(replicate=4))) == (0,)
    assert judged_ranks(Strategy(1, 8, mesh=Mesh(pipeline=4, replicate=2, tensor=2))) == (0, 12)


def test_a_shortened_model_has_the_blocks_that_were_kept():
    short = shortened(LLAMA, [0, 3])
    assert short is not None
    assert len(short.anatomy().blocks) == 2
    assert len(LLAMA.anatomy().blocks) == 4


def test_the_fast_model_knows_what_fsdp_copies(monkeypatch: pytest.MonkeyPatch):
    """Where links take no time, copies are left: out of two gathers of all parameters, read and written."""
    monkeypatch.setattr(layout_module, "transfer", lambda *_: 0.0)
    npu = replace(find_device("ascend-910b3"), count=4)
    layout = Layout(Mesh(shard=4), Zero(3))
    wanted = Target(2**34, 8 * 4 * 128, 128, "bf16", layouts=(layout,))
    search = Search(Tracers(LLAMA, npu, wanted), npu, wanted, 2**34)
    (point,) = [
        each.point
        for each in search.points
        if (each.point.strategy.micro_batch_size, each.point.strategy.loss_chunks) == (1, 1)
    ]
    copies = search.sketched(point).stages[0].resident.micro_batch_seconds
    rate = operator_cost(npu).memory_rate
    whole = search.tracers.of(wanted.optimizer).facts.parameter_bytes
    assert 2 * 2 * whole / rate < copies < 2 * 4 * whole / rate


def test_a_copy_into_a_gathers_buffer_is_of_this_ranks_shards():
    with fake_tensors():
        shards, buffer = [torch.empty(6), torch.empty(2)], torch.empty(32)
        func = torch.ops.fsdp.all_gather_copy_in.default
        assert traffic_bytes(func, (shards, buffer, [6, 2], 8, 0), {}, (buffer[:8], buffer)) == 2 * 8 * 4


def test_the_fast_model_counts_the_seconds_of_tensor_ranks_collectives():
    """They stand in a block's way: a rehearsal of a tensor rank takes as long as the fast model says."""
    npu = replace(find_device("ascend-910b3"), count=2)
    wanted = Target(
        2**34, 4 * 128, 128, "bf16", layouts=(Layout(Mesh(tensor=2), tensor=TensorParallel(sequence=True)),)
    )
    search = Search(Tracers(LLAMA, npu, wanted), npu, wanted, 2**34)
    point = next(each.point for each in search.points if each.point.strategy.loss_chunks == 1)
    candidate = search.solve(point, 2**34)
    assert candidate is not None
    profile = judged(LLAMA, candidate.strategy, npu)
    links = sum(each.seconds for each in profile.collectives.values())
    assert links > 0.1 * profile.step_seconds
    assert candidate.step_seconds == pytest.approx(profile.step_seconds, rel=0.05)


def test_room_for_fragments_is_left_until_a_rehearsal_has_said_how_much():
    npu = find_device("ascend-910b3")
    search = search_for(npu, Target(2**30, 6 * 128, 128, "bf16"), 10**8)
    point = search.points[0].point
    assert search.excess_of(point) == 8 * 10**6
    candidate = search.solve(point, 10**8)
    assert candidate is not None
    search.learn(candidate, 10**6)
    assert search.excess_of(point) == 10**6
    assert search_for(CPU, Target(2**30, 6 * 128, 128), 10**8).excess_of(point) == 0
