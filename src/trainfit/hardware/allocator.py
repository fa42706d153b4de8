"""Settings of the caching allocator, in PyTorch's own words, and how they are set in a running process.

PyTorch reads PYTORCH_ALLOC_CONF, or PYTORCH_CUDA_ALLOC_CONF and PYTORCH_NPU_ALLOC_CONF, when it starts, and takes the
same text later: segments that are there already stay as they are. Each text sets everything anew but
expandable_segments, which stays where it is not named. Source: c10/core/AllocatorConfig.cpp (PyTorch 2.13).
"""

from __future__ import annotations

import re
from types import ModuleType

import torch

from trainfit.errors import DeviceError
from trainfit.profile import AllocatorSettings
from trainfit.units import format_bytes

# Garbage is only collected under a limit below all that the device has.
COLLECTING_FRACTION = 0.99

_DEFAULTS = AllocatorSettings()
_OPTION = re.compile(r"(\w+):(\[[^\]]*\]|[^,\[]+)")
_before: list[str] = []  # what was set before trainfit first changed it


def conf_of(settings: AllocatorSettings) -> str:
    """What PYTORCH_CUDA_ALLOC_CONF would be: "expandable_segments:True"; "" for PyTorch's defaults."""
    named = vars(settings).items()
    return ",".join(f"{name}:{value}" for name, value in named if value != getattr(_DEFAULTS, name))


def configure(settings: AllocatorSettings, module: ModuleType, device: torch.device, *, held_bytes: int) -> list[str]:
    """Set the allocator of this process, or leave it as it was before for the defaults. Notes for the user.

    held_bytes: what it holds already. Raises DeviceError for what PyTorch does not take.
    """
    current = torch._C._accelerator_getAllocatorSettings()
    if settings == _DEFAULTS:
        if _before:
            _set(_with(_before.pop(), "expandable_segments:False"))
        elif current:
            return [f"the environment sets the allocator to {current}; a prediction is for PyTorch's defaults"]
        return []
    if not _before:
        _before.append(current)
    _set(_with(conf_of(settings), f"expandable_segments:False,{_before[0]}"))
    if settings.garbage_collection_threshold:
        module.set_per_process_memory_fraction(COLLECTING_FRACTION, device)
    if not held_bytes:
        return []
    return [f"the allocator was set when it held {format_bytes(held_bytes)}: segments from before stay as they are"]


def _with(conf: str, others: str) -> str:
    """conf, and of others what it does not name."""
    options = {name: value for text in (others, conf) for name, value in _OPTION.findall(text)}
    return ",".join(f"{name}:{value}" for name, value in options.items())


def _set(conf: str) -> None:
    try:
        torch._C._accelerator_setAllocatorSettings(conf)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(f"PyTorch does not take the allocator settings {conf}: {reason}; leave them out") from None
