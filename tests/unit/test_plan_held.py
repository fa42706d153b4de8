"""A recipe's activation: the policy's tiers, at the fastest micro batch that fits with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainfit.errors import RecipeError
from trainfit.hardware import find_device
from trainfit.plan import Target
from trainfit.plan.held import choose_held
from trainfit.plan.policies import parse_policy
from trainfit.rehearsal import rehearse
from trainfit.train import Recipe
from trainfit.workload import workload_from_config

CONFIG = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
WORKLOAD = workload_from_config(CONFIG, seq_len=256, name="tiny")
CPU = find_device("cpu")


def test_a_held_plan_has_the_policys_tiers_and_no_faster_micro_batch_fits():
    target = Target(8 * 2**20, 8 * 256, 256, operators=True)
    plan = choose_held(WORKLOAD, CPU, target, parse_policy("every:2"))
    assert plan.fits
    assert plan.target == target
    assert plan.strategy.tiers == ("full", "keep", "full")
    assert plan.strategy.kept_operators == ()
    assert plan.predicted == rehearse(WORKLOAD, plan.strategy, CPU)
    assert "activation every:2 decides the tiers: every K-th block in full" in plan.notes
    for size in (1, 2, 4, 8):
        other = replace(plan.strategy, micro_batch_size=size, accumulation_steps=8 // size)
        profile = rehearse(WORKLOAD, other, CPU)
        beaten = profile.step_seconds >= plan.predicted.step_seconds or profile.needed_bytes > plan.allowed_bytes
        assert beaten or size < plan.strategy.micro_batch_size
    assert plan.alternatives[-1].why.startswith("the plan without activation every:2: ")


def test_blocks_are_not_compiled_where_the_policy_has_tiers_that_a_graph_cannot_have():
    target = Target(16 * 2**20, 4 * 256, 256, may_change=frozenset({"compile"}))
    assert choose_held(WORKLOAD, CPU, target, parse_policy("every:2")).strategy.compile.blocks
    plan = choose_held(WORKLOAD, CPU, target, parse_policy("torchtitan"))
    assert (plan.strategy.compile.blocks, set(plan.strategy.tiers)) == (0, {"selective"})
    assert plan.target == target
    assert any(note.startswith("no block is compiled: activation torchtitan asks for selective") for note in plan.notes)


def test_memory_recomputes_no_more_blocks_than_it_must():
    target = Target(6 * 2**20, 8 * 256, 256)
    plan = choose_held(WORKLOAD, CPU, target, parse_policy("memory"))
    assert plan.fits
    full = plan.strategy.tiers.count("full")
    assert plan.strategy.tiers == ("full",) * full + ("keep",) * (3 - full)


def test_what_does_not_fit_says_that_the_policy_is_why():
    plan = choose_held(WORKLOAD, CPU, Target(2 * 2**20, 8 * 256, 256), parse_policy("none"))
    assert not plan.fits
    assert "does not fit under activation none: micro batch 1 x 8, keep" in plan.reason


def test_a_recipe_takes_policies_and_refuses_others():
    base = {"model": "gpt2", "data": {"paths": "python-stdlib"}, "seq_len": 8, "tokens_per_step": 8, "run_folder": "r"}
    recipe = Recipe.model_validate({**base, "steps": 1, "activation": "torchtitan"})
    assert recipe.activation == "torchtitan"
    with pytest.raises((RecipeError, ValueError), match="did you mean torchtitan"):
        Recipe.model_validate({**base, "steps": 1, "activation": "torchtitn"})
