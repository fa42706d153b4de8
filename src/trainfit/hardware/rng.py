"""Random number state of the host and of one device, to be put back before a block is recomputed."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from trainfit.errors import DeviceError


class RngState:
    """Reads and writes the generators that dropout draws from.

    NOTE [ Device RNG is stashed always ]
    torch.utils.checkpoint stashes a device's state only `if getattr(device_module, "_initialized", False)`. A backend
    without that attribute is skipped without a word, so dropout differs in recompute and gradients are wrong (pytorch
    #127676, #128478). Here the state is always read, and a backend that cannot give it is refused.
    A torch.Generator that a model makes for itself is in neither state.
    """

    def __init__(self, device: torch.device, module: ModuleType | None) -> None:
        """module is torch.cuda or torch.npu; None for the cpu. Raises DeviceError when it lacks RNG functions."""
        for name in ("get_rng_state", "set_rng_state"):
            if module is not None and not callable(getattr(module, name, None)):
                raise DeviceError(
                    f"torch.{device.type} has no {name}: dropout could not be repeated in recompute; "
                    f"update the {device.type} backend of torch"
                )
        self._device = device
        self._module = module

    def get_state(self) -> tuple[Tensor, ...]:
        """States of the host generator and, on an accelerator, of the device's; each a uint8 tensor on the host."""
        if self._module is None:
            return (torch.get_rng_state(),)
        return torch.get_rng_state(), self._module.get_rng_state(self._device)

    def set_state(self, state: tuple[Tensor, ...]) -> None:
        """Puts back what get_state gave. Raises DeviceError for a state of another kind of device."""
        expected = 1 if self._module is None else 2
        if len(state) != expected:
            raise DeviceError(
                f"RNG state has {len(state)} generators, {self._device.type} has {expected}; "
                "it was saved on another kind of device"
            )
        torch.set_rng_state(state[0])
        if self._module is not None:
            self._module.set_rng_state(state[1], self._device)
