"""Built-in models against published parameter counts; every way to name a model wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from trainfit.errors import ModelError, RecipeError
from trainfit.workload import builtin_names, resolve_workload

# Sizes of the published checkpoints (elements in their safetensors files); gpt-13b has none, see the test below.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "gpt2": 124_439_808,
    "gemma-2-9b": 9_241_705_984,
}
TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def write_config(folder: Path, **changes: Any) -> Path:
    settings = {key: value for key, value in (TINY_LLAMA | changes).items() if value is not None}
    path = folder / "config.json"
    path.write_text(json.dumps(settings))
    return path


def test_every_builtin_has_a_published_count_but_one() -> None:
    assert set(builtin_names()) == set(PUBLISHED) | {"gpt-13b"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_builtin_has_the_published_number_of_parameters(name: str) -> None:
    workload = resolve_workload(name, seq_len=1024)
    assert workload.anatomy().num_parameters == PUBLISHED[name]


def test_gpt_13b_is_40_layers_of_5120() -> None:
    workload = resolve_workload("gpt-13b", seq_len=2048)
    dim, layers = 5120, 40
    block = 12 * dim * dim + 13 * dim  # four dim x dim for attention, eight for the MLP; biases and two norms
    outside = (50257 + 2048) * dim + 2 * dim
    assert workload.anatomy().num_parameters == layers * block + outside
    assert len(workload.anatomy().blocks) == layers


def test_names_are_read_in_any_case() -> None:
    assert resolve_workload("GPT2", seq_len=8).name == "gpt2"


@pytest.mark.parametrize("give_folder", [True, False])
def test_config_file_and_its_folder_are_the_same_model(tmp_path: Path, give_folder: bool) -> None:
    path = write_config(tmp_path)
    workload = resolve_workload(str(tmp_path if give_folder else path), seq_len=16)
    assert (workload.vocab_size, workload.max_seq_len, workload.seq_len) == (97, 64, 16)
    assert len(workload.anatomy().blocks) == 2


def test_model_is_fp32_and_trains_whatever_dtype_the_config_names(tmp_path: Path) -> None:
    model = resolve_workload(str(write_config(tmp_path, dtype="bfloat16")), seq_len=16).make_model()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.training


def test_model_is_made_where_the_default_device_says(tmp_path: Path) -> None:
    workload = resolve_workload(str(write_config(tmp_path)), seq_len=16)
    with torch.device("meta"):
        on_meta = workload.make_model()
    assert {t.device.type for t in [*on_meta.parameters(), *on_meta.buffers()]} == {"meta"}
    with FakeTensorMode(), torch.device("cpu"):
        fake = workload.make_model()
    assert all(isinstance(tensor, FakeTensor) for tensor in [*fake.parameters(), *fake.buffers()])


def test_anatomy_draws_no_random_number_and_is_made_once(tmp_path: Path) -> None:
    workload = resolve_workload(str(write_config(tmp_path)), seq_len=16)
    before = torch.get_rng_state()
    anatomy = workload.anatomy()
    assert torch.equal(before, torch.get_rng_state())
    assert workload.anatomy() is anatomy
    assert workload.with_seq_len(32).anatomy() is anatomy


def test_same_seed_makes_the_same_model_twice(tmp_path: Path) -> None:
    workload = resolve_workload(str(write_config(tmp_path)), seq_len=16)
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(workload.make_model())
    for first, second in zip(*(model.parameters() for model in models)):
        assert first is not second
        assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("llama-2-13", "nearest names: llama-2-13b"),
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("zzzz", "built-in names: llama-2-7b"),
        ("nowhere/config.json", "no file nowhere/config.json"),
    ],
)
def test_unknown_names(model: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_workload(model, seq_len=8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "llama",', "not valid JSON: .* at line 1, column 24"),
        ("[1, 2]", "holds a JSON list"),
        ("", "not valid JSON"),
        ('{"vocab_size": 5}', "has no model_type"),
        ('{"model_type": "lama"}', "unknown model_type 'lama'; did you mean .*llama"),
        ('{"model_type": "vit"}', "is vit, not a causal language model"),
        ('{"model_type": "bert"}', "is_decoder"),
        ('{"model_type": "bert", "architectures": ["BertForMaskedLM"]}', "is BertForMaskedLM, not a causal"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "bad values"),
    ],
)
def test_broken_configs(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message) as caught:
        resolve_workload(str(tmp_path), seq_len=8)
    assert "\n" not in str(caught.value)


def test_code_that_a_config_names_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise RuntimeError('this code was run')")
    path = write_config(tmp_path, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    model = resolve_workload(str(path), seq_len=8).make_model()
    assert type(model).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(("name", "theta"), [("llama-2-7b", 1e4), ("qwen3-8b", 1e6), ("llama-3.1-8b", 5e5)])
def test_rotary_base_reaches_the_model(name: str, theta: float) -> None:
    model = resolve_workload(name, seq_len=8).make_model.args[0]  # type: ignore[attr-defined]
    assert model.rope_parameters["rope_theta"] == theta


def test_config_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="not UTF-8"):
        resolve_workload(str(tmp_path), seq_len=8)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no file .*config\.json"):
        resolve_workload(str(tmp_path), seq_len=8)


@pytest.mark.parametrize(
    "changes", [{"num_attention_heads": 5}, {"hidden_size": -4}, {"vocab_size": 0}, {"num_hidden_layers": -1}]
)
def test_sizes_that_make_no_model(tmp_path: Path, changes: dict[str, int]) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_workload(str(write_config(tmp_path, **changes)), seq_len=8).anatomy()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("seq_len", "message"), [(0, "seq_len is 0"), (-5, "seq_len is -5"), (65, "seq_len is 65, but .* has 64 positions")]
)
def test_lengths_that_the_model_does_not_have(tmp_path: Path, seq_len: int, message: str) -> None:
    path = write_config(tmp_path)
    with pytest.raises(RecipeError, match=message):
        resolve_workload(str(path), seq_len)
    with pytest.raises(RecipeError, match=message):
        resolve_workload(str(path), 64).with_seq_len(seq_len)
