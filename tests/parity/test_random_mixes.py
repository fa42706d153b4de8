"""Ten random mixes of techniques: each phase's peak is as predicted, and what is learnt is what plain training learns.

Every tier and every value of a setting that a CPU has is in one of them, a new one too or the first test fails.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import islice
from typing import Any, get_args

import pytest
import torch
from plain import (
    CPU,
    assert_equal_to_the_bit,
    gradients,
    small_workload,
    tiny_workload,
)
from test_compiled import workload as of_gated_blocks

from trainfit.errors import RecipeError
from trainfit.hardware import find_device, this_machine
from trainfit.operators import KeptOperators
from trainfit.plan.op_choice import frontier
from trainfit.profile import (
    ALL_TIERS,
    ATTENTIONS,
    CHOSEN_TIERS,
    COMPILED_TIERS,
    FROZEN_STORAGES,
    OPTIMIZER_KINDS,
    PRECISIONS,
    STATE_STORAGES,
    TIER_ACCURACY,
    WEIGHT_STORAGES,
    Cast,
    Compile,
    GradientStorage,
    LossScale,
    Offload,
    OptimizerVariant,
    Tier,
    TokenBucket,
)
from trainfit.rehearsal import measure, rehearse, verify
from trainfit.rehearsal.measure import random_window
from trainfit.rehearsal.rehearse import cuts_of
from trainfit.rehearsal.trace import Tracer
from trainfit.step import Strategy, build_step
from trainfit.techniques import TECHNIQUES
from trainfit.workload import LoRASettings, Workload, with_adapter

SEEDS = range(1, 11)
HOST = this_machine("cpu")
DEEP = 12  # blocks, in runs: a rehearsal leaves some out
CANDIDATES, DRAWS = 200, 20000  # for each mix: accepted ones, of which one is taken, and attempts at them
OPTIMIZER: dict[str, Sequence[Any]] = {
    "kind": OPTIMIZER_KINDS,
    "weights": WEIGHT_STORAGES,
    "gradients": get_args(GradientStorage),
    "states": STATE_STORAGES,
    "place": ("device", "host"),
    "update": ("step", "backward"),
    "kernel": ("fused", "foreach"),
}
SETTINGS: dict[str, Sequence[Any]] = {
    "micro_batch_size": (2, 3),
    "accumulation_steps": (1, 2),
    "precision": PRECISIONS,
    "loss_chunks": (1, 2, 5),
    "cast": get_args(Cast),
    "loss_scale": (None, LossScale(per_block=True)),
    "frozen_weights": FROZEN_STORAGES,
    "recompute_ahead": (0, 1),
    "offload": (Offload("disk"),),
    "attention": ATTENTIONS,
}
# What a tier table can switch between.
SWITCHED = tuple(
    tier
    for tier in ALL_TIERS
    if tier not in (*TIER_ACCURACY, *CHOSEN_TIERS, "recompute_attention", "recompute_mlp") and "offload" not in tier
)
# Drawn in ways of their own.
TIER_SETTINGS = {"tiers", "tier_table", "micro_batch_tokens", "kept_operators", "optimizer"}
# Not of one CPU's eager step: ranks are those of tests/distributed, a CPU has no caching allocator.
ELSEWHERE = {"mesh", "zero", "tensor", "pipeline", "allocator", "compile"}


@dataclass(frozen=True)
class Mix:
    family: str
    num_blocks: int
    seq_len: int
    dropout: bool
    adapter: bool
    strategy: Strategy

    @property
    def names(self) -> set[str]:
        """What it has of all there is to have."""
        strategy = self.strategy
        rows = [strategy.tiers, *(row.tiers for row in strategy.tier_table)]
        found = {f"tier {tier}" for row in rows for tier in row}
        found |= {f"{name} {getattr(strategy, name)}" for name in SETTINGS if name != "offload"}
        found |= {f"optimizer.{name} {getattr(strategy.optimizer, name)}" for name in OPTIMIZER}
        return found | {each for each in ("tier_table", "micro_batch_tokens") if getattr(strategy, each)}

    @property
    def is_deep(self) -> bool:
        return self.num_blocks == DEEP

    @cache  # noqa: B019
    def workload(self) -> Workload:
        changes: dict[str, Any] = {"vocab_size": 64, "max_position_embeddings": 512}
        if self.family == "gpt2":
            dropout = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.1 * self.dropout)
            sizes = {"n_embd": 64, "n_layer": self.num_blocks}
            workload = tiny_workload("gpt2", self.seq_len, **changes, **sizes, **dropout)
        else:
            changes |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": self.num_blocks}
            changes |= {"attention_dropout": 0.1 * self.dropout, **FAMILIES[self.family]}
            workload = small_workload(self.family, self.seq_len, **changes)
        targets = ("c_attn", "c_fc") if self.family == "gpt2" else "all-linear"
        return with_adapter(workload, LoRASettings(rank=4, targets=targets)) if self.adapter else workload

    def planned(self) -> Strategy:
        """With what chosen tiers keep: corners of the frontier of the blocks that there are."""
        strategy = self.strategy
        if not strategy.kept_operators:
            return strategy
        tracer = Tracer(
            self.workload(),
            find_device("h100"),  # whose figures are the same everywhere
            strategy.optimizer,
            frozen_weights=strategy.frozen_weights,
            precision=strategy.precision,
            cast=strategy.cast,
            attention=strategy.attention,
        )
        graph = tracer.graph(0, strategy.micro_batch_size, strategy.precision)
        corners = frontier(graph)
        kept = tuple(
            graph.rules(each.tier, corners[(at + 1) * len(corners) // 5].kept)
            for at, each in enumerate(strategy.kept_operators)
        )
        return replace(strategy, kept_operators=kept)


FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {},
    "gemma2": {"head_dim": 16, "sliding_window": 48},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def everything() -> set[str]:
    found = {f"tier {tier}" for tier in ALL_TIERS}
    found |= {f"{name} {value}" for name, values in SETTINGS.items() for value in values if name != "offload"}
    found |= {f"optimizer.{name} {value}" for name, values in OPTIMIZER.items() for value in values}
    return found | {"tier_table", "micro_batch_tokens"}


# ---- drawing --------------------------------------------------------------------------------------------------------


def usually_first(rng: random.Random, values: Sequence[Any]) -> Any:
    """Any, but the first, which is plain training's, half of the time: few mixes of rare values go together."""
    return values[0] if rng.random() < 0.5 else rng.choice(values)


