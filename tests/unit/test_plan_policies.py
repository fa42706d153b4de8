"""Policies: parsed and printed, and each against what its words say."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.errors import RecipeError
from trainfit.plan.policies import USUAL, Policy, Prices, Situation, parse_policy, policy_names
from trainfit.profile import SEARCH_TIERS, TIERS, Tier
from trainfit.step import format_tiers, parse_tiers

counts = st.integers(1, 999_999)
fixed = st.sampled_from([name for name in policy_names() if not name.endswith((":K", ":R"))])
policies = st.one_of(
    fixed.map(Policy),
    st.builds(Policy, st.sampled_from([name[:-2] for name in policy_names() if name.endswith(":K")]), counts),
    st.builds(Policy, st.just("ratio"), st.floats(0, 1)),
    st.lists(st.sampled_from(TIERS), min_size=2, max_size=9)
    .map(format_tiers)
    .filter(lambda text: "*" in text)
    .map(lambda text: Policy("list", text)),
)


@given(policies)
def test_a_policy_is_read_back_from_its_text(policy: Policy):
    assert parse_policy(str(policy)) == policy


@given(st.lists(st.sampled_from(TIERS), min_size=1, max_size=12).map(tuple))
def test_what_tiers_are_printed_as_is_a_policy_for_the_same(tiers: tuple[Tier, ...]):
    """And all that --activation took before policies had names."""
    assert parse_policy(format_tiers(tiers)).tiers(Situation(len(tiers))) == tiers


@given(counts, st.integers(0, 40))
def test_every_is_that_of_tiers(every: int, num_blocks: int):
    assert parse_policy(f"every:{every}").tiers(Situation(num_blocks)) == parse_tiers(f"every:{every}", num_blocks)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torchtian", "did you mean torchtitan"),
        ("evry:2", "did you mean every:K"),
        ("every:0", "whole number from 1; use every:1 or more"),
        ("every:x", "whole number from 1"),
        ("every", "did you mean every:K"),
        ("ratio:1.5", "share from 0 to 1, such as ratio:0.5"),
        ("ratio:nan", "share from 0 to 1"),
        ("megatron:blok:3", "did you mean megatron:block:K"),
        ("full:3", "did you mean full"),
        ("", "unknown activation policy ''; known are keep"),
        ("qqqqqqqq", "known are keep"),
    ],
)
def test_a_bad_policy_gets_one_line_with_the_nearest(text: str, message: str):
    with pytest.raises(RecipeError, match=message) as caught:
        parse_policy(text)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=12))
def test_any_text_is_a_policy_or_one_line(text: str):
    try:
        policy = parse_policy(text)
    except RecipeError:
        return
    assert parse_policy(str(policy)) == policy


def test_other_systems_policies_are_what_their_sources_say():
    def tiers(text: str, **situation: object) -> str:
        return format_tiers(parse_policy(text).tiers(Situation(6, **situation)))  # type: ignore[arg-type]

    assert tiers("huggingface") == tiers("torchtitan:full") == tiers("megatron:uniform:1") == "full"
    assert tiers("torchtitan") == "selective"
    assert tiers("torchtitan:selective:2") == "1*keep,1*full,1*keep,1*full,1*keep,1*full"
    assert tiers("torchtitan:selective:1") == "full"
    assert tiers("every:4") == "1*full,3*keep,1*full,1*keep"
    assert tiers("megatron:block:2") == "2*full,4*keep"
    assert tiers("megatron:block:2", stages=(3, 3)) == "2*full,1*keep,2*full,1*keep"
    assert tiers("megatron:block:9", stages=(3, 3)) == "full"
    assert tiers("megatron:selective") == "recompute_core"
    assert tiers("megatron:selective:mlp") == "recompute_mlp"
    with pytest.raises(RecipeError, match="megatron:uniform:2 recomputes 2 blocks as one region"):
        tiers("megatron:uniform:2")


@pytest.mark.parametrize("text", ["memory", "cost", "ratio:0.5"])
def test_policies_that_need_prices_say_where_there_are_some(text: str):
    assert parse_policy(text).needs_prices
    with pytest.raises(RecipeError, match=rf"policy {text} depends on what tiers save and cost"):
        parse_policy(text).tiers(Situation(3))


def test_usual_ones_are_policies():
    assert len({parse_policy(text) for text in USUAL}) == len(USUAL)


@st.composite
def priced(draw: st.DrawFn) -> Prices:
    """Blocks that save less and take longer from tier to tier; the peak is what is saved and a floor."""
    blocks = draw(st.integers(1, 3))
    order = SEARCH_TIERS
    saved: dict[Tier, list[int]] = {tier: [] for tier in order}
    seconds: dict[Tier, list[float]] = {tier: [] for tier in order}
    for _ in range(blocks):
        sizes = sorted(draw(st.lists(st.integers(1, 100), min_size=len(order), max_size=len(order))), reverse=True)
        times = sorted(draw(st.lists(st.integers(1, 100), min_size=len(order), max_size=len(order))))
        for tier, size, time in zip(order, sizes, times):
            saved[tier].append(size)
            seconds[tier].append(float(time))
    floor = draw(st.integers(0, 50))

    def peak(tiers: tuple[Tier, ...]) -> int:
        return floor + sum(saved[tier][block] for block, tier in enumerate(tiers))

    return Prices(saved, seconds, peak, draw(st.integers(1, 450)))


@given(priced())
def test_memory_is_the_shortest_run_of_full_blocks_that_fits(prices: Prices):
    blocks = len(prices.saved["keep"])
    tiers = parse_policy("memory").tiers(Situation(blocks, prices=prices))
    runs = [("full",) * n + ("keep",) * (blocks - n) for n in range(blocks + 1)]
    fitting = [run for run in runs if prices.peak_bytes(run) <= prices.allowed_bytes]
    assert tiers == (fitting[0] if fitting else runs[-1])


@given(priced())
def test_cost_fits_wherever_anything_does_and_stops_as_soon_as_it_fits(prices: Prices):
    blocks = len(prices.saved["keep"])
    tiers = parse_policy("cost").tiers(Situation(blocks, prices=prices))
    everything = list(product(SEARCH_TIERS, repeat=blocks))
    if any(prices.peak_bytes(each) <= prices.allowed_bytes for each in everything):
        assert prices.peak_bytes(tiers) <= prices.allowed_bytes
    if prices.peak_bytes(("keep",) * blocks) <= prices.allowed_bytes:
        assert tiers == ("keep",) * blocks


@given(priced(), st.floats(0, 1))
def test_ratio_keeps_no_more_than_its_share_unless_nothing_saves_more(prices: Prices, ratio: float):
    blocks = len(prices.saved["keep"])
    tiers = Policy("ratio", ratio).tiers(Situation(blocks, prices=prices))
    kept = sum(prices.saved[tier][block] for block, tier in enumerate(tiers))
    least = sum(min(prices.saved[tier][block] for tier in SEARCH_TIERS) for block in range(blocks))
    assert kept <= ratio * sum(prices.saved["keep"]) or kept == least


def test_cost_takes_what_is_cheap_for_its_bytes_first():
    """Block 1 saves as much for a tenth of the time; block 0 is left alone until it is needed."""
    order: tuple[Tier, ...] = ("keep", "pointwise", "attention", "full")
    saved = {tier: (size, size) for tier, size in zip(order, (100, 60, 50, 40))}
    seconds = {tier: (10.0 + extra, 10.0 + extra / 10) for tier, extra in zip(order, (0.0, 1.0, 5.0, 9.0))}

    def tiers(allowed: int) -> tuple[Tier, ...]:
        prices = Prices(saved, seconds, lambda chosen: sum(saved[tier][0] for tier in chosen), allowed)
        return parse_policy("cost").tiers(Situation(2, prices=prices))

    assert tiers(200) == ("keep", "keep")
    assert tiers(165) == ("keep", "pointwise")
    assert tiers(145) == tiers(120) == ("pointwise", "pointwise")  # the first 40 bytes of block 0, not the next of 1
    assert tiers(100) == ("pointwise", "full")
    assert tiers(80) == ("full", "full")
