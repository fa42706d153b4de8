"""Launch: the processes that torchrun started, and how they agree before their process group is up.

NOTE [ Agreeing without collectives ]
One rank plans, reads the text and makes the run's folder; the others wait for what it found. That takes as long as it
takes, so it must not fall under the time-out of a collective, and a plan is rehearsed on a fake process group, of which
a process has only one. So ranks talk through torchrun's key-value store until training begins.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from trainfit.errors import OtherRankError, TrainfitError
from trainfit.hardware.rendezvous import rendezvous
from trainfit.hardware.runtime import Accelerator

_START = timedelta(minutes=10)  # machines come up one after another
_PATIENCE = timedelta(days=1)  # torchrun ends everyone when a rank dies, so waiting needs no shorter limit


@dataclass(frozen=True)
class Launch:
    """This process among those of a run. One process without torchrun.

    local_rank, local_size: among those of this machine; it takes the device of that number. restarts: how often
    torchrun has started the run anew after a failure.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    restarts: int = 0

    @classmethod
    def from_environment(cls) -> Launch:
        """What torchrun says; one process where there is none."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
        return cls(*(int(os.environ.get(name, default)) for name, default in zip(names, (0, 1, 0, 1, 0))))

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that plans, prints and writes what all would write alike."""
        return self.rank == 0

    @cached_property
    def _store(self) -> Store:
        store, _, _ = rendezvous(_START)
        return PrefixStore("trainfit", store)

    def share(self, name: str, make: Callable[[], str]) -> str:
        """Text that rank 0 makes, on every rank.

        What rank 0 raises reaches the others as OtherRankError with the same exit code.
        """
        if self.size == 1:
            return make()
        if self.is_first:
            try:
                text = make()
            except BaseException as error:
                code = error.exit_code if isinstance(error, TrainfitError) else 1
                self._store.set(name, json.dumps({"error": f"{type(error).__name__}: {error}", "code": code}))
                raise
            self._store.set(name, json.dumps({"text": text}))
            return text
        self._store.wait([name], _PATIENCE)
        found = json.loads(self._store.get(name))
        if "error" in found:
            raise OtherRankError(f"rank 0 stopped: {found['error']}", found["code"])
        return str(found["text"])

    def gather(self, name: str, text: str) -> list[str]:
        """Every rank's text, by rank."""
        if self.size == 1:
            return [text]
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], text)
        self._store.wait(keys, _PATIENCE)
        return [self._store.get(key).decode() for key in keys]

    @contextmanager
    def process_group(self, device: Accelerator, *, timeout_seconds: float = 60.0) -> Iterator[None]:
        """The ranks' process group, taken down in the end: gloo can abort at exit otherwise. Nothing for one process.

        timeout_seconds: after which a collective that some rank never joins fails.
        """
        if self.size == 1:
            yield
            return
        self.gather("process group", "")  # all are here, so that the time-out is for the connection alone
        dist.init_process_group(
            backend_of(device),
            store=PrefixStore("group", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout_seconds),
        )
        try:
            yield
        finally:
            dist.destroy_process_group()


def backend_of(device: Accelerator) -> str:
    """The backend of device tensors, with gloo beside it for those of the host."""
    backend = device.distributed_backend
    return backend if backend == "gloo" else f"cpu:gloo,{device.device.type}:{backend}"
