"""Memory meters: one for the host, one for devices with a caching allocator."""

from __future__ import annotations

from types import ModuleType
from typing import Protocol

import torch

from trainfit.hardware import host


class MemoryMeter(Protocol):
    """What is allocated on a device, in bytes."""

    def current_bytes(self) -> int:
        """Allocated now."""

    def peak_bytes(self) -> int:
        """Most that was allocated at once since reset_peak()."""

    def reserved_bytes(self) -> int:
        """Taken from the system now, what is only cached included."""

    def peak_reserved_bytes(self) -> int:
        """Most that was taken from the system at once since reset_peak(): what runs out."""

    def reset_peak(self) -> bool:
        """Starts the peak again from now; False where the system does not allow it."""

    def total_bytes(self) -> int:
        """All the memory there is."""

    def free_bytes(self) -> int:
        """What this process can still take from the system."""

    def release_cache(self, threshold: float = 0.9) -> bool:
        """Gives cached blocks back when more than threshold of the memory is taken and some of it is only cached.

        True when the cache was emptied. Emptying it stalls the device and makes the next allocations slow, so it is
        for pressure, never for every micro batch.
        """


class HostMemory:
    """The host's meter: resident memory of this process, read from Linux's /proc.

    current_bytes is VmRSS and peak_bytes VmHWM: Python, torch and freed pages that malloc still holds included, so it
    is not what tensors alone take; what is reserved is the same. reset_peak writes 5 to /proc/self/clear_refs; where
    that is not allowed it returns False and peak_bytes stays the peak since the process began.
    """

    def current_bytes(self) -> int:
        return host.resident_bytes()

    def peak_bytes(self) -> int:
        return host.peak_resident_bytes()

    def reserved_bytes(self) -> int:
        return host.resident_bytes()

    def peak_reserved_bytes(self) -> int:
        return host.peak_resident_bytes()

    def reset_peak(self) -> bool:
        return host.reset_peak_resident()

    def total_bytes(self) -> int:
        return host.total_bytes()

    def free_bytes(self) -> int:
        return host.free_bytes()

    def release_cache(self, threshold: float = 0.9) -> bool:
        return False


class DeviceMemory:
    """The meter of a device with a caching allocator: torch.cuda's functions, which torch.npu has under the same names.

    current_bytes and peak_bytes are allocated bytes, rounded as the allocator rounds; reserved_bytes is what it holds,
    and peak_reserved_bytes the most that it held.
    """

    def __init__(self, device: torch.device, module: ModuleType) -> None:
        self._device = device
        self._module = module

    def current_bytes(self) -> int:
        return int(self._module.memory_allocated(self._device))

    def peak_bytes(self) -> int:
        return int(self._module.max_memory_allocated(self._device))

    def reserved_bytes(self) -> int:
        return int(self._module.memory_reserved(self._device))

    def peak_reserved_bytes(self) -> int:
        return int(self._module.max_memory_reserved(self._device))

    def reset_peak(self) -> bool:
        self._module.reset_peak_memory_stats(self._device)
        return True

    def total_bytes(self) -> int:
        return int(self._module.mem_get_info(self._device)[1])

    def free_bytes(self) -> int:
        return int(self._module.mem_get_info(self._device)[0])

    def release_cache(self, threshold: float = 0.9) -> bool:
        reserved = self.reserved_bytes()
        if reserved <= threshold * self.total_bytes() or reserved == self.current_bytes():
            return False
        self._module.empty_cache()
        return True
