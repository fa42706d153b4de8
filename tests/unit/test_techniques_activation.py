"""Tiers on whole models: frozen parts, routers, what each tier saves, and building a model again."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainfit.errors import RecipeError, RecomputeError
from trainfit.hardware import accelerator
from trainfit.step import Strategy, TrainStep, build_step
from trainfit.techniques.activation import recompute_block
from trainfit.workload import MicroBatch, workload_from_module

CPU = accelerator("cpu")
VOCAB, DIM, LENGTH, BLOCKS = 31, 16, 12, 3
TIERS = ("pointwise", "attention", "full")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, DIM // 2)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(mixed), 0.2, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.2, self.training)


class Model(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([block() for _ in range(BLOCKS)])
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make(block: type[nn.Module] = Block) -> nn.Module:
    torch.manual_seed(0)
    return Model(block)


def batch() -> MicroBatch:
    tokens = torch.randint(VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return MicroBatch.of(tokens[:, :-1], tokens[:, 1:])


def build(model: nn.Module, *tiers: str, **knobs) -> TrainStep:
    workload = workload_from_module(lambda: model, seq_len=LENGTH, vocab_size=VOCAB)
    return build_step(workload, Strategy(2, tiers=tiers, **knobs), CPU, model=model, max_grad_norm=None)


def planned(step: TrainStep, seed: int = 5) -> dict[str, Tensor]:
    step.model.zero_grad()
    torch.manual_seed(seed)
    step.accumulate([batch()])
    return {name: p.grad.clone() for name, p in step.model.named_parameters() if p.grad is not None}


def plain(model: nn.Module, seed: int = 5) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    logits = model(batch().inputs)
    F.cross_entropy(logits.flatten(0, 1), batch().labels.flatten()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("head_trains", [False, True], ids=["CK-01", "CK-02"])
def test_blocks_train_behind_a_frozen_embedding(tier: str, head_trains: bool):
    """Hidden states carry no gradient into the first block; every block's parameters get theirs all the same."""

    def frozen() -> nn.Module:
        model = make()
        model.embedding.requires_grad_(False)
        model.head.requires_grad_(head_trains)
        return model

    found = planned(build(frozen(), *[tier] * BLOCKS))
    trainable = {name for name, p in frozen().named_parameters() if p.requires_grad}
    assert found.keys() == trainable
    assert sum(name.startswith("layers.") for name in found) == BLOCKS * len(list(Block().parameters()))
    assert_equal(found, plain(frozen()))


@pytest.mark.parametrize("tier", TIERS)
def test_adapters_on_frozen_blocks_get_their_gradients(tier: str):
    class Adapted(Block):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)
            self.a, self.b = nn.Linear(DIM, 2, bias=False), nn.Linear(2, DIM, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.b(self.a(x))

    def frozen() -> nn.Module:
        model = make(Adapted)
        model.embedding.requires_grad_(False)
        model.head.requires_grad_(False)
        return model

    found = planned(build(frozen(), *[tier] * BLOCKS))
    assert len(found) == 2 * BLOCKS
    assert_equal(found, plain(frozen()))


class PrivateNoise:
    """Noise from a generator of its own, which no stash of generators covers."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(11)

    def __call__(self, scores: Tensor) -> Tensor:
        return torch.randn(scores.shape, generator=self.generator).mul_(3.0)


class CountedNoise:
    """Noise that follows from how often it was asked for."""

    def __init__(self) -> None:
        self.calls = itertools.count()

    def __call__(self, scores: Tensor) -> Tensor:
        return 3.0 * torch.sin(torch.arange(scores.numel()) * (next(self.calls) + 1.0) * 12.9898).view_as(scores)


class Experts(nn.Module):
    """Top-1 routing with noisy scores; gathers each expert's tokens, or runs all experts under a mask."""

    noise: type = PrivateNoise
    gather = True

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 3, bias=False)
        self.experts = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(3)])
        self.draw = self.noise()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens)
        weight, chosen = (scores + self.draw(scores)).topk(1, dim=-1)
        weight = weight.sigmoid()
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            if self.gather:
                rows = (chosen[:, 0] == number).nonzero()[:, 0]
                out = out.index_add(0, rows, expert(tokens[rows]).tanh() * weight[rows])
            else:
                out = out + expert(tokens).tanh() * weight * (chosen == number)
        return x + out.view_as(x)