def tiers_of(rng: random.Random, num_blocks: int, tiers: Sequence[Tier] = ALL_TIERS) -> tuple[Tier, ...]:
    """A kind for each block, or a long run of one where blocks are many."""
    kinds = rng.sample(tiers, min(num_blocks, 3))
    return (kinds[0], *[kinds[1]] * (num_blocks - 2), kinds[2])


def settings_of(rng: random.Random) -> dict[str, Any]:
    settings = {name: usually_first(rng, values) for name, values in SETTINGS.items()}
    variant = OptimizerVariant(**{name: usually_first(rng, values) for name, values in OPTIMIZER.items()})
    return {**settings, "optimizer": variant}


def accepted(settings: dict[str, Any]) -> Strategy | None:
    try:
        return Strategy(**settings)
    except RecipeError:
        return None


def draw(rng: random.Random, num_blocks: int) -> Mix | None:
    """None where a rule is against it."""
    family = rng.choice([family for family in FAMILIES if num_blocks < DEEP or family != "gemma2"])
    seq_len = rng.choice((96, 128))
    settings = settings_of(rng)
    has_table = rng.random() < 0.15
    settings["tiers"] = tiers = tiers_of(rng, num_blocks, SWITCHED if has_table else ALL_TIERS)
    if has_table:
        tokens = settings["micro_batch_size"] * seq_len
        rows = (TokenBucket(tokens // 2, tiers_of(rng, num_blocks, SWITCHED)), TokenBucket(tokens, tiers))
        settings |= {"tier_table": rows, "micro_batch_tokens": rng.choice((0, tokens))}
    chosen = [tier for tier in dict.fromkeys(tiers) if tier in CHOSEN_TIERS]
    settings["kept_operators"] = tuple(KeptOperators(tier, ()) for tier in chosen)
    if not any(tier.startswith("offload") for tier in tiers):
        settings["offload"] = Offload()
    if (strategy := accepted(settings)) is None:
        return None
    dropout = rng.random() < 0.5 and strategy.attention == "model"  # blockwise draws other numbers
    mix = Mix(family, num_blocks, seq_len, dropout, rng.random() < 0.3, strategy)
    return mix if fits(mix) else None


def fits(mix: Mix) -> bool:
    """Whether a step of its model takes it."""
    strategy = mix.strategy
    if strategy.frozen_weights != "fp32" and not mix.adapter:
        return False  # nothing is frozen
    if strategy.frozen_weights in ("int8", "nf4") and mix.family == "gpt2":
        return False  # it has no nn.Linear in its blocks
    rows = [strategy.tiers, *(row.tiers for row in strategy.tier_table)]
    return mix.family != "gemma2" or not any("recompute_core" in row for row in rows)  # its scores are written out


@cache
def mixes() -> tuple[Mix, ...]:
    """Of some that a seed draws, each is the one that has the most that none before it has."""
    found: list[Mix] = []
    seen: set[str] = set()
    for seed in SEEDS:
        rng = random.Random(seed)
        num_blocks = 3 if seed % 3 else DEEP
        drawn = (draw(rng, num_blocks) for _ in range(DRAWS))
        drawn = islice((mix for mix in drawn if mix is not None), CANDIDATES)
        found.append(max(drawn, key=lambda mix: len(mix.names - seen)))
        seen |= found[-1].names
    return tuple(found)


def mix_of(seed: int) -> Mix:
    return mixes()[seed - SEEDS[0]]


def clips_by(strategy: Strategy) -> float | None:
    return None if strategy.optimizer.update == "backward" else 1.0


# ---- what must hold -------------------------------------------------------------------------------------------------


def test_everything_that_there_is_is_in_a_mix():
    found: set[str] = set().union(*(mix.names for mix in mixes()))
    assert sorted(everything() - found) == []
    assert {field.name for field in fields(OptimizerVariant)} == set(OPTIMIZER)
    assert {field.name for field in fields(Strategy)} == {*SETTINGS, *TIER_SETTINGS, *ELSEWHERE}
    plain = Strategy(1)
    for name in {technique.setting for technique in TECHNIQUES} - ELSEWHERE:
        assert any(getattr(mix.strategy, name) != getattr(plain, name) for mix in mixes()), name


@pytest.mark.parametrize("seed", SEEDS, ids="seed-{}".format)
def test_its_peak_is_predicted(seed: int):
    mix = mix_of(seed)
    workload, strategy = mix.workload(), mix.planned()
    predicted = rehearse(workload, strategy, HOST, max_grad_norm=clips_by(strategy))
    measured = measure(workload, strategy, CPU, steps=0, max_grad_norm=clips_by(strategy))
    assert measured.peak_bytes == pytest.approx(predicted.peak_bytes, rel=0.01), mix
    assert measured.resident_bytes == pytest.approx(predicted.resident_bytes, rel=0.001), mix
    # Generator states are not rehearsed: 5 kB for a recomputed block, and for what it keeps of dropout.
    states = 25 * 5056 * mix.dropout
    for phase, num_bytes in measured.phases.items():
        assert num_bytes == pytest.approx(predicted.phases[phase], rel=0.01, abs=states), (phase, mix)


def test_most_deep_mixes_are_spliced():
    """A scale for each block, or tiers without a pattern, have all blocks run."""
    spliced = [next(cuts_of(mix.workload(), mix.planned(), 0), None) is not None for mix in mixes() if mix.is_deep]
    assert sum(spliced) > len(spliced) / 2


@pytest.mark.parametrize("seed", SEEDS, ids="seed-{}".format)
def test_it_learns_what_plain_training_does(seed: int):
    """To the bit, where nothing is rounded or summed up in another order."""
    mix = mix_of(seed)
    workload, strategy = mix.workload(), mix.planned()
    tiers = [tier for row in (strategy.tiers, *(each.tiers for each in strategy.tier_table)) for tier in row]
    lossy = [tier for tier in tiers if tier in TIER_ACCURACY]
    by_block = strategy.loss_scale is not None and strategy.loss_scale.per_block
    exact = not lossy and strategy.loss_chunks == 1 and strategy.attention == "model" and not by_block
    in_backward = strategy.optimizer.update == "backward"
    if strategy.optimizer.weights == "fp32" and not in_backward and strategy.frozen_weights == "fp32":
        report = verify(workload, strategy, CPU, steps=1)  # against a loop written by hand
        assert report.passed, (report, mix)
        assert report.bit_equal or not exact, mix
        return
    found, expected = (learnt(workload, each, weights=in_backward) for each in (strategy, plainly(strategy)))
    if exact:
        assert_equal_to_the_bit(found, expected)
    allowed = ROUNDING[strategy.precision] + max((LOSSY[tier] for tier in lossy), default=0.0)
    assert relative_error(found, expected) <= allowed, mix


def compiled_strategy(rng: random.Random) -> Strategy:
    for _ in range(DRAWS):
        settings = {**settings_of(rng), "frozen_weights": "fp32", "offload": Offload()}
        first, then = rng.sample(COMPILED_TIERS, 2)
        tiers, budget = (first,) * 6 + (then,) * 6, rng.choice((0.3, 0.6))
        if (strategy := accepted({**settings, "tiers": tiers, "compile": Compile(1, budget)})) is not None:
            return strategy
    raise AssertionError("no draw was accepted")


@pytest.mark.parametrize("seed", [1], ids="seed-{}".format)
def test_peak_of_compiled_blocks_is_predicted(seed: int):
    """One graph of a small block, since kernels take seconds each."""
    strategy = compiled_strategy(random.Random(seed))
    workload = of_gated_blocks(12)
    assert next(cuts_of(workload, strategy, 0), None), "nothing is spliced"
    predicted = rehearse(workload, strategy, HOST, max_grad_norm=clips_by(strategy))
    measured = measure(workload, strategy, CPU, steps=0, max_grad_norm=clips_by(strategy))
    assert measured.phases == pytest.approx(predicted.phases, rel=0.01), strategy
    found, expected = (learnt(workload, each, weights=False) for each in (strategy, plainly(strategy)))
    assert relative_error(found, expected) <= ROUNDING[strategy.precision]


# Root mean square over all gradients. Of sums in another order, and of what is compressed four times the codec's error.
ROUNDING = {"fp32": 1e-5, "bf16": 0.05, "fp16": 0.02}
LOSSY: dict[Tier, float] = {"keep_bf16": 0.0066, "keep_int8": 0.026, "keep_fp8": 0.103}


def plainly(strategy: Strategy) -> Strategy:
    """The same numbers without anything that saves activations."""
    scale = strategy.loss_scale and replace(strategy.loss_scale, per_block=False)
    return Strategy(
        strategy.micro_batch_size,
        strategy.accumulation_steps,
        strategy.precision,
        ("keep",) * len(strategy.tiers),
        optimizer=replace(strategy.optimizer, update="step"),
        loss_scale=scale,
        frozen_weights=strategy.frozen_weights,
    )


def learnt(workload: Workload, strategy: Strategy, *, weights: bool) -> dict[str, torch.Tensor]:
    """Gradients of a window, or what it makes of weights: an update in backward leaves no gradients."""
    torch.manual_seed(0)
    step = build_step(workload, strategy, CPU, max_grad_norm=None)
    window = random_window(workload, strategy, seed=1)
    torch.manual_seed(2)
    if weights:
        step(window)
        return {name: parameter.detach() for name, parameter in step.model.named_parameters()}
    step.accumulate(window)
    return gradients(step.model)


def relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    off = sum((found[name].double() - value.double()).square().sum() for name, value in expected.items())
    return float((off / sum(value.double().square().sum() for value in expected.values())).sqrt())
