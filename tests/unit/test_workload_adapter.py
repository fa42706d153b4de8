"""Adapters and freezing: what trains, under which names, and that every tier gives it its gradient."""

from __future__ import annotations

import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from plain import (
    CPU,
    assert_equal_to_the_bit,
    build,
    make_model,
    plain_gradients,
    planned_gradients,
    random_batch,
    small_workload,
    tiny_workload,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import trainfit.workload.adapter as adapter_module
from trainfit.errors import ModelError, RecipeError
from trainfit.hardware import this_machine
from trainfit.plan import Target, choose
from trainfit.rehearsal import rehearse
from trainfit.step import Strategy
from trainfit.techniques.activation import keep_rules
from trainfit.techniques.recompute import Region
from trainfit.workload import LoRASettings, Workload, with_adapter, with_frozen, with_trained_only, workload_from_module

TIERS = ("keep", "pointwise", "attention", "full")
LLAMA = small_workload("llama")
TIED = small_workload("llama", tie_word_embeddings=True)


def trained(workload: Workload) -> set[str]:
    return {name for name, p in workload.meta_model().named_parameters() if p.requires_grad}


def awake(workload: Workload) -> nn.Module:
    """A model whose B matrices are not zero, so that A has a gradient too."""
    model = make_model(workload)
    torch.manual_seed(7)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def test_only_the_adapter_trains_and_the_model_stays_what_it_was():
    adapted = with_adapter(LLAMA, LoRASettings(rank=4))
    assert trained(adapted) == {
        f"model.layers.{block}.self_attn.{target}.lora_{which}.default.weight"
        for block in (0, 1)
        for target in ("q_proj", "v_proj")
        for which in "AB"
    }
    for field in ("blocks", "structures", "embedding", "head", "backbone", "ties"):
        assert getattr(adapted.anatomy(), field) == getattr(LLAMA.anatomy(), field)
    base, model = make_model(LLAMA), make_model(adapted)
    assert type(model) is type(base)
    weights = {name.replace(".base_layer", ""): p for name, p in model.named_parameters()}
    assert all(torch.equal(weights[name], p) for name, p in base.named_parameters())
    assert torch.equal(base(torch.arange(8)[None]).logits, model(torch.arange(8)[None]).logits)
    again = make_model(adapted)  # A is drawn from torch's generator
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters()))
    assert len(pickle.loads(pickle.dumps(adapted)).meta_model().state_dict()) == len(model.state_dict())


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_all_linear_is_what_peft_takes_for_it(family: str):
    workload = tiny_workload(family)
    ours = trained(with_adapter(workload, LoRASettings(targets="all-linear")))
    theirs = get_peft_model(workload.make_model(), LoraConfig(target_modules="all-linear"))
    assert ours == {name.removeprefix("base_model.model.") for name, p in theirs.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("head_trains", [False, True], ids=["CK-01", "CK-02"])
def test_every_adapter_gets_its_gradient_behind_a_frozen_embedding(family: str, tier: str, head_trains: bool):
    """The first block's input carries no gradient; recompute draws dropout's numbers again. To the bit."""
    settings = LoRASettings(rank=4, dropout=0.2, targets="all-linear")
    workload = with_adapter(tiny_workload(family), settings)

    def model() -> nn.Module:
        made = awake(workload)
        made.get_output_embeddings().requires_grad_(head_trains)
        return made

    batch = random_batch(workload)
    found = planned_gradients(build(workload, tier, model=model()), [batch])
    assert found.keys() == {name for name, p in model().named_parameters() if p.requires_grad}
    assert all(gradient.abs().max() > 0 for gradient in found.values())
    assert_equal_to_the_bit(found, plain_gradients(model(), batch))


@pytest.mark.parametrize("tier", TIERS[1:])
def test_blocks_that_nothing_trains_in_or_before_save_nothing_and_run_once(tier: str, monkeypatch):
    workload = with_trained_only(LLAMA, ["lm_head*"])
    monkeypatch.setattr(Region, "__init__", None)  # whoever makes one fails
    batch = random_batch(workload)
    found = planned_gradients(build(workload, tier), [batch])
    assert found.keys() == {"lm_head.weight"}
    model = make_model(LLAMA)
    assert torch.equal(found["lm_head.weight"], plain_gradients(model, batch)["lm_head.weight"])


@pytest.mark.parametrize("tier", ["keep", "full"])
def test_casts_by_block_work_behind_frozen_weights(tier: str):
    """What a block without gradients was cast to is given back at once."""
    for workload in (with_trained_only(LLAMA, ["lm_head*"]), with_adapter(LLAMA, LoRASettings(targets="all-linear"))):
        batch = [random_batch(workload)]
        found = planned_gradients(build(workload, tier, model=awake(workload), precision="bf16", cast="block"), batch)
        expected = planned_gradients(build(workload, tier, model=awake(workload), precision="bf16"), batch)
        assert_equal_to_the_bit(found, expected)


def test_a_narrow_matmul_is_made_again_and_a_wide_one_kept():
    """An adapter's second matmul has as few products an element as its rank, and an output as large as the first."""
    (keep,) = {keep_rules("pointwise")[operator] for operator in (torch.ops.aten.mm.default,)}
    x, narrow = torch.empty(64, 4096), torch.empty(64, 8)
    assert keep((x, torch.empty(4096, 1024)), torch.empty(64, 1024), 1)
    assert keep((torch.empty(1024), x, torch.empty(4096, 1024)), torch.empty(64, 1024), 1)
    assert keep((x, torch.empty(4096, 8)), narrow, 1)
    assert not keep((narrow, torch.empty(8, 4096)), torch.empty(64, 4096), 1)


def test_a_plan_is_found_for_every_way_to_freeze():
    """The fast model traces blocks that carry no gradient, and shells whose loss has none without them."""
    hardware = this_machine("cpu")
    ways = [with_adapter(LLAMA, LoRASettings()), with_trained_only(LLAMA, ["lm_head*"]), with_frozen(LLAMA, ["*.0.*"])]
    for workload in ways:
        plan = choose(workload, hardware, Target(2**30, 96, LLAMA.seq_len))
        assert plan.fits
    smaller = Target(2**30, 96, LLAMA.seq_len, "bf16", frozen_weights="nf4")
    plan = choose(ways[0], hardware, smaller)
    assert plan.strategy.frozen_weights == "nf4"
    assert plan.predicted.peak_bytes < plan.plain.peak_bytes


def test_freezing_by_pattern():
    assert trained(with_frozen(LLAMA, ["model.layers.0.*", "*embed_tokens*"])) == {
        name for name in trained(LLAMA) if ".layers.0." not in name and "embed_tokens" not in name
    }
    assert trained(with_trained_only(LLAMA, ["lm_head.weight", "model.norm*"])) == {
        "lm_head.weight",
        "model.norm.weight",
    }
    # Names are those without an adapter, and a part of an adapter can be frozen.
    adapted = with_adapter(LLAMA, LoRASettings())
    assert all(".layers.1." in name for name in trained(with_frozen(adapted, ["*.layers.0.*"])))
    assert trained(with_frozen(adapted, ["*.q_proj.weight"])) == trained(adapted)
    module = workload_from_module(lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)), seq_len=4, vocab_size=9)
    assert trained(with_frozen(module, ["0.*"])) == {"1.weight", "1.bias"}


