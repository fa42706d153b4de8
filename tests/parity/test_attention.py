"""Blockwise attention in a whole step: what it learns, what it holds, under every tier, and when a plan takes it."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain import (
    CPU,
    build,
    gradients,
    make_model,
    planned_gradients,
    random_batch,
    small_workload,
    tiny_workload,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.errors import ModelError, RecipeError
from trainfit.hardware import this_machine
from trainfit.plan import Target, choose
from trainfit.plan.questions import LEANEST, Setting, longest_sequence
from trainfit.profile import Compile, Layout, TokenBucket
from trainfit.rehearsal import measure, rehearse
from trainfit.rehearsal.attention_scores import attention_holds_scores
from trainfit.step import Strategy, build_step, parse_tiers
from trainfit.techniques.attention import _mask
from trainfit.techniques.blockwise_attention import FORWARD, TILE
from trainfit.workload import Workload, run_model, workload_from_module

HOST = this_machine("cpu")
TIERS = ("keep", "pointwise", "attention", "full", "selective", "recompute_attention")


class Biased(nn.Module):
    """A user's own model: attention with a learnt bias for each distance, so SDPA takes its math path."""

    def __init__(self, dim: int = 32, vocab_size: int = 97, length: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList([BiasedBlock(dim, length) for _ in range(4)])
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class BiasedBlock(nn.Module):
    def __init__(self, dim: int, length: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(dim)
        self.mix, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.bias = nn.Parameter(torch.linspace(0, 1, length)[None, :, None] * torch.ones(heads, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        query, key, value = (
            each.view(batch, length, self.heads, -1).transpose(1, 2) for each in self.mix(self.norm(x)).chunk(3, -1)
        )
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        bias = (self.bias[:, :length] * torch.ones(length, device=x.device)).masked_fill(hidden, float("-inf"))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


def biased(seq_len: int = 128) -> Workload:
    return workload_from_module(partial(Biased, length=seq_len), seq_len=seq_len, vocab_size=97)


def windowed(seq_len: int = 160, **changes: Any) -> Workload:
    """Gemma 2: soft caps, a window in every second block, grouped heads, eager attention by itself."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "vocab_size": 97}
    return tiny_workload("gemma2", seq_len=seq_len, **{**sizes, "sliding_window": 48, **changes})


def blocks(workload: Workload) -> int:
    return len(workload.anatomy().blocks)


def with_sinks(seq_len: int = 80) -> Workload:
    """gpt-oss: a sink for each head, windows, a mixture of experts, eager attention by itself."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 24}
    return small_workload("gpt_oss", seq_len=seq_len, **experts, max_position_embeddings=512, rope_parameters=None)


@pytest.mark.parametrize(
    ("workload", "tier"),
    [(with_sinks(), "attention")] + [(windowed(), tier) for tier in TIERS] + [(biased(), tier) for tier in TIERS[:-1]],
)
def test_gradients_are_those_of_the_models_own_attention(workload: Workload, tier: str):
    batch = random_batch(workload)
    own = planned_gradients(build(workload), [batch])
    step = build(workload, tier, attention="blockwise")
    found = planned_gradients(step, [batch])
    assert found.keys() == own.keys()
    for name, gradient in own.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=2e-6 * float(gradient.abs().max()) + 1e-9)


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_families_with_fused_attention_take_it_too(family: str):
    changes = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0} if family == "gpt2" else {}
    workload = tiny_workload(family, seq_len=80, **changes)
    batch = random_batch(workload)
    own = planned_gradients(build(workload), [batch])
    found = planned_gradients(build(workload, "attention", attention="blockwise"), [batch])
    for name, gradient in own.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=2e-6 * float(gradient.abs().max()) + 1e-9)


def test_dropout_is_repeated_in_recompute():
    workload = tiny_workload("gpt2", seq_len=80, attn_pdrop=0.4)
    batch = random_batch(workload)
    kept = planned_gradients(build(workload, attention="blockwise"), [batch])
    again = planned_gradients(build(workload, "full", attention="blockwise"), [batch])
    other = planned_gradients(build(workload, attention="blockwise"), [batch], seed=2)
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    assert not all(torch.equal(kept[name], other[name]) for name in kept)


NARROW = {"hidden_size": 16, "head_dim": 8, "intermediate_size": 32, "vocab_size": 16}
PREDICTED = {
    "keep": {},
    "pointwise": {"precision": "bf16"},
    "attention": {"accumulation_steps": 2},
    "full": {"precision": "bf16", "loss_chunks": 4, "cast": "block"},
}


@pytest.mark.parametrize("family", ["gemma2", "user"])
@pytest.mark.parametrize("tier", PREDICTED)
def test_its_peak_is_predicted(family: str, tier: str):
    """To the byte, but for numbers of a few bytes that no rehearsal has.

    All but attention is so narrow that its tiles make the peak.
    """
    workload = windowed(256, **NARROW) if family == "gemma2" else biased(256)
    strategy = Strategy(2, tiers=parse_tiers(tier, blocks(workload)), attention="blockwise", **PREDICTED[tier])
    predicted = rehearse(workload, strategy, HOST)
    measured = measure(workload, strategy, CPU, steps=0)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.001)
    assert predicted.peak_place.startswith("block")
    plain = Strategy(2, tiers=parse_tiers(tier, blocks(workload)), **PREDICTED[tier])
    assert predicted.peak_bytes < rehearse(workload, plain, HOST).peak_bytes


