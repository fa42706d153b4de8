"""A run on documents of several lengths under a tier table: resumed to the bit, tightened without a trace in losses."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from trainfit.cli.main import main
from trainfit.errors import RecipeError
from trainfit.hardware import accelerator
from trainfit.profile import TokenBucket
from trainfit.step import Strategy
from trainfit.train import Started, StepDone, TiersChanged, read_metrics, recipe_workload, train
from trainfit.train.recipe import Recipe
from trainfit.train.tightening import UseMeter

CPU = accelerator("cpu")
# GPT-2 because it has dropout, which a resume and a recompute get wrong first.
MODEL = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "resid_pdrop": 0.2, "vocab_size": 300}
BY_TOKENS = Strategy(
    1,
    2,
    tiers=("full", "attention"),
    tier_table=(TokenBucket(32, ("keep", "keep")), TokenBucket(64, ("full", "attention"))),
    micro_batch_tokens=64,
)


@pytest.fixture(autouse=True)
def text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(25):
        (folder / f"{number}.txt").write_text(
            f"file {number}: " + f"{number * 7} and {number * 3}; " * (1 + number % 9)
        )


def make_recipe(**values) -> Recipe:
    defaults = {
        "model": MODEL,
        "data": {"paths": "text", "tokenizer": {"vocab_size": 300}, "held_out_fraction": 0.1, "lengths": "documents"},
        "seq_len": 64,
        "tokens_per_step": 256,
        "per_batch": True,
        "steps": 6,
        "evaluation": {"every": 100, "batches": 1},
        "save": {"every": 100, "keep": 3},
        "run_folder": "run",
    }
    return Recipe.model_validate({**defaults, **values}).located(Path.cwd())


def start(recipe, *, measure=False, **options):
    return train(recipe, BY_TOKENS, recipe_workload(recipe), CPU, measure=measure, **options)


def losses(folder: str) -> list[float]:
    return [entry["loss"] for entry in read_metrics(Path(folder)) if "loss" in entry]


def stop_after(step: int):
    """An on_event that sends this process Ctrl-C once the step is done."""

    def on_event(event):
        if isinstance(event, StepDone) and event.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    return on_event


def test_documents_are_trained_and_resumed_to_the_bit_in_the_middle():
    whole: list = []
    start(make_recipe(run_folder="whole"), on_event=whole.append)
    assert any(event.micro_batches > 1 for event in whole if isinstance(event, StepDone))
    start(make_recipe(), on_event=stop_after(3))
    assert len(losses("run")) == 3
    start(make_recipe(), resume=True)
    assert losses("run") == losses("whole")


def test_measured_use_tightens_and_relaxes_tiers_and_changes_no_loss(monkeypatch):
    use = iter([0, 0, 900, 1100, 1100, *[100] * 30])
    monkeypatch.setattr(UseMeter, "used_bytes", lambda self: next(use))
    monkeypatch.setattr(UseMeter, "recorded", lambda self, peak: 0)
    recipe = make_recipe(per_batch={"threshold": 0.5}, steps=26)
    events: list = []
    start(recipe, on_event=events.append, plan={"budget_bytes": 2000})
    changes = [event for event in events if isinstance(event, TiersChanged)]
    assert [(each.step, each.change, each.level) for each in changes] == [
        (4, "tightened", 1),
        (5, "tightened", 2),
        (25, "relaxed", 1),
    ]
    assert all(each.limit_bytes == 1000 and each.max_level == 2 for each in changes)
    metrics = [entry for entry in read_metrics(Path("run")) if "loss" in entry]
    assert [entry["tier_level"] for entry in metrics] == [0] * 4 + [1] + [2] * 20 + [1]
    assert [entry["used_bytes"] for entry in metrics[:5]] == [None, None, 900, 1100, 1100]

    monkeypatch.setattr(UseMeter, "used_bytes", lambda self: 0)
    start(recipe.model_copy(update={"run_folder": "untouched"}), plan={"budget_bytes": 2000})
    assert losses("run") == losses("untouched")


def test_epochs_of_documents_end_where_the_text_does():
    events: list = []
    report = start(make_recipe(steps=None, epochs=2), on_event=events.append)
    started = next(event for event in events if isinstance(event, Started))
    assert report.steps == started.steps > 2
    assert report.tokens == 2 * (started.training_tokens - 23)  # the first token of each document is not predicted


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"data": {"paths": "text"}}, "per_batch is for sequences of several lengths"),
        ({"activation": "full"}, "keep one"),
        ({"mesh": {"pipeline": 2}}, "makes micro batches of several shapes"),
        ({"per_batch": {"threshold": 1.5}}, "threshold"),
        ({"compile": "block"}, "each would be compiled anew"),
        ({"per_batch": False, "may_change": ["compile"]}, "each would be compiled anew"),
    ],
)
def test_recipes_that_cannot_be_per_batch(values, words):
    with pytest.raises((RecipeError, ValueError), match=words):
        make_recipe(**values)


CLI_RECIPE = """\
model: {model_type: llama, hidden_size: 48, intermediate_size: 96, num_hidden_layers: 3, num_attention_heads: 2,
        max_position_embeddings: 96}
data: {paths: text, tokenizer: {vocab_size: 300}, held_out_fraction: 0.1, lengths: documents}
seq_len: 96
tokens_per_step: 256
memory: 2200kiB
per_batch: {threshold: 0.98}
steps: 3
evaluation: {every: 3, batches: 1}
run_folder: run
"""


def test_the_command_plans_a_table_trains_by_it_and_was_right(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text(CLI_RECIPE)
    assert main(["train", "recipe.yaml", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert "tokens of a micro batch" in err
    table = report["plan"]["chosen"]["strategy"]["tier_table"]
    assert len(table) > 1
    assert len(report["plan"]["buckets"]) == len(table)
    assert len({rows * length for rows, length in report["measured_shapes"]}) > 1
    assert abs(report["relative_error"]) < 0.01
    assert main(["train", "recipe.yaml", "per_batch=false", "--plan", "run/plan.json", "run_folder=other"]) == 2
    assert "the plan has a tier table, the recipe no per_batch" in capsys.readouterr().err
