"""--html FILE: a page beside what is printed, whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from trainfit.errors import RecipeError


def check_page(file: str | None) -> None:
    """Raises RecipeError, before anything is computed, for a file that cannot be written."""
    if file is None:
        return
    path = Path(file)
    if not file or path.is_dir():
        raise RecipeError(f"--html {file!r} is a folder; name a file, such as {path / 'plan.html'}")
    if not path.parent.is_dir():
        raise RecipeError(f"--html {file}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise RecipeError(f"--html {file} cannot be written; check its permissions, or name another file")


def write_page(file: str, page: str) -> None:
    """Beside the file first, then in its place. Raises RecipeError where that fails; what was there is untouched."""
    path = Path(file)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise RecipeError(f"--html {file} cannot be written: {error.strerror or error}; name another file") from error
    finally:
        with suppress(OSError):
            draft.unlink()
