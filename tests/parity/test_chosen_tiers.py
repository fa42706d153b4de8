"""Chosen tiers: gradients to the bit, peaks as predicted, and operators that nobody asks for left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from plain import (
    CPU,
    assert_equal_to_the_bit,
    build,
    make_model,
    planned_gradients,
    random_batch,
    tiny_workload,
)
from test_prediction import assert_predicted
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.errors import RecipeError, RecomputeError
from trainfit.hardware import find_device
from trainfit.hardware.overheads import part_of_step
from trainfit.operators import BlockGraph, KeptOperators
from trainfit.plan.op_choice import frontier
from trainfit.profile import Mesh, OptimizerVariant, Precision, TokenBucket
from trainfit.rehearsal.trace import Tracer
from trainfit.step import Strategy, build_step
from trainfit.techniques.activation import recompute_block
from trainfit.techniques.deferred import Deferred
from trainfit.workload import Workload

DROPOUT = {
    "llama": {"attention_dropout": 0.1},
    "gpt2": {"attn_pdrop": 0.1, "resid_pdrop": 0.2, "embd_pdrop": 0.1},
    "qwen3_moe": {"attention_dropout": 0.1},
}
H100 = find_device("h100")  # whose figures are the same everywhere


def graph_of(workload: Workload, precision: Precision = "fp32") -> BlockGraph:
    return Tracer(workload, H100, precision=precision).graph(0, 2, precision)


def strategy_of(workload: Workload, rules: KeptOperators, precision: Precision = "fp32") -> Strategy:
    blocks = len(workload.anatomy().blocks)
    return Strategy(2, precision=precision, tiers=(rules.tier,) * blocks, kept_operators=(rules,))


@pytest.mark.parametrize(("family", "precision"), [("llama", "bf16"), ("gpt2", "fp32"), ("qwen3_moe", "fp32")])
def test_gradients_are_those_of_plain_training_to_the_bit(family: str, precision: Precision):
    workload = tiny_workload(family, **DROPOUT[family])
    batch = random_batch(workload)
    kept = planned_gradients(build(workload, "keep", precision=precision), [batch])
    graph = graph_of(workload, precision)
    corners = frontier(graph)
    assert len(corners) > 6
    for corner in corners[len(corners) // 2 :: len(corners) // 2 - 1]:
        strategy = strategy_of(workload, graph.rules("chosen_2", corner.kept), precision)
        step = build_step(workload, strategy, CPU, max_grad_norm=None, model=make_model(workload))
        for _ in range(2):  # a second backward over the same blocks: nothing of the first may be left
            assert_equal_to_the_bit(planned_gradients(step, [batch]), kept)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_predicted_peak_is_the_measured_one(family: str):
    workload = tiny_workload(family, seq_len=128)
    graph = graph_of(workload)
    corners = frontier(graph)
    strategy = strategy_of(workload, graph.rules("chosen_1", corners[len(corners) // 2].kept))
    assert_predicted(workload, strategy, rel=0.0 if family == "llama" else 0.001)


class Counting(TorchDispatchMode):
    """How often operators run again."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, Deferred) for each in types):
            return NotImplemented
        if part_of_step() == "recompute":
            self.runs[str(func)] += 1
        return func(*args, **(kwargs or {}))


def recomputed(workload: Workload, rules: KeptOperators) -> tuple[Counter[str], dict[str, torch.Tensor]]:
    step = build_step(workload, strategy_of(workload, rules), CPU, max_grad_norm=None, model=make_model(workload))
    batch = random_batch(workload)
    planned_gradients(step, [batch])  # the first call of a block learns where to look
    with Counting() as counting:
        found = planned_gradients(step, [batch])
    return counting.runs, found


STATISTICS = ("aten.rsqrt.default#1", "aten.rsqrt.default#2")
SQUARES = ("aten.pow.Tensor_Scalar#1", "aten.pow.Tensor_Scalar#2")


def test_what_led_to_kept_statistics_of_a_norm_does_not_run_again():
    workload = tiny_workload("llama")
    with_squares, expected = recomputed(workload, KeptOperators("chosen_1", STATISTICS))
    without, found = recomputed(workload, KeptOperators("chosen_1", STATISTICS, SQUARES))
    assert with_squares["aten.pow.Tensor_Scalar"] == with_squares["aten.mean.dim"] == 2 * 4
    assert without["aten.pow.Tensor_Scalar"] == without["aten.mean.dim"] == 0
    assert without["aten.mm.default"] == with_squares["aten.mm.default"]
    assert_equal_to_the_bit(found, expected)


def test_what_was_put_off_by_mistake_runs_when_it_is_asked_for():
    """Names that fit another model: nothing that is kept makes the squares, nor the queries, needless here."""
    workload = tiny_workload("llama")
    expected = planned_gradients(build(workload, "keep"), [random_batch(workload)])
    wrong = KeptOperators("chosen_1", (), (*SQUARES, "aten.mm.default#1", "aten.mul.Tensor#1", "aten.cat.default#1"))
    runs, found = recomputed(workload, wrong)
    assert runs["aten.pow.Tensor_Scalar"] == 2 * 4
    assert_equal_to_the_bit(found, expected)