def test_one_name_of_a_tied_tensor_is_enough_and_is_said():
    frozen = with_frozen(TIED, ["lm_head*"])
    assert "model.embed_tokens.weight" not in trained(frozen)
    (note,) = frozen.notes
    assert (
        note
        == "model.embed_tokens.weight and lm_head.weight are one tensor, which freeze takes under each of its names"
    )
    alone = with_trained_only(TIED, ["lm_head*"])
    assert trained(alone) == {"model.embed_tokens.weight"}
    step = build(alone)
    assert note.replace("freeze", "train_only") in step.notes
    model = make_model(TIED)
    share = model.lm_head.weight.numel() / sum(p.numel() for p in model.parameters())
    assert any(line.endswith(f"parameters train ({share:.2%})") for line in step.notes)


def test_frozen_parameters_have_no_gradient_and_no_state():
    workload = with_frozen(LLAMA, ["model.layers.0.*"])
    step = build(workload, "full")
    with_gradient = planned_gradients(step, [random_batch(workload)]).keys()
    assert with_gradient == trained(workload)
    states = {id(parameter) for parameter in step.optimizer.state}
    assert states == {id(p) for name, p in step.model.named_parameters() if name in with_gradient}
    profile = rehearse(workload, Strategy(1, tiers=("keep", "keep")), this_machine("cpu"))
    size = sum(p.nbytes for name, p in step.model.named_parameters() if name in with_gradient)
    assert profile.categories["optimizer"] == 2 * size + 4 * len(with_gradient)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: with_adapter(LLAMA, LoRASettings(targets=("q_prj",))), "'q_prj', which the model does not have; did"),
        (lambda: with_adapter(LLAMA, LoRASettings(targets=("zzz",))), "it has down_proj, gate_proj, k_proj"),
        (lambda: with_adapter(LLAMA, LoRASettings(targets=("embed_tokens",))), "a Embedding; LoRA here is for"),
        (lambda: with_adapter(TIED, LoRASettings(targets=("lm_head",))), "lm_head, whose weight is another module's"),
        (lambda: LoRASettings(rank=0), "adapter.rank is 0"),
        (lambda: LoRASettings(alpha=-1.0), "adapter.alpha is -1.0"),
        (lambda: LoRASettings(dropout=1.0), "adapter.dropout is 1.0"),
        (lambda: LoRASettings(targets=()), "adapter.targets names no module"),
        (lambda: LoRASettings(targets="all"), "or all-linear"),  # type: ignore[arg-type]
        (lambda: with_frozen(LLAMA, ["lm_haed*"]), "near names are lm_head.weight"),
        (lambda: with_frozen(LLAMA, ["embed_tokens"]), "near names are model.embed_tokens.weight"),
        (lambda: with_frozen(LLAMA, ["*"]), "leaves nothing to train"),
        (lambda: with_trained_only(LLAMA, ["nothing*"]), "train_only has 'nothing*'"),
    ],
)
def test_what_cannot_be_is_one_line(change, said: str):
    with pytest.raises(RecipeError) as caught:
        change()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_peft_the_error_has_the_command(monkeypatch):
    monkeypatch.setattr(adapter_module, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'trainfit\[adapters\]'"):
        with_adapter(LLAMA, LoRASettings())


def test_in_bf16_no_fp32_copy_of_an_input_is_made():
    """PEFT would cast what an adapter is given to the adapter's fp32; autocast casts it back."""
    workload = with_adapter(LLAMA, LoRASettings(targets="all-linear"))
    step = build(workload, precision="bf16", frozen_weights="half")
    layer = step.model.get_submodule("model.layers.0.mlp.down_proj")
    x = torch.randn(1, 4, 48, dtype=torch.bfloat16, requires_grad=True)
    with CPU.autocast("bf16"), Made() as made:
        layer(x)
    assert (x.shape, torch.bfloat16) not in made.casts  # it is in the compute dtype already
    assert made.casts  # of A and B, to bf16
    assert all(dtype == torch.bfloat16 for _, dtype in made.casts)


class Made(TorchDispatchMode):
    """Shapes and dtypes of what was cast."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: list[tuple[torch.Size, torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.casts.append((output.shape, output.dtype))
        return output
