"""A table of tiers: rows fit and are right to the percent, the longest micro batch is known before the run (ME-10)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trainfit.errors import DoesNotFitError, RecipeError
from trainfit.hardware import accelerator, this_machine
from trainfit.plan import Plan, Target
from trainfit.plan.compare import compare_policies
from trainfit.plan.per_batch import _Rows, between, choose_per_batch, shape_of
from trainfit.plan.policies import parse_policy
from trainfit.profile import SEARCH_TIERS, BlockTrace, Layout, Mesh, ShellTrace, Zero
from trainfit.rehearsal import RecordedRun, rehearse
from trainfit.rehearsal.model_trace import ModelTrace
from trainfit.report import plan_page
from trainfit.step import build_step, format_tiers
from trainfit.workload import MicroBatch, workload_from_config

CPU, MACHINE = accelerator("cpu"), this_machine("cpu")
LONGEST = 256
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": LONGEST,
}
WORKLOAD = workload_from_config(CONFIG, seq_len=LONGEST, name="short")
BUDGET = 6 * 2**20


def target(budget: int = BUDGET, **settings) -> Target:
    return Target(budget, 4 * LONGEST, LONGEST, **settings)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return choose_per_batch(WORKLOAD, MACHINE, target(operators=True), threshold=0.9)


def window(*shapes) -> list[MicroBatch]:
    return [MicroBatch.of(*(torch.zeros(shape, dtype=torch.long) for _ in range(2))) for shape in shapes]


def test_every_row_stays_below_the_threshold_and_recomputes_no_less_than_the_one_before(plan):
    assert plan.fits
    assert plan.allowed_bytes == int(0.9 * BUDGET)
    table = plan.strategy.tier_table
    assert [bucket.max_tokens for bucket in plan.buckets] == [row.max_tokens for row in table]
    assert all(bucket.peak_bytes <= plan.allowed_bytes for bucket in plan.buckets)
    assert plan.predicted.peak_bytes == max(bucket.peak_bytes for bucket in plan.buckets)
    assert len(table) > 2
    assert table[-1].max_tokens == LONGEST
    seconds = [bucket.token_seconds for bucket in plan.buckets]
    recomputing = [sum(map(SEARCH_TIERS.index, row.tiers)) for row in table]  # each saves less than the one before it
    assert recomputing == sorted(recomputing), (recomputing, seconds)
    assert recomputing[0] == 0
    assert table[-1].tiers == plan.strategy.tiers
    assert plan.strategy.kept_operators == ()
    assert not any("chosen tiers" in note for note in plan.notes)


def measured_bytes(plan: Plan, *shapes) -> int:
    """The second step's peak."""
    torch.manual_seed(0)
    recorded = RecordedRun(CPU)
    with recorded:
        step = build_step(WORKLOAD, plan.strategy, CPU)
        batches = window(*shapes)
        step(batches)
        recorded.watch(step, lambda: step(batches))
    return recorded.profile(step).peak_bytes


def test_what_lost_to_the_static_plan_says_so(plan):
    """By how much it did, beside the table's seconds, would be another figure."""
    static, *others = plan.alternatives
    assert static.why.startswith("static plan")
    assert others
    assert all(each.why.endswith("beside the static plan") for each in others)


def test_rows_need_what_was_predicted(plan):
    table = plan.strategy.tier_table
    for row in (table[1], table[-1]):
        shapes = [shape_of(row.max_tokens, LONGEST)] * 2
        predicted = rehearse(WORKLOAD, plan.strategy, MACHINE, micro_batches=window(*shapes)).peak_bytes
        assert measured_bytes(plan, *shapes) == pytest.approx(predicted, rel=0.01)
        bucket = next(each for each in plan.buckets if each.max_tokens == row.max_tokens)
        assert predicted == pytest.approx(bucket.peak_bytes, rel=0.01)  # but for the ids of a longer window


def test_shorter_sequences_of_as_many_tokens_need_no_more(plan):
    tokens = plan.strategy.tier_table[1].max_tokens
    one, many = (
        rehearse(WORKLOAD, plan.strategy, MACHINE, micro_batches=window(*[(size, tokens // size)] * 2)).peak_bytes
        for size in (1, tokens // 16)
    )
    assert many <= one


def test_the_longest_micro_batch_is_refused_before_the_run_with_its_numbers():
    """ME-10: a run must not die at the longest of its batches, thousands of steps on."""
    with pytest.raises(DoesNotFitError, match=r"one sequence of 256 tokens, needs .* MiB at least; .* lower seq_len"):
        choose_per_batch(WORKLOAD, MACHINE, target(), threshold=0.5)


def test_micro_batches_whose_rehearsal_is_too_large_are_left_out(monkeypatch):
    assert choose_per_batch(WORKLOAD, MACHINE, target(2**30)).strategy.micro_batch_tokens > LONGEST
    honest = _Rows._row

    def of_several_too_large(self, tokens, tiers):
        row = honest(self, tokens, tiers)
        return row if tokens <= LONGEST else replace(row, profile=replace(row.profile, peak_bytes=2**31))

    monkeypatch.setattr(_Rows, "_row", of_several_too_large)
    plan = choose_per_batch(WORKLOAD, MACHINE, target(2**30))
    assert plan.fits
    assert plan.strategy.micro_batch_tokens <= plan.strategy.tier_table[-1].max_tokens == LONGEST


def test_what_no_static_plan_fits_is_said_by_the_static_plan():
    static = choose_per_batch(WORKLOAD, MACHINE, target(2 * 2**20))
    assert not static.fits
    assert not static.strategy.tier_table


def test_stages_are_refused():
    layout = Layout(Mesh(pipeline=2), Zero())
    with pytest.raises(RecipeError, match="per_batch works with copies and shards"):
        choose_per_batch(WORKLOAD, replace(MACHINE, count=2), target(64 * 2**20, layouts=(layout,)))


def test_policies_are_not_compared_with_a_table(plan):
    with pytest.raises(RecipeError, match="the plan has a table of them; leave per_batch out"):
        compare_policies(WORKLOAD, MACHINE, plan, [parse_policy("full")])


def test_the_page_of_a_plan_shows_its_table(plan):
    page = str(plan_page(plan))
    assert "Activation tier of each block" not in page
    for row in plan.strategy.tier_table:
        assert f">{row.max_tokens}" in page
        assert format_tiers(row.tiers) in page


def test_a_plan_with_a_table_goes_through_json(plan):
    assert Plan.from_json(plan.to_json()) == plan


def test_traces_between_lengths_are_parabolas():
    def trace(length: int) -> ModelTrace:
        value = 7 + 3 * length + 2 * length**2
        block = BlockTrace(value, 2 * value, 3 * value, 11, value * 1e-6, value * 2e-6)
        return ModelTrace({(0, "keep"): block}, {4: ShellTrace(value, 5, value + 1, value * 1e-6)}, 8 * length)

    made = between(48, {length: trace(length) for length in (32, 64, 128)}, 4)
    expected = trace(48)
    assert made.shared_bytes == expected.shared_bytes
    assert made.shell[4].before_blocks_peak_bytes == expected.shell[4].before_blocks_peak_bytes
    found = made.blocks[0, "keep"]
    assert (found.saved_bytes, found.backward_peak_bytes, found.gradient_bytes) == (
        expected.blocks[0, "keep"].saved_bytes,
        expected.blocks[0, "keep"].backward_peak_bytes,
        11,
    )
    assert found.forward_seconds == pytest.approx(expected.blocks[0, "keep"].forward_seconds)
