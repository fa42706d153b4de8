"""Figure, DeviceSpec, Hardware: what a device is, in numbers that say where they come from. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from trainfit.errors import DeviceError
from trainfit.profile import Precision

if TYPE_CHECKING:
    from trainfit.hardware.calibration import Calibration

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


# What holds for a device of which nobody said otherwise.
_STREAMS = Figure(0.85, "assumed: large element-wise kernels; copies on A100 and H100 reach 0.85 to 0.92", "low")
_ATTENTION_FORWARD = Figure(0.6, "assumed: FlashAttention-2 on A100, up to 73 % of the peak (arXiv:2307.08691)", "low")
_ATTENTION_BACKWARD = Figure(0.5, "assumed: FlashAttention-2 on A100, up to 63 % of the peak (arXiv:2307.08691)", "low")
LINK_LATENCY = Figure(3.4e-6, "NCCL's tuning model: a ring's step over NVLink, simple protocol", "medium")
_NETWORK_LATENCY = Figure(14e-6, "NCCL's tuning model: a ring's step over the network, simple protocol", "medium")
CALL_LATENCY = Figure(8.4e-6, "NCCL's tuning model: base of a ring, simple protocol", "medium")
_HOST_LINK = Figure(25e9, "assumed: PCIe 4.0 x16, of whose 31.5 GB/s copies from pinned memory reach 24 to 26", "low")
_DISK = Figure(1e9, "assumed: writes to an NVMe drive that outlast its cache, 1 to 3 GB/s", "low")
_HOST_MEMORY = Figure(
    50e9, "assumed: a server's fused AdamW on many cores, copies to and from the device beside it", "low"
)


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
    memory_efficiency: fraction of the memory bandwidth that element-wise kernels reach; attention_forward,
        attention_backward: fraction of what large matmuls reach that attention does.
    devices_per_node: devices that link_bandwidth connects. network_bandwidth: bytes a second between nodes, one
        direction, of one device's share; None where no such machine has several nodes.
    call_latency, link_latency, network_latency: seconds of a collective by being called, and of each step of its ring
        within a node and between nodes.
    host_bandwidth: bytes a second that an update in host memory goes through.
    host_link: bytes a second between the device and pinned host memory, one direction. disk: to and from a file.
    calibration: what was measured on this very device, which goes before the figures above.
    """

    name: str
    kind: Kind
    memory_bytes: Figure
    tflops: Mapping[Precision, Figure] = field(hash=False)
    memory_bandwidth: Figure
    link_bandwidth: Figure
    overhead_bytes: Figure
    allocation_granularity: int
    launch_seconds: Figure
    efficiency: Figure
    reported_names: tuple[str, ...] = ()
    memory_efficiency: Figure = _STREAMS
    attention_forward: Figure = _ATTENTION_FORWARD
    attention_backward: Figure = _ATTENTION_BACKWARD
    devices_per_node: int = 8
    network_bandwidth: Figure | None = None
    call_latency: Figure = CALL_LATENCY
    link_latency: Figure = LINK_LATENCY
    network_latency: Figure = _NETWORK_LATENCY
    host_bandwidth: Figure = _HOST_MEMORY
    host_link: Figure = _HOST_LINK
    disk: Figure = _DISK
    calibration: Calibration | None = field(default=None, hash=False, repr=False)

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

    @property
    def node_size(self) -> int:
        """Devices within one machine; of a host's processes all."""
        return self.count if self.is_host else min(self.count, self.spec.devices_per_node)

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
