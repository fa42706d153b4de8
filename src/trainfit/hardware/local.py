"""What this machine is: a catalogue row where the driver's name is known, else figures measured here.

A calibration that `trainfit devices --calibrate` has stored goes before both. Without one:

A measurement takes under half a second in all, is made once for each thread count that torch is set to, and is rounded
to two digits because it repeats no better. It is kept: a plan of the same recipe is the same the next time.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product

import torch

from trainfit.hardware.calibration import Calibration
from trainfit.hardware.calibration_store import load_calibration
from trainfit.hardware.catalogue import find_reported
from trainfit.hardware.device import CALL_LATENCY, LINK_LATENCY, DeviceSpec, Figure, Hardware, Kind
from trainfit.hardware.measured_store import MeasuredFigures, figures_of
from trainfit.hardware.runtime import DTYPES, Accelerator, accelerator, best_kind
from trainfit.profile import Precision

_MATMUL_SECONDS = 0.05
_MATMUL_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
_COPY_BYTES = 64 * 2**20
_LAUNCHES = 200
_MIB = 2**20
_GLOO_LATENCY = Figure(1e-4, "assumed: gloo's threads and sockets on one machine", "low")


def this_machine(kind: Kind | None = None) -> Hardware:
    """One device of this machine: CUDA or NPU when there is one, else the CPU; or the kind asked for.

    The count is 1 whatever is plugged in: how many devices a run uses is the run's choice. Raises DeviceError when
    that kind of device is not here.
    """
    return Hardware(_spec(kind or best_kind()))


def _spec(kind: Kind) -> DeviceSpec:
    """The catalogue's row or the measured one, with the memory that is there now: limits of a container can change."""
    device = accelerator(kind)
    known = find_reported(device.name)
    calibration = load_calibration(device.name, torch.get_num_threads(), torch.__version__)
    if calibration is not None:
        known = with_calibration(known or _shape(device), calibration)
    spec = known or _measured_spec(kind, torch.get_num_threads())
    return replace(spec, memory_bytes=_total(device))


def with_calibration(spec: DeviceSpec, calibration: Calibration) -> DeviceSpec:
    """The spec with everything that was measured; a data sheet's peaks stay, since MFU is a share of them."""
    if spec.kind != "cpu":
        return replace(spec, calibration=calibration)

    def figure(value: float, how: str) -> Figure:
        return Figure(float(f"{value:.3g}"), f"{calibration.source}, {how}", "medium")

    largest = 2.0**20
    copied = calibration.tables["copy.fp32"].at(largest)
    return replace(
        spec,
        tflops={each: figure(_best_tflops(calibration, each), "fastest matmul") for each in spec.tflops},
        memory_bandwidth=figure(8 * largest / copied, "read and write of a 4 MiB copy"),
        launch_seconds=figure(calibration.per_operator["forward"].smallest, "an operator around its kernel"),
        calibration=calibration,
    )


def _best_tflops(calibration: Calibration, precision: Precision) -> float:
    tables = [table for name, table in calibration.tables.items() if re.fullmatch(rf"matmul\.\w+\.{precision}", name)]
    return max(
        2 * math.prod(sizes) / seconds / 1e12
        for table in tables
        for sizes, seconds in zip(product(*table.axes), table.seconds)
    )


def _total(device: Accelerator) -> Figure:
    source = "physical memory, or the tightest cgroup limit" if device.kind == "cpu" else "reported by the driver here"
    return Figure(device.memory.total_bytes(), source, "high")


@cache
def _measured_spec(kind: Kind, num_threads: int) -> DeviceSpec:
    """num_threads: that torch is set to."""
    device = accelerator(kind)
    figures = figures_of(device.name, num_threads, torch.__version__, device.precisions, partial(_measure, device))
    threads = _threads(device)
    return replace(
        _shape(device),
        tflops={each: _figure(value, f"{threads}, square matmuls") for each, value in figures.tflops.items()},
        memory_bandwidth=_figure(figures.memory_bandwidth, f"{threads}, read and write of a 64 MiB copy"),
        launch_seconds=_figure(figures.launch_seconds, "one-element additions"),
    )


