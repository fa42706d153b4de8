"""Kill -9 at random moments: python benchmarks/kill_ranks.py [kills] [ranks]

A run under torchrun loses one rank again and again, half of the times while a checkpoint is being written; torchrun
starts it anew, trainfit goes on from the last whole checkpoint. In the end its weights and moments must be those of a
run that nobody disturbed, to the bit. Exits with 1 where they are not.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

RECIPE = """\
model: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 4, num_attention_heads: 2,
        num_key_value_heads: 2, max_position_embeddings: 64, tie_word_embeddings: true}
data: {paths: text, tokenizer: {vocab_size: 300}, held_out_fraction: 0.1}
seq_len: 32
tokens_per_step: 256
steps: 60
evaluation: {every: 60, batches: 1}
save: {every: 4, keep: 2}
zero: {stage: 3}
run_folder: run
"""
KILLS_OF_A_RUN = 5
PATIENCE_SECONDS = 600.0


def write_recipe(folder: Path) -> None:
    (folder / "text").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE)
    for number in range(40):
        words = " ".join(f"{number * 7 + k} and {number * k}" for k in range(60))
        (folder / "text" / f"{number}.txt").write_text(f"file {number}: {words}")


def start(folder: Path, ranks: int, restarts: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, "--max-restarts", str(restarts), "-m", "trainfit", "train", "recipe.yaml"]
    log = (folder / "log.txt").open("wb")
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)


def ranks_of(launcher: subprocess.Popen[bytes]) -> list[int]:
    """Process ids of its ranks."""
    try:
        return [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]
    except OSError:
        return []


def newest(folder: Path) -> int:
    """The step of the last whole checkpoint; 0 for none."""
    return max((int(path.name[5:]) for path in (folder / "run" / "checkpoints").glob("step-*")), default=0)


def kill_one(
    folder: Path, launcher: subprocess.Popen[bytes], random_numbers: random.Random, *, while_saving: bool
) -> str:
    """Wait for a moment of the run, kill a rank, and say when that was; "" if the run ended before."""
    progress = newest(folder)
    target = progress + random_numbers.choice((0, 4, 8))
    pause = random_numbers.uniform(0.0, 0.6)
    while launcher.poll() is None:
        saving = any((folder / "run" / "checkpoints").glob(".partial-*"))
        if newest(folder) >= target and (saving or not while_saving):
            if not while_saving:
                time.sleep(pause)
            if alive := ranks_of(launcher):
                os.kill(random_numbers.choice(alive), signal.SIGKILL)
                return f"after step {newest(folder)}{', while saving' if saving else ''}"
        time.sleep(0.0005)
    return ""


def wait_for_new_ranks(launcher: subprocess.Popen[bytes], old: list[int]) -> None:
    while launcher.poll() is None and (not ranks_of(launcher) or set(ranks_of(launcher)) & set(old)):
        time.sleep(0.05)


def content(folder: Path) -> dict[str, bytes]:
    """The last checkpoint's tensors, file by file."""
    checkpoint = folder / "run" / "checkpoints" / f"step-{newest(folder):08d}"
    return {path.name: path.read_bytes() for path in sorted(checkpoint.glob("*.safetensors"))}


def disturbed_run(template: Path, folder: Path, ranks: int, kills: int, seed: int) -> tuple[int, bool]:
    """Kills that hit, and whether the run came to its end."""
    shutil.copytree(template, folder)
    random_numbers = random.Random(seed)
    launcher = start(folder, ranks, kills + 1)
    hits = 0
    for number in range(kills):
        before = ranks_of(launcher)
        moment = kill_one(folder, launcher, random_numbers, while_saving=number % 2 == 1)
        if not moment:
            break
        hits += 1
        print(f"  killed a rank {moment}", flush=True)
        wait_for_new_ranks(launcher, before or ranks_of(launcher))
    return hits, launcher.wait(PATIENCE_SECONDS) == 0


def main(kills: int, ranks: int) -> int:
    failed = hits = run = 0
    with TemporaryDirectory() as scratch:
        template, alone = Path(scratch) / "template", Path(scratch) / "undisturbed"
        write_recipe(template)
        shutil.copytree(template, alone)
        if start(alone, ranks, 0).wait(PATIENCE_SECONDS):
            print((alone / "log.txt").read_text()[-2000:])
            return 1
        expected = content(alone)
        while hits < kills:
            run += 1
            folder = Path(scratch) / f"run{run}"
            print(f"run {run}", flush=True)
            found, ended = disturbed_run(template, folder, ranks, min(KILLS_OF_A_RUN, kills - hits), seed=run)
            hits += found
            same = ended and newest(folder) == newest(alone) and content(folder) == expected
            failed += not same
            print(f"run {run}: {found} kills, {'equal to the bit' if same else 'NOT EQUAL'}", flush=True)
            if not same:
                print((folder / "log.txt").read_text()[-2000:])
            if not found:
                break
    print(f"{hits} kills of one of {ranks} ranks in {run} runs, {failed} runs ended otherwise than the undisturbed one")
    return int(failed > 0 or hits < kills)


if __name__ == "__main__":
    sys.exit(main(*(int(argument) for argument in (*sys.argv[1:3], *("20", "2")[len(sys.argv) - 1 :]))))