def test_predicted_dropout_takes_what_it_takes():
    workload = tiny_workload("gpt2", seq_len=256, attn_pdrop=0.1)
    strategy = Strategy(2, tiers=parse_tiers("attention", 4), loss_chunks=8, attention="blockwise")
    predicted, measured = rehearse(workload, strategy, HOST), measure(workload, strategy, CPU, steps=0)
    # Generator states are not rehearsed: 5 kB for each recomputed block.
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, abs=4 * 5056 + 512)


def test_peaks_grow_with_the_sequence_and_not_with_its_square(monkeypatch: pytest.MonkeyPatch):
    """Measured over three lengths, of at least a tile each, on models that are small beside their activations."""
    monkeypatch.setitem(TILE, "cpu", 2**16)  # type: ignore[misc]
    peaks: dict[str, list[int]] = {"model": [], "blockwise": []}
    for attention, found in peaks.items():
        for length in (128, 256, 512):
            workload = windowed(length, hidden_size=16, head_dim=8)
            strategy = Strategy(1, tiers=("full",) * blocks(workload), loss_chunks=16, attention=attention)
            found.append(measure(workload, strategy, CPU, steps=0).peak_bytes)
    rises = {name: [later - earlier for earlier, later in itertools.pairwise(found)] for name, found in peaks.items()}
    assert rises["blockwise"][1] < 2.3 * rises["blockwise"][0]
    assert rises["model"][1] > 3.5 * rises["model"][0]


@pytest.mark.parametrize(("tier", "times"), [("keep", 1), ("attention", 1), ("pointwise", 1), ("full", 2)])
def test_tiers_that_keep_attention_do_not_run_it_twice(tier: str, times: int):
    class Counted(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += func is FORWARD
            return func(*args, **(kwargs or {}))

    workload = windowed()
    step = build(workload, tier, attention="blockwise")
    for _ in range(2):  # what to look at is learnt in the first
        with Counted() as counted:
            step.accumulate([random_batch(workload)])
        assert counted.calls == times * blocks(workload)


def test_a_model_that_is_built_again_has_its_own_attention_back():
    workload = windowed()
    model = workload.make_model()
    config, own = model.config, model.config._attn_implementation
    first = planned_gradients(build(workload, model=model), [random_batch(workload)])
    build(workload, "full", model=model, attention="blockwise")
    assert model.config is not config
    assert config._attn_implementation == own
    step = build(workload, model=model)
    assert step.model.config is config
    again = planned_gradients(step, [random_batch(workload)])
    assert all(torch.equal(again[name], first[name]) for name in first)


def test_the_key_value_cache_stays_off():
    """A copy of the config brings its own use_cache, and whose configs a model has is looked up once for each."""
    workload = tiny_workload("llama", seq_len=32)
    model, ids = make_model(workload), random_batch(workload).inputs
    run_model(model, ids)
    step = build(workload, model=model, attention="blockwise")
    seen: list[Any] = []
    block = step.model.model.layers[0]
    block.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    run_model(step.model, ids)
    assert seen
    assert not any("Cache" in type(value).__name__ for value in seen[0].values())


def test_one_query_after_cached_keys_sees_them_all():
    """As transformers has it, which makes no mask for it: tokens that are generated are the model's own."""
    workload = tiny_workload("llama", seq_len=32)
    ids = random_batch(workload).inputs

    @torch.no_grad()
    def last_scores(**knobs: Any) -> Tensor:
        model = build(workload, **knobs).model.eval()
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        scores: Tensor = model(ids[:, -1:], past_key_values=cache, use_cache=True).logits
        return scores

    found, expected = last_scores(attention="blockwise"), last_scores()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_attention_that_is_the_blocks_own_is_refused():
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)])

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    workload = workload_from_module(Averaging, seq_len=16, vocab_size=50)
    step = build_step(workload, Strategy(1, tiers=("keep",) * 2, attention="blockwise"), CPU)
    with pytest.raises(RecipeError, match=r"layers\.0 never calls F\.scaled_dot_product_attention"):
        step([random_batch(workload, rows=1)])
    with pytest.raises(RecipeError, match="recompute_core recomputes attention's scores"):
        Strategy(1, tiers=("recompute_core",), attention="blockwise")
    table = (TokenBucket(8, ("recompute_core",)), TokenBucket(16, ("full",)))
    with pytest.raises(RecipeError, match="recompute_core recomputes attention's scores"):
        Strategy(1, tiers=("full",), tier_table=table, attention="blockwise")
    with pytest.raises(RecipeError, match="set attention: model, or leave compile out"):
        Strategy(1, compile=Compile(1), attention="blockwise")
    with pytest.raises(RecipeError, match="unknown attention 'flash'"):
        Strategy(1, attention="flash")  # type: ignore[arg-type]


