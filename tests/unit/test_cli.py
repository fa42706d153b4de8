"""The verbs: their JSON, their exit codes, and what they print, on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trainfit.cli.main import main
from trainfit.cli.options import StepOptions
from trainfit.cli.setup import open_recipe, prepare, time_notes
from trainfit.hardware import Figure, Hardware, catalogue, find_device
from trainfit.techniques.chunked_loss import auto_chunks

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
VERBS = ("plan", "explain", "rehearse", "train", "measure", "verify", "export", "devices")
PROFILE_KEYS = {"peak_bytes", "peak_phase", "phases", "categories", "resident_bytes", "step_seconds"}
STEP = ("--seq-len", "32", "--micro-batch", "2")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def run_json(capsys, *arguments: str, code: int = 0) -> dict:
    assert main([*arguments, "--json"]) == code
    out, err = capsys.readouterr()
    assert err.count("\n") == (1 if code else 0)
    return json.loads(out)


def run_text(capsys, *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def flat(text: str) -> str:
    """Without the breaks of lines."""
    return " ".join(text.split())


@pytest.mark.parametrize("arguments", [["--help"], *([verb, "--help"] for verb in VERBS)], ids=" ".join)
def test_help_imports_no_torch(arguments):
    code = (
        "import sys; from trainfit.cli.main import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules); assert not heavy, heavy; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage: trainfit" in done.stdout


def test_help_lists_all_policies():
    from trainfit.cli.options import POLICY_NAMES
    from trainfit.plan.policies import policy_names

    assert ", ".join(policy_names()) == POLICY_NAMES


def test_recompute_ahead_is_the_recipes_where_no_option_says_it(folder):
    (folder / "recipe.yaml").write_text(
        "model: config.json\ndata: {paths: text}\nseq_len: 32\ntokens_per_step: 64\nsteps: 1\nrun_folder: run\n"
        "recompute_ahead: 1\n"
    )
    step = StepOptions("recipe.yaml", micro_batch=2, activation="full")
    recipe, hardware = open_recipe("recipe.yaml"), find_device("cpu")
    assert prepare(step, recipe, hardware, print).strategy.recompute_ahead == 1
    assert prepare(replace(step, recompute_ahead=0), recipe, hardware, print).strategy.recompute_ahead == 0
    assert prepare(replace(step, model="config.json", seq_len=32), None, hardware, print).strategy.recompute_ahead == 0


def test_python_m_trainfit_is_the_command():
    done = subprocess.run([sys.executable, "-m", "trainfit", "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("trainfit ")


def test_rehearse_has_the_keys_and_adds_up(capsys):
    profile = run_json(capsys, "rehearse", "config.json", *STEP)
    assert profile.keys() >= PROFILE_KEYS
    assert sum(profile["categories"].values()) == profile["peak_bytes"] == max(profile["phases"].values())
    assert profile["peak_phase"] in profile["phases"]


def test_rehearse_follows_its_options(capsys):
    plain = run_json(capsys, "rehearse", "config.json", *STEP)
    options = ("--activation", "1*full,2*pointwise", "--loss-chunks", "auto", "--accumulation", "3")
    other = run_json(capsys, "rehearse", "config.json", *STEP, *options, "--device", "h100", "--precision", "auto")
    assert other["strategy"]["tiers"] == ["full", "pointwise", "pointwise"]
    assert other["strategy"]["accumulation_steps"] == 3
    assert other["strategy"]["loss_chunks"] == auto_chunks(2 * 32, LLAMA["vocab_size"], LLAMA["hidden_size"]) == 1
    assert (plain["strategy"]["precision"], other["strategy"]["precision"]) == ("fp32", "bf16")
    assert other["device"] == "h100"
    assert {"precision auto took bf16 on h100", "loss chunks auto took 1"} <= set(other["notes"])


def test_rehearse_says_what_compiling_takes(capsys):
    words = "blocks are compiled: the first step takes about"
    assert words in flat(run_text(capsys, "rehearse", "config.json", *STEP, "--compile", "block"))
    assert words not in flat(run_text(capsys, "rehearse", "config.json", *STEP))


def test_rehearse_takes_a_mesh(capsys):
    options = ("--devices", "8", "--zero-stage", "3", "--replicate", "2", "--accumulation", "2", "--device", "h100")
    profile = run_json(capsys, "rehearse", "config.json", *STEP, *options, "--rank", "5")
    assert profile["strategy"]["mesh"] == {"pipeline": 1, "replicate": 2, "shard": 4, "tensor": 1}
    assert profile["strategy"]["zero"]["stage"] == 3
    assert profile["rank"] == 5
    assert profile["collectives"]["reduce_scatter"]["count"] == 2 * (3 + 1)
    assert profile["collectives"]["all_gather"]["group_sizes"] == [4]
    assert 0 < profile["exposed_communication_seconds"] <= profile["communication_seconds"]
    text = run_text(capsys, "rehearse", "config.json", *STEP, *options)
    for words in ("replicate 2 x shard 4, ZeRO 3", "Peak of rank 0", "reduce_scatter", "not hidden"):
        assert words in text
    replicas = run_json(capsys, "rehearse", "config.json", *STEP, "--devices", "4")
    assert replicas["strategy"]["mesh"]["replicate"] == 4
    assert replicas["strategy"]["zero"]["stage"] == 0


def test_measure_starts_its_ranks(capsys):
    options = ("--devices", "2", "--zero-stage", "2", "--steps", "0", "--device", "cpu")
    answer = run_json(capsys, "measure", "config.json", *STEP, *options)
    assert [profile["rank"] for profile in answer["ranks"]] == [0, 1]
    assert answer["measured"]["peak_bytes"] == max(profile["peak_bytes"] for profile in answer["ranks"])
    assert answer["predicted"]["rank"] == answer["measured"]["rank"]
    assert abs(answer["relative_error"]) < 0.02


def test_auto_precision_on_a_cpu_is_fp32(capsys):
    profile = run_json(capsys, "rehearse", "config.json", *STEP, "--device", "cpu", "--precision", "auto")
    assert profile["strategy"]["precision"] == "fp32"


def test_measure_agrees_with_what_was_predicted(capsys):
    answer = run_json(capsys, "measure", "config.json", *STEP, "--steps", "1", "--device", "cpu")
    assert answer["predicted"].keys() >= PROFILE_KEYS
    assert answer["measured"].keys() >= PROFILE_KEYS
    assert answer["relative_error"] == answer["predicted"]["peak_bytes"] / answer["measured"]["peak_bytes"] - 1
    assert abs(answer["relative_error"]) < 0.01


def test_measure_alone_writes_nothing_but_json():
    """In a process of its own: what the profiler's C++ writes would pass by capsys."""
    command = [sys.executable, "-m", "trainfit", "measure", "config.json", *STEP, "--steps", "0", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == ""
    assert json.loads(done.stdout)["relative_error"] is not None


def test_plan_that_fits(capsys):
    target = ("--device", "h100", "--seq-len", "32", "--tokens-per-step", "1000", "--memory", "1GiB")
    plan = run_json(capsys, "plan", "config.json", *target)
    assert plan.keys() >= {"fits", "budget_bytes", "chosen", "alternatives", "reason", "hash"}
    assert plan["fits"]
    assert plan["budget_bytes"] == 2**30
    strategy, predicted = plan["chosen"]["strategy"], plan["chosen"]["predicted"]
    assert predicted.keys() >= PROFILE_KEYS
    assert strategy["micro_batch_size"] * strategy["accumulation_steps"] == 31  # 1000 / 32 rounded to the nearest
    assert any("1000 tokens" in note and "992" in note for note in plan["notes"])


def test_plan_takes_the_optimizer_and_the_cast_that_are_asked_for(capsys):
    target = ("--device", "ascend-910a", "--seq-len", "32", "--tokens-per-step", "1000", "--memory", "1GiB")
    asked = ("--precision", "fp16", "--optimizer", "kernel=foreach,states=int8", "--cast", "block")
    strategy = run_json(capsys, "plan", "config.json", *target, *asked)["chosen"]["strategy"]
    assert (strategy["cast"], strategy["precision"]) == ("block", "fp16")
    assert (strategy["optimizer"]["kernel"], strategy["optimizer"]["states"]) == ("foreach", "int8")
    [note] = [note for note in run_json(capsys, "plan", "config.json", *target)["notes"] if "auto" in note]
    assert note == (
        "precision auto took fp32 on ascend-910a, which has no bf16 and computes 62 times as fast with --precision fp16"
    )


def test_an_update_in_backward_can_be_planned_without_clipping(capsys):
    target = ("--device", "h100", "--seq-len", "32", "--tokens-per-step", "32", "--memory", "1GiB")
    asked = ("plan", "config.json", *target, "--optimizer", "update=backward")
    assert main([*asked]) == 2
    assert "max_grad_norm 1 clips by; set max_grad_norm: null (--max-grad-norm none)" in flat(capsys.readouterr().err)
    plan = run_json(capsys, *asked, "--max-grad-norm", "none", "--export", "trl")
    assert plan["chosen"]["strategy"]["optimizer"]["update"] == "backward"
    assert "max_grad_norm: 0.0" in plan["exports"]["trl"]["text"]
    clipped = run_json(capsys, "plan", "config.json", *target, "--max-grad-norm", "0.5", "--export", "trl")
    assert "max_grad_norm: 0.5" in clipped["exports"]["trl"]["text"]


@pytest.mark.parametrize("norm", ["0", "-1", "nan", "inf", "null"])
def test_a_norm_that_clips_nothing_is_none(capsys, norm):
    assert main(["plan", "config.json", "--device", "h100", "--seq-len", "32", "--max-grad-norm", norm]) == 2
    assert f"--max-grad-norm {norm} is no norm to clip by" in flat(capsys.readouterr().err)


def test_plan_that_does_not_fit_is_still_json(capsys):
    target = ("--device", "cpu", "--seq-len", "32", "--tokens-per-step", "64", "--memory", "100kiB")
    assert main(["plan", "config.json", *target, "--json"]) == 2
    out, err = capsys.readouterr()
    plan = json.loads(out)
    assert not plan["fits"]
    assert err == f"error: {plan['reason']}\n"
    assert "KiB" in err


def test_devices_lists_this_machine_and_the_catalogue(capsys):
    rows = run_json(capsys, "devices")["devices"]
    assert [row["device"] for row in rows] == ["this", *(spec.name for spec in catalogue())]
    h100 = next(row for row in rows if row["device"] == "h100")
    assert h100["usable_bytes"] == find_device("h100").usable_bytes
    assert h100["memory_bytes"]["source"]


def test_a_link_that_nobody_looked_up_is_noted():
    """Where there is one; its seconds are no better than its figure."""
    eight = find_device("h100", 8)
    assumed = replace(eight.spec, link_bandwidth=Figure(16e9, "assumed: PCIe 3.0 x16", "low"))
    assert time_notes(replace(eight, spec=assumed)) == ("times of links are from 16 GB/s, assumed: PCIe 3.0 x16",)
    assert time_notes(Hardware(assumed)) == ()
    assert time_notes(eight) == ()


def test_verify_passes_and_says_by_how_much(capsys):
    answer = run_json(capsys, "verify", "config.json", *STEP, "--activation", "every:2", "--loss-chunks", "4")
    assert answer["passed"]
    assert 0 <= answer["gradient_difference"] <= answer["tolerance"]


def test_verify_that_fails_is_exit_code_1(capsys, monkeypatch):
    import trainfit.rehearsal

    honest = trainfit.rehearsal.verify

    def broken(*arguments, **options):
        return replace(honest(*arguments, **options), passed=False, gradient_difference=0.5)

    monkeypatch.setattr(trainfit.rehearsal, "verify", broken)
    assert run_json(capsys, "verify", "config.json", *STEP, code=1)["gradient_difference"] == 0.5


def test_tables_fit_100_columns(capsys):
    step = ("config.json", *STEP, "--activation", "every:2")
    target = ("--device", "cpu", "--seq-len", "32", "--tokens-per-step", "640", "--memory", "3MiB")
    for arguments in (
        ("devices",),
        ("rehearse", *step),
        ("measure", *step, "--steps", "1"),
        ("verify", *step),
        ("plan", "config.json", *target),
    ):
        lines = run_text(capsys, *arguments).splitlines()
        assert max(map(len, lines)) <= 100, arguments


def test_rehearse_prints_peak_and_place(capsys):
    text = run_text(capsys, "rehearse", "config.json", *STEP)
    assert "Peak " in text
    assert "At the peak" in text
    assert "micro batch" in text


def test_the_entry_point_gives_the_exit_code(folder: Path):
    done = subprocess.run([sys.executable, "-m", "trainfit", "rehearse"], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 2
    assert done.stderr == "error: missing argument 'MODEL'; see `trainfit rehearse --help`\n"


def test_a_reader_that_has_gone_is_no_error():
    """As in `trainfit devices | head -1`."""
    for arguments in (["devices"], ["devices", "--json"]):
        process = subprocess.Popen(
            [sys.executable, "-m", "trainfit", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 1


def test_a_plan_of_a_recipe_keeps_its_optimizer(capsys, tmp_path):
    """What `plan --json` writes is what `train --plan` takes."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"""
model: {{model_type: llama, vocab_size: 300, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
         num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 32}}
data: {{paths: text.txt, tokenizer: {{vocab_size: 300}}}}
seq_len: 32
tokens_per_step: 128
memory: 1GiB
steps: 2
precision: bf16
cast: operator
max_grad_norm: null
optimizer: {{weights: bf16_stochastic, states: int8}}
run_folder: {tmp_path / "run"}
"""
    )
    (tmp_path / "text.txt").write_text("all that is said twice is said twice over. " * 400)
    planned = run_json(capsys, "plan", str(recipe))
    optimizer = planned["chosen"]["strategy"]["optimizer"]
    assert (optimizer["weights"], optimizer["states"]) == ("bf16_stochastic", "int8")
    assert planned["target"]["optimizer"] == optimizer
    (tmp_path / "plan.json").write_text(json.dumps(planned))
    assert main(["train", str(recipe), "--plan", str(tmp_path / "plan.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["hash"] == planned["hash"]
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert main(["train", str(recipe), "optimizer.states=fp32", "--plan", str(tmp_path / "plan.json")]) == 2
    assert "the plan's optimizer is" in capsys.readouterr().err


def test_devices_calibrates_and_says_so_from_then_on(capsys, monkeypatch, tmp_path):
    """On a small grid: what is measured is the business of other tests."""
    from trainfit.hardware import microbenchmarks

    small = microbenchmarks.Grids(
        elements=(1, 2**10), matmul=((16, 64),) * 3, lengths=(16,), head_dims=(16,), copies=(2**10,)
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(microbenchmarks, "Grids", lambda: small)
    assert main(["devices", "--calibrate", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "tables in" in err
    row = json.loads(out)["devices"][0]
    assert row["calibration"]["num_threads"] == torch.get_num_threads()
    assert "tables" not in row["calibration"]
    assert row["tflops"]["fp32"]["source"].startswith("measured here on ")
    assert run_json(capsys, "devices")["devices"][0] == row
    (path,) = (tmp_path / "trainfit" / "calibration").glob("*.json")
    rehearsed = run_json(capsys, "rehearse", "gpt2", "--seq-len", "16", "--device", "cpu")
    assert any("calibration, measured here on" in note for note in rehearsed["notes"])
    assert rehearsed["step_seconds_low"] < rehearsed["step_seconds"] < rehearsed["step_seconds_high"]
    assert rehearsed["mfu"]["low"] < rehearsed["mfu"]["high"]
    path.write_text("{")
    assert main(["devices"]) == 2
    assert "devices --calibrate" in capsys.readouterr().err
