"""Starts a few gloo ranks for a test."""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.multiprocessing as mp

from trainfit.hardware import accelerator
from trainfit.hardware.ranks import process_group

TIMEOUT_SECONDS = 300.0  # eight ranks on two slow cores take 90


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """What function(*args) returns on each rank of a gloo process group, by rank.

    function and args are sent to new processes, so function must be importable. Raises AssertionError with the rank and
    its traceback if one fails, or if they take longer than TIMEOUT_SECONDS.
    """
    with TemporaryDirectory() as folder:
        port = _free_port()
        context = start_context()
        processes = [
            context.Process(target=_one_rank, args=(rank, world_size, port, folder, function, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            _wait(processes, Path(folder))
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [torch.load(_file(folder, rank, "result"), weights_only=False) for rank in range(world_size)]


def start_context() -> Any:
    """As spawn, but imports, by far the longest part of a rank's start, are done once for all ranks and tests."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["trainfit.train", "trainfit.step", "torch._dynamo"])  # AdamW imports the last
    return context


def _one_rank(
    rank: int, world_size: int, port: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    try:
        with process_group(accelerator("cpu"), timeout_seconds=TIMEOUT_SECONDS / 2):
            result = function(*args)
        torch.save(result, _file(folder, rank, "result"))
    except BaseException:
        _file(folder, rank, "error").write_text(traceback.format_exc())
        raise SystemExit(1) from None


def _wait(processes: list[Any], folder: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while any(process.is_alive() for process in processes):
        time.sleep(0.05)
        failed = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
        late = time.monotonic() > deadline
        if failed or late:
            break
    for rank, process in enumerate(processes):
        if process.exitcode != 0:
            error = _file(str(folder), rank, "error")
            if error.exists() or process.exitcode is not None:
                text = error.read_text() if error.exists() else f"exit code {process.exitcode}"
                raise AssertionError(f"rank {rank} failed:\n{text}")
    late_ranks = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    assert not late_ranks, f"ranks {late_ranks} still ran after {TIMEOUT_SECONDS} seconds"


def _file(folder: str, rank: int, kind: str) -> Path:
    return Path(folder) / f"{rank}.{kind}"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
