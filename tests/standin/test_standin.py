"""Runs tests/standin/device on the stand-in npu, in a process of its own (NOTE [ A process of its own ])."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from standin_build import missing_tools

_FOLDER = Path(__file__).parent / "device"
_TIMEOUT_SECONDS = 600


@pytest.mark.standin
def test_device_tests_pass_on_the_standin(monkeypatch):
    # A ninja from the environment's wheels lies beside its python, on no one's PATH.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if missing := missing_tools():
        pytest.skip(f"the stand-in needs {' and '.join(missing)} to compile")
    environment = os.environ | {"TRAINFIT_STANDIN": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "", str(_FOLDER)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
