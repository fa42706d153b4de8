"""Export: transformers loads what was trained, from shards of any size and from any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig, AutoModelForCausalLM

import trainfit.train.merge as merge_module
from trainfit.cli.main import main
from trainfit.errors import InputError, ResumeError
from trainfit.hardware import accelerator
from trainfit.step import Strategy
from trainfit.train import recipe_workload, train
from trainfit.train.checkpoint import list_checkpoints
from trainfit.train.export import export_safetensors
from trainfit.train.recipe import Recipe

CPU = accelerator("cpu")
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
LLAMA = {"model_type": "llama", "max_position_embeddings": 64, "vocab_size": 300, **SMALL}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 300}


@pytest.fixture(autouse=True)
def text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(25):
        (folder / f"{number}.txt").write_text(f"file {number}: " + f"{number * 7} and {number * 3}; " * 20)


def trained(model) -> Path:
    """The last checkpoint of a short run."""
    recipe = Recipe.model_validate(
        {
            "model": model,
            "data": {"paths": "text", "tokenizer": {"vocab_size": 300}, "held_out_fraction": 0.1},
            "seq_len": 16,
            "tokens_per_step": 64,
            "steps": 2,
            "optimizer": {"learning_rate": 1e-2},
            "run_folder": "run",
        }
    ).located(Path.cwd())
    train(recipe, Strategy(4, 1, tiers=("keep", "keep")), recipe_workload(recipe), CPU, measure=False)
    return list_checkpoints(Path("run/checkpoints"))[-1]


def logits(model) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(torch.arange(24).reshape(2, 12) * 11).logits


def of_checkpoint(model_settings, checkpoint: Path):
    """The trained model, by torch alone."""
    settings = dict(model_settings)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config)
    missing, unexpected = model.load_state_dict(load_file(checkpoint / "model.safetensors"), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return model


@pytest.mark.parametrize(
    "settings", [LLAMA, {**LLAMA, "tie_word_embeddings": True}, GPT2], ids=["plain", "tied", "gpt2"]
)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_transformers_loads_it_and_gives_the_same_logits(settings, max_shard_bytes):
    checkpoint = trained(settings)
    exported = export_safetensors(checkpoint, Path("out"), max_shard_bytes)
    assert exported.notes == ()
    assert exported.step == 2
    loaded, report = AutoModelForCausalLM.from_pretrained("out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == torch.float32
    assert torch.equal(logits(loaded), logits(of_checkpoint(settings, checkpoint)))
    assert (Path("out") / "tokenizer.json").is_file()
    shards = sorted(Path("out").glob("model*.safetensors"))
    if max_shard_bytes == 10**9:
        assert [path.name for path in shards] == ["model.safetensors"]
        return
    assert [path.name for path in shards] == [
        f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)
    ]
    contents = [load_file(path) for path in shards]
    for content in contents:
        sizes = [tensor.nbytes for tensor in content.values()]
        assert sum(sizes) <= max_shard_bytes or len(sizes) == 1
    index = json.loads((Path("out") / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for content in contents for tensor in content.values())
    assert index["weight_map"] == {name: path.name for path, content in zip(shards, contents) for name in content}


def test_one_tensor_at_a_time_is_in_memory(monkeypatch):
    checkpoint = trained(LLAMA)
    alive: list[StorageWeakRef] = []
    read = merge_module.read_tensor

    def watched(folder, saved):
        assert all(storage.expired() for storage in alive)
        tensor = read(folder, saved)
        alive.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(merge_module, "read_tensor", watched)
    export_safetensors(checkpoint, Path("out"))
    assert len(alive) > 10


def test_a_model_that_is_not_found_is_a_note_and_a_damaged_checkpoint_an_error():
    checkpoint = trained(LLAMA)
    manifest = json.loads((checkpoint / "checkpoint.json").read_text())
    manifest["recipe"]["model"] = "gone/config.json"
    (checkpoint / "checkpoint.json").write_text(json.dumps(manifest))
    Path("run/config.json").unlink()
    (note,) = export_safetensors(checkpoint, Path("out")).notes
    assert note.startswith("without config.json: no file")
    assert not (Path("out") / "config.json").exists()
    with pytest.raises(InputError, match="out is there already; name a new folder"):
        export_safetensors(checkpoint, Path("out"))
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.seek(-8, 2)
        file.write(b"\xff" * 8)
    with pytest.raises(ResumeError, match="SHA-256 differs"):
        export_safetensors(checkpoint, Path("other"))
    assert not Path("other").exists()


def test_the_verb_takes_a_run_folder_or_a_checkpoint(capsys):
    checkpoint = trained(GPT2)
    assert main(["export", "run", "a", "--max-shard", "20kB"]) == 0
    out, err = capsys.readouterr()
    assert "step 2 of run/checkpoints/step-00000002" in out
    assert err == ""
    assert main(["export", str(checkpoint), "b", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["files"] == ["config.json", "model.safetensors", "tokenizer.json"]
    assert answer["num_parameters"] == sum(p.numel() for p in of_checkpoint(GPT2, checkpoint).parameters())
    for arguments, line in (
        (["export", "run", "a"], "a is there already; name a new folder"),
        (["export", "text", "c"], "has no checkpoint.json: not a trainfit checkpoint"),
        (["export", "nowhere", "c"], "nowhere has no checkpoint"),
        (["export", "run", "c", "--max-shard", "much"], "'much' is not a size in bytes"),
    ):
        assert main(arguments) == 2
        assert line in capsys.readouterr().err
    assert not Path("c").exists()
