"""together: an action on every rank, whose failure on one is the failure of all."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from trainfit.errors import TrainfitError

T = TypeVar("T")
_COLLECTIVE = re.compile(r"gloo|nccl|hccl|process ?group|connection (closed|reset) by peer", re.IGNORECASE)


def together(action: Callable[[], T], group: dist.ProcessGroup | None = None, *, alone: bool | None = None) -> list[T]:
    """What the action gave on each rank of the group, by rank. Every rank must call it, in the same order.

    Where it raised on any rank, every rank raises the error of the first such rank: none goes on, and none waits for
    one that has stopped. group: None takes that of the whole launch. alone: ask no other rank; None asks when more
    than one process was started.
    """
    if alone is None:
        alone = not dist.is_initialized() or dist.get_backend() == "fake" or dist.get_world_size() == 1
    if alone:
        return [action()]
    value, error = None, None
    try:
        value = action()
    except Exception as raised:
        error = raised
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, (None if error is None else _portable(error), value), group=group)
    first = next((failed for failed, _ in answers if failed is not None), None)
    if first is not None:
        kind, message = first
        raise kind(message) from error
    return [value for _, value in answers]


def is_of_collective(error: BaseException) -> bool:
    """Whether a collective failed, which is another rank's doing."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _COLLECTIVE.search(str(error)) is not None


def _portable(error: Exception) -> tuple[type[Exception], str]:
    """What another process can raise alike, whatever a foreign error's constructor takes."""
    if isinstance(error, TrainfitError):
        return type(error), str(error)
    return (OSError if isinstance(error, OSError) else RuntimeError), f"{type(error).__name__}: {error}"
