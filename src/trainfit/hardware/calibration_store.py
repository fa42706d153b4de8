"""Where calibrations lie: a JSON file for each device, number of threads, version of torch and processor.

Imports no torch.
"""

from __future__ import annotations

import json
import os
import platform
import re
from contextlib import suppress
from pathlib import Path

from trainfit.errors import DeviceError
from trainfit.hardware.calibration import Calibration

_CPU_INFO = Path("/proc/cpuinfo")


def calibration_path(device: str, num_threads: int, torch_version: str) -> Path:
    """In $XDG_CACHE_HOME/trainfit/calibration, by default under ~/.cache; machines may share a home."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says to ignore a path that is not absolute.
    folder = Path(cache) if cache.startswith("/") else Path.home() / ".cache"
    name = re.sub(r"[^A-Za-z0-9.+]+", "-", f"{device}-{num_threads}-torch-{torch_version}-{processor()}")
    return folder / "trainfit" / "calibration" / f"{name}.json"


def processor() -> str:
    """This machine's, as the system calls its model, and how many of its threads there are."""
    model = ""
    with suppress(OSError):
        lines = _CPU_INFO.read_text(errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.machine()} x {os.cpu_count()}"


def save_calibration(calibration: Calibration) -> Path:
    """Writes it, whole or not at all. Raises DeviceError where the folder cannot be written."""
    path = calibration_path(calibration.device, calibration.num_threads, calibration.torch_version)
    passing = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        passing.write_text(json.dumps(calibration.to_json(), indent=1))
        passing.replace(path)
    except OSError as error:
        raise DeviceError(
            f"cannot write {path}: {error.strerror}; set XDG_CACHE_HOME to a folder that you can write"
        ) from error
    return path


def load_calibration(device: str, num_threads: int, torch_version: str) -> Calibration | None:
    """What was stored for exactly these, or None. Raises DeviceError for a file that is broken or of something else."""
    path = calibration_path(device, num_threads, torch_version)
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DeviceError(f"{path} cannot be read ({_short(error)}); {_AGAIN}") from error
    try:
        found = Calibration.from_json(data)
    except DeviceError as error:
        raise DeviceError(f"{path} holds {error}; {_AGAIN}") from error
    asked = (device, num_threads, torch_version)
    if (found.device, found.num_threads, found.torch_version) != asked:
        raise DeviceError(
            f"{path} is of {found.device}, {found.num_threads} threads, torch {found.torch_version}, not of "
            f"{device}, {num_threads}, {torch_version}; {_AGAIN}"
        )
    return found


_AGAIN = "delete it, or make it again with `trainfit devices --calibrate`"


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
