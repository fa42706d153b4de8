"""trainfit ask and plan --compare, through the command line: documented keys, and tables that name the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainfit.cli.main import main

CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
STEP = {"strategy", "seq_len", "tokens_per_step", "predicted", "allowed_bytes", "fits"}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path / "config.json")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_sequence_and_its_keys(model: str, capsys: pytest.CaptureFixture[str]):
    found = answer(capsys, "ask", "sequence", model, "--device", "cpu", "--memory", "1GiB")
    assert found.keys() == {"seq_len", "granularity", "found", "next", "model", "device", "devices", "notes"}
    assert (found["seq_len"], found["next"]) == (64, None)
    assert found["found"].keys() == STEP
    assert main(["ask", "sequence", model, "--device", "cpu", "--memory", "1GiB"]) == 0
    assert "all positions that the model has" in capsys.readouterr().out


def test_batch_and_its_keys(model: str, capsys: pytest.CaptureFixture[str]):
    question = [
        "ask",
        "batch",
        model,
        "--device",
        "cpu",
        "--seq-len",
        "64",
        "--memory",
        "2MB",
        "--policy",
        "torchtitan",
    ]
    found = answer(capsys, *question)
    assert [each["way"] for each in found["batches"]] == ["plain", "torchtitan", "leanest"]
    sizes = [each["micro_batch_size"] for each in found["batches"]]
    assert 0 < sizes[0] < sizes[1] < sizes[2]
    assert all(each["found"]["fits"] > each["next"]["fits"] for each in found["batches"])


def test_savings_and_devices_and_their_keys(model: str, capsys: pytest.CaptureFixture[str]):
    found = answer(capsys, "ask", "savings", model, "--device", "h100", "--seq-len", "64", "--micro-batch", "2")
    assert found["plain"].keys() == STEP
    assert found["savings"][0].keys() == {"change", "saved_bytes", "slowdown", "accuracy", "why", "step"}
    few = answer(capsys, "ask", "devices", model, "--device", "h100", "--seq-len", "64")
    assert (few["devices"], few["fewer"]) == (1, None)


def test_compare_adds_policies_to_a_plan(model: str, capsys: pytest.CaptureFixture[str]):
    step = ("--device", "cpu", "--seq-len", "64", "--tokens-per-step", "256", "--memory", "1GiB")
    found = answer(capsys, "plan", model, *step, "--policy", "torchtitan", "--policy", "huggingface")
    rows = {row["policy"]: row for row in found["policies"]}
    assert rows.keys() == {"trainfit", "torchtitan", "huggingface"}
    assert rows["huggingface"]["tiers"] == ["full", "full"]
    assert rows["trainfit"]["peak_bytes"] == found["chosen"]["predicted"]["peak_bytes"]
    keys = {"policy", "words", "tiers", "peak_bytes", "step_seconds", "fits", "slowdown", "why"}
    assert all(row.keys() == keys for row in rows.values())
    assert "policies" not in answer(capsys, "plan", model, *step)
