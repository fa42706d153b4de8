"""calibrate(): what this machine takes for each class of operator, in under a minute.

NOTE [ Warm and cold ]
In a training step an operator reads what was written some operators ago. So no kernel is timed on one pair of buffers
again and again, which would stay in the innermost cache: operands go round a pool, and so do outputs. Those that blocks
and updates in pieces consist of are timed in a small pool too, under the name "near".

NOTE [ Whose seconds ]
With one thread on a CPU, seconds are the processor's for this thread: what a neighbour took of the core is not in them.
With several threads and on devices they are the clock's, the device's queue included. Kernels are timed in two passes,
of which the faster counts: a neighbour that slows down one is seldom there in the other. The second goes over the least
steady first, and ends when TABLES_SECONDS have gone by.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from trainfit.hardware.calibration import Calibration, Table
from trainfit.hardware.kernels import FP32_KERNELS, HALF_KERNELS, KERNELS, LAYOUTS, NEAR, Make, apart, matrices
from trainfit.hardware.overheads import Price, Recompute, operator_overheads
from trainfit.hardware.runtime import DTYPES, Accelerator, accelerator
from trainfit.profile import Precision

POOL_BYTES = 32 * 2**20
WEIGHT_BYTES = 32 * 2**20  # for matmuls, whose weights were last used a block or more ago
NEAR_BYTES = 2**20
COLD_BYTES = 64 * 2**20  # for what goes over all gradients or states once a step
_COLD = ("foreach", "adamw")
TABLES_SECONDS = 40.0  # what comes after the tables takes some ten seconds, and a minute was promised for all
ATTENTION_HEADS = 4  # sequences x heads of every attention that is timed
_SAMPLE_SECONDS = 2e-5  # calls are repeated within a sample until it is that long
_SAMPLES_SECONDS = 2e-3  # samples are taken for as long, at least one and at most as many
_FILL_SECONDS = 2e-3  # calls that only go round the pools, at most
_MAX_SAMPLES = 24
_MAX_COPIES = 128
_MAX_MATRICES = 32
_LONG_SECONDS = 4e-3  # a kernel that takes so long is not timed on larger operands: they take in proportion
# What takes longer is timed once, and a matmul that should take longer is taken in proportion: in bf16, for which many
# CPUs have no instructions, one of 2^29 multiply-adds takes seconds.
_LONGEST_SECONDS = 0.04

Sizes = tuple[float, ...]
Position = tuple[int, ...]
Measured = Mapping[Position, float]
Report = Callable[[str, float], None]


@dataclass(frozen=True)
class Grids:
    """At which sizes to measure. max_matmul: multiply-adds; what is larger is taken in proportion."""

    elements: Sizes = (1, 2**10, 2**13, 2**16, 2**18, 2**20, 2**22)
    matmul: tuple[Sizes, Sizes, Sizes] = ((16, 64, 256, 1024, 4096),) * 3
    max_matmul: int = 2**29
    lengths: Sizes = (32, 64, 128, 256, 512, 1024)
    head_dims: Sizes = (32, 64, 128)
    copies: Sizes = (2**10, 2**16, 2**20, 2**23, 2**26)


DEVICE_GRIDS = Grids(
    elements=(1, 2**12, 2**16, 2**20, 2**24, 2**27),
    matmul=((16, 128, 1024, 4096, 16384),) * 3,
    max_matmul=2**37,
    lengths=(128, 512, 1024, 2048, 4096),
    head_dims=(64, 128),
)


@dataclass
class Stopwatch:
    """Seconds of calls on one device. See NOTE [ Whose seconds ]."""

    device: Accelerator
    spreads: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        alone = self.device.kind == "cpu" and torch.get_num_threads() == 1
        self.now = time.thread_time if alone else time.perf_counter

    def synchronized(self) -> float:
        """Seconds now, after all that was launched."""
        self.device.synchronize()
        return self.now()

    def seconds(self, calls: Sequence[Callable[[], Any]], num_bytes: int = 0, pool_bytes: int = POOL_BYTES) -> float:
        """Of one call: each is made in turn, its output kept until as many bytes have passed as the pool has.

        The median of its samples counts: some find their memory in a nearer cache than others.
        """
        num_kept = max(1, min(_MAX_COPIES, min(pool_bytes, POOL_BYTES) // max(1, num_bytes)))
        kept: deque[Any] = deque(maxlen=num_kept)
        once = self._sample(calls[0], 1, kept)
        # A device builds or loads the kernel of a shape at its first call, and its library at the first of all.
        if once > _LONGEST_SECONDS and not self.device.is_beside_host:
            return once
        if once < _LONG_SECONDS:
            kept.append(calls[1 % len(calls)]())
        once = self._sample(calls[0], 1, kept)
        if once > _LONG_SECONDS:
            return once
        for at in range(min(num_kept if num_bytes else 0, int(_FILL_SECONDS / once))):
            kept.append(calls[at % len(calls)]())  # so that outputs lie where memory was touched before
        repeats = max(1, min(1000, int(_SAMPLE_SECONDS / once)))
        count = max(1, min(_MAX_SAMPLES, int(_SAMPLES_SECONDS / (once * repeats))))
        samples = [self._sample(calls[at % len(calls)], repeats, kept) for at in range(count)]
        samples += [once] if repeats == 1 else []
        middle = statistics.median(samples)
        self.spreads.append(middle / min(samples) - 1)
        return middle

    def _sample(self, call: Callable[[], Any], repeats: int, kept: deque[Any]) -> float:
        """Mean seconds of some calls in a row."""
        self.device.synchronize()
        begin = self.now()
        for _ in range(repeats):
            kept.append(call())
        self.device.synchronize()
        return max(self.now() - begin, 1e-9) / repeats


@dataclass(frozen=True)
class Series:
    """One table to be: its axes, and how to measure what is on them, as seconds by position."""

    axes: tuple[Sizes, ...]
    measure: Callable[[], Measured]


def calibrate(
    device: Accelerator,
    *,
    price_of: Callable[[Calibration], Price],
    grids: Grids | None = None,
    tiers: Mapping[str, Recompute] | None = None,
    report: Report = lambda what, share: None,
) -> Calibration:
    """Measures the device.

    price_of: what tables say of an operator's kernel; see operator_cost.py. tiers: how to put a block under each
    tier that makes anything again, to measure what that takes. report is told what is measured and the share that is
    done.
    """
    watch = Stopwatch(device)
    work = dict(_work(watch, device, grids or (Grids() if device.kind == "cpu" else DEVICE_GRIDS)))
    with torch.no_grad():
        best = _best_of(work, watch, report)
    report("operators around their kernels", 1.0)
    made = Calibration(
        device=device.name,
        kind=device.kind,
        num_threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        date=datetime.now(UTC).date().isoformat(),
        spread=statistics.median(watch.spreads),
        per_operator={},
        tables={name: Table.grown(series.axes, best[name]) for name, series in work.items()},
    )
    return replace(made, per_operator=operator_overheads(watch.synchronized, device, price_of(made), tiers))


def _best_of(work: Mapping[str, Series], watch: Stopwatch, report: Report) -> dict[str, dict[Position, float]]:
    """The least seconds of two passes; the second goes over what was least steady first, and stops in time."""
    best: dict[str, dict[Position, float]] = {name: {} for name in work}
    unsteady: dict[str, float] = {}

    def measure(name: str) -> None:
        before = len(watch.spreads)
        for position, seconds in work[name].measure().items():
            best[name][position] = min(seconds, best[name].get(position, seconds))
        unsteady[name] = statistics.mean(watch.spreads[before:] or [0.0])

    begin = time.perf_counter()
    for done, name in enumerate(work):
        report(name, done / len(work) / 2)
        measure(name)
    for done, name in enumerate(sorted(work, key=unsteady.__getitem__, reverse=True)):
        if time.perf_counter() - begin > TABLES_SECONDS:
            break
        report(name, 0.5 + done / len(work) / 2)
        measure(name)
    return best


def _work(watch: Stopwatch, device: Accelerator, grids: Grids) -> Iterator[tuple[str, Series]]:
    for precision in device.precisions:
        for layout in LAYOUTS:
            measure = partial(_matmuls, watch, layout, precision, grids)
            yield f"matmul.{layout}.{precision}", Series(grids.matmul, measure)
        for direction, kind in product(("forward", "backward"), ("causal", "whole")):
            attend = partial(_attentions, watch, precision, grids, kind == "causal", direction == "backward")
            axes = (grids.lengths, grids.head_dims)
            yield f"attention.{direction}.{kind}.{precision}", Series(axes, attend)
        for name, (make, call) in {**KERNELS, **(FP32_KERNELS if precision == "fp32" else HALF_KERNELS)}.items():
            pool_bytes = COLD_BYTES if name.startswith(_COLD) else POOL_BYTES
            kernel = partial(_kernel, watch, make, call, precision, grids, pool_bytes)
            yield f"{name}.{precision}", Series((grids.elements,), kernel)
            if name in NEAR and device.kind == "cpu":
                near = partial(_kernel, watch, make, call, precision, grids, NEAR_BYTES)
                yield f"{name}.near.{precision}", Series((grids.elements,), near)
    yield "rows.fp32", Series((grids.elements,), partial(_kernel, watch, apart, torch.neg, "fp32", grids))
    if device.is_beside_host:
        for name, to_device in (("to_device", True), ("to_host", False)):
            yield name, Series((grids.copies,), partial(_host_copies, watch, grids, to_device))
        host = Stopwatch(accelerator("cpu"))
        host.now = time.perf_counter
        update = partial(_kernel, host, *FP32_KERNELS["adamw"], "fp32", grids)
        yield "host_adamw.fp32", Series((grids.elements,), update)


def _kernel(
    watch: Stopwatch,
    make: Make,
    call: Callable[..., Any],
    precision: Precision,
    grids: Grids,
    pool_bytes: int = POOL_BYTES,
) -> Measured:
    dtype, device = DTYPES[precision], watch.device.device
    measured: dict[Position, float] = {}
    for position, (elements,) in _positions((grids.elements,)):
        if max(measured.values(), default=0.0) > _LONG_SECONDS:
            break
        num_bytes = elements * dtype.itemsize
        sets = [make(elements, dtype, device) for _ in range(_copies(num_bytes, pool_bytes))]
        measured[position] = watch.seconds([partial(call, *each) for each in sets], num_bytes, pool_bytes)
    return measured


def _copies(num_bytes: int, pool_bytes: int = POOL_BYTES) -> int:
    return max(1 if pool_bytes == NEAR_BYTES else 2, min(_MAX_COPIES, pool_bytes // max(1, num_bytes)))


def _matmuls(watch: Stopwatch, layout: str, precision: Precision, grids: Grids) -> Measured:
    dtype, device = DTYPES[precision], watch.device.device

    def seconds(m: int, n: int, k: int) -> float:
        num_bytes = (m * k + k * n + m * n) * dtype.itemsize
        copies = min(_MAX_MATRICES, _copies(num_bytes, WEIGHT_BYTES))
        sets = [matrices(layout, m, n, k, dtype, device) for _ in range(copies)]
        return watch.seconds([partial(torch.mm, *each) for each in sets], m * n * dtype.itemsize)

    measured: dict[Position, float] = {}
    for position, sizes in _positions(grids.matmul):
        if (
            math.prod(sizes) <= grids.max_matmul
            and _in_proportion(position, grids.matmul, measured) <= _LONGEST_SECONDS
        ):
            measured[position] = seconds(*sizes)
    return measured


def _in_proportion(position: Position, axes: tuple[Sizes, ...], measured: Measured) -> float:
    """Seconds by those of the sizes one step before, which is what Table.grown takes; infinite behind what has none."""
    found = []
    for axis, at in enumerate(position):
        before = (*position[:axis], at - 1, *position[axis + 1 :])
        if at:
            found.append(measured.get(before, math.inf) * axes[axis][at] / axes[axis][at - 1])
    return min(found, default=0.0)


def _positions(axes: tuple[Sizes, ...]) -> Iterator[tuple[Position, tuple[int, ...]]]:
    for position in product(*(range(len(axis)) for axis in axes)):
        yield position, tuple(int(axis[at]) for axis, at in zip(axes, position))


def _attentions(watch: Stopwatch, precision: Precision, grids: Grids, causal: bool, backward: bool) -> Measured:
    dtype, device = DTYPES[precision], watch.device.device

    def seconds(length: int, dim: int) -> float:
        whole = torch.full((1, length, ATTENTION_HEADS, dim), 0.5, dtype=dtype, device=device)
        query, key, value = (whole.clone().transpose(1, 2).requires_grad_(backward) for _ in range(3))
        attend = partial(F.scaled_dot_product_attention, query, key, value, is_causal=causal)
        if not backward:
            return watch.seconds([attend], query.nbytes)
        with torch.enable_grad():
            output = attend()
        gradient = torch.full_like(output, 0.5)
        gradients = partial(torch.autograd.grad, output, (query, key, value), gradient, retain_graph=True)
        return watch.seconds([gradients], 3 * query.nbytes)

    return {position: seconds(*sizes) for position, sizes in _positions((grids.lengths, grids.head_dims))}


def _host_copies(watch: Stopwatch, grids: Grids, to_device: bool) -> Measured:
    def seconds(num_bytes: int) -> float:
        there = torch.zeros(num_bytes, dtype=torch.uint8, device=watch.device.device)
        here = watch.device.pinned((num_bytes,), torch.uint8)
        target, source = (there, here) if to_device else (here, there)
        return watch.seconds([partial(target.copy_, source, non_blocking=True)])

    return {position: seconds(*sizes) for position, sizes in _positions((grids.copies,))}
