"""SecondProcess: a process that computes beside this one what it is asked for, such as another rank's rehearsal.

Standard library only: it is started before this process imports torch, and both import it at the same time.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, TypeVar

Answer = TypeVar("Answer")

_MAX_REQUEST_BYTES = 32 * 1024  # what a pipe takes at once while the other side is busy


class SecondProcess:
    """Computes what is submitted, one after the other.

    It is spawned: a fork would take the locks of other threads along, and devices that were set up. So the module that
    runs as a script must be importable without running (`if __name__ == "__main__"`). What it cannot be sent, and
    what it has not answered when it dies, is computed here instead: only the time differs.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        """modules: what it imports before it is first asked."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, tuple(modules)), daemon=True)
        self._process.start()
        theirs.close()
        self._asked = 0
        self._answers: dict[int, tuple[bool, Any] | None] = {}

    def submit(self, function: Callable[..., Answer], *args: Any, **kwargs: Any) -> Callable[[], Answer]:
        """Begin function(*args, **kwargs), a function at the top of a module; call what is returned for its answer.

        That raises what the function raised.
        """

        def here() -> Answer:
            return function(*args, **kwargs)

        try:
            request = pickle.dumps((function, [pickle.dumps(each) for each in args], kwargs))
        except Exception:  # pickle raises whatever an object's own methods do
            return here
        if len(request) > _MAX_REQUEST_BYTES:
            return here
        try:
            self._pipe.send_bytes(request)
        except OSError:
            return here
        number = self._asked
        self._asked += 1

        def answer() -> Answer:
            found = self._answer(number)
            if found is None:
                return here()
            is_right, value = found
            if not is_right:
                raise value
            return value  # type: ignore[no-any-return]

        return answer

    def close(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _answer(self, number: int) -> tuple[bool, Any] | None:
        while len(self._answers) <= number:
            answer = None
            with suppress(EOFError, OSError):
                answer = pickle.loads(self._pipe.recv_bytes())
            self._answers[len(self._answers)] = answer
        return self._answers[number]


def submit(
    beside: SecondProcess | None, function: Callable[..., Answer], *args: Any, **kwargs: Any
) -> Callable[[], Answer]:
    """To the other process where there is one; else it is computed when the answer is asked for."""
    if beside is None:
        return lambda: function(*args, **kwargs)
    return beside.submit(function, *args, **kwargs)


def _serve(pipe: Connection, modules: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks ends this one
    if "TRAINFIT_DEBUG" not in os.environ:
        warnings.simplefilter("ignore")
    for module in modules:
        importlib.import_module(module)
    while True:
        try:
            function, args, kwargs = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        pipe.send_bytes(_answered(function, [_loaded(each) for each in args], kwargs))


def _answered(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
    """(True, what it gave), (False, what it raised), or None where that cannot be sent."""
    answer: tuple[bool, Any]
    try:
        answer = True, function(*args, **kwargs)
    except Exception as error:
        answer = False, error
    try:
        data = pickle.dumps(answer)
        pickle.loads(data)  # an error whose arguments are not its message's cannot be made again
    except Exception:
        return pickle.dumps(None)
    return data


@lru_cache(maxsize=16)
def _loaded(data: bytes) -> Any:
    """The same object for the same argument: a workload keeps what was found out about it."""
    return pickle.loads(data)
