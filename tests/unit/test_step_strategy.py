"""Strategy and tier texts: what is written is read back; what makes no sense is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainfit.errors import RecipeError
from trainfit.hardware import accelerator
from trainfit.profile import PRECISIONS, TIERS, Mesh, Pipeline, Zero
from trainfit.step import Strategy, build_step, format_tiers, parse_tiers
from trainfit.step.strategy_rules import settings_without_effect
from trainfit.workload import workload_from_module

tier_lists = st.lists(st.sampled_from(TIERS), max_size=40).map(tuple)
strategies = st.builds(
    Strategy,
    micro_batch_size=st.integers(1, 10**6),
    accumulation_steps=st.integers(1, 10**6),
    precision=st.sampled_from(PRECISIONS),
    tiers=tier_lists,
    loss_chunks=st.integers(1, 10**6),
)


@given(tier_lists)
def test_tiers_are_read_back_as_written(tiers: tuple[str, ...]):
    text = format_tiers(tiers)
    assert parse_tiers(text, len(tiers)) == tiers
    assert len(text.split(",")) == max(len(list(groupby(tiers))), 1)


@given(strategies)
def test_strategies_are_read_back_as_written(strategy: Strategy):
    again = Strategy.from_json(json.loads(json.dumps(strategy.to_json())))
    assert again == strategy
    assert again.hash == strategy.hash


@given(strategies, st.integers(1, 10**6))
def test_hash_follows_every_knob(strategy: Strategy, number: int):
    for name in ("micro_batch_size", "accumulation_steps", "loss_chunks"):
        other = replace(strategy, **{name: number})
        assert (other.hash == strategy.hash) == (other == strategy)
    other = replace(strategy, tiers=(*strategy.tiers, "full"))
    assert other.hash != strategy.hash


@given(st.text(max_size=30), st.integers(0, 12))
def test_any_text_gives_tiers_or_a_recipe_error(text: str, num_blocks: int):
    try:
        tiers = parse_tiers(text, num_blocks)
    except RecipeError:
        return
    assert len(tiers) == num_blocks
    assert set(tiers) <= set(TIERS)


@given(st.integers(1, 9), st.integers(0, 20))
def test_every_kth_block_from_the_first_is_recomputed(every: int, num_blocks: int):
    tiers = parse_tiers(f"every:{every}", num_blocks)
    assert [block for block, tier in enumerate(tiers) if tier == "full"] == list(range(0, num_blocks, every))
    assert set(tiers) <= {"full", "keep"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("half", "unknown activation tier 'half'; one of"),
        ("every:0", "every:1"),
        ("3*full", "names 3 blocks; the model has 4"),
        ("5*full", "the model has 4"),
        ("99999999999999999999*full", "the model has 4"),
        ("2*full,2*", "not understood"),
        ("", "not understood"),
        ("every:-1", "not understood"),
        ("2 full,2 keep", "not understood"),
    ],
)
def test_bad_tiers_are_one_line(text: str, message: str):
    with pytest.raises(RecipeError, match=message) as caught:
        parse_tiers(text, 4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size is 0"),
        ({"accumulation_steps": -3}, "accumulation_steps is -3"),
        ({"loss_chunks": 0}, "loss_chunks is 0"),
        ({"micro_batch_size": 1.5}, "micro_batch_size is 1.5"),
        ({"micro_batch_size": "4"}, "micro_batch_size is '4'"),
        ({"micro_batch_size": True}, "micro_batch_size is True"),
        ({"precision": "fp8"}, "unknown precision 'fp8'"),
        ({"tiers": ["full", "half"]}, "unknown activation tier 'half'; one of keep, "),
        ({"tiers": ["keep_int9"]}, "unknown activation tier 'keep_int9'; did you mean keep_int8"),
        ({"optimizer": {"kind": "sgd"}}, "unknown optimizer.kind 'sgd'"),
        ({"microbatch": 4}, "unknown strategy key 'microbatch'"),
        (
            {"mesh": {"shard": 2}, "zero": {"stage": 2, "reduce_dtype": "fp16"}},
            "reduce_dtype fp16 needs the loss scale of precision fp16",
        ),
        (
            {"accumulation_steps": 2, "mesh": {"shard": 2}, "zero": {"stage": 1, "reduce_dtype": "bf16"}},
            "would also add up 2 micro batches",
        ),
        (
            {
                "accumulation_steps": 2,
                "mesh": {"replicate": 2, "shard": 2},
                "zero": {"stage": 2, "reduce_dtype": "bf16"},
            },
            "would also add up 2 micro batches",
        ),
        (
            {"mesh": {"shard": 4, "tensor": 2}, "zero": {"stage": 3, "reshard_size": 2}},
            "does not work with mesh.tensor 2",
        ),
        (
            {
                "accumulation_steps": 4,
                "mesh": {"pipeline": 2, "tensor": 2},
                "tensor": {"sequence": True},
                "pipeline": {"schedule": "interleaved", "stages_per_rank": 2},
            },
            "tensor.sequence does not work with pipeline.schedule interleaved",
        ),
    ],
)
def test_bad_strategies_are_one_line(change: dict[str, Any], message: str):
    with pytest.raises(RecipeError, match=message):
        Strategy.from_json({"micro_batch_size": 1, **change})


ALONE = "mesh.replicate x mesh.shard is 1, so no gradients are exchanged"


@pytest.mark.parametrize(
    ("knobs", "lines"),
    [
        ({}, []),
        ({"zero": Zero(2)}, ["zero.stage 2 shares nothing: mesh.shard is 1"]),
        ({"zero": Zero(2), "mesh": Mesh(replicate=2)}, ["zero.stage 2 shares nothing: mesh.shard is 1"]),
        ({"zero": Zero(2), "mesh": Mesh(shard=2)}, []),
        ({"zero": Zero(2, "step", prefetch=2, reduce_dtype="bf16"), "mesh": Mesh(shard=2)}, []),
        (
            {"zero": Zero(3, reshard_size=2)},
            [
                "zero.stage 3 shares nothing: mesh.shard is 1",
                "zero.reshard_size 2 has no effect: there is one process",
            ],
        ),
        (
            {"zero": Zero(0, "micro_batch", prefetch=2, reduce_dtype="bf16"), "mesh": Mesh(replicate=2)},
            [
                "zero.gradient_sync micro_batch has no effect: zero.stage is 0",
                "zero.prefetch 2 has no effect: zero.stage is 0",
                "zero.reduce_dtype bf16 has no effect: zero.stage is 0",
            ],
        ),
        ({"zero": Zero(0, prefetch=2)}, [f"zero.prefetch 2 has no effect: {ALONE}"]),
        (
            {"zero": Zero(1, reduce_dtype="bf16"), "accumulation_steps": 2},
            ["zero.stage 1 shares nothing: mesh.shard is 1", f"zero.reduce_dtype bf16 has no effect: {ALONE}"],
        ),
        ({"pipeline": Pipeline("gpipe")}, ["pipeline.schedule gpipe has no effect: mesh.pipeline is 1"]),
        (
            {"pipeline": Pipeline("interleaved", 2)},
            [
                "pipeline.schedule interleaved has no effect: mesh.pipeline is 1",
                "pipeline.stages_per_rank 2 has no effect: mesh.pipeline is 1",
            ],
        ),
        ({"pipeline": Pipeline("gpipe"), "mesh": Mesh(pipeline=2)}, []),
    ],
)
def test_settings_without_effect_are_told_and_not_refused(knobs: dict[str, Any], lines: list[str]):
    assert settings_without_effect(Strategy(1, **knobs)) == lines


def test_a_step_notes_what_has_no_effect():
    workload = workload_from_module(partial(nn.Embedding, 5, 5), seq_len=4, vocab_size=5)
    strategy = Strategy(1, zero=Zero(3, prefetch=2), pipeline=Pipeline("gpipe"))
    assert build_step(workload, strategy, accelerator("cpu")).notes == tuple(settings_without_effect(strategy))


def test_a_strategy_without_a_micro_batch_is_refused():
    with pytest.raises(RecipeError, match="micro_batch_size"):
        Strategy.from_json({})
