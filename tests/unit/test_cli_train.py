"""trainfit train: plan, run, comparison; resumed with the plan it began with; progress in lines and as a bar."""

from __future__ import annotations

import io
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from rich.console import Console

import trainfit.cli.progress as progress_module
from trainfit.cli.main import main
from trainfit.cli.progress import TrainingDisplay
from trainfit.cli.train import _goes_on
from trainfit.hardware import Launch
from trainfit.plan import Plan
from trainfit.profile import Profile
from trainfit.step import Strategy
from trainfit.train import Evaluated, Measured, Preparing, Started, StepDone, read_metrics

RECIPE = """\
model: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
        max_position_embeddings: 64}
data: {paths: text, tokenizer: {vocab_size: 300}, held_out_fraction: 0.1}
seq_len: 16
tokens_per_step: 128
memory: 1300kiB
steps: 6
evaluation: {every: 3, batches: 1}
run_folder: run
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "text").mkdir()
    for number in range(25):
        (tmp_path / "text" / f"{number}.txt").write_text(f"file {number}: " + f"{number * 7} and {number * 3}; " * 20)
    return tmp_path


def test_a_run_shows_its_plan_its_progress_and_that_the_prediction_was_right(capsys):
    assert main(["train", "recipe.yaml"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 100
    for words in (
        "plain training",
        "chosen",
        "of 1.3 MiB",
        "step 6/6",
        "held-out loss",
        "unigram",
        "tokens/s",
        "error",
    ):
        assert words in out
    plan = json.loads(Path("run/plan.json").read_text())
    assert plan["plain"]["peak_bytes"] > plan["allowed_bytes"] >= plan["chosen"]["predicted"]["peak_bytes"]
    assert plan["hash"] in out
    assert [line["step"] for line in read_metrics(Path("run")) if "loss" in line] == [1, 2, 3, 4, 5, 6]


def test_what_several_devices_need_is_noted_and_changes_nothing_on_one(capsys):
    assert main(["train", "recipe.yaml", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)["plan"]["chosen"]
    zero = "zero={stage: 3, prefetch: 2, reduce_dtype: bf16, reshard_size: 2}"
    assert main(["train", "recipe.yaml", zero, "pipeline.schedule=gpipe", "run_folder=other"]) == 0
    out = capsys.readouterr().out
    for key in ("zero.stage 3", "zero.prefetch 2", "zero.reduce_dtype bf16", "zero.reshard_size 2", "gpipe"):
        assert out.count(f"{key} ") == 1, key
    chosen = json.loads(Path("other/plan.json").read_text())["chosen"]
    assert chosen["predicted"]["peak_bytes"] == plain["predicted"]["peak_bytes"]


def test_json_is_one_document_and_the_peak_is_as_predicted(capsys):
    assert main(["train", "recipe.yaml", "steps=3", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert "step 3/3" in err
    assert report["steps"] == 3
    assert report["held_out_loss"] > 0
    peak = report["plan"]["chosen"]["predicted"]["peak_bytes"]
    assert report["relative_error"] == peak / report["measured"]["peak_bytes"] - 1
    assert abs(report["relative_error"]) < 0.01


def test_ctrl_c_saves_and_resume_goes_on_with_the_same_plan(capsys, monkeypatch):
    draw = TrainingDisplay._draw_step

    def stop_at_step_3(display, event):
        draw(display, event)
        if event.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingDisplay, "_draw_step", stop_at_step_3)
        assert main(["train", "recipe.yaml"]) == 130
    assert "interrupted at step 3 of 6" in capsys.readouterr().err
    plan = Path("run/plan.json").read_text()
    assert main(["train", "recipe.yaml"]) == 2  # nobody loses an unfinished run
    assert "--resume" in capsys.readouterr().err

    def never(*arguments, **options):
        raise AssertionError("a resumed run planned anew")

    monkeypatch.setattr("trainfit.cli.setup.choose", never)
    assert main(["train", "recipe.yaml", "--resume"]) == 0
    assert "resumed at step 3" in capsys.readouterr().out
    assert Path("run/plan.json").read_text() == plan


def go_on(folders: list[Path], restarts: list[int]) -> list[bool]:
    """What ranks on machines with these folders and counts of restarts decide, by rank."""
    store, size = dist.HashStore(), len(restarts)

    def decide(rank: int) -> bool:
        launch = Launch(rank, size, restarts=restarts[rank])
        vars(launch)["_store"] = store  # torchrun's
        return _goes_on(launch, folders[rank])

    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(decide, range(size)))


@pytest.mark.parametrize(
    ("restarts", "has_saved", "expected"),
    [
        ([1, 0], True, True),
        ([0, 1], True, True),
        ([0, 0, 3], True, True),
        ([0, 0], True, False),
        ([1, 0], False, False),
    ],
)
def test_all_ranks_go_on_after_a_restart_of_some(restarts, has_saved, expected, folder):
    if has_saved:
        (folder / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    # What rank 0 sees counts: another machine may see a new checkpoint later.
    folders = [folder / "run", *(folder / "late" for _ in restarts[1:])]
    assert go_on(folders, restarts) == [expected] * len(restarts)


def test_a_plan_file_is_followed(capsys):
    assert main(["plan", "recipe.yaml", "--memory", "1400kiB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    Path("plan.json").write_text(json.dumps(plan))
    assert main(["train", "recipe.yaml", "--plan", "plan.json", "memory=1500kiB", "steps=1"]) == 0
    assert json.loads(Path("run/plan.json").read_text())["hash"] == plan["hash"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tiers": ["full"] * 2, "compile": {"blocks": 1}}, "the plan's compile is compiled blocks, the recipe's none"),
        (
            {"tiers": ["offload_full"] * 2},
            "the plan's tiers have offload_full to host",
        ),
        ({"tiers": ["keep_int8"] * 2}, "the plan's tiers have keep_int8, which rounds what backward reads"),
    ],
)
def test_a_plan_file_that_does_what_the_recipe_does_not_allow_is_refused(changes, words, capsys):
    assert main(["plan", "recipe.yaml", "--memory", "1400kiB", "--json"]) == 0
    plan = Plan.from_json(json.loads(capsys.readouterr().out))
    other = replace(plan, strategy=Strategy.from_json({**plan.strategy.to_json(), **changes}))
    Path("plan.json").write_text(json.dumps(other.to_json()))
    assert main(["train", "recipe.yaml", "--plan", "plan.json", "steps=1"]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_measure_and_verify_take_the_plan_of_a_recipe(capsys):
    assert main(["measure", "recipe.yaml", "--steps", "0", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert abs(measured["relative_error"]) < 0.01
    assert main(["plan", "recipe.yaml", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert measured["predicted"]["peak_bytes"] <= plan["allowed_bytes"] < plan["plain"]["peak_bytes"]
    assert main(["verify", "recipe.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]
    assert main(["rehearse", "recipe.yaml", "--micro-batch", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["strategy"]["micro_batch_size"] == 3


# ---- the display on its own ----------------------------------------------------------------------------------------


def events(steps: int, first: int = 0):
    yield Preparing("encoding the text", 0, 100)
    yield Preparing("encoding the text", 100, 100)
    yield Started(first, steps, 10**6, 10**7, 10**5, 10**4, 6.5, ("a note",))
    for step in range(first + 1, steps + 1):
        if step == first + 2:
            yield Measured(step, Profile(300 * 2**20, "backward", "", {}, {}, 0))
        yield StepDone(step, steps, 0, 3.0, 1e-3, 1.0, 64 * step, 12_345.0, 0.1, 2**30)
    yield Evaluated(steps, 2.5)


def drawn(steps: int, *, terminal: bool, first: int = 0) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with TrainingDisplay(console, 500 * 2**20) as display:
        for event in events(steps, first):
            display.on_event(event)
    return console.file.getvalue()


@pytest.mark.parametrize("steps", [1, 7, 200])
def test_without_a_terminal_a_run_is_a_few_lines(steps):
    text = drawn(steps, terminal=False)
    lines = [line for line in text.splitlines() if line.startswith("step") and "/" in line]
    assert len(lines) <= 13
    assert f"{steps}/{steps}" in lines[-1]
    assert "\x1b" not in text
    assert "note: a note" in text
    assert max(map(len, text.splitlines())) <= 100


def test_on_a_terminal_there_is_a_bar_with_loss_speed_memory_and_time():
    text = drawn(20, terminal=True)
    assert "━" in text
    for words in ("20/20", "3.000", "12.3k tok/s", "peak 300.0 of 500.0 MiB", "done"):
        assert words in text


def test_time_left_counts_only_the_steps_of_this_process(monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr(progress_module.time, "perf_counter", lambda: float(next(clock)))
    lines = [line for line in drawn(100, terminal=False, first=80).splitlines() if line.startswith("step  90/100")]
    # Clock ticks of a second: one for each of two warm steps, then one a step; ten steps are left after step 90.
    assert len(lines) == 1
    assert lines[0].endswith("10.0 s left")
