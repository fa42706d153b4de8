"""Recipes: read, checked, overridden; everything wrong is one line that says what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainfit.errors import ModelError, RecipeError
from trainfit.train import load_recipe, recipe_workload
from trainfit.units import format_count

MINIMAL = """\
model: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2}
data: {paths: text, tokenizer: {vocab_size: 300}}
seq_len: 16
tokens_per_step: 64
steps: 4
run_folder: run
"""


def write(folder: Path, text: str = MINIMAL) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def error_of(folder: Path, *overrides: str, text: str = MINIMAL) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(folder, text), overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message


def test_sizes_are_read_as_people_write_them(tmp_path):
    recipe = load_recipe(write(tmp_path), ["memory=512MiB", "tokens_per_step=64k", "optimizer.learning_rate=1e-3"])
    assert recipe.memory == 512 * 2**20
    assert recipe.tokens_per_step == 64_000
    assert recipe.sequences_per_step == 64_000 // 16
    assert recipe.optimizer.learning_rate == 1e-3


def test_override_reaches_a_nested_key_and_leaves_the_rest(tmp_path):
    recipe = load_recipe(write(tmp_path), ["data.tokenizer.vocab_size=400", "data.held_out_fraction=0.1"])
    assert recipe.data.tokenizer.vocab_size == 400
    assert recipe.data.paths == ("text",)


def test_hash_follows_every_value_and_not_the_folder(tmp_path):
    (tmp_path / "moved").mkdir()
    plain = load_recipe(write(tmp_path))
    assert load_recipe(write(tmp_path / "moved")).hash == plain.hash
    assert load_recipe(write(tmp_path), ["seed=1"]).hash != plain.hash


def test_paths_start_from_the_folder_of_the_recipe(tmp_path):
    recipe = load_recipe(write(tmp_path))
    assert recipe.resolve("text") == tmp_path / "text"
    assert recipe.resolve("/elsewhere") == Path("/elsewhere")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("sed_len=4", ["unknown key sed_len", "did you mean seq_len?"]),
        ("learning_rate=1", ["unknown key learning_rate", "did you mean optimizer.learning_rate?"]),
        ("optimizer.learning_rte=1", ["did you mean optimizer.learning_rate?"]),
        ("zzz=1", ["unknown key zzz", "known keys are model, data, seq_len"]),
        ("steps=-4", ["steps is -4", "greater than or equal to 1"]),
        ("steps=4000000000", ["steps is 4000000000", "less than or equal to 1000000000"]),
        ("steps=true", ["steps is True", "it must be a whole number"]),
        ("steps=2.5", ["steps is 2.5", "it must be a whole number"]),
        ("seq_len=0", ["seq_len is 0"]),
        ("tokens_per_step=-64", ["tokens_per_step is -64", "4M, 500k"]),
        ("tokens_per_step=8", ["tokens_per_step 8", "one sequence of 16"]),
        ("memory=lots", ["memory is 'lots'", "60GiB"]),
        ("memory=-1", ["memory is -1"]),
        ("optimizer.learning_rate=.nan", ["optimizer.learning_rate is nan"]),
        ("optimizer.betas=[0.9]", ["optimizer.betas.1 is missing"]),
        ("data.tokenizer.vocab_size=100", ["data.tokenizer.vocab_size is 100", "257"]),
        ("data.tokenizer.path=a.json", ["either vocab_size", "or path"]),
        ("data.paths=[]", ["data.paths is []", "at least one"]),
        ("model=3", ["model is 3", "model_type"]),
        ("epochs=1", ["steps 4 and epochs 1 are both set", "keep one"]),
        ("steps=null", ["steps is missing; set steps or epochs"]),
        ("schedule.warmup_steps=9", ["schedule.warmup_steps 9", "steps 4"]),
        ("precision=fp8", ["precision is 'fp8'", "'fp32'"]),
        ("seq_len.deep=1", ["seq_len is 16 and has no keys"]),
        ("seq_len", ["not key=value"]),
        ("may_change=precision", ["may_change is 'precision'", "it must be a list"]),
        ("data=text", ["data is 'text'", "it must be a mapping of keys"]),
        ("seq_len=[", ["not a YAML value"]),
    ],
)
def test_bad_values_name_the_key_the_value_and_the_next_move(tmp_path, override, parts):
    message = error_of(tmp_path, override)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("compile=block", "activation='4*keep,2*discard'"), "tier 'discard' looks at operators as they run"),
        (("compile=block", "activation=selective"), "use keep, pointwise, attention, full, or leave compile out"),
    ],
)
def test_tiers_that_compiled_blocks_lack_are_refused_before_anything_is_built(tmp_path, overrides, words):
    assert words in error_of(tmp_path, *overrides)


def test_tiers_of_graphs_may_be_given_to_compiled_blocks(tmp_path):
    path = write(tmp_path)
    assert load_recipe(path, ["compile=block", "activation='2*attention,2*full'"]).activation == "2*attention,2*full"
    load_recipe(path, ["may_change=[compile]", "activation=discard"])  # which block it is for is the plan's


def test_several_errors_come_in_one_line_with_the_rest_counted(tmp_path):
    message = error_of(tmp_path, "steps=-1", "seq_len=-1", "seed=-1", "save.every=-1", "evaluation.every=-1")
    assert message.count(";") == 2 * 3
    assert message.endswith("and 2 more")


def test_missing_keys_are_named(tmp_path):
    message = error_of(tmp_path, text="model: gpt2\n")
    assert "data is missing; add it" in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model: gpt2\nseq_len: [1,\nsteps: 3\n", ["line 4", "in what began at line 2; correct it there"]),
        ("seq_len: 1\nseq_len: 2\n", ["line 2", "'seq_len' is written twice"]),
        ("", ["is empty"]),
        ("- a\n- b\n", ["is a list"]),
        ("just words\n", ["is a str"]),
        ("model: !!python/object/apply:os.system ['true']\n", ["line 1", "could not determine a constructor"]),
    ],
)
def test_broken_yaml_is_one_line_with_its_place(tmp_path, text, parts):
    message = error_of(tmp_path, text=text)
    for part in ["recipe.yaml", *parts]:
        assert part in message


def test_a_missing_recipe_offers_the_nearest_file(tmp_path):
    write(tmp_path)
    with pytest.raises(RecipeError, match=r"did you mean .*recipe\.yaml\?"):
        load_recipe(tmp_path / "recipes.yaml")
    with pytest.raises(RecipeError, match="cannot read recipe"):
        load_recipe(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="cannot read recipe"):
        load_recipe(tmp_path / "binary.yaml")


def test_inline_model_takes_the_tokenizers_vocabulary_and_the_recipes_optimizer(tmp_path):
    recipe = load_recipe(write(tmp_path), ["optimizer.weight_decay=0.3"])
    workload = recipe_workload(recipe)
    assert workload.vocab_size == 300
    assert workload.seq_len == 16
    assert workload.optimizer.weight_decay == 0.3
    assert len(workload.anatomy().blocks) == 2


def test_the_name_of_an_inline_model_tells_it_from_others(tmp_path):
    overrides = ([], ["model.rms_norm_eps=0.00001"], ["model.num_hidden_layers=3"], ["model.vocab_size=300"])
    named = [recipe_workload(load_recipe(write(tmp_path), changes)) for changes in overrides]
    for workload in named:
        size = format_count(workload.anatomy().num_parameters)
        assert re.fullmatch(rf"llama-{re.escape(size)}-[0-9a-f]{{6}}", workload.name)
    assert len({workload.name for workload in named[:3]}) == 3
    assert named[3].name == named[0].name  # what was left out is what was written


GEMMA3 = """\
model:
  model_type: gemma3
  text_config: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2, head_dim: 16,
                num_key_value_heads: 1}
  vision_config: {hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}
