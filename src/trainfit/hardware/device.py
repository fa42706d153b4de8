"""Figure, DeviceSpec, Hardware: what a device is, in numbers that say where they come from. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from trainfit.errors import DeviceError
from trainfit.profile import Precision

Kind = Literal["cpu", "cuda", "npu"]
Confidence = Literal["high", "medium", "low"]

_MAX_COUNT = 1_000_000


@dataclass(frozen=True)
class Figure:
    """A number, where it comes from, and how sure it is.

    high: a vendor's data sheet or a measurement; medium: sources differ or it was read off other users' logs;
    low: derived or assumed, and the source says how.
    """

    value: float
    source: str
    confidence: Confidence


@dataclass(frozen=True)
class DeviceSpec:
    """Facts of one device.

    memory_bytes: what the runtime reports as total, which is less than the name on the box says.
    tflops: dense matmul peak, 10**12 operations a second by precision; a missing key means not supported.
    memory_bandwidth, link_bandwidth: bytes a second; the link is one direction, to all peers of the node together.
    overhead_bytes: driver context and library workspaces, which no tensor shows.
    allocation_granularity: the allocator rounds each request up to a multiple of this many bytes.
    launch_seconds: host time for one eager operator.
    efficiency: fraction of the peak in tflops that large matmuls reach.
    reported_names: what get_device_name() says on this device.
    """

    name: str
    kind: Kind
    memory_bytes: Figure
    tflops: Mapping[Precision, Figure] = field(hash=False)
    memory_bandwidth: Figure
    link_bandwidth: Figure | None
    overhead_bytes: Figure
    allocation_granularity: int
    launch_seconds: Figure
    efficiency: Figure
    reported_names: tuple[str, ...] = ()

    @property
    def usable_bytes(self) -> int:
        """Memory that tensors can have: the total less the overhead."""
        return max(0, int(self.memory_bytes.value) - int(self.overhead_bytes.value))


@dataclass(frozen=True)
class Hardware:
    """The devices of one run: count times the same spec. Raises DeviceError for a count that no run can have.

    limit_bytes: the least that any of them leaves to tensors, where that is less than the spec's; None: nobody asked.
    """

    spec: DeviceSpec
    count: int = 1
    limit_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.count <= _MAX_COUNT:
            raise DeviceError(f"{self.count} devices; the count must be between 1 and {_MAX_COUNT}")

    @property
    def total_bytes(self) -> int:
        """Memory of one device as its runtime reports it."""
        return int(self.spec.memory_bytes.value)

    @property
    def usable_bytes(self) -> int:
        """Memory of one device that tensors can have."""
        usable = self.spec.usable_bytes
        return usable if self.limit_bytes is None else min(usable, self.limit_bytes)

    @property
    def is_host(self) -> bool:
        """Whether it is the host itself, whose memory all processes share; other devices are each process's own."""
        return self.spec.kind == "cpu"

    def shared_by(self, processes: int) -> Hardware:
        """What one of several processes on this machine has: a device of its own, or its part of the host's memory."""
        return replace(self, limit_bytes=self.usable_bytes // processes) if self.is_host else self

    def supports(self, precision: Precision) -> bool:
        return precision in self.spec.tflops

    def require(self, precision: Precision) -> None:
        """Raises DeviceError when the device cannot compute in that precision."""
        if not self.supports(precision):
            raise unsupported(self.spec.name, precision, tuple(self.spec.tflops))


def unsupported(name: str, precision: str, supported: tuple[str, ...]) -> DeviceError:
    """The one wording for a precision that a device lacks."""
    return DeviceError(f"{name} has no {precision} arithmetic; use --precision {' or '.join(supported)}")
