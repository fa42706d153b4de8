"""run_on_ranks(): one function in as many processes as a mesh has ranks, on this machine."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.multiprocessing.spawn import ProcessContext, ProcessException, start_processes

from trainfit.errors import ModelError, RankError, TrainfitError
from trainfit.hardware import accelerator
from trainfit.hardware.ranks import process_group

COLLECTIVE_SECONDS = 600.0
Answer = TypeVar("Answer")


def run_on_ranks(
    function: Callable[..., Answer], size: int, kind: str, *args: Any, timeout_seconds: float = 3600.0
) -> list[Answer]:
    """function(device, *args) on each rank of a process group; returns what each gave, by rank.

    Processes are spawned, one device of `kind` and one thread each. function and args travel by pickle. What a rank
    raises on purpose is raised here with the rank's number; another failure and a timeout as RankError. The first
    failure ends all.
    """
    try:
        payload = pickle.dumps((function, args))
    except Exception as error:
        raise ModelError(
            f"several processes cannot be given this workload ({type(error).__name__}: {error}); make its model and "
            "loss with functions at the top of a module, not with lambdas or nested functions"
        ) from error
    with tempfile.TemporaryDirectory(prefix="trainfit-ranks-") as folder, _one_thread():
        spawned = (size, kind, _free_port(), folder, payload)
        context = start_processes(_run_rank, spawned, nprocs=size, join=False, daemon=True, start_method="spawn")
        assert context is not None
        _join(context, size, folder, timeout_seconds)
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(size)]


def _run_rank(rank: int, size: int, kind: str, port: int, folder: str, payload: bytes) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    try:
        function, args = pickle.loads(payload)
        device = accelerator(kind, index=rank)
        with process_group(device, timeout_seconds=COLLECTIVE_SECONDS):
            answer = function(device, *args)
    except TrainfitError as error:
        (Path(folder) / f"error-{rank}").write_bytes(pickle.dumps((type(error), f"rank {rank} of {size}: {error}")))
        raise
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(answer))


def _join(context: ProcessContext, size: int, folder: str, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                raise RankError(f"{size} processes did not finish in {timeout_seconds:.0f} s; they were ended")
    except ProcessException as error:
        # The others may have failed first because this one was gone: what was raised on purpose says why.
        for said in sorted(Path(folder).glob("error-*")):
            kind, message = pickle.loads(said.read_bytes())
            raise kind(message) from error
        reason = str(error).strip().splitlines()[-1]
        raise RankError(f"rank {error.error_index} of {size} failed: {reason}") from error
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def _one_thread() -> Iterator[None]:
    """OpenMP reads its number of threads when a process begins."""
    name = "OMP_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
