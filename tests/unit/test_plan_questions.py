"""Questions and comparisons on tiny models: answers are held against rehearsals of theirs and of neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainfit.errors import DoesNotFitError
from trainfit.hardware import Hardware, find_device
from trainfit.plan import Target, choose
from trainfit.plan.compare import PLANNED, compare_policies, prices_of_plan
from trainfit.plan.policies import Situation, parse_policy
from trainfit.plan.questions import (
    LEANEST,
    PLAIN,
    Setting,
    Trial,
    compare_cards,
    fewest_devices,
    head_dim,
    largest_batches,
    longest_sequence,
)
from trainfit.plan.savings import savings
from trainfit.profile import AllocatorSettings, Layout, LossScale, Mesh, Zero
from trainfit.rehearsal import rehearse
from trainfit.workload import Workload, workload_from_config

CONFIG = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 2048,
}


def tiny(seq_len: int = 64, **changes: object) -> Workload:
    return workload_from_config({**CONFIG, **changes}, seq_len=seq_len, name="tiny")


def setting(budget: int, workload: Workload | None = None, *, devices: int = 1, device: str = "cpu") -> Setting:
    workload = workload or tiny()
    layout = sharded(devices)
    target = Target(budget, workload.seq_len * devices, workload.seq_len, layouts=(layout,))
    return Setting(workload, find_device(device, devices), target, layout, head_dim(workload))


def sharded(devices: int) -> Layout:
    return Layout() if devices == 1 else Layout(Mesh(shard=devices), Zero(3))


def needed(asked: Setting, way: str, size: int = 1) -> int:
    return asked.try_out(asked.strategy(way, size)).predicted.needed_bytes


def budget_for(num_bytes: int) -> int:
    """One whose allowed bytes are just so many, or a little more, on a CPU."""
    return int(num_bytes / 0.99) + 1


def rehearsed_again(trial: Trial, asked: Setting, hardware: Hardware | None = None) -> bool:
    profile = rehearse(asked.workload.with_seq_len(trial.seq_len), trial.strategy, hardware or asked.hardware)
    return profile == trial.predicted


def test_the_longest_sequence_fits_and_the_next_does_not():
    asked = setting(2**40)
    budget = budget_for(needed(asked.with_seq_len(400), LEANEST))
    answer = longest_sequence(setting(budget), granularity=16)
    assert answer.seq_len == answer.found.seq_len == 400
    assert answer.found.fits
    assert answer.next is not None
    assert answer.next.seq_len == 416
    assert not answer.next.fits
    assert rehearsed_again(answer.found, asked)
    assert set(answer.found.strategy.tiers) == {"full"}


def test_the_longest_sequence_ends_where_positions_do():
    answer = longest_sequence(setting(2**34, tiny(max_position_embeddings=700)), granularity=256)
    assert (answer.seq_len, answer.next) == (700, None)


def test_the_largest_batch_of_each_way():
    asked = setting(2**40)
    budget = budget_for(needed(asked, PLAIN, 7))
    plain, pointwise, leanest = largest_batches(setting(budget), (PLAIN, "pointwise", LEANEST))
    assert plain.micro_batch_size == 7
    assert 7 < pointwise.micro_batch_size < leanest.micro_batch_size
    for batch in (plain, pointwise, leanest):
        assert batch.found is not None
        assert batch.next is not None
        assert batch.next.strategy.micro_batch_size == batch.micro_batch_size + 1
        assert batch.found.fits > batch.next.fits
    assert leanest.found is not None
    assert rehearsed_again(leanest.found, asked)


def test_a_way_that_fits_nothing_is_a_row_and_no_way_that_fits_is_an_error():
    asked = setting(2**40, tiny(512))
    plain, leanest = largest_batches(setting(budget_for(needed(asked, LEANEST, 2)), tiny(512)))
    assert (plain.found, plain.micro_batch_size, leanest.micro_batch_size) == (None, 0, 2)
    assert plain.next is not None
    with pytest.raises(DoesNotFitError, match=r"not even one sequence of 512 tokens fits: micro batch 1 x 1, full"):
        largest_batches(setting(1000, tiny(512)))


def test_the_fewest_devices_share_what_one_less_cannot():
    """On the host, whose allocator reserves nothing: a GPU's 2 MiB and 20 MiB segments outweigh so small a model."""
    workload = tiny(16, hidden_size=128, intermediate_size=256)
    budget = budget_for(needed(setting(2**40, workload, devices=3), LEANEST))
    answer = fewest_devices(setting(budget, workload), sharded)
    assert answer.devices == answer.found.strategy.mesh.shard == 3
    assert answer.fewer is not None
    assert answer.fewer.strategy.mesh.size == 2
    assert answer.found.fits > answer.fewer.fits
    with pytest.raises(DoesNotFitError, match="not even 2 devices are enough"):
        fewest_devices(setting(budget, workload), sharded, at_most=2)
    assert fewest_devices(setting(2**40, workload), sharded).devices == 1