class ExpertsInPlace(Experts):
    """Normalises the chosen scores in place, as Mixtral and Qwen do, so that a stored choice is overwritten."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = (self.router(tokens) + self.draw(self.router(tokens))).softmax(-1)
        weight, chosen = scores.topk(2, dim=-1)
        weight /= weight.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(tokens[rows]).tanh() * weight[rows, place, None])
        return x + out.view_as(x)


ROUTERS = [
    type("Routed", (base,), {"noise": noise, "gather": gather})
    for base in (Experts, ExpertsInPlace)
    for noise in (PrivateNoise, CountedNoise)
    for gather in (True, False)
    # A softmax saves what it computed from the scores, and a count that only Python holds cannot be turned back.
    if base is Experts or (gather and noise is PrivateNoise)
]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("router", ROUTERS, ids=lambda r: f"{r.__base__.__name__}-{r.noise.__name__}-{r.gather}")
def test_a_noisy_router_chooses_once(tier: str, router: type[nn.Module]):
    """CK-06: what the router chose is stored; gathering would fail otherwise, masks would be wrong without a word."""
    step, reference = build(make(router), *[tier] * BLOCKS), make(router)
    for _ in range(2):
        for planned_layer, layer in zip(step.model.layers, reference.layers):
            if router.noise is CountedNoise:  # both begin at the same count; recompute asks once more than plain
                planned_layer.draw = copy.deepcopy(layer.draw)
        assert_equal(planned(step), plain(reference))


def test_noise_differs_from_call_to_call():
    """Else the tests above would prove nothing."""
    for noise in (PrivateNoise(), CountedNoise()):
        assert not torch.equal(noise(torch.zeros(5)), noise(torch.zeros(5)))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_each_tier_saves_more_than_the_one_before(training: bool):
    """CK-11: bytes that are live after forward and were not before, in eval mode with grad on too."""
    from trainfit.rehearsal.tracker import StorageTracker

    ids = batch().inputs

    def held(tier: str) -> int:
        model = make()
        model.train(training)
        if tier != "keep":
            for layer in model.layers:
                recompute_block(layer, tier, CPU)
        tracker = StorageTracker()
        with tracker:
            logits = model(ids)
        return tracker.live_bytes() if logits.requires_grad else 0

    keep, pointwise, attention, full = (held(tier) for tier in ("keep", *TIERS))
    hidden = 4 * ids.numel() * DIM
    assert keep > pointwise > attention > full
    # full: each block's input. attention: also the output of attention and its log-sum-exp. pointwise: also qkv, out
    # and up; and down in training, where the mask of the dropout behind it is saved after it.
    assert attention - full == pytest.approx(BLOCKS * (hidden + 4 * ids.numel() * 2), rel=0.01)
    assert pointwise - attention == pytest.approx(BLOCKS * (3 + 1 + 4 + training) * hidden, rel=0.01)


def test_number_of_tiers_must_be_that_of_blocks():
    with pytest.raises(RecipeError, match=r"2 activation tiers .* 3 blocks"):
        build(make(), "full", "full")


def test_a_model_built_again_has_the_new_tiers_only():
    """After out of memory the same model gets a smaller strategy: tiers must not pile up."""
    calls: list[int] = []

    class Counted(Block):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return super().forward(x)

    model = make(Counted)
    expected = plain(model)
    for tiers, runs in ((("full",) * BLOCKS, 2), (("full",) * BLOCKS, 2), (("keep",) * BLOCKS, 1), ((), 1)):
        step = build(model, *tiers)
        calls.clear()
        assert_equal(planned(step), expected)
        assert len(calls) == runs * BLOCKS


def test_a_forward_that_someone_patched_is_run_and_comes_back():
    model = make()
    original = model.layers[0].forward
    model.layers[0].forward = lambda x: original(x) * 2.0
    expected = plain(model)
    patched = model.layers[0].forward
    assert_equal(planned(build(model, *["full"] * BLOCKS)), expected)
    build(model)
    assert model.layers[0].forward is patched
    assert "forward" not in vars(model.layers[1])


def test_a_copy_of_a_planned_model_is_its_own():
    """Averaged weights are made by deepcopy: the copy's gradients go to the copy."""
    step = build(make(), *["full"] * BLOCKS)
    twin = copy.deepcopy(step.model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(0.5)
    reference = make()
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(0.5)
    assert_equal(plain(twin), plain(reference))
    assert all(p.grad is None for p in step.model.parameters())


@pytest.mark.parametrize("tier", ["keep", "full", "keep_int8"])
@pytest.mark.parametrize("knobs", [{"attention": "blockwise"}, {"precision": "bf16", "cast": "block"}], ids=str)
def test_a_copy_is_its_own_whatever_stands_around_its_blocks(tier: str, knobs: dict[str, str]):
    step = build(make(), *[tier] * BLOCKS, **knobs)
    block, x = copy.deepcopy(step.model).layers[0], torch.randn(2, LENGTH, DIM, requires_grad=True)
    with torch.no_grad():
        for p in block.parameters():
            p.zero_()
    with CPU.autocast(knobs.get("precision", "fp32")):
        output = block(x)
    assert torch.equal(output, x)
    output.sum().backward()
    assert block.out.bias.grad is not None
    assert all(p.grad is None for p in step.model.parameters())


def test_a_cache_that_fills_names_its_block():
    """CK-08, in a model: the error says which block."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.cache = nn.Linear(DIM, DIM), []

        def forward(self, x: Tensor) -> Tensor:
            self.cache.append(self.key(x))
            keys = torch.cat(self.cache, 1)
            return x + (x @ keys.mT).softmax(-1) @ keys

    workload = workload_from_module(lambda: Model(Cached), seq_len=LENGTH, vocab_size=VOCAB)
    model = make(Cached)
    step = build_step(workload, Strategy(2, tiers=("keep", "full", "keep")), CPU, model=model)
    for layer in model.layers:
        layer.cache.clear()
    with pytest.raises(RecomputeError, match=r"layers\.1.*use_cache=False"):
        step.accumulate([batch()])