def test_statistics_of_half_norms_may_be_put_off():
    """Of half weights a CPU makes them in half precision, where a meta tensor says fp32."""
    workload = tiny_workload("gpt2", **DROPOUT["gpt2"])
    batch, half = random_batch(workload), OptimizerVariant(weights="bf16_kahan")
    expected = planned_gradients(build(workload, "keep", precision="bf16", optimizer=half), [batch])
    rules = KeptOperators("chosen_1", (), ("aten.addmm.default#2", "aten.addmm.default#4"))
    strategy = replace(strategy_of(workload, rules, "bf16"), optimizer=half)
    step = build_step(workload, strategy, CPU, max_grad_norm=None, model=make_model(workload))
    assert_equal_to_the_bit(planned_gradients(step, [batch]), expected)


def test_casts_that_are_given_up_after_forward_are_not_kept():
    """Under cast "block", of the weights of llama's seven matrices: kept ones would have no memory in backward."""
    workload = tiny_workload("llama")
    batch = random_batch(workload)
    casts = tuple(f"aten._to_copy.default#{run}" for run in range(1, 8))
    expected = planned_gradients(build(workload, "keep", precision="bf16"), [batch])
    strategy = replace(strategy_of(workload, KeptOperators("chosen_1", casts), "bf16"), cast="block")
    step = build_step(workload, strategy, CPU, max_grad_norm=None, model=make_model(workload))
    assert_equal_to_the_bit(planned_gradients(step, [batch]), expected)
    graph = Tracer(workload, H100, precision="bf16", cast="block").graph(0, 2, "bf16")
    assert [each.may_store for each in graph.operators if each.key in casts] == [False] * 7


class Tripled(nn.Module):
    """Twice what is tripled, and a view or none of it, before it is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tripled = x * 3.0
        before = tripled * 2.0 if self.training else tripled.view(2, 2, 8)
        tripled.add_(1.0)
        return self.one(before).view(4, 8) + self.two(tripled)


def gradients_of(block: nn.Module) -> list[torch.Tensor]:
    block.zero_grad()
    block(torch.linspace(0, 1, 32).view(4, 8)).square().sum().backward()
    return [p.grad.clone() for p in block.parameters()]


def test_what_is_put_off_does_not_see_what_is_written_after_it():
    """An operator would run on what was written; a view is meant to show it."""
    block = Tripled()
    shown = gradients_of(block.eval())
    chosen = KeptOperators("chosen_1", (), ("aten.mul.Tensor#1", "aten.mul.Tensor#2"))
    recompute_block(block, "chosen_1", CPU, chosen=chosen)
    assert all(torch.equal(one, other) for one, other in zip(gradients_of(block), shown, strict=True))
    with pytest.raises(RecomputeError, match=r"an input of aten.mul.Tensor was changed in place after recompute had"):
        gradients_of(block.train())


@pytest.mark.parametrize(
    "key",
    [
        *("aten.mm.default", "aten.nothing.default#1", "mm#1", "aten.topk.default#1", "#1", "a b"),
        *("aten.detach.default#1", "aten.view.default#1", "aten.add_.Tensor#1", "aten._local_scalar_dense.default#1"),
    ],
)
def test_what_is_no_operator_that_may_be_kept_is_refused(key: str):
    workload = tiny_workload("llama")
    with pytest.raises(RecipeError, match="make the plan again"):
        build_step(workload, strategy_of(workload, KeptOperators("chosen_1", (key,))), CPU)
    with pytest.raises(RecipeError, match="make the plan again"):
        build_step(workload, strategy_of(workload, KeptOperators("chosen_1", (), (key,))), CPU)


def test_chosen_tiers_and_what_they_keep_go_together():
    rules = KeptOperators("chosen_1", STATISTICS)
    with pytest.raises(RecipeError, match="chosen_2 keeps the operators that kept_operators says, which has none"):
        Strategy(1, tiers=("chosen_2",), kept_operators=(rules,))
    with pytest.raises(RecipeError, match="kept_operators has 'chosen_1' 2 times"):
        Strategy(1, kept_operators=(rules, rules))
    with pytest.raises(RecipeError, match="kept_operators has 'full' 1 times"):
        Strategy(1, kept_operators=(KeptOperators("full", ()),))
    with pytest.raises(RecipeError, match=r"set mesh\.tensor: 1"):
        Strategy(1, tiers=("chosen_1",), kept_operators=(rules,), mesh=Mesh(tensor=2))
    strategy = Strategy(1, tiers=("chosen_1",), kept_operators=(rules,))
    assert Strategy.from_json(strategy.to_json()) == strategy
    with pytest.raises(RecipeError, match="kept_operators has an unknown key or lacks one: 'skipped'"):
        Strategy.from_json({"micro_batch_size": 1, "kept_operators": [{"tier": "chosen_1", "kept": []}]})


def test_a_tier_table_has_no_chosen_tiers():
    rules = KeptOperators("chosen_1", STATISTICS)
    table = (TokenBucket(64, ("chosen_1",)),)
    with pytest.raises(RecipeError, match="a tier_table is for several"):
        Strategy(1, tiers=("chosen_1",), kept_operators=(rules,), tier_table=table, micro_batch_tokens=64)
