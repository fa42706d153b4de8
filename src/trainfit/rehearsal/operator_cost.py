"""Seconds of operators: from a calibration where the device has one, else by the roofline of its data sheet."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from trainfit.hardware.calibration import Calibration, Table
from trainfit.hardware.microbenchmarks import NEAR_BYTES
from trainfit.hardware.overheads import Price, part_of_step, touched_bytes
from trainfit.hardware.runtime import PRECISION_OF
from trainfit.hardware.transfers import TransferPlace
from trainfit.profile import Precision
from trainfit.rehearsal.calibrated import CalibratedKernels
from trainfit.rehearsal.flops import ATTENTION, kernel_flops, model_flops
from trainfit.rehearsal.traffic import tensors_of, traffic_bytes
from trainfit.techniques.recompute import priced_tier

# Which of a device's figures decides how long something takes.
Bound = Literal["arithmetic", "attention", "memory", "launch", "calibration", "link", "network", "host"]


class OperatorTime(NamedTuple):
    """flops: of those that the model asks for."""

    seconds: float
    bound: Bound
    flops: float = 0.0


NOTHING = OperatorTime(0.0, "launch")

_NOTHING_AROUND = Table(((1.0,),), (1e-12,))
ADAMW_BYTES = 28  # that an fp32 update moves for a parameter: weight, two moments read and written, gradient read


class _Memory:
    """What the latest operators touched: bytes in the mean, and how long ago each storage was among it.

    Python and the dispatcher come back to the same code after some tens of operators, about a block's: as many count.
    """

    def __init__(self) -> None:
        self._latest: deque[int] = deque([0] * _LATEST, maxlen=_LATEST)
        self._sum = 0
        self._total = 2 * _NEAR_BYTES
        self._touched: dict[int, int] = {}  # by storage: all bytes that had been touched by then

    def mean_with(self, num_bytes: int) -> float:
        """Bytes an operator, with one more that touched so many."""
        self._sum += num_bytes - self._latest[0]
        self._latest.append(num_bytes)
        return self._sum / _LATEST

    def near_share(self, operands: Sequence[Tensor], outputs: Sequence[Tensor], *, recycled: bool) -> float:
        """How much of what an operator goes through was touched a few bytes ago, by bytes.

        recycled: memory is given back soon and taken again, so what is made lies where something was just before.
        """
        oldest = self._total - _NEAR_BYTES
        known = {tensor.untyped_storage()._cdata for tensor in operands}
        read = sum(tensor.nbytes for tensor in operands)
        near = sum(t.nbytes for t in operands if self._touched.get(t.untyped_storage()._cdata, -1) >= oldest)
        made = sum(tensor.nbytes for tensor in outputs if tensor.untyped_storage()._cdata not in known)
        return (near + made * recycled) / max(1, read + made)

    def touches(self, tensors: Sequence[Tensor], num_bytes: int) -> None:
        self._total += num_bytes
        for tensor in tensors:
            self._touched[tensor.untyped_storage()._cdata] = self._total

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Made without being written: another storage may have had the address."""
        for tensor in tensors:
            self._touched.pop(tensor.untyped_storage()._cdata, None)


_LATEST = 64
_NEAR_BYTES = 4 * NEAR_BYTES  # two operands and an output of a calibration, and what comes between them


