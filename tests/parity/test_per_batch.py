"""Per-batch plans: the same bits under every row of a table, and documents in padded batches as one by one."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from plain import (
    assert_equal_to_the_bit,
    build,
    gradients,
    largest_difference,
    make_model,
    planned_gradients,
    sequences,
    small_workload,
)

from trainfit.errors import RecipeError
from trainfit.hardware import this_machine
from trainfit.profile import TokenBucket
from trainfit.rehearsal import rehearse
from trainfit.step import Strategy
from trainfit.train.variable import DocumentTokens
from trainfit.workload import MicroBatch

MACHINE = this_machine("cpu")
LENGTHS = (64, 33, 17, 16, 9, 3, 2, 1)
TABLE = (
    TokenBucket(32, ("keep", "keep")),
    TokenBucket(48, ("pointwise", "keep")),
    TokenBucket(64, ("full", "attention")),
)


def workload(family="llama"):
    return small_workload(family, seq_len=64, attention_dropout=0.0)


def batches(vocab_size: int = 97, tokens: int = 48) -> list[MicroBatch]:
    """LENGTHS put together by tokens: micro batches of 1 x 64, 1 x 48, 1 x 32, 3 x 16 and 2 x 16."""
    texts = [text.numpy() for text in sequences(LENGTHS, vocab_size)]
    ends = np.cumsum([len(text) for text in texts])
    data = DocumentTokens.of(np.concatenate(texts), ends, 64, 0).in_batches_of(tokens)
    return [data.rows(group) for group in data.groups(np.arange(len(LENGTHS)), 1)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("chunks", [1, 4])
def test_every_row_and_level_gives_the_same_bits(precision, chunks):
    window = batches()
    expected = planned_gradients(build(workload(), precision=precision, loss_chunks=chunks), window)
    step = build(workload(), precision=precision, loss_chunks=chunks, tier_table=TABLE)
    assert len({step.tier_switch.tiers_of(batch.labels.numel()) for batch in window}) == 3, "every row is used"
    for level in range(step.tier_switch.max_level + 1):
        step.tier_switch.level = level
        assert_equal_to_the_bit(planned_gradients(step, window), expected)


def test_dropout_is_the_same_under_every_row():
    dropped = small_workload("llama", seq_len=64, attention_dropout=0.3)
    window = batches()
    expected = planned_gradients(build(dropped), window)
    step = build(dropped, tier_table=TABLE)
    step.tier_switch.level = 1
    assert_equal_to_the_bit(planned_gradients(step, window), expected)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_gradients_are_those_of_the_documents_one_by_one(family):
    """Padding on the right of a causal model takes part in nothing."""
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if family == "gpt2" else {}
    model = small_workload(family, seq_len=64, **no_dropout)
    alone = make_model(model).double()
    texts, total = sequences(LENGTHS, 97), sum(LENGTHS)
    for text in texts:
        logits = alone(text[None, :-1]).logits
        (torch.nn.functional.cross_entropy(logits[0], text[1:], reduction="sum") / total).backward()
    expected = {name: gradient.float() for name, gradient in gradients(alone).items()}
    step = build(model, tier_table=TABLE)
    assert largest_difference(planned_gradients(step, batches()), expected) < 1e-5


def test_a_tier_is_chosen_by_the_tokens_with_padding():
    switch = build(workload(), tier_table=TABLE).tier_switch
    rows = [row.tiers for row in TABLE]
    chosen = [switch.tiers_of(tokens) for tokens in (1, 32, 33, 48, 64, 65)]
    assert chosen == [rows[0], rows[0], rows[1], rows[1], rows[2], ("full", "full")]
    switch.level = 1
    assert [switch.tiers_of(tokens) for tokens in (32, 48, 64)] == [rows[1], rows[2], ("full", "full")]


def test_blocks_run_what_the_table_says():
    step = build(workload(), tier_table=TABLE)
    seen = []
    for block in step.model.model.layers:
        block.register_forward_hook(lambda module, *_: seen.append(vars(module)["forward"].tier))
    for batch in batches():
        step.accumulate([batch])
    keep, middle = ["keep", "keep"], ["pointwise", "keep"]
    assert seen == ["full", "attention", *middle, *keep, *middle, *keep]


def test_a_copied_model_switches_on_its_own():
    step = build(workload(), tier_table=TABLE)
    copied = copy.deepcopy(step.model)
    forward = vars(copied.model.layers[0])["forward"]
    assert forward._block() is copied.model.layers[0]
    assert all(plan.block() is copied.model.layers[0] for plan in forward.plans.values())


def test_another_strategy_takes_the_switches_away():
    model = make_model(workload())
    build(workload(), tier_table=TABLE, model=model)
    plain = build(workload(), model=model)
    assert plain.tier_switch is None
    assert not any("forward" in vars(block) for block in model.model.layers)


def test_a_row_is_rehearsed_as_the_step_of_its_tiers_alone_and_as_it_runs():
    strategy = Strategy(1, 2, tiers=TABLE[-1].tiers, tier_table=TABLE, micro_batch_tokens=48)
    batch = batches()[1]
    alone = strategy.for_tokens(batch.labels.numel())
    assert alone.tiers == TABLE[1].tiers
    through_table = rehearse(workload(), strategy, MACHINE, micro_batches=[batch, batch])
    assert through_table == rehearse(workload(), alone, MACHINE, micro_batches=[batch, batch])


def test_a_tier_that_makes_outputs_again_gives_the_same_bits():
    window = batches()
    table = (TokenBucket(32, ("keep", "keep")), TokenBucket(64, ("discard", "full")))
    expected = planned_gradients(build(workload()), window)
    assert_equal_to_the_bit(planned_gradients(build(workload(), tier_table=table), window), expected)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ((TokenBucket(32, ("keep",)), TokenBucket(64, ("full",))), "1 activation tiers for a model of 2 blocks"),
        ((TABLE[1], TABLE[0]), "must ascend"),
        ((TokenBucket(32, ("keep", "never")),), "unknown activation tier 'never'"),
        ((TokenBucket(32, ("keep", "recompute_mlp")),), "a tier table cannot switch"),
        ((TokenBucket(32, ("keep", "keep_int8")),), "changes gradients"),
    ],
)
def test_tables_that_cannot_be(table, words):
    with pytest.raises(RecipeError, match=words):
        build(workload(), tier_table=table)


def test_a_table_and_tiers_go_together():
    with pytest.raises(RecipeError, match="gives 2 blocks a tier, tiers 1"):
        Strategy(1, tiers=("full",), tier_table=TABLE)
    with pytest.raises(RecipeError, match="tiers give block 1 keep, the last row of tier_table attention"):
        Strategy(1, tiers=("full", "keep"), tier_table=TABLE)


def test_a_strategy_with_a_table_goes_through_json():
    strategy = Strategy(1, 2, tiers=TABLE[-1].tiers, tier_table=TABLE, micro_batch_tokens=48)
    assert Strategy.from_json(strategy.to_json()) == strategy
