"""Every script in benchmarks/ can still be started: what one takes from another, or from trainfit, is there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

SCRIPTS = sorted(path.stem for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_imports(name: str):
    said = ""
    try:
        importlib.import_module(name)
    except SystemExit as end:  # it counts the heap, for which something must be preloaded
        said = str(end)
    assert said in ("", f"run it as: benchmarks/fair.sh python benchmarks/{name}.py")
