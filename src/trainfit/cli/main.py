"""The trainfit command: its verbs, and the one place where failures become exit codes."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from trainfit import __version__
from trainfit.cli.ask import ask
from trainfit.cli.beside import runs_as_command
from trainfit.cli.console import debugging, hush, print_error
from trainfit.cli.devices import devices
from trainfit.cli.explain import explain as explain_blocks
from trainfit.cli.export import export
from trainfit.cli.failure import FAILED, explain
from trainfit.cli.measure import measure
from trainfit.cli.plan import plan
from trainfit.cli.rehearse import rehearse
from trainfit.cli.train import train
from trainfit.cli.verify import verify
from trainfit.errors import OtherRankError

_QUIET_LIBRARIES = {"TRANSFORMERS_VERBOSITY": "error", "TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "6"}
# Threads of OpenMP wait for each other by spinning, and keep each other off the core as soon as anything else runs
# there. The quickstart's step on two cores, alone and with one neighbour: 0.67 s and never done by default, 1.18 and
# 1.33 s with OMP_WAIT_POLICY=passive, 0.77 and 0.72 s when they spin for a while and then sleep. Read by libgomp.
_PATIENT_THREADS = {"GOMP_SPINCOUNT": "30000"}


app = typer.Typer(
    name="trainfit",
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (plan, explain_blocks, rehearse, train, measure, verify, export, devices):
    app.command()(verb)
app.add_typer(ask, name="ask")


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"trainfit {__version__}\n")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
) -> None:
    """Make a PyTorch training run fit the memory it has, and know beforehand that it does.

    Exit codes: 0, 1 (failed), 2 (bad input). TRAINFIT_DEBUG=1 shows tracebacks and warnings.
    """


def run() -> None:
    """Entry of the trainfit command."""
    if "OMP_WAIT_POLICY" not in os.environ:
        _set_unset(_PATIENT_THREADS)
    runs_as_command()
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run one verb and give its exit code; a failure is one line on stderr."""
    try:
        with _quiet():
            return _invoke(list(arguments) or ["--help"])
    except BrokenPipeError:
        # The reader (head, less) has gone; what is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except SystemExit:  # Rich's answer to the same
        return FAILED
    except BaseException as error:
        if debugging():
            traceback.print_exc()
        code, line = explain(error)
        if not isinstance(error, OtherRankError):  # which rank 0 has printed
            print_error(line)
        return code


def _invoke(arguments: list[str]) -> int:
    """Like Click's main(), without its own printing of failures and its own exit."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("trainfit", arguments) as context:
            code = command.invoke(context)
            sys.stdout.flush()
            return int(code or 0)
    except typer.Exit as leave:
        return leave.exit_code


def _set_unset(variables: Mapping[str, str]) -> None:
    """Set environment variables that the user has not set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings of libraries between our lines; the variables must be set before the libraries are imported."""
    if debugging():
        yield
        return
    _set_unset(_QUIET_LIBRARIES)
    with warnings.catch_warnings():
        hush()
        yield
