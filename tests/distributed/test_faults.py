"""A rank that dies, hangs, fails, skips a module or runs out of data ends the run in seconds, named with its place."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import fault_ranks

# Ranks are forked from a process that has imported everything: starting them takes no time.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "trainfit.step", "trainfit.train.watch"])
KILLED = -signal.SIGKILL


class Outcome:
    """Exit codes (None: it had not ended) and stderr by rank; seconds from when the last rank was ready."""

    def __init__(self, case: str, folder: Path, *, size: int = 2, timeout_seconds: float = 40.0) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        arguments = [(case, rank, size, port, str(folder)) for rank in range(size)]
        processes = [FORKS.Process(target=fault_ranks.run, args=each) for each in arguments]
        for process in processes:
            process.start()
        limit = time.monotonic() + timeout_seconds
        try:
            for process in processes:
                waits = "stopped" not in case or processes.index(process) != int(case.split(" ")[1])
                process.join(max(0.0, limit - time.monotonic()) if waits else 0.0)
            self.codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                process.join(5)
        ready = max(path.stat().st_mtime for path in folder.glob("ready*"))
        self.seconds = time.time() - ready
        self.logs = [(folder / f"stderr{rank}").read_text() for rank in range(size)]
        self.clean = [(folder / f"clean{rank}").exists() for rank in range(size)]

    def verdict(self, rank: int) -> str:
        lines = [line for line in self.logs[rank].splitlines() if line.startswith("trainfit: ")]
        assert len(lines) == 1, self.logs[rank][-3000:]
        return lines[0]


def assert_ended(outcome: Outcome, *, by: dict[int, int | None], within_seconds: float) -> None:
    assert outcome.codes == [by[rank] for rank in sorted(by)], outcome.logs
    assert outcome.seconds < within_seconds
    assert not any(outcome.clean)


@pytest.mark.parametrize("case", ["killed 1 0", "killed 0 3", "stopped 1 3", "stopped 0 2"])
def test_a_rank_that_is_gone_is_named_with_its_last_place(case, tmp_path):
    """Also rank 0, in whose process the store lives: its sockets close when killed and stay open when stopped."""
    fault, gone = case.split()[0], int(case.split()[1])
    outcome = Outcome(case, tmp_path)
    code = KILLED if fault == "killed" else None
    assert_ended(outcome, by={gone: code, 1 - gone: 17}, within_seconds=12)
    line = outcome.verdict(1 - gone)
    assert line.startswith(f"trainfit: nothing heard from rank {gone} for ")
    assert f"last seen: rank {gone} in the forward of blocks.1 (step 3, micro batch 1)" in line


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_dies_while_all_save_is_named(gone, tmp_path):
    """The save's own error, gloo's, is not what the others report: it waits for who finds the rank gone."""
    outcome = Outcome(f"killed_saving {gone} 0", tmp_path)
    assert_ended(outcome, by={gone: KILLED, 1 - gone: 17}, within_seconds=12)
    line = outcome.verdict(1 - gone)
    assert line.startswith(f"trainfit: nothing heard from rank {gone} for ")
    assert f"last seen: rank {gone} saving" in line
    assert not list(tmp_path.glob("saves/step-*"))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_module_that_one_rank_skips_is_named_by_all(stage, tmp_path):
    """SH-04: rank 1 leaves blocks.2 out, from the first step on."""
    outcome = Outcome(f"skips 1 {stage}", tmp_path)
    # gloo may end a process itself when collectives of other sizes meet.
    assert 17 in outcome.codes
    assert outcome.seconds < 8
    lines = [outcome.verdict(rank) for rank in range(2) if outcome.codes[rank] == 17]
    assert len(set(lines)) == 1
    assert (
        "ranks disagree in step 1: as forward 3 of its blocks rank 0 entered blocks.2 where rank 1 entered blocks.3"
        in (lines[0])
    )


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_module_that_one_ranks_loss_ignores_gets_zeros_from_it(stage, tmp_path):
    """SH-04: blocks.2 runs on both ranks and leads to a loss on rank 0 alone. Weights are those of one process."""
    outcome = Outcome(f"ignores 1 {stage}", tmp_path)
    assert outcome.codes == [0, 0], outcome.logs
    expected = fault_ranks.in_one_process(ignored_by=1, ranks=2)
    got = torch.load(tmp_path / "weights", weights_only=True)
    for name, weight in expected.items():
        torch.testing.assert_close(
            got[name], weight, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_an_exception_of_one_rank_ends_the_others_with_its_line(tmp_path):
    outcome = Outcome("raises 1 3", tmp_path)
    assert_ended(outcome, by={0: 17, 1: 1}, within_seconds=6)
    place = "in the forward of blocks.0 (step 3, micro batch 1)"
    assert outcome.verdict(0) == f"trainfit: rank 1 failed {place}: ZeroDivisionError: division by zero"
    assert "Traceback" in outcome.logs[1]


def test_another_number_of_micro_batches_is_told_by_both_ranks(tmp_path):
    outcome = Outcome("fewer_counted 1 3", tmp_path)
    assert_ended(outcome, by={0: 1, 1: 1}, within_seconds=6)
    for log in outcome.logs:
        assert "data-parallel rank 0 has 2 micro batches in this step, rank 1 has 1" in log


def test_another_number_of_micro_batches_that_nobody_counts_is_ended(tmp_path):
    """A loop that compares no numbers: rank 1 ends its step while rank 0 gathers for another micro batch.

    gloo ends a process where collectives of other sizes meet; the other one says where that was.
    """
    outcome = Outcome("fewer 1 3", tmp_path)
    assert 17 in outcome.codes
    assert outcome.seconds < 8
    assert "rank 0 in the forward (step 3, micro batch 2)" in outcome.verdict(outcome.codes.index(17))


def test_a_rank_whose_data_ends_early_is_named(tmp_path):
    outcome = Outcome("ends_early 1 3", tmp_path)
    assert outcome.codes == [17, 0]
    assert outcome.seconds < 8
    assert "rank 1 ended training after step 2 while others go on: rank 0 at the start of step 3" in outcome.verdict(0)


def test_a_rank_that_hangs_is_named_with_its_line_of_code(tmp_path):
    outcome = Outcome("hangs_in_data 1 2", tmp_path)
    assert_ended(outcome, by={0: 17, 1: 17}, within_seconds=10)
    assert "rank 1 waiting for data (after step 2) at fault_ranks.py:" in outcome.verdict(1)


@pytest.mark.parametrize("case", ["clean 1 3", "clean 0 0", "long_together 1 3"])
def test_no_alarm_when_ranks_end_apart_save_alone_or_are_slow_together(case, tmp_path):
    outcome = Outcome(case, tmp_path)
    assert outcome.codes == [0, 0], outcome.logs
    assert outcome.clean == [True, True]
    assert not any("trainfit:" in log for log in outcome.logs)
    assert outcome.seconds > 2 * fault_ranks.STALL_SECONDS  # as long as what it should bear


def test_torchrun_starts_the_ranks_again():
    """In the same store, where verdict and addresses of the first life still lie."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    worker = [str(Path(fault_ranks.__file__)), "hangs_in_data 0 3"]
    ran = subprocess.run(
        [*command, "--max-restarts", "1", *worker], capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert sorted(ran.stdout.splitlines()) == [f"rank {rank} ended life 1" for rank in range(2)]
    assert "rank 0 waiting for data (after step 2) at fault_ranks.py:" in ran.stderr
