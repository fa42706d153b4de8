"""Which machine: device facts in numbers, and one facade over cpu, cuda and npu at run time.

Importing this package does not import torch, so that help and the device list stay fast: names that need torch
(Accelerator, Ranks, accelerator, this_machine) are looked up on first use by __getattr__ below.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainfit.hardware.catalogue import catalogue, find_device
from trainfit.hardware.device import DeviceSpec, Figure, Hardware, Kind

if TYPE_CHECKING:
    from trainfit.hardware.launch import Launch
    from trainfit.hardware.local import this_machine
    from trainfit.hardware.ranks import Ranks, ranks_of
    from trainfit.hardware.runtime import DTYPES, Accelerator, accelerator

__all__ = [
    "DTYPES",
    "Accelerator",
    "DeviceSpec",
    "Figure",
    "Hardware",
    "Kind",
    "Launch",
    "Ranks",
    "accelerator",
    "catalogue",
    "find_device",
    "ranks_of",
    "this_machine",
]

# No submodule has the name of one of these: importing it would put the module where the function should be.
_NEED_TORCH = {
    "Accelerator": "runtime",
    "DTYPES": "runtime",
    "Launch": "launch",
    "Ranks": "ranks",
    "accelerator": "runtime",
    "ranks_of": "ranks",
    "this_machine": "local",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
