"""A store for the process group that knows nothing of processes that have died.

NOTE [ One store, several lives ]
torchrun keeps one store while it restarts the processes of a run. In it lie the addresses that the dead ones listened
at, under the very keys that the new ones use: who reads before its peer has written connects to nobody, and the
restart fails. A count of restarts as a prefix would do on one machine; on several, launchers count for themselves. So
ranks that start agree on a name first:
  each rank    writes a token of its own
  rank 0       offers a name for the tokens it sees, and a new one whenever a token has changed
  each rank    accepts the offer that holds its token
  rank 0       confirms the offer that all have accepted
"""

from __future__ import annotations

import json
import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trainfit.errors import DeviceError

_POLL_SECONDS = 0.02


def rendezvous(timeout: timedelta) -> tuple[Any, int, int]:
    """Store, rank and world size of a torchrun launch. Raises DeviceError if a rank does not come in time."""
    c10d: Any = dist.distributed_c10d
    store, rank, size = next(c10d.rendezvous("env://", timeout=timeout))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        prefix = c10d.PrefixStore
        store = prefix(_agree_on_name(prefix("trainfit/start", store), rank, size, timeout.total_seconds()), store)
    return store, rank, size


def _agree_on_name(store: Any, rank: int, size: int, seconds: float) -> str:
    """See NOTE [ One store, several lives ]."""
    own, until = uuid.uuid4().hex, time.monotonic() + seconds
    store.set(f"token{rank}", own)
    offer: dict[str, Any] = {"name": "", "tokens": []}
    while time.monotonic() < until:
        if rank == 0:
            tokens = [_read(store, f"token{each}") for each in range(size)]
            if "" not in tokens and tokens != offer["tokens"]:
                offer = {"name": uuid.uuid4().hex, "tokens": tokens}
                store.set("offer", json.dumps(offer))
            if offer["name"] and all(_read(store, f"accepted{each}") == offer["name"] for each in range(1, size)):
                store.set("confirmed", offer["name"])
                return str(offer["name"])
        else:
            seen = json.loads(_read(store, "offer") or "{}")
            if own in seen.get("tokens", ()):
                store.set(f"accepted{rank}", seen["name"])
                if _read(store, "confirmed") == seen["name"]:
                    return str(seen["name"])
        time.sleep(_POLL_SECONDS)
    raise DeviceError(f"rank {rank} of {size} waited {seconds:g} s for the others to start; see their logs")


def _read(store: Any, key: str) -> str:
    """What is there now; "" for nothing. store.get would wait for it."""
    return store.get(key).decode() if store.check([key]) else ""