def _measure(device: Accelerator) -> MeasuredFigures:
    return MeasuredFigures(
        {precision: _matmul_tflops(device, precision) for precision in device.precisions},
        _copy_bandwidth(device),
        _launch_seconds(device),
    )


def _shape(device: Accelerator) -> DeviceSpec:
    """A device of which nothing is known, before anything is measured."""
    unknown = Figure(1.0, "not measured yet", "low")
    measured = "is what was measured here, no peak"
    return DeviceSpec(
        name=device.name,
        kind=device.kind,
        memory_bytes=_total(device),
        tflops=dict.fromkeys(device.precisions, unknown),
        memory_bandwidth=unknown,
        link_bandwidth=_link(device.kind),
        overhead_bytes=_overhead(device.kind),
        allocation_granularity=1 if device.kind == "cpu" else 512,
        launch_seconds=unknown,
        efficiency=Figure(1.0, f"tflops {measured}", "medium"),
        memory_efficiency=Figure(1.0, f"memory_bandwidth {measured}", "medium"),
        call_latency=_GLOO_LATENCY if device.kind == "cpu" else CALL_LATENCY,
        link_latency=_GLOO_LATENCY if device.kind == "cpu" else LINK_LATENCY,
    )


def _link(kind: Kind) -> Figure:
    if kind == "cpu":
        return Figure(1e9, "assumed: gloo between processes of one machine, over its loopback interface", "low")
    return Figure(16e9, "assumed: PCIe 3.0 x16, one direction, of an unknown device", "low")


def _overhead(kind: Kind) -> Figure:
    if kind == "cpu":
        return Figure(512 * _MIB, "Python with torch and transformers loaded stays below this", "medium")
    return Figure(1024 * _MIB, "assumed: context and library workspaces of an unknown device", "low")


def _matmul_tflops(device: Accelerator, precision: Precision) -> float:
    """Best rate of square matmuls that grow until the next would not fit the time allowed; in two rounds, since a
    neighbour that holds up the smallest one would end a round at once."""
    return _rounded(max(_growing_matmuls(device, precision) for _ in range(2)))


def _growing_matmuls(device: Accelerator, precision: Precision) -> float:
    best = 0.0
    for size in _MATMUL_SIZES:
        left, right = torch.ones(2, size, size, dtype=DTYPES[precision], device=device.device).unbind()
        out = torch.empty_like(left)
        seconds = _seconds(device, partial(torch.mm, left, right, out=out), repeats=1)
        best = max(best, 2 * size**3 / seconds / 1e12)
        # Six runs, eight times the work at the next size.
        if 6 * 8 * seconds > _MATMUL_SECONDS:
            break
    return best


def _copy_bandwidth(device: Accelerator) -> float:
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device.device)
    target = torch.empty_like(source)
    seconds = _seconds(device, lambda: target.copy_(source), repeats=1)
    return _rounded(2 * _COPY_BYTES / seconds)


def _launch_seconds(device: Accelerator) -> float:
    scalar = torch.zeros(1, device=device.device)
    return _rounded(_seconds(device, lambda: scalar.add_(1), repeats=_LAUNCHES // 5))


def _seconds(device: Accelerator, work: Callable[[], object], *, repeats: int, tries: int = 5) -> float:
    """Seconds of one call of work, the device's queue included: the shortest of several tries after a warm-up call.

    A try that a neighbour on the machine held up says nothing about the machine.
    """
    shortest = float("inf")
    with torch.no_grad():
        work()
        device.synchronize()
        for _ in range(tries):
            start = time.perf_counter()
            for _ in range(repeats):
                work()
            device.synchronize()
            shortest = min(shortest, (time.perf_counter() - start) / repeats)
    return max(shortest, 1e-9)


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


def _figure(value: float, how: str) -> Figure:
    return Figure(value, f"measured here, {how}", "medium")


def _threads(device: Accelerator) -> str:
    return f"{torch.get_num_threads()} threads" if device.kind == "cpu" else device.name
