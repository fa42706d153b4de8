"""Seconds of operators: from a calibration where the device has one, else by the roofline of its data sheet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from trainfit.hardware.calibration import Calibration
from trainfit.hardware.runtime import PRECISION_OF
from trainfit.profile import Precision
from trainfit.rehearsal.calibrated import CalibratedKernels
from trainfit.rehearsal.flops import ATTENTION, kernel_flops
from trainfit.rehearsal.traffic import tensors_of, traffic_bytes

# Which of a device's figures decides how long something takes.
Bound = Literal["arithmetic", "attention", "memory", "launch", "calibration", "link", "network", "host"]


class OperatorTime(NamedTuple):
    seconds: float
    bound: Bound


NOTHING = OperatorTime(0.0, "launch")

ADAMW_BYTES = 28  # that an fp32 update moves for a parameter: weight, two moments read and written, gradient read


@dataclass(frozen=True)
class OperatorCost:
    """How long operators take on one device.

    flops_per_second by precision, as large matmuls really reach; bytes_per_second of memory, as element-wise kernels
    reach; launch_seconds per operator. attention: the shares of flops_per_second that its forward and backward reach.
    host_bytes_per_second: what an update in host memory goes through.
    calibration: measured seconds, which go before all these. runs_ahead: the host launches operators while the device
    still computes earlier ones, so that only the longer of the two counts.
    """

    flops_per_second: Mapping[Precision, float]
    bytes_per_second: float
    launch_seconds: float
    attention: tuple[float, float] = (1.0, 1.0)
    host_bytes_per_second: float = 50e9
    calibration: Calibration | None = None
    runs_ahead: bool = True
    _known: dict[Any, OperatorTime] = field(default_factory=dict, repr=False, compare=False)

    @property
    def memory_rate(self) -> float:
        """Bytes a second of large element-wise kernels."""
        table = self.calibration and self.calibration.table("unary_.fp32")
        return 8 * table.axes[0][-1] / table.at(table.axes[0][-1]) if table else self.bytes_per_second

    def seconds(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> float:
        return self.time(func, args, kwargs, output).seconds

    def time(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> OperatorTime:
        """Of one call. The same shapes are looked at once."""
        in_backward = computes_gradients()
        key = (func, in_backward, _signature(args), _signature(tuple(kwargs.items())))
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self._time(func, args, kwargs, output, in_backward)
        return known

    def _time(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, in_backward: bool
    ) -> OperatorTime:
        free = func.is_view or func._schema.name in _FREE
        if self.calibration is not None:
            around = self.calibration.per_operator["backward" if in_backward else "forward"]
            if free:
                return OperatorTime(0.0 if self.runs_ahead else around, "calibration")
            kernel = CalibratedKernels(self.calibration).seconds(func, args, kwargs, output)
            return OperatorTime(max(kernel, around) if self.runs_ahead else kernel + around, "calibration")
        return NOTHING if free else self._roofline(func, args, kwargs, output)

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
        host = replace(self, bytes_per_second=rate, launch_seconds=0.0, calibration=None, _known={})
        seconds = 0.0 if func.is_view else host._roofline(func, args, kwargs, output).seconds
        return OperatorTime(seconds, "host")


def computes_gradients() -> bool:
    """Whether autograd's engine is running, and not a recompute inside of it."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


def is_recompute() -> bool:
    """Whether a forward runs again within autograd's engine."""
    return torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()


def _signature(tree: Any) -> Any:
    """Equal for arguments that take equally long."""
    if isinstance(tree, Tensor):
        return tuple(tree.shape), tree.stride(), tree.dtype
    if isinstance(tree, list | tuple):
        return tuple(map(_signature, tree))
    return tree if isinstance(tree, int | str | bool | torch.dtype) else None


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
    }
)
