"""Compiles npu_stub.cpp once and loads it: 20 to 45 s the first time, under a second afterwards.

The result lies in $TRAINFIT_STANDIN_BUILD or ~/.cache/trainfit, in a folder named after torch's version and a hash of
source and flags, so a change of either builds anew. Needs g++ and ninja.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

_NAME = "npu_stub"
_SOURCE = Path(__file__).resolve().with_name(f"{_NAME}.cpp")
_FLAGS = ["-O0", "-g0", "-DUSE_C10D_GLOO", "-std=c++20"]


def missing_tools() -> list[str]:
    """The build tools that are not on PATH."""
    return [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]


@cache
def load_extension() -> ModuleType:
    """The compiled stand-in: set_limit, set_device_count, get_default_generator, fallbacks, ProcessGroupHCCL."""
    library = _folder() / f"{_NAME}.so"
    if not library.exists():
        _build(library.parent)
    spec = importlib.util.spec_from_file_location(_NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _folder() -> Path:
    root = os.environ.get("TRAINFIT_STANDIN_BUILD") or Path.home() / ".cache" / "trainfit"
    digest = hashlib.sha256(_SOURCE.read_bytes() + " ".join(_FLAGS).encode()).hexdigest()[:12]
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return Path(root) / f"standin-torch{torch.__version__}-{python}-{digest}"


def _build(folder: Path) -> None:
    """Builds beside folder and moves the result there whole: a killed or a second build leaves nothing half-made."""
    from torch.utils.cpp_extension import load

    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="standin-", dir=folder.parent))
    try:
        load(_NAME, [str(_SOURCE)], build_directory=str(scratch), extra_cflags=_FLAGS, is_python_module=False)
        scratch.rename(folder)
    except OSError:
        if not (folder / f"{_NAME}.so").exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
