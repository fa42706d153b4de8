"""The peak in words: where, what, why, and only remedies that are not taken yet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainfit.profile import CATEGORIES, Mesh, OptimizerVariant, Profile, Zero
from trainfit.report.peak_words import explain_peak
from trainfit.step import Strategy

GIB = 2**30


def profile(phase: str = "backward", place: str = "block 3, aten::mm", **parts: int) -> Profile:
    categories = dict.fromkeys(CATEGORIES, 0) | {name: size * GIB for name, size in parts.items()}
    return Profile(sum(categories.values()), phase, place, {phase: GIB}, categories, GIB)


def test_where_and_what_are_the_profiles_figures():
    where, what, *_ = explain_peak(profile(parameters=6, activations=13, loss=1, temporary=0))
    assert where == "The peak, 20.0 GiB, comes in the backward phase of block 3, while aten::mm runs."
    assert (
        what
        == "Live then: saved activations 13.0 GiB (65 %), parameters 6.0 GiB (30 %), logits and loss 1.0 GiB (5 %)."
    )


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("", "comes in the backward phase."),
        ("aten::mm", "comes in the backward phase, while aten::mm runs."),
        ("embedding, aten::x", "comes in the backward phase of the embedding, while aten::x runs."),
    ],
)
def test_places_that_are_no_blocks(place, words):
    assert explain_peak(profile(place=place, parameters=1))[0].endswith(words)


@pytest.mark.parametrize(
    ("phase", "place", "parts", "words"),
    [
        ("forward", "block 1, x", {"activations": 1}, "nothing is freed before backward"),
        ("loss", "x", {"loss": 1}, "logits and their gradient come on top"),
        ("optimizer", "x", {"gradients": 1}, "All gradients are complete"),
        ("backward", "embedding, x", {"gradients": 1}, "as large as its weight"),
        ("backward", "x", {"gradients": 1}, "gradients of later modules"),
        ("backward", "block 7, x", {"activations": 2, "gradients": 1}, "While block 7 runs backward"),
        ("backward", "block 7, x", {"activations": 2, "gradients": 1}, "the blocks before it saved"),
        ("backward", "block 7, x", {"activations": 1, "gradients": 2}, "gradients of the blocks after it"),
        ("backward", "block 0, x", {"activations": 1, "gradients": 2}, "gradients of all blocks"),
        ("backward", "block 7, x", {"communication": 3, "gradients": 2}, "take their buffers"),
    ],
)
def test_why_then(phase, place, parts, words):
    assert words in explain_peak(profile(phase, place, **parts))[2]


def remedies(strategy: Strategy, **parts: int) -> str:
    *_, last = explain_peak(profile(**parts), strategy)
    return last if last.startswith("What would lower it") else ""


def test_the_largest_part_is_named_first_and_small_ones_not_at_all():
    keep = Strategy(4, 1, tiers=("keep",) * 4)
    text = remedies(keep, activations=20, optimizer=10, loss=1)
    assert text.index("recompute more blocks") < text.index("8 bits")
    assert "chunk" not in text
    assert "the loss in more than 1 chunk" in remedies(keep, loss=20, parameters=1)


def test_what_is_done_already_is_not_advised():
    full = Strategy(1, 8, tiers=("full",) * 4)
    assert remedies(full, activations=1) == "What would lower it: shorter sequences."
    small = OptimizerVariant(weights="bf16_stochastic", states="int8", gradients="half")
    sharded = Strategy(1, 2, "bf16", mesh=Mesh(shard=8), zero=Zero(3), optimizer=small)
    assert remedies(sharded, parameters=1, optimizer=1, gradients=1) == ""
    assert "ZeRO 3" in remedies(Strategy(1, 1, mesh=Mesh(replicate=8)), parameters=1)
    assert "ZeRO" not in remedies(Strategy(1, 1), parameters=1, gradients=1)  # nobody to share with


def test_only_what_the_strategy_allows_is_advised():
    assert "weights=bf16_stochastic" in remedies(Strategy(1, 1, "bf16"), parameters=1)
    assert "weights" not in remedies(Strategy(1, 1, "fp32"), parameters=1)  # half weights compute in bf16
    assert "update=backward" in remedies(Strategy(1, 1), gradients=1)
    assert "update=backward" not in remedies(Strategy(1, 2), gradients=1)
    assert remedies(Strategy(1, 2, optimizer=OptimizerVariant("adafactor")), optimizer=1) == ""


def test_host_memory_is_advised_to_a_device_beside_it():
    """A CPU's states are there already."""
    keep, of_cpu = Strategy(1, 1), profile(optimizer=1)
    of_device = replace(of_cpu, reserved_bytes=of_cpu.peak_bytes)
    assert "place=host" in explain_peak(of_device, keep)[-1]
    assert "place=host" not in explain_peak(of_cpu, keep)[-1]


def test_without_a_strategy_nothing_is_advised():
    assert not any("lower it" in sentence for sentence in explain_peak(profile(activations=1)))
