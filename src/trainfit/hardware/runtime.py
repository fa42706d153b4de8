"""Accelerator: the one place that asks which device this is.

Everything that differs between cpu, cuda and npu at run time is a row of _BACKENDS or a method here; the rest of
trainfit asks an Accelerator and never a device type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, cast

import torch

from trainfit.errors import DeviceError
from trainfit.hardware import allocator, npu
from trainfit.hardware.device import Kind, unsupported
from trainfit.hardware.memory import DeviceMemory, HostMemory, MemoryMeter
from trainfit.hardware.out_of_memory import says_out_of_memory
from trainfit.hardware.rng import RngState
from trainfit.profile import PRECISIONS, AllocatorSettings, Precision

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISION_OF: dict[torch.dtype, Precision] = {dtype: precision for precision, dtype in DTYPES.items()}


@dataclass(frozen=True)
class _Backend:
    """What differs between kinds of device. precisions takes torch.cuda or torch.npu."""

    distributed: str
    missing: Callable[[], str]
    precisions: Callable[[ModuleType], tuple[Precision, ...]]
    fused_adamw_ignores_grad_scaler: bool = False
    allocation_padding: int = 0


def _cuda_precisions(module: ModuleType) -> tuple[Precision, ...]:
    # Without emulation: bf16 computed in fp32 is no faster, and a plan that chose it for speed would be wrong.
    return ("fp32", "bf16", "fp16") if module.is_bf16_supported(including_emulation=False) else ("fp32", "fp16")


_BACKENDS: dict[Kind, _Backend] = {
    "cpu": _Backend("gloo", lambda: "", lambda _: PRECISIONS),
    "cuda": _Backend("nccl", lambda: "it needs a CUDA build of torch and a driver", _cuda_precisions),
    "npu": _Backend(
        npu.DISTRIBUTED_BACKEND,
        npu.why_missing,
        npu.precisions,
        npu.FUSED_ADAMW_IGNORES_GRAD_SCALER,
        npu.ALLOCATION_PADDING,
    ),
}


class RehearsedStream(torch.cpu.Stream):
    """A stream of the device that the cpu stands for: it orders nothing, but a rehearsal sees what is put on it."""

    def record_event(self) -> Any:
        return torch.cpu.Event()


class Accelerator:
    """One device at run time: its memory, random numbers, autocast, streams and process-group backend."""

    def __init__(
        self, device: torch.device, kind: Kind, module: ModuleType | None, *, rehearses: Kind | None = None
    ) -> None:
        """module is torch.cuda or torch.npu; None on the cpu. Use accelerator() to make one.

        rehearses: the kind of device that the cpu stands for in a rehearsal.
        """
        self.device = device
        self.kind = kind
        self._rehearses = rehearses or kind
        self.is_rehearsed = rehearses is not None
        self._module = module
        self._backend = _BACKENDS[kind]
        self.memory: MemoryMeter = HostMemory() if module is None else DeviceMemory(device, module)
        self.rng = RngState(device, module)

    @cached_property
    def name(self) -> str:
        """What the driver calls the device; "cpu" on the cpu."""
        return "cpu" if self._module is None else str(self._module.get_device_name(self.device))

    @property
    def stands_for(self) -> Kind:
        """The kind of device: its own, or in a rehearsal the rehearsed one's."""
        return self._rehearses

    @property
    def autocast_name(self) -> str:
        """The device_type that torch.autocast and torch.amp.GradScaler want."""
        return self.device.type

    @property
    def shares_host_memory(self) -> bool:
        """Whether a copy to the host would lie in the very memory that the device computes in."""
        return self._rehearses == "cpu"

    @property
    def is_beside_host(self) -> bool:
        """Whether what is made on the host must be moved: not in a rehearsal, whatever device it is of."""
        return self._module is not None

    @property
    def distributed_backend(self) -> str:
        """ "gloo", "nccl" or "hccl"."""
        return self._backend.distributed

    @property
    def fused_adamw_ignores_grad_scaler(self) -> bool:
        """True where fused AdamW neither unscales nor skips under a GradScaler, so that pair must be refused."""
        return _BACKENDS[self._rehearses].fused_adamw_ignores_grad_scaler

    @cached_property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions that this device computes in."""
        return self._backend.precisions(self._module or torch.cpu)

    def supports(self, precision: Precision) -> bool:
        return precision in self.precisions

    def require(self, precision: Precision) -> None:
        """Raises DeviceError when the device cannot compute in that precision."""
        if not self.supports(precision):
            raise unsupported(self.name, precision, self.precisions)

    def autocast(self, precision: Precision, *, cache_enabled: bool = False) -> AbstractContextManager[Any]:
        """Context in which matmuls run in that precision; does nothing for fp32.

        cache_enabled keeps a low-precision copy of every weight until the outermost context ends: the bytes of a whole
        low-precision model, so it is off unless asked for. Raises DeviceError for a precision that the device lacks.
        """
        self.require(precision)
        if precision == "fp32":
            return nullcontext()
        return torch.autocast(self.autocast_name, dtype=DTYPES[precision], cache_enabled=cache_enabled)

    def synchronize(self) -> None:
        """Waits until the device has done all its work; returns at once on the cpu."""
        if self._module is not None:
            self._module.synchronize(self.device)

    @property
    def has_streams(self) -> bool:
        """Whether the device, or the rehearsed one, does two things at a time."""
        return self._rehearses != "cpu"

    @property
    def _streams(self) -> Any:
        """The module whose streams they are: in a rehearsal torch.cpu, which remembers the current one."""
        return self._module or torch.cpu

    def new_stream(self) -> Any:
        """A stream of this device for stream(); None on the cpu."""
        if self._module is not None:
            return self._module.Stream(self.device)
        return RehearsedStream() if self.has_streams else None

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Context that puts work on a stream from new_stream(); does nothing on the cpu."""
        return nullcontext() if stream is None else self._streams.stream(stream)

    def current_stream(self) -> Any:
        """The stream on which work of this thread is put; None on the cpu."""
        return self._streams.current_stream(self.device) if self.has_streams else None

    def stream_waits(self, stream: Any) -> None:
        """A stream from new_stream() goes on when the current one has done what is put on it by now."""
        if stream is not None:
            stream.wait_stream(self.current_stream())

    def wait_for(self, stream: Any) -> None:
        """The current stream goes on when a stream from new_stream() has done what is put on it by now."""
        if stream is not None:
            self.current_stream().wait_stream(stream)

    def mark(self, stream: Any) -> Callable[[], None]:
        """A function that returns when a stream from new_stream() has done what is put on it by now."""
        if stream is None:
            return lambda: None
        wait: Callable[[], None] = stream.record_event().synchronize
        return wait

    def copy_beside(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> Any:
        """Copies on a stream from new_stream(), after what the current one is given by now. An event for wait_event().

        Both tensors' memory must stay theirs until the current stream has waited for the event.
        """
        self.stream_waits(stream)
        with self.stream(stream):
            destination.copy_(source, non_blocking=True)
        return None if stream is None else stream.record_event()

    def wait_event(self, event: Any) -> None:
        """The current stream goes on when an event of copy_beside() has come."""
        if event is not None:
            self.current_stream().wait_event(event)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor in host memory that the device copies to and from while the host goes on.

        Not pinned, and so copied to and from in turn, where the backend cannot pin.
        """
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=self.pins_memory)

    @cached_property
    def pins_memory(self) -> bool:
        if self._module is None:
            return False
        try:
            torch.empty(1, pin_memory=True)
        except (RuntimeError, NotImplementedError):
            return False
        return True

    def configure_allocator(self, settings: AllocatorSettings) -> list[str]:
        """Set the device's caching allocator, before anything is allocated. Notes for the user.

        Raises DeviceError for what PyTorch does not take.
        """
        if self._module is None:
            unused = self._rehearses == "cpu" and settings != AllocatorSettings()
            return ["allocator settings have no effect: a CPU has no caching allocator"] if unused else []
        assert isinstance(self.memory, DeviceMemory)
        return allocator.configure(settings, self._module, self.device, held_bytes=self.memory.reserved_bytes())

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether error says that this device has no memory left for an allocation."""
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        return isinstance(error, RuntimeError) and says_out_of_memory(error, self.kind)

    def __repr__(self) -> str:
        return f"Accelerator({str(self.device)!r})"


def accelerator(device: str | torch.device, *, index: int | None = None) -> Accelerator:
    """The Accelerator of "cpu", "cuda", "npu", "cuda:1" or a torch.device.

    index: the number of a device that is to be this process's own, current one; a host has only itself. Raises
    DeviceError for another kind of device and for one that is not there.
    """
    match = re.fullmatch(rf"({'|'.join(_BACKENDS)})(?::(\d+))?", str(device))
    if match is None:
        raise DeviceError(f"{str(device)!r} is no device to train on; use one of {', '.join(_BACKENDS)}")
    kind = cast(Kind, match[1])
    if kind == "cpu":
        return Accelerator(torch.device("cpu"), "cpu", None)
    module = getattr(torch, kind, None)
    count = module.device_count() if module is not None and module.is_available() else 0
    if module is None or count == 0:
        raise DeviceError(f"no {kind} device on this machine: {_BACKENDS[kind].missing()}; or use cpu")
    number = index if index is not None else int(match[2]) if match[2] else module.current_device()
    if number >= count:
        raise DeviceError(f"{kind}:{number} is not there: this machine has {count} {kind} device(s), numbered from 0")
    if index is not None:
        module.set_device(number)
    return Accelerator(torch.device(kind, number), kind, module)


def rehearsed(kind: Kind) -> Accelerator:
    """The cpu in the place of a device of some kind, for fake tensors."""
    return Accelerator(torch.device("cpu"), "cpu", None, rehearses=kind)


def fused_adamw_ignores_grad_scaler(kind: Kind) -> bool:
    """See Accelerator.fused_adamw_ignores_grad_scaler."""
    return _BACKENDS[kind].fused_adamw_ignores_grad_scaler


def allocation_padding_of(kind: Kind) -> int:
    """Bytes that the caching allocator of such devices adds to each request before it rounds up."""
    return _BACKENDS[kind].allocation_padding


def distributed_backend_of(kind: Kind) -> str:
    """The process-group backend that carries a device's tensors: "gloo", "nccl" or "hccl"."""
    return _BACKENDS[kind].distributed


def best_kind() -> Kind:
    """ "cuda" or "npu" when such a device is there, else "cpu"."""
    for kind in ("cuda", "npu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return kind
    return "cpu"
