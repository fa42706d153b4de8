"""Tensor plans: what is split and how, what stays whole, and what is refused in one line."""

from __future__ import annotations

import pytest
import torch
from plain import small_workload, tiny_workload
from torch import nn

from trainfit.errors import ModelError, RecipeError
from trainfit.hardware import this_machine
from trainfit.profile import Mesh, TensorParallel
from trainfit.rehearsal import rehearse
from trainfit.step import Strategy
from trainfit.workload import Workload, workload_from_module
from trainfit.workload.tensor_plan import TensorPlan, check_sequence, tensor_plan


def plan_of(workload: Workload, size: int = 2) -> TensorPlan:
    with torch.device("meta"):
        return tensor_plan(workload.make_model(), workload, workload.anatomy(), size)


def of_block(plan: TensorPlan) -> dict[str, str]:
    prefix = "model.layers.0."
    return {name.removeprefix(prefix): kind for name, kind in plan.splits.items() if name.startswith(prefix)}


def test_llama_is_split_as_its_plan_says():
    plan = plan_of(small_workload("llama"))
    columns = dict.fromkeys(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "columns")
    mlp = {"mlp.gate_proj": "columns", "mlp.up_proj": "columns", "mlp.down_proj": "rows"}
    assert of_block(plan) == columns | {"self_attn.o_proj": "rows"} | mlp
    assert len(plan.splits) == 2 * 7  # neither embedding nor head
    assert plan.notes == []


def test_norms_of_heads_are_shared():
    assert of_block(plan_of(small_workload("qwen3")))["self_attn.q_norm"] == "shared"


MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}


@pytest.mark.parametrize(("num_experts", "is_split"), [(6, True), (5, False)])
def test_experts_are_split_by_number_or_stay_whole(num_experts: int, is_split: bool):
    plan = plan_of(small_workload("qwen3_moe", **MOE | {"num_experts": num_experts}))
    assert ("mlp.experts" in of_block(plan)) == is_split
    assert of_block(plan)["self_attn.q_proj"] == "columns"
    notes = ["model.layers.*.mlp.experts stays whole on every tensor rank: mesh.tensor 2 does not divide 5 experts"]
    assert plan.notes == ([] if is_split else notes)


def test_a_part_with_an_unknown_style_stays_whole():
    """The rest of its part would hand it what it does not expect."""
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    moe = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
    plan = plan_of(small_workload("deepseek_v2", **sizes, **moe, num_key_value_heads=4, first_k_dense_replace=1))
    assert not any("self_attn" in name for name in plan.splits)
    assert of_block(plan)["mlp.gate_proj"] == "columns"
    assert any("model.layers.*.self_attn stays whole" in note and "mla_kv_a_proj" in note for note in plan.notes)


def test_a_model_without_a_plan_is_refused():
    workload = tiny_workload("gpt2")
    with pytest.raises(ModelError, match=r"no tensor plan for gpt2; use mesh.shard 2 with zero.stage 3"):
        plan_of(workload)


@pytest.mark.parametrize(("keys", "size", "allowed"), [(2, 4, "1, 2"), (1, 2, "1"), (4, 3, "1, 2, 4")])
def test_heads_that_do_not_divide_are_refused(keys: int, size: int, allowed: str):
    with pytest.raises(RecipeError, match=f"mesh.tensor {size} .* 4 .* and {keys} key-value .* it can be {allowed}$"):
        plan_of(small_workload("llama", num_key_value_heads=keys), size)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8), nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 11)))


@pytest.mark.parametrize(
    ("styles", "message"),
    [
        (None, "has no tensor plan; name its linears in Workload.tensor_plan"),
        ({"1.0": "columns"}, "it is one of colwise, rowwise, sequence"),
        ({"*.7": "colwise"}, r"'\*.7', but no module"),
        ({"1.1": "colwise"}, "it is for nn.Linear"),
        ({"1": "sequence", "1.0": "colwise"}, "splits 1.0 inside of 1"),
    ],
)
def test_a_users_plan_is_checked(styles: dict[str, str] | None, message: str):
    workload = workload_from_module(perceptron, seq_len=8, vocab_size=11).copy(tensor_plan=styles)
    with pytest.raises((ModelError, RecipeError), match=message):
        plan_of(workload)


def test_a_star_is_one_part_of_a_name():
    workload = workload_from_module(perceptron, seq_len=8, vocab_size=11).copy(tensor_plan={"*.0": "colwise"})
    assert plan_of(workload).splits == {"1.0": "columns"}


@pytest.mark.parametrize(
    ("model_type", "seq_len", "message"), [("phi3", 24, "not for phi3"), ("llama", 25, "seq_len 25 over 2 ranks")]
)
def test_sequences_that_cannot_be_split_are_refused(model_type: str, seq_len: int, message: str):
    workload = small_workload(model_type, seq_len, pad_token_id=0)
    with torch.device("meta"), pytest.raises(RecipeError, match=message):
        check_sequence(workload.make_model(), workload, 2)


def test_split_sequences_need_tensor_ranks():
    with pytest.raises(RecipeError, match=r"set mesh.tensor too"):
        Strategy(1, tensor=TensorParallel(sequence=True))
    strategy = Strategy(1, mesh=Mesh(tensor=2), tensor=TensorParallel(sequence=True))
    assert Strategy.from_json(strategy.to_json()) == strategy


@pytest.mark.parametrize(
    ("ranks", "features", "move"),
    [(2, 43, "leave it out, or use mesh.shard 2"), (4, 42, "lower it to 2, or use mesh.shard 4")],
)
def test_features_that_ranks_do_not_divide_are_refused_with_what_to_do(ranks: int, features: int, move: str):
    workload = small_workload("llama", num_key_value_heads=4, intermediate_size=features)
    strategy = Strategy(1, mesh=Mesh(tensor=ranks))
    with pytest.raises(RecipeError, match=f"the {features} features of .*mlp.*; {move} with zero.stage 3"):
        rehearse(workload, strategy, this_machine("cpu"))
