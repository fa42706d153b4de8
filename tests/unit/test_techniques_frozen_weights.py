"""Frozen weights in fewer bytes: the codes are a library's, the gradients those of the weights that they stand for."""

from __future__ import annotations

import pytest
import torch
from plain import (
    CPU,
    assert_equal_to_the_bit,
    build,
    largest_difference,
    make_model,
    planned_gradients,
    random_batch,
    small_workload,
    tiny_workload,
)
from torch import Tensor, nn

import trainfit.techniques.quantised as quantised
from trainfit.errors import RecipeError
from trainfit.profile import Mesh, Zero
from trainfit.rehearsal import verify
from trainfit.step import Strategy
from trainfit.techniques.frozen_weights import FrozenWeights
from trainfit.techniques.quantised import NF4_VALUES, QuantisedLinear, dequantise, pair_table, quantise
from trainfit.workload import LoRASettings, with_adapter, with_frozen, with_trained_only

LLAMA = small_workload("llama")
ADAPTED = with_adapter(LLAMA, LoRASettings(rank=4, targets="all-linear"))


def weights(seed: int = 0, shape: tuple[int, int] = (96, 128)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05


def test_nf4_is_bitsandbytes_to_the_bit():
    functional = pytest.importorskip("bitsandbytes.functional", reason="the peer is not installed")
    weight = weights()
    theirs, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    codes, scales = quantise(weight, "nf4")
    assert torch.equal(codes, theirs.view(-1))
    assert torch.equal(scales, state.absmax)
    assert torch.equal(
        dequantise(codes, scales, weight.shape, torch.float32), functional.dequantize_4bit(theirs, state)
    )


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_codes_are_the_nearest_there_are_and_take_few_bytes(kind):
    weight = weights()
    weight[0, :64] = 0.0  # a block of nothing has no scale to divide by
    codes, scales = quantise(weight, kind)
    assert codes.nbytes + scales.nbytes == weight.numel() * {"int8": 1 + 4 / 64, "nf4": 0.5 + 4 / 64}[kind]
    made = dequantise(codes, scales, weight.shape, torch.float32)
    values = torch.tensor(NF4_VALUES) if kind == "nf4" else torch.arange(-127, 128) / 127
    blocks = weight.view(-1, 64)
    candidates = blocks.abs().amax(1)[:, None, None] * values
    nearest = (blocks[:, :, None] - candidates).abs().amin(2)
    assert torch.allclose((made.view(-1, 64) - blocks).abs(), nearest, atol=1e-7, rtol=1e-5)
    assert torch.equal(made[0, :64], torch.zeros(64))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_pieces_change_nothing_and_weights_are_rounded_once(kind, monkeypatch):
    weight = weights()
    whole = [*quantise(weight, kind), dequantise(*quantise(weight, kind), weight.shape, torch.float32)]
    half = dequantise(*whole[:2], weight.shape, torch.bfloat16)
    assert torch.equal(half, whole[2].bfloat16())
    monkeypatch.setattr(quantised, "_PIECE", 256)
    pieces = [*quantise(weight, kind), dequantise(*quantise(weight, kind), weight.shape, torch.float32)]
    assert all(torch.equal(first, second) for first, second in zip(whole, pieces))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_quantised_linear_is_a_linear_with_the_weights_it_stands_for(kind, precision):
    linear = nn.Linear(128, 96)
    linear.weight.data = weights()
    linear.weight.requires_grad_(False)
    ours = QuantisedLinear(linear, kind, pair_table(torch.device("cpu")))
    assert isinstance(ours, nn.Linear)
    linear.weight.data = dequantise(ours.codes, ours.scales, (96, 128), torch.float32)
    found = []
    for module in (linear, ours):
        linear.bias.grad = None
        x = torch.randn(3, 5, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with CPU.autocast(precision):
            y = module(x)
        y.float().pow(2).sum().backward()
        found.append((y, x.grad, linear.bias.grad))
    assert all(a.dtype == b.dtype for a, b in zip(*found))
    assert all(torch.equal(a, b) for a, b in zip(found[0][:2], found[1][:2]))
    assert torch.allclose(found[0][2], found[1][2], rtol=1e-2 if precision == "bf16" else 1e-5)


def test_it_saves_codes_and_nothing_else():
    linear = nn.Linear(128, 96, bias=False).requires_grad_(False)
    ours = QuantisedLinear(linear, "nf4", pair_table(torch.device("cpu")))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours(torch.randn(4, 128, requires_grad=True))
    assert {t.data_ptr() for t in saved} == {ours.codes.data_ptr(), ours.scales.data_ptr()}


def awake(workload) -> nn.Module:
    model = make_model(workload)
    torch.manual_seed(7)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("tier", ["pointwise", "attention", "full"])
@pytest.mark.parametrize("kind", ["half", "int8", "nf4"])
def test_every_tier_gives_the_gradients_of_keep(kind, tier):
    """CK-01 again: codes are no slots of a recompute region, and what a matmul in them gave is kept where it should."""
    knobs = {"precision": "bf16", "frozen_weights": kind}
    batches = [random_batch(ADAPTED), random_batch(ADAPTED, seed=4)]  # the second call looks only where it must
    expected = planned_gradients(build(ADAPTED, "keep", model=awake(ADAPTED), **knobs), batches)
    found = planned_gradients(build(ADAPTED, tier, model=awake(ADAPTED), **knobs), batches)
    assert len(found) == 2 * 2 * 7
    assert_equal_to_the_bit(found, expected)


@pytest.mark.parametrize(("kind", "worst"), [("half", 0.05), ("int8", 0.05), ("nf4", 0.3)])
def test_gradients_are_near_those_of_fp32_weights(kind, worst):
    """As near as the weights are, in the norm of all of them; and not so near that nothing was rounded."""
    batch = [random_batch(ADAPTED)]
    knobs = {} if kind != "half" else {"precision": "bf16"}
    expected = planned_gradients(build(ADAPTED, model=awake(ADAPTED), **knobs), batch)
    found = planned_gradients(build(ADAPTED, model=awake(ADAPTED), frozen_weights=kind, **knobs), batch)
    different = sum((found[name] - expected[name]).pow(2).sum() for name in expected).sqrt()
    difference = float(different / sum(gradient.pow(2).sum() for gradient in expected.values()).sqrt())
    assert worst / 20 < difference < worst


def test_what_is_stored_how():
    step = build(ADAPTED, precision="bf16", frozen_weights="nf4")
    assert {name.rpartition(".")[2]: p.dtype for name, p in step.model.named_parameters() if "q_proj" in name} == {
        "codes": torch.uint8,
        "scales": torch.float32,
        "weight": torch.float32,
    }
    plain = {name: p.dtype for name, p in step.model.named_parameters() if "_proj" not in name}
    assert set(plain.values()) == {torch.bfloat16}
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} <= plain.keys()
    assert isinstance(step.model.get_submodule("model.layers.0.mlp.up_proj.base_layer"), QuantisedLinear)
    step = build(with_frozen(LLAMA, ["*.layers.0.*"]), precision="bf16", frozen_weights="int8")
    assert isinstance(step.model.get_submodule("model.layers.0.mlp.up_proj"), QuantisedLinear)
    assert type(step.model.get_submodule("model.layers.1.mlp.up_proj")) is nn.Linear


def test_a_tie_stays_one_tensor_in_half():
    tied = with_frozen(small_workload("llama", tie_word_embeddings=True), ["lm_head*"])
    model = build(tied, precision="bf16", frozen_weights="half").model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("part", ["embedding", "blocks"])
def test_half_weights_beside_trained_fp32_ones(part):
    """Frozen norms in bf16 behind an embedding that trains in fp32, and the other way round."""
    for family in ("llama", "gpt2"):
        base = tiny_workload(family)
        names = {"llama": "*embed_tokens*", "gpt2": "*wte*"}[family]
        workload = (
            with_trained_only(base, [names])
            if part == "embedding"
            else with_frozen(base, [names, "*norm*", "*ln*"][: 2 if family == "llama" else 1])
        )
        for tier in ("keep", "full"):
            found = planned_gradients(
                build(workload, tier, precision="bf16", frozen_weights="half"), [random_batch(base)]
            )
            expected = planned_gradients(build(workload, tier, precision="bf16"), [random_batch(base)])
            assert largest_difference(found, expected) < 0.1


@pytest.mark.parametrize(
    ("workload", "kind", "mesh", "said"),
    [
        (LLAMA, "half", Mesh(), "every parameter of llama trains; set adapter, freeze or train_only"),
        (with_trained_only(tiny_workload("gpt2"), ["*wte*"]), "nf4", Mesh(), "for frozen nn.Linear weights, of which"),
        (ADAPTED, "nf4", Mesh(shard=2), "which mesh.shard 2 cannot split; use frozen_weights half"),
        (ADAPTED, "int8", Mesh(tensor=2), "which mesh.tensor 2 cannot split"),
        (ADAPTED, "int8", Mesh(pipeline=2), "which mesh.pipeline 2 cannot split"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(workload, kind, mesh, said):
    from trainfit.hardware import Ranks
    from trainfit.step.build import prepare

    made = prepare(workload, CPU)
    made.ranks = Ranks(mesh)
    with pytest.raises(RecipeError) as caught:
        FrozenWeights().apply(made, kind)
    assert said in str(caught.value)


def test_verify_says_that_it_cannot_compare():
    strategy = Strategy(1, precision="bf16", frozen_weights="half", mesh=Mesh(), zero=Zero())
    with pytest.raises(RecipeError, match="frozen_weights half rounds weights before training"):
        verify(ADAPTED, strategy, CPU)