data: {paths: text, tokenizer: {vocab_size: 300}}
seq_len: 16
tokens_per_step: 64
steps: 3
run_folder: run
"""


def test_a_model_with_a_text_config_takes_the_vocabulary_there(tmp_path):
    (tmp_path / "gemma3.yaml").write_text(GEMMA3)
    workload = recipe_workload(load_recipe(tmp_path / "gemma3.yaml"))
    assert workload.vocab_size == 300
    assert len(workload.anatomy().blocks) == 2
    wrong = ["model.text_config.hiden_size=64"]
    with pytest.raises(RecipeError, match=r"did you mean model\.text_config\.hidden_size\?"):
        recipe_workload(load_recipe(tmp_path / "gemma3.yaml", wrong))


def test_a_misspelt_model_setting_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"unknown key model\.hiden_size; did you mean model\.hidden_size\?"):
        recipe_workload(load_recipe(write(tmp_path), ["model.hiden_size=64"]))
    with pytest.raises(ModelError, match="lama"):
        recipe_workload(load_recipe(write(tmp_path), ["model.model_type=lama"]))


def test_model_path_starts_from_the_folder_of_the_recipe(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 3, "n_embd": 8, "n_head": 2}')
    assert len(recipe_workload(load_recipe(write(tmp_path), ["model=config.json"])).anatomy().blocks) == 3
    with pytest.raises(ModelError, match="nowhere"):
        recipe_workload(load_recipe(write(tmp_path), ["model=nowhere.json"]))


def test_numbers_with_an_exponent_are_numbers_without_a_dot_too(tmp_path: Path):
    """YAML 1.1 reads 1e-5 as text, which an inline model config would keep as it is."""
    path = tmp_path / "recipe.yaml"
    model = "model: {model_type: llama, rms_norm_eps: 1e-5}"
    path.write_text(f"{model}\ndata: {{paths: x}}\nseq_len: 8\ntokens_per_step: 8\nsteps: 1\nrun_folder: r\n")
    assert load_recipe(path).model["rms_norm_eps"] == 1e-5
