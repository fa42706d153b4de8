"""What the stand-in puts at torch.npu: the functions of torch_npu that trainfit and torch itself call.

Names and meanings follow torch_npu 2.13. npu_standin.py registers this module; nothing else imports it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from standin_build import load_extension
from torch import Tensor
from torch.accelerator import memory as _memory

_extension = load_extension()
_NUM_DEVICES = int(os.environ.get("TRAINFIT_STANDIN_DEVICES", "8"))
_extension.set_device_count(_NUM_DEVICES)

_initialized = True  # torch.utils.checkpoint reads it before it stashes the device's RNG
default_generators = tuple(_extension.get_default_generator(index) for index in range(_NUM_DEVICES))
amp = ModuleType("torch.npu.amp")
memory = ModuleType("torch.npu.memory")


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


# Devices


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return _NUM_DEVICES


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_index(device))


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def get_device_name(device: Any = None) -> str:
    return "Ascend910B3"


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


class device:  # noqa: N801  the name that torch_npu gives it
    """Context that makes another device the current one."""

    def __init__(self, device: Any) -> None:
        self._target = _index(device)

    def __enter__(self) -> None:
        self._previous = torch._C._accelerator_exchangeDevice(self._target)

    def __exit__(self, *_: object) -> None:
        torch._C._accelerator_maybeExchangeDevice(self._previous)


# Random numbers


def manual_seed(seed: int) -> None:
    _extension.get_default_generator(_index()).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for index in range(_NUM_DEVICES):
        _extension.get_default_generator(index).manual_seed(int(seed))


def seed_all() -> None:
    manual_seed_all(torch.initial_seed())


def initial_seed() -> int:
    return int(_extension.get_default_generator(_index()).initial_seed())


def get_rng_state(device: Any = "npu") -> Tensor:
    return _extension.get_default_generator(_index(device)).get_state()


def set_rng_state(state: Tensor, device: Any = "npu") -> None:
    _extension.get_default_generator(_index(device)).set_state(state)


def get_rng_state_all() -> list[Tensor]:
    return [get_rng_state(index) for index in range(_NUM_DEVICES)]


def set_rng_state_all(states: list[Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


# Memory


def memory_stats(device: Any = None) -> dict[str, Any]:
    return dict(_memory.memory_stats(_index(device)))


def memory_allocated(device: Any = None) -> int:
    return _memory.memory_allocated(_index(device))


def max_memory_allocated(device: Any = None) -> int:
    return _memory.max_memory_allocated(_index(device))


def memory_reserved(device: Any = None) -> int:
    return _memory.memory_reserved(_index(device))


def max_memory_reserved(device: Any = None) -> int:
    return _memory.max_memory_reserved(_index(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    _memory.reset_peak_memory_stats(_index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return _memory.get_memory_info(_index(device))


def empty_cache() -> None:
    _memory.empty_cache()


# Streams: the host does the work at once, so they order nothing


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **existing: Any) -> Stream:
        if existing:  # stream_id, device_index, device_type of a stream that is there already
            return super().__new__(cls, priority=priority, **existing)
        return super().__new__(cls, device=torch.device("npu", _index(device)), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(cls, device="npu", enable_timing=enable_timing)

    def record(self, stream: Any = None) -> None:
        super().record(stream if stream is not None else current_stream())

    def wait(self, stream: Any = None) -> None:
        super().wait(stream if stream is not None else current_stream())


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Any = None) -> Stream:
    kind = int(torch._C._autograd.DeviceType.PrivateUse1)
    return Stream(stream_id=0, device_index=_index(device), device_type=kind)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    previous = current_stream(stream.device_index)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(previous)
