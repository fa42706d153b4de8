"""Every failure as an exit code and one line: what, the numbers, the next move."""

from __future__ import annotations

import errno
import re
from typing import Any

from trainfit.cli.console import DEBUG_VARIABLE
from trainfit.errors import TrainfitError
from trainfit.hardware.out_of_memory import says_out_of_memory

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def explain(error: BaseException) -> tuple[int, str]:
    """The exit code and the line."""
    if isinstance(error, TrainfitError):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if hasattr(error, "format_message"):  # Click's, and that of the Typer releases that carry their own Click
        return BAD_INPUT, _usage(error)
    if isinstance(error, OSError):
        return _of_system(error)
    if isinstance(error, MemoryError) or says_out_of_memory(error):
        return FAILED, f"{_short(error)}; lower the micro batch or the memory of the recipe, or see `trainfit plan`"
    return FAILED, f"{type(error).__name__}: {_short(error)}; this is a bug: {DEBUG_VARIABLE}=1 shows where"


def _usage(error: Any) -> str:
    context = getattr(error, "ctx", None)
    help_line = f"see `{context.command_path if context else 'trainfit'} --help`"
    if (option := getattr(error, "option_name", None)) and hasattr(error, "possibilities"):
        near = ", ".join(error.possibilities or ())
        return f"no such option {option}; " + (f"did you mean {near}?" if near else help_line)
    message = " ".join(error.format_message().split()).rstrip(".")
    return f"{message[:1].lower()}{message[1:]}; {help_line}"


def _of_system(error: OSError) -> tuple[int, str]:
    what = error.strerror or _short(error)
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return FAILED, f"{where}{what}; free some space or name another folder"
    return BAD_INPUT, f"{where}{what}; check the path and its permissions"


def _short(error: BaseException) -> str:
    text = re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