def test_it_is_known_which_models_hold_scores():
    assert attention_holds_scores(windowed(), HOST)
    assert attention_holds_scores(biased(), HOST)
    assert attention_holds_scores(tiny_workload("gpt2", attn_pdrop=0.1), HOST)  # a CPU's kernel knows no dropout
    assert not attention_holds_scores(tiny_workload("llama"), HOST)
    assert not attention_holds_scores(small_workload("mixtral"), HOST)


class OwnScores(nn.Module):
    """Attention written out, which blockwise cannot replace; it may look at a value, as no fake tensor can."""

    def __init__(self, *, looks: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.layers, self.looks = nn.ModuleList([OwnScoresBlock(), OwnScoresBlock()]), looks

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if self.looks and x.sum().item() > 0:
            x = x + 1
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class OwnScoresBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out((x @ x.mT).softmax(-1)[:, None] @ x[:, None]).squeeze(1)


@pytest.mark.parametrize("looks", [False, True])
def test_where_it_cannot_be_put_it_is_not_offered(looks):
    workload = workload_from_module(partial(OwnScores, looks=looks), seq_len=16, vocab_size=50)
    assert not attention_holds_scores(workload, HOST)


def test_a_mask_that_is_asked_for_in_another_way_is_one_clear_error():
    """Versions of transformers differ in what they say of a mask: releases 4 gave cache_position."""
    with pytest.raises(ModelError, match=r"asks for a mask without q_length, .* or set attention: model"):
        _mask(batch_size=1, cache_position=torch.arange(4), kv_length=4, mask_function=None, dtype=None)


def test_a_bug_of_ours_is_no_reason_not_to_offer_it(monkeypatch):
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise TypeError("a bug")

    monkeypatch.setattr("trainfit.techniques.attention.blockwise_attention", broken)
    for workload in (windowed(), biased()):
        with pytest.raises(TypeError, match="a bug"):
            attention_holds_scores(workload, HOST)


def test_a_plan_takes_it_where_the_models_own_does_not_fit():
    workload = windowed(512)
    lean = Strategy(1, tiers=("full",) * blocks(workload), loss_chunks=16)
    floor = rehearse(workload, lean, HOST).peak_bytes
    target = Target(int(0.9 * floor), 512, 512)
    plan = choose(workload, HOST, target)
    assert plan.fits
    assert plan.strategy.attention == "blockwise"
    assert "blockwise attention" in plan.reason
    assert any("scores" in note for note in plan.notes)
    own = [each for each in plan.alternatives if each.strategy.attention == "model"]
    assert own
    assert all(each.peak_bytes > plan.allowed_bytes for each in own)
    kept = choose(workload, HOST, Target(int(0.9 * floor), 512, 512, attention="model"))
    assert not kept.fits


def test_longer_sequences_fit_with_it():
    workload = windowed(64, max_position_embeddings=4096)
    own, free = (Target(24 * 2**20, 64, 64, attention=attention) for attention in ("model", "auto"))
    settings = [Setting(workload, HOST, target, Layout(), 64) for target in (own, free)]
    lengths = [longest_sequence(setting, granularity=512).seq_len for setting in settings]
    assert lengths[1] >= 2 * lengths[0]
    assert settings[1].strategy(LEANEST).attention == "blockwise"


def test_gradients_of_the_bias_are_there():
    workload = biased()
    step = build(workload, attention="blockwise")
    found = gradients_after(step, workload)
    assert all(found[f"layers.{block}.bias"].abs().max() > 0 for block in range(4))


def gradients_after(step: Any, workload: Workload) -> dict[str, Tensor]:
    step.accumulate([random_batch(workload)])
    return gradients(step.model)
