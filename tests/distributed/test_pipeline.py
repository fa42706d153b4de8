"""Pipelines of 2 and 4 gloo ranks against plain training in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from pipeline_ranks import (
    Case,
    Trained,
    run_cases,
    train_plainly,
    uneven_plainly,
)
from ranks import run_ranks

from trainfit.profile import Mesh, Pipeline, Zero

INTERLEAVED, GPIPE = Pipeline("interleaved", 2), Pipeline("gpipe")
SHARDED, REPLICATED = Mesh(pipeline=2, shard=2), Mesh(pipeline=2, replicate=2)
MIXED = "2*full,1*keep,1*pointwise,1*keep"
TWO_RANKS = {
    "accumulation 2": Case(),
    "accumulation 4, mixed tiers, chunked loss": Case(accumulation=4, tiers=MIXED, chunks=3),
    "tied": Case("gpt2", chunks=2),
    "tied, capped head, interleaved": Case("gemma2", pipeline=INTERLEAVED, accumulation=4, tiers=MIXED),
    "experts, gpipe": Case("qwen3_moe", pipeline=GPIPE, tiers="full"),
    "own module": Case("own"),
    "frozen first stage, interleaved": Case(frozen=("embed", "layers.0."), pipeline=INTERLEAVED),
    "low precision between stages": Case("own", precision="bf16", steps=1),
}
FOUR_RANKS = {
    "tied, zero 1": Case("gpt2", SHARDED, Zero(1)),
    "tied, zero 2, accumulation 4": Case("gpt2", SHARDED, Zero(2), accumulation=4, tiers=MIXED, chunks=2),
    "zero 3, accumulation 4": Case("llama", SHARDED, Zero(3), accumulation=4, tiers="full", chunks=2),
    "interleaved, zero 1": Case("llama", SHARDED, Zero(1), INTERLEAVED, steps=8),
    "interleaved, zero 2": Case("qwen3_moe", SHARDED, Zero(2), INTERLEAVED, accumulation=4, steps=5),
    "tied, interleaved, zero 3": Case("gpt2", SHARDED, Zero(3, prefetch=2), INTERLEAVED, tiers="full", steps=8),
    "tied, interleaved, replicas": Case("gpt2", REPLICATED, pipeline=INTERLEAVED, steps=8),
    "four stages": Case(mesh=Mesh(pipeline=4), accumulation=4),
}
CASES = [*((2, name) for name in TWO_RANKS), *((4, name) for name in FOUR_RANKS)]


UNEVEN = [Case(), Case(pipeline=INTERLEAVED, accumulation=4)]


@cache
def answers(world_size: int) -> list[Any]:
    """All that is asked of so many ranks, in one start of them."""
    two = world_size == 2
    return run_ranks(run_cases, world_size, list((TWO_RANKS if two else FOUR_RANKS).values()), UNEVEN if two else [])


def trained(world_size: int) -> list[dict[str, Trained]]:
    """By rank, by name of the case."""
    return [dict(zip(TWO_RANKS if world_size == 2 else FOUR_RANKS, found)) for found, _ in answers(world_size)]


@cache
def plain(case: Case) -> Trained:
    return train_plainly(case)


def found_and_expected(world_size: int, name: str) -> tuple[Case, list[Trained], Trained]:
    case = (TWO_RANKS if world_size == 2 else FOUR_RANKS)[name]
    like = Case(case.family, frozen=case.frozen, precision=case.precision, steps=case.steps)
    return case, [of_rank[name] for of_rank in trained(world_size)], plain(like)


@pytest.mark.parametrize(("world_size", "name"), CASES)
def test_losses_and_norms_equal_plain_training(world_size: int, name: str):
    case, ranks, expected = found_and_expected(world_size, name)
    for found in ranks:
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
        # In bf16 each micro batch's weight gradients are rounded.
        assert found.norms == pytest.approx(expected.norms, rel=1e-5 if case.precision == "fp32" else 1e-2)


@pytest.mark.parametrize(("world_size", "name"), [pair for pair in CASES if pair[1] != "low precision between stages"])
def test_weights_equal_plain_training(world_size: int, name: str):
    _, ranks, expected = found_and_expected(world_size, name)
    for found in ranks:
        for parameter, weight in found.weights.items():
            largest = expected.weights[parameter].abs().max()
            difference = (weight - expected.weights[parameter]).abs().max() / largest
            assert difference < 1e-5, parameter
    assert {name for found in ranks for name in found.weights} == set(expected.weights)


@pytest.mark.parametrize(("world_size", "name"), CASES)
def test_evaluation_equals_plain_evaluation_on_every_rank(world_size: int, name: str):
    case, ranks, expected = found_and_expected(world_size, name)
    for found in ranks:
        rel = 1e-5 if case.precision == "fp32" else 1e-2
        assert found.evaluated == (pytest.approx(expected.evaluated[0], rel=rel), expected.evaluated[1])


def test_each_rank_has_its_stages_blocks_and_no_others():
    first, last = (of_rank["tied, capped head, interleaved"] for of_rank in trained(2))

    def blocks(found: Trained) -> set[int]:
        return {int(name.split(".")[2]) for name in found.own if name.startswith("model.layers.")}

    assert (blocks(first), blocks(last)) == ({0, 2, 3}, {1, 4})
    both = set(first.own) & set(last.own)
    assert both == {"model.embed_tokens.weight"}, "the tied weight, and nothing else"
    assert "model.norm.weight" not in first.own


def test_tied_weights_stay_equal_to_the_bit():
    for name in ("tied", "tied, capped head, interleaved"):
        first, last = (of_rank[name].weights for of_rank in trained(2))
        both = set(first) & set(last)
        assert both
        assert all(torch.equal(first[name], last[name]) for name in both)


@pytest.mark.parametrize("number", range(len(UNEVEN)))
def test_windows_that_do_not_fill_the_pipeline(number: int):
    expected = uneven_plainly(UNEVEN[number])
    for _, found in answers(2):
        for pair, expected_pair in zip(found[number], expected, strict=True):
            assert pair == pytest.approx(expected_pair, rel=1e-5)
