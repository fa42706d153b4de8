"""trainfit train under torchrun: the same run on any number of processes, resumed on any other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

from trainfit.train import read_metrics

RECIPE = """\
model: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
        num_key_value_heads: 2, max_position_embeddings: 64, tie_word_embeddings: true}
data: {paths: text, tokenizer: {vocab_size: 300}, held_out_fraction: 0.1}
seq_len: 16
tokens_per_step: 112
steps: 6
evaluation: {every: 3, batches: 1}
save: {every: 3, keep: 9}
run_folder: run
"""
# One after another would take longer than all together; a rank is one thread.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "text").mkdir()
    for number in range(25):
        (folder / "text" / f"{number}.txt").write_text(f"file {number}: " + f"{number * 7} and {number * 3}; " * 20)
    return folder


def train(folder: Path, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "trainfit"]
    if ranks > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        launcher += ["-m", "trainfit"]
    command = [*launcher, "train", "recipe.yaml", *arguments]
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )


def losses(folder: Path) -> dict[int, float]:
    return {int(line["step"]): line["loss"] for line in read_metrics(folder / "run") if "loss" in line}


def held_out(folder: Path) -> list[float]:
    return [line["held_out_loss"] for line in read_metrics(folder / "run") if "held_out_loss" in line]


@pytest.fixture(scope="module")
def alone(template: Path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    shutil.copytree(template, folder)
    done = train(folder, 1)
    assert done.returncode == 0, done.stderr
    return folder


LAUNCHES = {
    "2-stage-chosen": (2, ()),
    "2-stage-3": (2, ("zero.stage=3",)),
    "2-pipeline": (2, ("mesh={pipeline: 2}",)),
    "4-tensor-by-shard": (4, ("mesh={tensor: 2, shard: 2}", "zero.stage=2")),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_every_launch_trains_the_same(name: str, template: Path, alone: Path, tmp_path: Path):
    """7 sequences a step: shares are unequal, and the last micro batches of some ranks are empty."""
    ranks, arguments = LAUNCHES[name]
    folder = tmp_path / "copy"
    shutil.copytree(template, folder)
    done = train(folder, ranks, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("held-out loss") == 3  # after steps 3 and 6 and in the summary, by rank 0 alone
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-5)
    assert held_out(folder) == pytest.approx(held_out(alone), rel=1e-5)
    mesh = json.loads((folder / "run" / "plan.json").read_text())["chosen"]["strategy"]["mesh"]
    assert prod(mesh.values()) == ranks


def test_a_run_of_four_goes_on_with_two_with_another_two_and_with_one(template: Path, alone: Path, tmp_path: Path):
    folder = tmp_path / "copy"
    shutil.copytree(template, folder)
    assert train(folder, 4, "zero.stage=3").returncode == 0
    for ranks, arguments in ((2, ()), (2, ("mesh={tensor: 2}",)), (1, ())):
        shutil.rmtree(folder / "run" / "checkpoints" / "step-00000006")
        (folder / "run" / "summary.json").unlink()
        done = train(folder, ranks, "--resume", *arguments)
        assert done.returncode == 0, done.stderr
        assert losses(folder) == pytest.approx(losses(alone), rel=1e-5)
        mesh = json.loads((folder / "run" / "plan.json").read_text())["chosen"]["strategy"]["mesh"]
        assert prod(mesh.values()) == ranks
        assert mesh["tensor"] == (2 if arguments else 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("mesh={shard: 4}",), "mesh has 4 devices"),
        (("memory=100kiB",), "does not fit"),
        (("seq_len=100000",), "100000"),
        (("mesh={pipeline: 2}", "tokens_per_step=16"), "1 sequences for each pipeline of 2 stages"),
    ],
)
def test_bad_input_is_said_once_whatever_the_number_of_ranks(arguments, words, template: Path, tmp_path: Path):
    folder = tmp_path / "copy"
    shutil.copytree(template, folder)
    done = train(folder, 2, *arguments)
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(ours) == 1, done.stderr
    assert words in ours[0]
    assert not (folder / "run" / "checkpoints").exists()


def test_ranks_that_read_other_recipes_are_refused(template: Path, tmp_path: Path):
    """As machines with a copy each may."""
    folder = tmp_path / "copy"
    shutil.copytree(template, folder)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    command = f"exec {sys.executable} -m trainfit train recipe.yaml optimizer.learning_rate=$((RANK + 1))e-4"
    done = subprocess.run(
        [*launcher, "bash", "-c", command],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    assert "recipe.yaml says something else to rank 1 than to rank 0" in done.stderr