def test_savings_are_differences_to_plain_training():
    workload = tiny(512, hidden_size=256, intermediate_size=512, vocab_size=1000, num_hidden_layers=2)
    asked = setting(2**34, workload, devices=2, device="h100")
    settled = replace(asked.target, precision="bf16", allocator=AllocatorSettings(expandable_segments=True))
    plain, rows = savings(replace(asked, target=settled), 4)
    assert {row.trial.strategy.allocator for row in rows if row.trial is not None} == {settled.allocator}
    assert plain.strategy.mesh == Mesh(replicate=2)
    changes = {row.change: row for row in rows}
    by_hand = replace(plain.strategy, tiers=("full",) * 2)
    full = rehearse(asked.workload, by_hand, asked.hardware)
    assert changes["activation full"].saved_bytes == plain.predicted.needed_bytes - full.needed_bytes > 0
    assert changes["activation full"].slowdown == full.step_seconds / plain.predicted.step_seconds - 1
    assert changes["activation pointwise"].saved_bytes < changes["activation full"].saved_bytes
    assert changes["micro batch 1 x 4"].saved_bytes > 0
    assert {"ZeRO 1", "ZeRO 2", "ZeRO 3", "int8 states", "cast block"} <= changes.keys()
    assert changes["int8 states"].accuracy == "lossy"
    assert changes["ZeRO 3"].accuracy == "exact"
    assert changes["states on the host"].saved_bytes > 0
    each_in_backward = changes.get("update in backward")
    assert each_in_backward is None  # two copies would have to sum first


def test_cards_have_a_plan_each_and_a_small_one_says_what_it_lacks():
    workload = tiny(256)

    def target(budget: int) -> Target:
        return Target(budget, 4 * 256, 256, "bf16")

    pairs = [(find_device("h100"), target(2**30)), (find_device("ascend-910b3"), target(2**30))]
    h100, ascend = compare_cards(workload, pairs)
    assert h100.fits
    assert ascend.fits
    assert h100.plan is not None
    assert h100.tokens_per_second == pytest.approx(4 * 256 / h100.plan.predicted.step_seconds)
    small, old = compare_cards(workload, [pairs[0], (find_device("ascend-910a"), target(2**30))])
    assert small.fits
    assert not old.fits
    assert "has no bf16 arithmetic" in old.why
    with pytest.raises(DoesNotFitError, match=r"h100.*: does not fit: .*; .*910b3.*: does not fit"):
        compare_cards(workload, [(hardware, target(10_000)) for hardware, _ in pairs])


def test_a_saving_that_plain_training_does_not_take_says_why_and_the_others_stay():
    asked = setting(2**30, device="h100")
    half = replace(asked.target, precision="fp16", loss_scale=LossScale())
    _, rows = savings(replace(asked, target=half))
    refused = {row.change: row.why for row in rows if row.trial is None}
    assert list(refused) == ["update in backward"]
    assert "fp16 must skip such a step" in refused["update in backward"]
    assert len(rows) > 5