@dataclass(frozen=True)
class OperatorCost:
    """How long operators take on one device.

    flops_per_second by precision, as large matmuls really reach; bytes_per_second of memory, as element-wise kernels
    reach; launch_seconds per operator. attention: the shares of flops_per_second that its forward and backward reach.
    host_bytes_per_second: what an update in host memory goes through. transfer_bytes_per_second: what copies beside
    computation go through, by where they go.
    calibration: measured seconds, which go before all these. runs_ahead: the host launches operators while the device
    still computes earlier ones, so that only the longer of the two counts.
    """

    flops_per_second: Mapping[Precision, float]
    bytes_per_second: float
    launch_seconds: float
    attention: tuple[float, float] = (1.0, 1.0)
    host_bytes_per_second: float = 50e9
    transfer_bytes_per_second: Mapping[TransferPlace, float] = field(default_factory=dict)
    calibration: Calibration | None = None
    runs_ahead: bool = True
    _known: dict[Any, tuple[OperatorTime, int]] = field(default_factory=dict, repr=False, compare=False)
    _memory: _Memory = field(default_factory=_Memory, repr=False, compare=False)

    @property
    def memory_rate(self) -> float:
        """Bytes a second of large element-wise kernels."""
        table = self.calibration and self.calibration.table("unary_.fp32")
        return 8 * table.axes[0][-1] / table.at(table.axes[0][-1]) if table else self.bytes_per_second

    def seconds(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> float:
        return self.time(func, args, kwargs, output).seconds

    def time(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> OperatorTime:
        """Of one call, after those before it. The same shapes are looked at once."""
        free = func.is_view or func._schema.name in _FREE
        near = 0.0 if free else self._near_share((args, kwargs), output)
        key = (func, near, _signature(args), _signature(tuple(kwargs.items())))
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self._looked_at(func, args, kwargs, output, free, near)
        time, touched = known
        if self.calibration is None:
            return time
        if self.runs_ahead:  # kernels do not displace what the host has in its caches
            around = 0.0 if free else self.calibration.around(_part(), 0.0)
            return OperatorTime(max(time.seconds, around), "calibration", time.flops)
        if not free:
            self._memory.touches([*tensors_of((args, kwargs)), *tensors_of(output)], touched)
        elif not func.is_view:
            self._memory.forget(tensors_of(output))
        around = self.calibration.around(_part(), self._memory.mean_with(touched))
        return OperatorTime(time.seconds + around, "calibration", time.flops)

    def _looked_at(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, free: bool, near: float
    ) -> tuple[OperatorTime, int]:
        """What a kernel takes by itself, and the bytes that it touches."""
        if free:
            return NOTHING, 0
        time = self._kernel(func, args, kwargs, output, near)
        time = time._replace(flops=model_flops(func, args, kwargs, output))
        return time, touched_bytes(func, args, kwargs, output)

    def _near_share(self, given: Any, output: Any) -> float:
        """How much of what an operator reads and writes is still in the near caches.

        What autograd keeps for backward is made where nobody was for long.
        """
        if self.calibration is None or self.runs_ahead:
            return 0.0
        recycled = part_of_step() in ("no_grad", "backward")
        return self._memory.near_share(tensors_of(given), tensors_of(output), recycled=recycled)

    def _kernel(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, near: float
    ) -> OperatorTime:
        if self.calibration is None:
            return self._roofline(func, args, kwargs, output)
        return OperatorTime(
            CalibratedKernels(self.calibration, near).seconds(func, args, kwargs, output), "calibration"
        )

    def _roofline(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> OperatorTime:
        memory = traffic_bytes(func, args, kwargs, output) / self.bytes_per_second
        tensors = tensors_of(args) or tensors_of(output)
        precision = PRECISION_OF.get(tensors[0].dtype, "fp32") if tensors else "fp32"
        rate = self.flops_per_second.get(precision) or min(self.flops_per_second.values())
        bound: Bound = "arithmetic"
        if func in ATTENTION:
            rate, bound = rate * self.attention[ATTENTION[func][1]], "attention"
        arithmetic = kernel_flops(func, args, kwargs, output) / rate
        kernel = max(memory, arithmetic)
        if self.launch_seconds > kernel:
            bound = "launch"
        elif memory > arithmetic:
            bound = "memory"
        return OperatorTime(self.launch_seconds + kernel, bound)

    def on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> OperatorTime:
        """What an update in host memory takes, by its traffic."""
        if self.calibration is not None and (table := self.calibration.table("host_adamw.fp32")) is not None:
            elements = table.axes[0][-1]
            rate = ADAMW_BYTES * elements / table.at(elements)
        else:
            rate = self.host_bytes_per_second
        host = replace(self, bytes_per_second=rate, launch_seconds=0.0, calibration=None, _known={}, _memory=_Memory())
        seconds = 0.0 if func.is_view else host._roofline(func, args, kwargs, output).seconds
        return OperatorTime(seconds, "host")


def is_recompute() -> bool:
    """Whether a forward runs again within autograd's engine."""
    return part_of_step() == "recompute"


def kernel_prices(calibration: Calibration) -> Price:
    """What its tables say of operators one after the other, without what is around their kernels."""
    bare = replace(calibration, per_operator=dict.fromkeys(("forward", "backward", "no_grad"), _NOTHING_AROUND))
    return OperatorCost({}, 1.0, 0.0, calibration=bare, runs_ahead=False).seconds


def _part() -> str:
    """Which of a calibration's overheads an operator has that is dispatched now."""
    part = part_of_step()
    tier = priced_tier() if part in ("forward", "recompute") else None
    return part if tier is None else f"{part}.{tier}"


def _signature(tree: Any) -> Any:
    """Equal for arguments that take equally long."""
    if isinstance(tree, Tensor):
        return tree.shape, tree.stride(), tree.dtype
    if isinstance(tree, (list, tuple)):
        return tuple([_signature(each) for each in tree])
    return tree if isinstance(tree, (int, str, bool, torch.dtype)) else None


_FREE = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::_unsafe_view",
        "aten::lift_fresh",
        "aten::detach",
        "prim::device",
        # FSDP's marks for a profiler are dispatched as operators are, and launch nothing.
        "profiler::_record_function_enter_new",
        "profiler::_record_function_exit",
    }
)
