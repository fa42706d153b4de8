"""SecondProcess: a process that computes beside this one what it is asked for, such as another rank's rehearsal.

Standard library only: it is started before this process imports torch, and both import it at the same time.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

Answer = TypeVar("Answer")


class SecondProcess:
    """Computes what is submitted, one after the other.

    It is spawned: a fork would take the locks of other threads along, and devices that were set up. So the module that
    runs as a script must be importable without running (`if __name__ == "__main__"`). What it cannot be sent, and
    what it has not answered when it dies, is computed here instead: only the time differs.

    NOTE [ Nobody waits for ever ]
    A pipe that is full stops who writes. A thread over there takes requests as they come, whatever is computed
    meanwhile, so to submit never waits for an answer that is not read yet, and answers may be read late or never. The
    same thread sees this process end, however it does, and ends its own. Ctrl-C does not reach it: it is ended from
    here.
    """

    def __init__(self, modules: Sequence[str] = (), begin: Callable[[], object] | None = None) -> None:
        """modules: what it imports before it is first asked. begin: what it calls before that."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, tuple(modules), begin), daemon=True)
        with _deaf_to_interrupts():
            self._process.start()
        theirs.close()
        self._asked = 0
        self._answers: list[tuple[bool, Any] | None] = []

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
        try:
            with self._ended_by_errors():
                self._pipe.send_bytes(request)
                number, self._asked = self._asked, self._asked + 1
        except OSError:
            return here

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
            with self._ended_by_errors():
                self._answers.append(self._received())
        return self._answers[number]

    def _received(self) -> tuple[bool, Any] | None:
        """The next answer; None where it has ended."""
        try:
            answer: tuple[bool, Any] | None = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            return None
        return answer

    @contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        """An interrupt may leave half a message, or an answer without its number."""
        try:
            yield
        except BaseException:
            self.close()
            raise


def submit(
    beside: SecondProcess | None, function: Callable[..., Answer], *args: Any, **kwargs: Any
) -> Callable[[], Answer]:
    """To the other process where there is one; else it is computed when the answer is asked for."""
    if beside is None:
        return lambda: function(*args, **kwargs)
    return beside.submit(function, *args, **kwargs)


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """A process that is started meanwhile has SIGINT blocked for good, from its first instruction on."""
    resource_tracker.ensure_running()  # start() would, which unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def without_collection() -> Iterator[None]:
    """Around large imports, of a process of our own: what they leave stays as long as it lives.

    The garbage collector would go through all of it again and again, which is a sixth of what they take, and later a
    twentieth of a plan.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def _serve(pipe: Connection, modules: Sequence[str], begin: Callable[[], object] | None) -> None:
    requests: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_take, args=(pipe, requests), daemon=True).start()
    if begin is not None:
        begin()
    with without_collection():
        for module in modules:
            importlib.import_module(module)
    with suppress(OSError):  # who asked has ended
        while True:
            pipe.send_bytes(_answered(requests.get()))


def _take(pipe: Connection, requests: SimpleQueue[bytes]) -> None:
    """See NOTE [ Nobody waits for ever ]."""
    with suppress(EOFError, OSError):
        while True:
            requests.put(pipe.recv_bytes())
    os._exit(0)


def _answered(request: bytes) -> bytes:
    """(True, what it gave), (False, what it raised), or None where one of them or the request cannot be sent."""
    answer: tuple[bool, Any]
    try:
        function, args, kwargs = pickle.loads(request)
        args = [_loaded(each) for each in args]
    except Exception:  # of a module that only who asks has
        return pickle.dumps(None)
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