def test_policies_beside_a_plan_are_rehearsed_in_its_step():
    workload, hardware = tiny(256), find_device("cpu")
    roomy = choose(workload, hardware, Target(2**34, 4 * 256, 256))
    target = Target(int(roomy.predicted.needed_bytes * 0.8), 4 * 256, 256)
    plan = choose(workload, hardware, target)
    names = ("none", "huggingface", "torchtitan", "memory", "cost", "ratio:0.5", "1*full,2*keep", "2*keep")
    rows = {row.policy: row for row in compare_policies(workload, hardware, plan, [*map(parse_policy, names)])}
    assert rows.keys() == {*names, PLANNED}
    assert rows[PLANNED].predicted == plan.predicted
    for name in names[:-1]:
        row = rows[name]
        assert row.strategy is not None
        assert row.strategy == replace(plan.strategy, tiers=row.strategy.tiers)
        assert row.predicted == rehearse(workload, row.strategy, hardware)
        assert row.fits == (row.predicted.needed_bytes <= plan.allowed_bytes)
    assert "names 2 blocks; the model has 3" in rows["2*keep"].why
    assert rows["2*keep"].predicted is None
    fitting = [row for row in rows.values() if row.fits]
    assert min(row.slowdown for row in fitting if row.slowdown is not None) == 0.0
    assert rows["huggingface"].slowdown is not None
    assert rows["huggingface"].slowdown > 0


def test_prices_know_tiers_of_a_plan_that_no_search_takes():
    workload, hardware = tiny(256), find_device("cpu")
    plan = choose(workload, hardware, Target(2**34, 4 * 256, 256))
    strategy = replace(plan.strategy, tiers=("selective",) * 3)
    plan = replace(plan, strategy=strategy, predicted=rehearse(workload, strategy, hardware))
    found = prices_of_plan(workload, hardware, plan).peak_bytes(strategy.tiers)
    assert found == pytest.approx(plan.predicted.needed_bytes, rel=0.02)


def test_policies_are_judged_as_the_plan_is():
    """By the pipeline stage that needs the most, and with the seconds of a window whose last micro batch is short."""
    policy = [parse_policy("huggingface")]
    workload, hardware = tiny(num_hidden_layers=4, vocab_size=4099), find_device("cpu", 2)
    staged = choose(workload, hardware, Target(2**34, 4 * 64, 64, layouts=(Layout(Mesh(pipeline=2)),)))
    row = next(row for row in compare_policies(workload, hardware, staged, policy) if row.policy != PLANNED)
    assert row.strategy is not None
    assert row.predicted is not None
    first, last = (rehearse(workload, row.strategy, hardware, rank=rank) for rank in (0, 1))
    assert row.predicted.needed_bytes == last.needed_bytes > first.needed_bytes
    for profile in (first, last, row.predicted):
        assert profile.step_seconds_low < profile.step_seconds < profile.step_seconds_high
        assert profile.step_seconds == pytest.approx(sum(profile.phase_seconds.values()))

    workload, hardware = tiny(), find_device("cpu")
    plan = choose(workload, hardware, Target(2**34, 3 * 64, 64))
    short = replace(plan, strategy=replace(plan.strategy, micro_batch_size=2, accumulation_steps=2))
    row = next(row for row in compare_policies(workload, hardware, short, policy) if row.policy != PLANNED)
    assert row.strategy is not None
    assert row.predicted is not None
    full = rehearse(workload, row.strategy, hardware)
    assert row.predicted.phase_seconds["forward"] == pytest.approx(full.phase_seconds["forward"] * 3 / 4)
    assert row.predicted.tokens == 3 * 64


def test_prices_of_a_plan_meet_its_rehearsal():
    """At the plan's own tiers to the byte, at others within the fast model's bounds; so memory's answer fits."""
    workload, hardware = tiny(256), find_device("cpu")
    plan = choose(workload, hardware, Target(2**34, 4 * 256, 256))
    prices = prices_of_plan(workload, hardware, plan)
    off = plan.allowed_bytes - prices.allowed_bytes
    assert prices.peak_bytes(plan.strategy.tiers) + off == plan.predicted.needed_bytes
    full = replace(plan.strategy, tiers=("full",) * 3)
    predicted = rehearse(workload, full, hardware).needed_bytes
    assert prices.peak_bytes(full.tiers) + off == pytest.approx(predicted, rel=0.03)
    tight = replace(prices, allowed_bytes=prices.peak_bytes(("full", "keep", "keep")))
    assert parse_policy("memory").tiers(Situation(3, prices=tight)) == ("full", "keep", "keep")
