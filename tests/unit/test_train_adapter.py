"""Adapter runs: from exported weights to a run, back to transformers and to peft, and on after a stop."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from trainfit.cli.main import main
from trainfit.errors import InputError, RecipeError, ResumeError
from trainfit.hardware import accelerator
from trainfit.step import Strategy, build_step
from trainfit.train import load_recipe, recipe_workload, train
from trainfit.train.checkpoint import list_checkpoints
from trainfit.train.export import export_safetensors
from trainfit.train.recipe import Recipe

CPU = accelerator("cpu")
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
LLAMA = {"model_type": "llama", "max_position_embeddings": 64, "vocab_size": 300, **SMALL}
MODELS = {
    "llama": LLAMA,
    "tied": {**LLAMA, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 300}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
# Square c_proj among them: nothing but its class says which way round its weight is.
TARGETS = {"llama": "all-linear", "tied": ["q_proj", "up_proj"], "gpt2": ["c_attn", "c_proj"]}


@pytest.fixture(autouse=True)
def text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(25):
        (folder / f"{number}.txt").write_text(f"file {number}: " + f"{number * 7} and {number * 3}; " * 20)


def recipe(model, run_folder: str, **keys) -> Recipe:
    values = {
        "model": model,
        "data": {"paths": "text", "tokenizer": {"vocab_size": 300}, "held_out_fraction": 0.1},
        "seq_len": 16,
        "tokens_per_step": 64,
        "steps": 3,
        "optimizer": {"learning_rate": 1e-2},
        "run_folder": run_folder,
    }
    return Recipe.model_validate({**values, **keys}).located(Path.cwd())


def run(settings: Recipe, *, resume: bool = False, **knobs) -> Path:
    strategy = Strategy(4, 1, tiers=("keep", "full"), frozen_weights=settings.frozen_weights, **knobs)
    train(settings, strategy, recipe_workload(settings), CPU, measure=False, resume=resume)
    return list_checkpoints(Path(settings.run_folder) / "checkpoints")[-1]


def base(model) -> Path:
    export_safetensors(run(recipe(model, "base-run")), Path("base"))
    return Path("base")


def adapted(family: str, **keys) -> Recipe:
    keys = {"steps": 6, "seed": 5, **keys}
    data = {"paths": "text", "tokenizer": {"path": "base/tokenizer.json"}, "held_out_fraction": 0.1}
    lora = {"rank": 4, "targets": TARGETS[family]}
    return recipe("base", "run", weights="base", adapter=lora, data=data, **keys)


def logits(model) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(torch.arange(24).reshape(2, 12) * 11).logits


def trained(settings: Recipe, checkpoint: Path):
    """The run's own model, by torch alone."""
    workload = recipe_workload(settings).copy(start=None)
    model = build_step(workload, Strategy(4, frozen_weights=settings.frozen_weights), CPU).model
    missing, unexpected = model.load_state_dict(load_file(checkpoint / "model.safetensors"), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return model


@pytest.mark.parametrize("family", MODELS)
def test_merged_weights_and_the_adapter_alone_give_the_run_s_logits(family):
    base(MODELS[family])
    settings = adapted(family)
    checkpoint = run(settings)
    expected = logits(trained(settings, checkpoint))
    exported = export_safetensors(checkpoint, Path("merged"))
    assert exported.notes == ()
    merged, report = AutoModelForCausalLM.from_pretrained("merged", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    before = logits(AutoModelForCausalLM.from_pretrained("base"))
    assert (before - expected).abs().max() > 1e-2, "the adapter has learnt nothing that shows"
    torch.testing.assert_close(logits(merged), expected, rtol=1e-5, atol=1e-5)
    assert sum(p.numel() for p in merged.parameters()) == exported.num_parameters
    alone = export_safetensors(checkpoint, Path("adapter"), adapter_only=True)
    assert alone.files == ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "adapter")
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-5, atol=1e-5)
    theirs = {name for name, _ in loaded.named_parameters() if ".lora_" in name}
    assert len(load_file("adapter/adapter_model.safetensors")) == len(theirs)
    assert json.loads(Path("adapter/adapter_config.json").read_text())["base_model_name_or_path"] == str(
        Path("base").absolute()
    )


@pytest.mark.parametrize("storage", ["int8", "nf4"])
def test_quantised_weights_are_exported_as_what_they_stand_for(storage):
    base(LLAMA)
    settings = adapted("llama", frozen_weights=storage)
    checkpoint = run(settings)
    saved = load_file(checkpoint / "model.safetensors")
    assert "model.layers.0.mlp.up_proj.base_layer.codes" in saved
    export_safetensors(checkpoint, Path("merged"))
    merged = AutoModelForCausalLM.from_pretrained("merged")
    torch.testing.assert_close(logits(merged), logits(trained(settings, checkpoint)), rtol=1e-5, atol=1e-5)


