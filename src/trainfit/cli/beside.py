"""second_process(): half of a long plan's work, for commands that have a second core."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from trainfit.cli.console import debugging, hush
from trainfit.second_process import SecondProcess, without_collection

_USED = ("trainfit.plan", "transformers.modeling_utils")  # what takes long to import
_is_command = False


def runs_as_command() -> None:
    """This process was started as trainfit: it may start others. One that calls main() has a script of its own, which
    each new process would import."""
    global _is_command
    _is_command = True


def imports() -> AbstractContextManager[None]:
    """Around what takes long to import, see without_collection(); nothing in a process that is not ours."""
    return without_collection() if _is_command else nullcontext()


@contextmanager
def second_process(devices: int) -> Iterator[SecondProcess | None]:
    """Where plans take long, which are those for several devices. None elsewhere, and without a second core."""
    if not _is_command or devices == 1 or len(os.sched_getaffinity(0)) == 1:
        yield None
        return
    process = SecondProcess(_USED, begin=None if debugging() else hush)
    try:
        yield process
    finally:
        process.close()
