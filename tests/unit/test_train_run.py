"""A run: resumed to the bit, scheduled by updates, evaluated without a graph, stopped cleanly."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import trainfit.train.checkpoint as checkpoint_module
from trainfit.errors import RecipeError, ResumeError, TrainfitError
from trainfit.hardware import accelerator, this_machine
from trainfit.rehearsal import rehearse
from trainfit.step import Strategy
from trainfit.train import (
    Archived,
    Evaluated,
    Interrupted,
    Measured,
    Preparing,
    Resumed,
    Saved,
    Started,
    StepDone,
    read_metrics,
    recipe_workload,
    train,
)
from trainfit.train.checkpoint import list_checkpoints, read_state
from trainfit.train.evaluate import held_out_loss
from trainfit.train.packing import PackedTokens
from trainfit.train.recipe import Recipe, ScheduleSettings
from trainfit.train.schedule import learning_rate_at

CPU = accelerator("cpu")
# GPT-2 because it has dropout and tied weights, the two that a resume gets wrong first.
MODEL = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "resid_pdrop": 0.2, "vocab_size": 300}


@pytest.fixture(autouse=True)
def text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(25):
        (folder / f"{number}.txt").write_text(f"file {number}: " + f"{number * 7} and {number * 3}; " * 20)


def make_recipe(**values) -> Recipe:
    defaults = {
        "model": MODEL,
        "data": {"paths": "text", "tokenizer": {"vocab_size": 300}, "held_out_fraction": 0.1},
        "seq_len": 16,
        "tokens_per_step": 64,
        "steps": 6,
        "optimizer": {"learning_rate": 1e-2},
        "schedule": {"warmup_steps": 2},
        "evaluation": {"every": 2, "batches": 2},
        "save": {"every": 3, "keep": 3},
        "run_folder": "run",
    }
    return Recipe.model_validate({**defaults, **values}).located(Path.cwd())


def start(recipe, *, events=None, strategy=None, **options):
    strategy = strategy or Strategy(2, 2, tiers=("keep", "keep"))
    on_event = (lambda event: None) if events is None else events.append
    return train(recipe, strategy, recipe_workload(recipe), CPU, on_event=on_event, **options)


def stop_after(step):
    """An on_event that sends this process Ctrl-C once the step is done."""

    def on_event(event):
        if isinstance(event, StepDone) and event.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    return on_event


def run_until(recipe, step):
    return train(
        recipe, Strategy(2, 2, tiers=("keep", "keep")), recipe_workload(recipe), CPU, on_event=stop_after(step)
    )


def saved_bytes(folder):
    files = ("model.safetensors", "optimizer.safetensors", "rng.safetensors")
    latest = list_checkpoints(Path(folder) / "checkpoints")[-1]
    return {name: (latest / name).read_bytes() for name in files}


def losses(folder):
    return [(line["step"], line.get("loss"), line.get("held_out_loss")) for line in read_metrics(Path(folder))]


def test_resume_is_the_unbroken_run_to_the_bit():
    """Parameters, moments, generator, losses and evaluations of 6 updates equal those of 3 and 3, dropout on."""
    start(make_recipe(run_folder="whole"))
    assert run_until(make_recipe(run_folder="halves"), 3).interrupted
    torch.manual_seed(999)  # nothing of the process may leak into the rest of the run
    report = start(make_recipe(run_folder="halves"), resume=True)
    assert report.steps == 6
    assert losses("halves") == losses("whole")
    assert saved_bytes("halves") == saved_bytes("whole")


def test_dropout_is_on_in_that_test():
    """Guards the test above: without dropout it would not see a lost generator."""
    start(make_recipe(run_folder="a"))
    start(make_recipe(run_folder="b", model={**MODEL, "resid_pdrop": 0.0}))
    assert losses("a") != losses("b")


def test_resume_crosses_an_epoch_whose_last_window_is_short():
    whole = make_recipe(run_folder="whole", steps=None, epochs=2, tokens_per_step=1024, seq_len=16)
    half = whole.model_copy(update={"run_folder": "halves"}).located(Path.cwd())
    strategy = Strategy(16, 4, tiers=("keep", "keep"))
    report = start(whole, strategy=strategy)
    per_epoch = report.steps // 2
    tokens = [line["tokens"] for line in read_metrics(Path("whole")) if "loss" in line]
    assert report.steps == 2 * per_epoch
    assert tokens[-1] == 2 * tokens[per_epoch - 1]  # every sequence once an epoch, the rest not dropped
    assert (tokens[per_epoch - 1] - tokens[per_epoch - 2]) < 1024
    train(half, strategy, recipe_workload(half), CPU, on_event=stop_after(per_epoch))
    start(half, strategy=strategy, resume=True)
    assert losses("halves") == losses("whole")


def test_a_kill_while_saving_leaves_the_checkpoint_before(monkeypatch):
    def killed(partial, final):
        raise KeyboardInterrupt

    recipe = make_recipe()
    run_until(recipe, 2)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "_publish", killed)
        with pytest.raises(KeyboardInterrupt):
            start(recipe, resume=True)
    folder = Path("run/checkpoints")
    assert [path.name for path in folder.iterdir() if path.name.startswith(".partial")]
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000002"]
    events = []
    start(recipe, resume=True, events=events)
    assert next(e for e in events if isinstance(e, Resumed)).step == 2
    assert not [path for path in folder.iterdir() if path.name.startswith(".partial")]


def test_learning_rate_counts_updates_not_micro_batches():
    """GA-05: a warm-up of 10 with 4 micro batches an update takes 10 updates."""
    recipe = make_recipe(steps=12, schedule={"warmup_steps": 10, "min_ratio": 0.5}, save={"every": 50})
    start(recipe, strategy=Strategy(1, 4, tiers=("keep", "keep")))
    rates = [line["learning_rate"] for line in read_metrics(Path("run")) if "loss" in line]
    assert rates[:10] == pytest.approx([1e-2 * (update + 1) / 10 for update in range(10)], rel=1e-12)
    assert rates[-1] == pytest.approx(0.5e-2, rel=1e-12)
    assert len(rates) == 12


def test_schedule_is_a_warm_up_and_half_a_cosine():
    settings = ScheduleSettings(warmup_steps=4, min_ratio=0.1)
    rates = [learning_rate_at(update, 20, 2.0, settings) for update in range(20)]
    assert rates[3] == 2.0
    assert rates[11] == pytest.approx(2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2))
    assert rates[-1] == pytest.approx(0.2)
    assert learning_rate_at(100, 20, 2.0, settings) == rates[-1]
    assert learning_rate_at(0, 1, 2.0, ScheduleSettings(warmup_steps=1)) == 2.0


def test_the_optimizer_trains_at_the_scheduled_rate():
    """Two runs that differ in the peak rate alone move their weights in that ratio in the first update."""
    moved = []
    for rate in (1e-3, 2e-3):
        recipe = make_recipe(
            run_folder=f"run{rate}", steps=1, optimizer={"learning_rate": rate, "weight_decay": 0.0}, schedule={}
        )
        torch.manual_seed(0)
        before = recipe_workload(recipe).make_model().state_dict()["transformer.h.0.mlp.c_fc.weight"]
        start(recipe)
        after = load_file(list_checkpoints(Path(f"run{rate}/checkpoints"))[-1] / "model.safetensors")[
            "transformer.h.0.mlp.c_fc.weight"
        ]
        moved.append((after - before).abs().mean().item())
    assert moved[1] / moved[0] == pytest.approx(2, rel=1e-3)
    # The schedule without warm-up ends at min_ratio in its only update.
    assert moved[0] == pytest.approx(1e-3 * 0.1, rel=0.05)


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 50)


def live_tensor_bytes():
    gc.collect()
    return sum(t.untyped_storage().nbytes() for t in gc.get_objects() if issubclass(type(t), torch.Tensor))


def test_evaluation_keeps_nothing_of_a_batch():
    """ME-03: live bytes at every batch are the same however many there were; the loss is the mean over tokens."""
    model = Linear()
    data = PackedTokens(torch.randint(0, 50, (8 * 20 + 1,)).numpy().astype("uint16"), 8)
    seen = []

    def evaluate(batch):
        seen.append(live_tensor_bytes())
        with torch.no_grad():
            logits = model.head(batch.inputs[..., None].float().expand(-1, -1, 4) / 50)
            return nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum"), (
                batch.num_tokens
            )

    loss = held_out_loss(evaluate, data, data.spread(20), 3)
    assert len(seen) == 7
    assert max(seen[1:6]) == min(seen[1:6])
    total, count = evaluate(data.rows(range(20)))
    assert loss == pytest.approx(total.item() / count, rel=1e-5)


def test_nothing_of_a_step_outlives_it():
    """ME-06: neither metrics nor events hold tensors, so live tensors do not grow with steps."""
    live = []

    def on_event(event):
        if isinstance(event, StepDone):
            assert not any(isinstance(value, torch.Tensor) for value in vars(event).values())
            live.append(live_tensor_bytes())

    recipe = make_recipe(steps=8, evaluation={"every": 3, "batches": 1})
    train(recipe, Strategy(2, 2, tiers=("keep", "keep")), recipe_workload(recipe), CPU, on_event=on_event)
    assert live[-1] <= live[2]


def test_run_folder_has_what_it_promises():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = []
    report = start(make_recipe(), events=events, plan={"hash": "abc", "fits": True})
    assert json.loads(Path("run/plan.json").read_text()) == {"hash": "abc", "fits": True}
    assert json.loads(Path("run/summary.json").read_text())["held_out_loss"] == report.held_out_loss
    assert read_state(report.checkpoint).plan_hash == "abc"
    updates = [line for line in read_metrics(Path("run")) if "loss" in line]
    keys = (
        "step loss learning_rate gradient_norm tokens tokens_per_second step_seconds memory_bytes loss_scale skipped "
        "micro_batches used_bytes tier_level"
    )
    assert [set(line) for line in updates] == [set(keys.split())] * 6
    assert [line["step"] for line in updates] == [1, 2, 3, 4, 5, 6]
    assert [line["tokens"] for line in updates] == [64 * n for n in range(1, 7)]
    board = EventAccumulator("run/tensorboard").Reload()
    assert [scalar.step for scalar in board.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [s.value for s in board.Scalars("loss")] == pytest.approx([line["loss"] for line in updates])
    order = [type(event) for event in events if not isinstance(event, Preparing)]
    step, evaluated, saved = StepDone, Evaluated, Saved
    expected = [Started, step, Measured, step, evaluated, step, saved, step, evaluated, step, step, evaluated, saved]
    assert order == expected
    assert report.final_loss == updates[-1]["loss"]
    assert report.held_out_loss < report.unigram_loss + 3  # both in nats per token
    assert not report.interrupted


def test_a_second_run_keeps_the_first_one_aside():
    start(make_recipe(steps=2))
    first = Path("run/metrics.jsonl").read_text()
    events = []
    start(make_recipe(steps=2), events=events)
    assert Path("run/earlier-1/metrics.jsonl").read_text() == first
    assert [e.folder for e in events if isinstance(e, Archived)] == [Path("run/earlier-1")]
    assert not any(isinstance(event, Preparing) for event in events)  # tokens are used again


def test_interrupted_run_is_saved_and_not_overwritten():
    before = signal.getsignal(signal.SIGINT)
    events = []
    recipe = make_recipe()

    def on_event(event):
        events.append(event)
        stop_after(4)(event)

    report = train(recipe, Strategy(2, 2, tiers=("keep", "keep")), recipe_workload(recipe), CPU, on_event=on_event)
    assert report.interrupted
    assert report.steps == 4
    assert [type(event) for event in events[-2:]] == [Interrupted, Saved]
    assert not Path("run/summary.json").exists()
    with pytest.raises(ResumeError, match=r"unfinished run, saved at step-00000004; go on with --resume"):
        start(recipe)
    assert signal.getsignal(signal.SIGINT) is before


def test_second_update_is_measured_and_is_what_the_rehearsal_said():
    recipe, events = make_recipe(), []
    report = start(recipe, events=events)
    strategy = Strategy(2, 2, tiers=("keep", "keep"))
    predicted = rehearse(recipe_workload(recipe), strategy, this_machine("cpu"), max_grad_norm=recipe.max_grad_norm)
    (measured,) = [event for event in events if isinstance(event, Measured)]
    assert measured.step == 2
    assert report.measured is measured.profile
    assert report.measured_peak_bytes == pytest.approx(predicted.peak_bytes, rel=0.01)


def test_measuring_changes_nothing_that_is_learnt():
    start(make_recipe(run_folder="measured"))
    report = start(make_recipe(run_folder="not"), measure=False)
    assert report.measured is None
    assert losses("not") == losses("measured")
    assert saved_bytes("not") == saved_bytes("measured")


def test_a_run_that_ends_before_its_second_update_has_nothing_measured():
    report = start(make_recipe(steps=1, schedule={}))
    assert report.steps == 1
    assert report.measured is None
    assert report.measured_peak_bytes is None


def test_divergence_stops_with_one_line_that_names_the_step():
    recipe = make_recipe(optimizer={"learning_rate": 10.0}, max_grad_norm=None, steps=40, schedule={})
    workload = recipe_workload(recipe)

    def poisoned():
        model = workload.make_model()
        model.transformer.wte.weight.data[:, 0] = float("nan")
        return model

    from dataclasses import replace

    with pytest.raises(TrainfitError, match=r"diverged at step 1: loss nan.*lower optimizer\.learning_rate") as caught:
        train(recipe, Strategy(2, 2, tiers=("keep", "keep")), replace(workload, make_model=poisoned), CPU)
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)
    assert not list_checkpoints(Path("run/checkpoints"))


def test_keep_removes_all_but_the_last():
    start(make_recipe(save={"every": 1, "keep": 2}))
    assert [path.name for path in list_checkpoints(Path("run/checkpoints"))] == ["step-00000005", "step-00000006"]


def test_tied_parameters_are_saved_once_and_nothing_is_pickled():
    report = start(make_recipe(steps=2))
    tensors = load_file(report.checkpoint / "model.safetensors")
    manifest = json.loads((report.checkpoint / "checkpoint.json").read_text())
    assert manifest["ties"] == {"lm_head.weight": "transformer.wte.weight"}
    assert "lm_head.weight" not in tensors
    assert {path.suffix for path in report.checkpoint.iterdir()} == {".safetensors", ".json"}


def resume_error(**values) -> str:
    before = saved_bytes("run")
    with pytest.raises(ResumeError) as caught:
        start(make_recipe(**values), resume=True)
    assert saved_bytes("run") == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_resume_refuses_what_would_be_another_run():
    run_until(make_recipe(), 2)
    assert "another model.n_embd (16 then, 32 now)" in resume_error(model={**MODEL, "n_embd": 32})
    assert "another seed (0 then, 1 now)" in resume_error(seed=1)
    assert "another seq_len (16 then, 8 now)" in resume_error(seq_len=8)
    events = []
    start(make_recipe(steps=3, save={"every": 1}), resume=True, events=events)
    assert next(e for e in events if isinstance(e, Resumed)).changed == ("save.every", "save.keep", "steps")
    assert "is at step 3 of 3: the run is over; raise steps" in resume_error(steps=3)


def test_resume_of_a_folder_without_a_run_leaves_no_trace():
    with pytest.raises(ResumeError, match="has no checkpoint to resume from"):
        start(make_recipe(run_folder="deep/new"), resume=True)
    assert not Path("deep").exists()


def test_no_write_access_is_found_before_anything_long(monkeypatch):
    Path("occupied").write_text("a file")
    events = []
    with pytest.raises(RecipeError, match=r"cannot write to run_folder occupied/run .*; set run_folder="):
        start(make_recipe(run_folder="occupied/run"), events=events)
    assert not events


def test_metrics_of_updates_to_be_redone_are_dropped():
    start(make_recipe(run_folder="whole"))
    run_until(make_recipe(), 3)
    with Path("run/metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 1.0}\n{"step": 5, "lo')
    start(make_recipe(), resume=True)
    assert losses("run") == losses("whole")


HALF = {"precision": "fp16", "loss_scale": {"init_scale": 2.0**40, "growth_interval": 3}}


def in_half(recipe, **options):
    scale = recipe.loss_scale.loss_scale()
    return train(
        recipe,
        Strategy(2, 2, "fp16", ("keep", "keep"), loss_scale=scale),
        recipe_workload(recipe),
        CPU,
        **options,
    )


@pytest.mark.parametrize("per_block", [False, True])
def test_an_fp16_run_goes_on_to_the_bit_with_its_scale(per_block: bool):
    """MP-05. Begins with skips at 2**40, and is interrupted among them and after them."""
    half = {**HALF, "loss_scale": {**HALF["loss_scale"], "per_block": per_block}}
    in_half(make_recipe(run_folder="whole", steps=40, **half))
    recipe = make_recipe(run_folder="parts", steps=40, **half)
    in_half(recipe, on_event=stop_after(5))
    assert read_state(list_checkpoints(Path("parts/checkpoints"))[-1]).loss_scaling["skips_in_a_row"] == 5
    in_half(recipe, on_event=stop_after(33), resume=True)
    report = in_half(recipe, resume=True)
    assert report.steps == 40
    assert 5 < report.skipped_steps < 33

    def lines(folder):
        keys = ("step", "loss", "loss_scale", "skipped", "learning_rate", "held_out_loss", "underflow_with_one")
        return [tuple(line.get(key) for key in keys) for line in read_metrics(Path(folder))]

    assert lines("parts") == lines("whole")
    assert saved_bytes("parts") == saved_bytes("whole")
    states = [read_state(list_checkpoints(Path(f"{name}/checkpoints"))[-1]) for name in ("parts", "whole")]
    assert states[0].loss_scaling == states[1].loss_scaling
    assert states[0].skipped_steps == report.skipped_steps
    evaluated = [line for line in read_metrics(Path("whole")) if "held_out_loss" in line]
    assert all(("underflow_with_blocks" in line) == per_block for line in evaluated)


def test_the_schedule_stands_still_while_steps_are_skipped():
    """GA-05: a warm-up of 10 takes 10 updates, however many were skipped before."""
    recipe = make_recipe(steps=40, schedule={"warmup_steps": 10, "min_ratio": 0.5}, save={"every": 50}, **HALF)
    report = in_half(recipe)
    updates = [line for line in read_metrics(Path("run")) if "loss" in line]
    first = next(index for index, line in enumerate(updates) if not line["skipped"])
    assert report.skipped_steps >= first > 10
    assert [line["learning_rate"] for line in updates[: first + 1]] == [1e-3] * (first + 1)
    taken = [line["learning_rate"] for line in updates if not line["skipped"]]
    assert taken[:10] == pytest.approx([1e-2 * (update + 1) / 10 for update in range(10)], rel=1e-12)
    scales = [line["loss_scale"] for line in updates]
    assert scales[:3] == [2.0**40, 2.0**39, 2.0**38]
    assert len(taken) == 40 - report.skipped_steps
    state = load_file(report.checkpoint / "optimizer.safetensors")
    assert {value.item() for name, value in state.items() if name.startswith("step.")} == {len(taken)}


def test_a_run_that_only_skips_ends_with_the_module_that_overflows(monkeypatch):
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    forward = GPT2MLP.forward
    monkeypatch.setattr(GPT2MLP, "forward", lambda self, hidden_states: forward(self, hidden_states) * 1e9)
    recipe = make_recipe(precision="fp16", loss_scale={"max_skips": 3})
    match = (
        r"3 steps in a row overflowed and were skipped, the last at loss scale 16384, step 3: values of "
        r"transformer\.h\.0\.mlp are the first that are not finite, in forward .*; set precision: bf16"
    )
    with pytest.raises(TrainfitError, match=match):
        in_half(recipe)