def test_weights_that_train_start_from_what_was_exported():
    folder = base(LLAMA)
    checkpoint = run(recipe("base", "run", weights="base", optimizer={"learning_rate": 1e-12, "weight_decay": 0.0}))
    started, given = load_file(checkpoint / "model.safetensors"), load_file(folder / "model.safetensors")
    assert started.keys() == given.keys()
    assert all(torch.allclose(started[name], given[name], atol=1e-9, rtol=0) for name in given)


@pytest.mark.parametrize("storage", ["fp32", "nf4"])
def test_a_run_goes_on_to_the_bit_and_does_not_read_the_weights_again(storage):
    base(LLAMA)
    dropout = {"rank": 4, "targets": "all-linear", "dropout": 0.1}
    keys = {"frozen_weights": storage, "save": {"every": 3}, "schedule": {"min_ratio": 1.0}}
    settings = adapted("llama", **keys)
    settings = Recipe.model_validate({**settings.to_json(), "adapter": dropout}).located(Path.cwd())
    whole = load_file(run(settings) / "model.safetensors")
    shutil.rmtree("run/checkpoints/step-00000006")
    Path("base/model.safetensors").unlink()
    again = load_file(run(settings, resume=True) / "model.safetensors")
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_what_trains_cannot_change_on_the_way():
    base(LLAMA)
    settings = adapted("llama", steps=3)
    run(settings)
    other = settings.model_copy(update={"steps": 5, "adapter": settings.adapter.model_copy(update={"rank": 8})})
    with pytest.raises(ResumeError, match=r"was trained with another adapter\.rank"):
        run(other.located(Path.cwd()), resume=True)
    frozen = settings.model_copy(update={"steps": 5, "freeze": ("*.layers.0.*",)})
    with pytest.raises(ResumeError, match="was trained with another freeze"):
        run(frozen.located(Path.cwd()), resume=True)


def test_export_says_what_it_cannot_do():
    checkpoint = run(recipe(LLAMA, "plain"))
    with pytest.raises(InputError, match="has no adapter; leave --adapter-only out"):
        export_safetensors(checkpoint, Path("out"), adapter_only=True)
    base(LLAMA)
    checkpoint = run(adapted("llama"))
    Path("run/config.json").unlink()
    shutil.rmtree("base")
    with pytest.raises(InputError, match=r"put the model's config\.json into the run folder"):
        export_safetensors(checkpoint, Path("out"))
    assert not Path("out").exists()
    assert not Path(".partial-out").exists()


def test_a_recipe_in_another_folder_and_the_verbs(tmp_path, capsys):
    """weights and model are relative to the recipe, and the export needs neither: the run folder has the config."""
    base(LLAMA)
    (tmp_path / "recipes").mkdir()
    values = {**adapted("llama").to_json(), "model": "../base", "weights": "../base", "frozen_weights": "half"}
    values |= {"data": {"paths": "../text", "tokenizer": {"path": "../base/tokenizer.json"}, "held_out_fraction": 0.1}}
    path = tmp_path / "recipes" / "lora.yaml"
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    assert main(["train", str(path), "precision=bf16", "memory=64MiB"]) == 0
    assert "parameters train" in capsys.readouterr().out
    assert main(["export", "run", "merged"]) == 0
    assert main(["export", "run", "adapter", "--adapter-only", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.partition("{")[2].join(["{", ""]))
    assert "adapter_config.json" in answer["files"]
    assert AutoModelForCausalLM.from_pretrained("merged").dtype == torch.bfloat16  # as the weights were kept
    assert main(["train", str(path), "precision=bf16", "run_folder=other", "weights=../nowhere"]) == 2
    assert "no weights at" in capsys.readouterr().err
    assert not Path("other").exists()


def test_recipe_keys(tmp_path):
    path = tmp_path / "recipe.yaml"
    values = recipe(LLAMA, "run").to_json()
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    assert load_recipe(path, ["adapter={targets: q_proj}"]).adapter.targets == ("q_proj",)
    assert load_recipe(path, ["freeze='*.0.*'"]).freeze == ("*.0.*",)
    assert load_recipe(path).adapter is None
    for override, said in (
        (["adapter.rank=0"], "adapter.rank is 0"),
        (["adapter.rnk=4"], "unknown key adapter.rnk"),
        (["adapter.targets=[]"], "name at least one module"),
        (["adapter.dropout=1"], "adapter.dropout is 1"),
        (["adapter={}", "train_only=[lm_head*]"], "train_only has nothing to choose; keep one"),
    ):
        with pytest.raises(RecipeError) as caught:
            load_recipe(path, override)
        assert said in str(caught.value)
