"""Where output goes: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape

MAX_WIDTH = 100
DEBUG_VARIABLE = "TRAINFIT_DEBUG"


def debugging() -> bool:
    """Whether the user asked for tracebacks and warnings."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def hush() -> None:
    """No warnings of libraries between our lines."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)


def output() -> Console:
    """Results, on stdout."""
    return _console(Console(highlight=False))


def notes() -> Console:
    """Progress and remarks, on stderr."""
    return _console(Console(stderr=True, highlight=False))


def quiet() -> Console:
    """Nowhere: a rank whose lines another one prints."""
    return Console(quiet=True, width=MAX_WIDTH)


def _console(console: Console) -> Console:
    # Not a terminal: a file or a pipe has no width of its own, and Rich's 80 columns would wrap tables.
    console.width = min(console.width, MAX_WIDTH) if console.is_terminal else MAX_WIDTH
    return console


def print_json(value: Any) -> None:
    """The one JSON document of a --json run."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False, default=str) + "\n")


def print_error(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    sys.stderr.write(f"error: {' '.join(message.split())}\n")


def print_notes(lines: Iterable[str], console: Console) -> None:
    for line in lines:
        console.print(f"[yellow]note:[/] {escape(line)}")


@contextmanager
def status(console: Console, what: str) -> Iterator[Callable[[str], None]]:
    """A spinner that says what is being done; silent where the console is no terminal. Gives a function to say more."""
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(escape(what)) as spinner:
        yield lambda text: spinner.update(escape(text[:1].upper() + text[1:]))
