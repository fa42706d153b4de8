"""Bad input: exit code 2, one line with the next move, nothing on stdout, no files left."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import trainfit.cli.main as cli
from trainfit.cli.failure import explain
from trainfit.cli.main import main

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
RECIPE = f"""\
model: {json.dumps(LLAMA)}
data: {{paths: text, tokenizer: {{vocab_size: 300}}, held_out_fraction: 0.1}}
seq_len: 16
tokens_per_step: 64
steps: 2
run_folder: run
"""
MODEL = ("config.json", "--seq-len", "32")
TARGET = ("plan", *MODEL, "--device", "cpu", "--tokens-per-step", "64")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRAINFIT_DEBUG", raising=False)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "broken.json").write_text('{"model_type": "llama",')
    (tmp_path / "zero.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 0}))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "broken.yaml").write_text("model: [llama\nseq_len: 3")
    (tmp_path / "a_file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "text").mkdir()
    for number in range(12):
        (tmp_path / "text" / f"{number}.txt").write_text(f"file {number}: " + f"{number * 7} and {number * 3}; " * 20)
    return tmp_path


CASES = [
    # the command line itself
    (["plann"], "no such command 'plann'"),
    (["rehearse"], "missing argument 'MODEL'"),
    (["rehearse", *MODEL, "--micro-bach", "2"], "did you mean --micro-batch"),
    (["rehearse", *MODEL, "--micro-batch", "two"], "--micro-batch"),
    (["rehearse", *MODEL, "--device"], "--device"),
    (["devices", "h100"], "unexpected extra argument"),
    # models
    (["rehearse", "llama-2-7x", "--seq-len", "32"], "llama-2-7b"),
    (["rehearse", "none.json", "--seq-len", "32"], "no file none.json"),
    (["rehearse", "broken.json", "--seq-len", "32"], "line 1"),
    (["rehearse", "zero.json", "--seq-len", "32"], "num_hidden_layers"),
    (["rehearse", "empty", "--seq-len", "32"], "no "),
    (["rehearse", "config.json"], "--seq-len is missing"),
    # sizes
    (["rehearse", "config.json", "--seq-len", "129"], "128"),
    (["rehearse", "config.json", "--seq-len", "-5"], "--seq-len is -5"),
    (["rehearse", "config.json", "--seq-len", "999999999"], "--seq-len is 999999999"),
    (["rehearse", *MODEL, "--micro-batch", "0"], "--micro-batch is 0"),
    (["rehearse", *MODEL, "--micro-batch", "999999999999"], "--micro-batch is 999999999999"),
    (["rehearse", *MODEL, "--accumulation", "-1"], "--accumulation is -1"),
    (["rehearse", *MODEL, "--loss-chunks", "0"], "--loss-chunks is '0'"),
    (["rehearse", *MODEL, "--loss-chunks", "33"], "32 tokens"),
    (["measure", *MODEL, "--steps", "-1"], "--steps is -1"),
    (["verify", *MODEL, "--steps", "0"], "--steps is 0"),
    (["plan", *MODEL, "--device", "cpu", "--tokens-per-step", "64", "--devices", "0"], "--devices is 0"),
    # choices
    (["rehearse", *MODEL, "--activation", "ful"], "pointwise"),
    (["rehearse", *MODEL, "--activation", "3*full"], "the model has 2"),
    (["rehearse", *MODEL, "--activation", "keep_int9,keep"], "did you mean keep_int8"),
    (["rehearse", *MODEL, "--activation", "every:0"], "every:1"),
    (["rehearse", "recipe.yaml", "--activation", "full"], "--micro-batch"),
    (["rehearse", *MODEL, "--activation", "torchtitn"], "did you mean torchtitan"),
    (["rehearse", *MODEL, "--activation", "cost"], "depends on what tiers save and cost"),
    (["rehearse", *MODEL, "--activation", "megatron:uniform:2"], "use megatron:uniform:1"),
    ([*TARGET, "--policy", "memry"], "did you mean memory"),
    # questions
    (["ask", "sequense", "config.json"], "no such command 'sequense'"),
    (["ask", "batch", "config.json", "--device", "cpu"], "--seq-len is missing"),
    (["ask", "batch", *MODEL, "--device", "cpu", "--policy", "x"], "unknown activation policy 'x'"),
    (["ask", "sequence", "config.json", "--device", "cpu", "--granularity", "0"], "--granularity is 0"),
    (
        ["ask", "sequence", "config.json", "--device", "cpu", "--memory", "100kB"],
        "not even 128 tokens fit: micro batch 1",
    ),
    (["ask", "devices", *MODEL, "--device", "h100", "--at-most", "0"], "--at-most is 0"),
    (["ask", "savings", *MODEL, "--device", "h10"], "h100"),
    (["ask", "cards", *MODEL, "--device", "h100"], "give two or more"),
    (["rehearse", *MODEL, "--precision", "fp8"], "bf16"),
    (["rehearse", *MODEL, "--precision", "bf16", "--device", "ascend-910a"], "ascend-910a has no bf16"),
    ([*TARGET, "--may-change", "model"], "precision"),
    # meshes
    (["rehearse", *MODEL, "--devices", "0"], "--devices is 0"),
    (["rehearse", *MODEL, "--devices", "4", "--zero-stage", "4"], "--zero-stage is 4"),
    (["rehearse", *MODEL, "--zero-stage", "3"], "has 1 device to share over"),
    (["rehearse", *MODEL, "--devices", "8", "--tensor", "3"], "give 6 or 9"),
    (["rehearse", *MODEL, "--devices", "2", "--tensor", "4"], "--tensor is 4"),
    (["rehearse", *MODEL, "--devices", "8", "--zero-stage", "2", "--replicate", "3"], "does not divide the 8 devices"),
    (["rehearse", *MODEL, "--devices", "8", "--zero-stage", "2", "--replicate", "8"], "replicate 8)"),
    (["rehearse", *MODEL, "--devices", "8", "--replicate", "2"], "makes 8 replicas"),
    (["rehearse", *MODEL, "--devices", "8", "--rank", "8"], "--rank is 8"),
    (["rehearse", "recipe.yaml", "--devices", "8"], "--micro-batch"),
    (["verify", *MODEL, "--devices", "2"], "--devices"),
    (
        ["measure", "recipe.yaml", "--devices", "2", "--zero-stage", "2"],
        "a recipe with --devices 2 --zero-stage 2 lacks --micro-batch; give one, such as --micro-batch 1 "
        "(`trainfit plan recipe.yaml --devices 2` finds the fastest)",
    ),
    # devices
    (["rehearse", *MODEL, "--device", "h10"], "h100"),
    (["plan", *MODEL, "--device", "ascend-910b9", "--tokens-per-step", "64"], "ascend-910b"),
    (["measure", *MODEL, "--device", "ascend-910b3"], "ascend-910b3 is not in this machine"),
    (["measure", "llama-2-70b", "--seq-len", "128", "--device", "cpu"], "free"),
    # budgets
    ([*TARGET, "--memory", "much"], "60GiB"),
    ([*TARGET, "--memory", "0"], "at least 1"),
    ([*TARGET, "--memory", "1"], "does not fit"),
    ([*TARGET, "--memory", "-1GiB"], "is not a size"),
    ([*TARGET, "--memory", "900TiB"], "is more than"),
    (["plan", *MODEL, "--device", "cpu"], "--tokens-per-step is missing"),
    ([*TARGET, "--offload", "host"], "set offload.place: disk"),
    ([*TARGET, "--cast", "whole"], "unknown cast 'whole'"),
    ([*TARGET, "--cast", "block"], "set precision: bf16"),
    ([*TARGET, "--optimizer", "moments=int8"], "states=int8"),
    (["plan", *MODEL, "--device", "cpu", "--tokens-per-step", "many"], "4M"),
    # recipes
    (["train"], "missing argument 'RECIPE'"),
    (["train", "recipee.yaml"], "recipe.yaml"),
    (["train", "broken.yaml"], "line"),
    (["train", "recipe.yaml", "steps"], "key=value"),
    (["train", "recipe.yaml", "seqlen=16"], "seq_len"),
    (["train", "recipe.yaml", "memory=100kiB"], "does not fit"),
    (["train", "recipe.yaml", "per_batch={treshold: 0.9}"], "did you mean per_batch.threshold"),
    (["train", "recipe.yaml", "offload={place: disk, budgt: 1GiB}"], "did you mean offload.budget"),
    (
        ["train", "recipe.yaml", "offload={place: disk, directory: nowhere}"],
        "offload.directory nowhere takes no file (No such file or directory)",
    ),
    # what trains, and from which weights
    (["train", "recipe.yaml", "adapter={targets: [q_prj]}"], "did you mean q_proj"),
    (["train", "recipe.yaml", "adapter={rank: 0}"], "adapter.rank is 0"),
    (["train", "recipe.yaml", "freeze=['lm_haed*']"], "near names are lm_head.weight"),
    (["train", "recipe.yaml", "train_only=nothing"], "names no parameter"),
    (["train", "recipe.yaml", "freeze='*'"], "nothing to train"),
    (["train", "recipe.yaml", "weights=nowhere"], "no weights at nowhere"),
    (["train", "recipe.yaml", "weights=empty"], "has no model.safetensors"),
    (["train", "recipe.yaml", "frozen_weights=int8"], "every parameter of"),
    (["train", "recipe.yaml", "memory=900TiB"], "is more than"),
    (["train", "recipe.yaml", "seq_len=256", "tokens_per_step=256"], "128"),
    (["train", "recipe.yaml", "device=abacus"], "abacus"),
    (["train", "recipe.yaml", "data.paths=short.txt"], "too short"),
    (["train", "recipe.yaml", "data.paths=nowhere"], "nowhere"),
    (["train", "recipe.yaml", "run_folder=a_file/run"], "a_file takes no new folder: Not a directory); set run_folder"),
    (["train", "recipe.yaml", "run_folder=/proc/foo"], "/proc/foo (/proc takes no new folder: No such"),
    (["train", "recipe.yaml", "mesh.data=2"], "unknown key mesh.data; set mesh.replicate"),
    (["train", "recipe.yaml", "zero.reshard_size=2"], "zero.stage is not set; set zero.stage=3 or leave"),
    (["train", "recipe.yaml", "zero={stage: 2, reshard_size: 4}"], "zero.stage is 2; set zero.stage=3 or leave"),
    (["train", "recipe.yaml", "--resume"], "no checkpoint"),
    (["train", "recipe.yaml", "--plan", "none.json"], "no plan at none.json"),
    (["train", "recipe.yaml", "--plan", "broken.json"], "cannot read plan"),
    (["train", "recipe.yaml", "--plan", "config.json"], "plan"),
    (["measure", "nowhere.yaml"], "nowhere.yaml"),
    (["verify", "recipe.yaml", "--seq-len", "200"], "128"),
]


def everything(folder: Path) -> set[tuple[str, int]]:
    # A folder's own time changes when a file comes and goes, as the probe for write access does.
    return {(str(path), 0 if path.is_dir() else path.stat().st_mtime_ns) for path in folder.rglob("*")}


def refuse(arguments, capsys, folder) -> str:
    before = everything(folder)
    code = main(arguments)
    out, err = capsys.readouterr()
    assert code == 2, err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert "Traceback" not in err
    assert everything(folder) == before
    assert not out or arguments[0] in (
        "plan",
        "train",
    )  # the plan may be printed before training finds its text wanting
    return err


@pytest.mark.parametrize(("arguments", "says"), CASES, ids=[" ".join(arguments) for arguments, _ in CASES])
def test_bad_input_is_one_line(arguments, says, capsys, folder):
    assert says in refuse(arguments, capsys, folder)


def test_json_does_not_change_how_errors_look(capsys, folder):
    assert refuse(["rehearse", *MODEL, "--device", "h10", "--json"], capsys, folder).startswith("error: unknown device")


def test_resume_from_the_run_of_another_model(capsys, folder):
    assert main(["train", "recipe.yaml"]) == 0
    capsys.readouterr()
    other = ["train", "recipe.yaml", "--resume", "steps=4", "model.num_hidden_layers=3"]
    assert "num_hidden_layers" in refuse(other, capsys, folder)


def test_plan_of_another_model_device_or_size(capsys, folder):
    assert main(["plan", "recipe.yaml", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    (folder / "plan.json").write_text(json.dumps(plan))
    train = ["train", "recipe.yaml", "--plan", "plan.json"]
    assert "sequences a step 4" in refuse([*train, "tokens_per_step=128"], capsys, folder)
    assert f"model {plan['model']}" in refuse([*train, "model.num_hidden_layers=3"], capsys, folder)
    assert "model" in refuse([*train, "model=gpt2"], capsys, folder)
    assert "raise memory" in refuse([*train, "memory=100kiB"], capsys, folder)
    peak = plan["chosen"]["predicted"]["peak_bytes"]  # a budget of so many bytes allows fewer
    assert "raise memory" in refuse([*train, f"memory={peak}"], capsys, folder)
    (folder / "plan.json").write_text(json.dumps({**plan, "device": "h100"}))
    assert "hash" in refuse(train, capsys, folder)  # a plan that was edited is no plan


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_write_access(capsys, folder):
    (folder / "empty").chmod(0o500)
    assert "cannot write" in refuse(["train", "recipe.yaml", "run_folder=empty/run"], capsys, folder)


# ---- failures that are not the user's input ------------------------------------------------------------------------


def fail_with(error, monkeypatch, capsys):
    def raise_it(arguments):
        raise error

    monkeypatch.setattr(cli, "_invoke", raise_it)
    code = main(["devices"])
    return code, capsys.readouterr().err


def test_ctrl_c_is_130_and_one_line(monkeypatch, capsys):
    assert fail_with(KeyboardInterrupt(), monkeypatch, capsys) == (130, "error: interrupted\n")


def test_a_bug_is_one_line_with_a_way_to_see_more(monkeypatch, capsys):
    code, err = fail_with(ValueError("first\nsecond"), monkeypatch, capsys)
    assert code == 1
    assert err == "error: ValueError: first second; this is a bug: TRAINFIT_DEBUG=1 shows where\n"
    monkeypatch.setenv("TRAINFIT_DEBUG", "1")
    assert "Traceback" in fail_with(ValueError("first"), monkeypatch, capsys)[1]


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (PermissionError(13, "Permission denied", "/there"), 2, "/there: Permission denied"),
        (OSError(28, "No space left on device", "/full"), 1, "free some space"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), 1, "lower the micro batch"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."), 1, "micro batch"),
        (RuntimeError("NPU out of memory. Tried to allocate 2 GiB"), 1, "lower the micro batch"),
        (MemoryError(), 1, "lower the micro batch"),
    ],
)
def test_what_the_system_refuses(error, code, says):
    found, line = explain(error)
    assert found == code
    assert says in line
    assert "bug" not in line
