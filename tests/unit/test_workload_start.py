"""Start weights: which files are read, and what is said of those that are not this model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plain import CPU, make_model, small_workload, tiny_workload
from safetensors.torch import save_file
from torch import nn

from trainfit.errors import ModelError
from trainfit.hardware import this_machine
from trainfit.rehearsal import rehearse
from trainfit.step import Strategy, build_step
from trainfit.workload import LoRASettings, StartWeights, Workload, with_adapter, with_weights

LLAMA = small_workload("llama")


def other(workload: Workload) -> nn.Module:
    torch.manual_seed(11)
    return workload.make_model()


def started(workload: Workload, path: Path) -> nn.Module:
    torch.manual_seed(0)
    return build_step(with_weights(workload, path), Strategy(1), CPU).model


def plain_names(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.replace(".base_layer", ""): p for name, p in model.state_dict().items() if ".lora_" not in name}


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    theirs = expected.state_dict()
    assert plain_names(found).keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in plain_names(found).items())


@pytest.mark.parametrize("shard", ["5GB", "20kB"], ids=["one", "shards"])
@pytest.mark.parametrize("tied", [False, True], ids=["plain", "tied"])
def test_a_hugging_face_folder_is_read(tmp_path, shard: str, tied: bool):
    workload = small_workload("llama", tie_word_embeddings=tied)
    source = other(workload)
    source.save_pretrained(tmp_path / "base", max_shard_size=shard)
    assert (len(list((tmp_path / "base").glob("*.safetensors"))) > 1) == (shard == "20kB")
    assert_same(started(workload, tmp_path / "base"), source)
    adapted = started(with_adapter(workload, LoRASettings()), tmp_path / "base")
    assert_same(adapted, source)
    drawn = make_model(with_adapter(workload, LoRASettings())).state_dict()
    assert all(torch.equal(p, drawn[name]) for name, p in adapted.state_dict().items() if ".lora_" in name)


def test_a_file_alone_in_another_dtype_is_cast(tmp_path):
    source = other(LLAMA).bfloat16()
    save_file(source.state_dict(), tmp_path / "any.safetensors")
    model = started(LLAMA, tmp_path / "any.safetensors")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert_same(model, source.float())


def test_a_backbone_without_its_name_in_front_is_read(tmp_path):
    """As openai's gpt2 is, with masks that transformers ignores."""
    workload = tiny_workload("gpt2")
    source = other(workload)
    tensors = {
        name.removeprefix("transformer."): p for name, p in source.state_dict().items() if name != "lm_head.weight"
    }
    save_file({**tensors, "h.0.attn.bias": torch.ones(2)}, tmp_path / "model.safetensors")
    assert_same(started(workload, tmp_path), source)


def test_a_rehearsal_reads_nothing(tmp_path):
    workload = with_weights(LLAMA, tmp_path / "nowhere")
    assert rehearse(workload, Strategy(1), this_machine("cpu")) == rehearse(LLAMA, Strategy(1), this_machine("cpu"))
    with pytest.raises(ModelError, match="no weights at"):
        build_step(workload, Strategy(1), CPU)


def refused(path: Path, workload: Workload = LLAMA) -> str:
    """What is said, on meta and before anything is copied."""
    model = make_model(workload)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with pytest.raises(ModelError) as caught:
        StartWeights(str(path)).check(workload.meta_model())
    with pytest.raises(ModelError) as again:
        StartWeights(str(path)).load_into(model)
    assert str(again.value) == str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    return str(caught.value)


def test_what_is_missing_different_or_too_much_is_said(tmp_path):
    tensors = other(LLAMA).state_dict()
    file = tmp_path / "model.safetensors"
    save_file({name: p for name, p in tensors.items() if name != "model.norm.weight"}, file)
    assert f"1 of its {len(tensors)} tensors are missing, such as model.norm.weight" in refused(tmp_path)
    save_file({**tensors, "lm_head.weight": torch.zeros(96, 32)}, file)
    assert "lm_head.weight has shape (96, 32) there and (97, 32) in the model" in refused(tmp_path)
    save_file({**tensors, "extra": torch.zeros(1)}, file)
    assert "1 tensors there are not the model's, such as extra" in refused(tmp_path)
    save_file({**tensors, "model.norm.weight": torch.zeros(32, dtype=torch.int32)}, file)
    assert "model.norm.weight is I32 there" in refused(tmp_path)
    assert "are not this model's" in refused(tmp_path, tiny_workload("gpt2"))


def test_nothing_is_unpickled_and_broken_files_are_one_line(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        assert "pytorch_model.bin is not safetensors: trainfit unpickles nothing" in refused(path)
    assert "no weights at" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "has no model.safetensors and no model.safetensors.index.json" in refused(tmp_path / "empty")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert "is a run, not a model; write one with trainfit export" in refused(tmp_path / "run")
    other(LLAMA).save_pretrained(tmp_path / "cut", max_shard_size="20kB")
    next((tmp_path / "cut").glob("model-00002*")).unlink()
    assert "lacks 1 of its" in refused(tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    assert "index.json cannot be read" in refused(tmp_path / "cut")
    save_file(other(LLAMA).state_dict(), tmp_path / "short.safetensors")
    whole = (tmp_path / "short.safetensors").read_bytes()
    (tmp_path / "short.safetensors").write_bytes(whole[:-100])
    assert "short.safetensors is no safetensors file" in refused(tmp_path / "short.safetensors")
