"""Devices as data: one row each, every figure with its source. Imports no torch."""

from __future__ import annotations

import difflib
import re
from typing import get_args

from trainfit.errors import DeviceError
from trainfit.hardware.device import Confidence, DeviceSpec, Figure, Hardware, Kind
from trainfit.profile import Precision

_MIB = 2**20


def _gib(size: float) -> int:
    return round(size * 2**30)


# NVIDIA: dense rates (without the sparsity factor of 2). fp32 is the CUDA cores' rate, because torch leaves TF32 off
# for matmul. fp16 and bf16 accumulate in fp32, as torch does.
_A100 = "NVIDIA A100 data sheet, SXM"
_H100 = "NVIDIA H100 data sheet, SXM, sparse rate halved"
_H200 = "NVIDIA H200 data sheet, SXM, sparse rate halved"
_L40S = "NVIDIA L40S data sheet"
_GA102 = "NVIDIA GA102 white paper, fp16 and bf16 with fp32 accumulate"
_ADA = "NVIDIA Ada white paper, fp16 and bf16 with fp32 accumulate"
_LOGS = "total in public out-of-memory logs of torch, rounded down from the lowest found"

# Ascend: from the toolkit's platform files and vendor pages; cube rates, not vector rates.
_CUBE = "cube rate: cores x 4096 multiply-adds x clock of the toolkit's platform file"
_QUARTER = "assumed: a quarter of the cube fp16 rate; no published figure was found"
_ASCEND_TOTAL = "a 64 GB card reports 60.96 to 61.27 GiB in public out-of-memory logs; the lowest"
_ASCEND_SCALED = "assumed: the share of 32 GB that a 64 GB card reports of its 64"
_ASCEND_64GB = Figure(_gib(60.96), _ASCEND_TOTAL, "high")
_ASCEND_32GB = Figure(_gib(60.96 / 2), _ASCEND_SCALED, "low")
_ASCEND_LINK = "vendor's 392 GB/s over seven links, read as both directions together; one pair gets a seventh"


_NVLINK_LATENCY = Figure(3.4e-6, "NCCL's tuning model: a ring's step over NVLink, simple protocol", "medium")
_PCIE_LATENCY = Figure(5.7e-6, "NCCL's tuning model: a ring's step over PCIe, simple protocol", "medium")
_DGX_A100 = Figure(25e9, "DGX A100: a 200 Gb/s adapter for each GPU", "medium")
_DGX_H100 = Figure(50e9, "DGX H100: a 400 Gb/s adapter for each GPU", "medium")
_ASCEND_NETWORK = Figure(25e9, "vendor pages and papers: a 200 Gb/s RoCE port on each device", "medium")


def _gpu_overhead() -> Figure:
    return Figure(600 * _MIB, "CUDA context and loaded kernels of torch 2, 0.4 to 0.6 GiB; no NCCL", "medium")


def _npu_overhead() -> Figure:
    return Figure(
        _gib(1.5), "assumed: context and operator workspaces; no HCCL, 2 x 200 MB for each communicator", "low"
    )


def _rates(source: str, confidence: Confidence, *, fp32: float, half: float) -> dict[Precision, Figure]:
    matrix = Figure(half, source, confidence)
    return {"fp32": Figure(fp32, source, confidence), "bf16": matrix, "fp16": matrix}


def _gpu(
    name: str,
    source: str,
    *,
    memory: Figure,
    fp32: float,
    half: float,
    bandwidth: float,
    link: Figure,
    efficiency: Figure,
    reported_names: tuple[str, ...],
    network: Figure | None = None,
) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        kind="cuda",
        memory_bytes=memory,
        tflops=_rates(source, "high", fp32=fp32, half=half),
        memory_bandwidth=Figure(bandwidth, source, "high"),
        link_bandwidth=link,
        overhead_bytes=_gpu_overhead(),
        allocation_granularity=512,
        launch_seconds=Figure(5e-6, "assumed: eager dispatch and launch of one CUDA kernel, 3 to 10 us", "low"),
        efficiency=efficiency,
        reported_names=reported_names,
        network_bandwidth=network,
        link_latency=_PCIE_LATENCY if link is _PCIE else _NVLINK_LATENCY,
    )


def _npu(
    name: str,
    *,
    memory: Figure,
    tflops: dict[Precision, Figure],
    bandwidth: Figure,
    link: Figure,
    reported_names: tuple[str, ...],
    network: Figure | None = None,
) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        kind="npu",
        memory_bytes=memory,
        tflops=tflops,
        memory_bandwidth=bandwidth,
        link_bandwidth=link,
        overhead_bytes=_npu_overhead(),
        allocation_granularity=512,
        launch_seconds=Figure(1e-5, "assumed: twice a CUDA kernel's, through torch_npu's task queue", "low"),
        efficiency=Figure(0.75, "assumed: a little below what A100 and H100 reach; not measured", "low"),
        reported_names=reported_names,
        network_bandwidth=network or _ASCEND_NETWORK,
        call_latency=Figure(20e-6, "assumed: HCCL, twice what NCCL takes", "low"),
        link_latency=Figure(7e-6, "assumed: a ring's step of HCCL, twice NCCL's over NVLink", "low"),
        network_latency=Figure(28e-6, "assumed: a ring's step of HCCL over RoCE, twice NCCL's", "low"),
        memory_efficiency=Figure(0.7, "assumed: not measured; below the 0.85 of GPUs", "low"),
    )


def _ascend_910b(
    name: str,
    cube: float,
    confidence: Confidence,
    *,
    memory: Figure = _ASCEND_64GB,
    bandwidth: float = 1.6e12,
    reported_names: tuple[str, ...],
) -> DeviceSpec:
    half = Figure(cube, _CUBE, confidence)
    return _npu(
        name,
        memory=memory,
        tflops={"fp32": Figure(cube / 4, _QUARTER, "low"), "bf16": half, "fp16": half},
        bandwidth=Figure(bandwidth, "toolkit's platform file and vendor pages", confidence),
        link=Figure(196e9, _ASCEND_LINK, "low"),
        reported_names=reported_names,
    )


def _reached(fraction: float, confidence: Confidence, source: str) -> Figure:
    return Figure(fraction, source, confidence)


_MEASURED = "best bf16 matmul that ml-engineering (S. Bekman) measured over the data sheet's rate"
_PCIE = Figure(32e9, "PCIe 4.0 x16, one direction", "high")

_CATALOGUE: tuple[DeviceSpec, ...] = (
    _npu(
        "ascend-910a",
        memory=_ASCEND_32GB,
        tflops={
            "fp32": Figure(4.1, "assumed: vector unit, 32 cores x 64 lanes x 2 x 1 GHz; the cube has no fp32", "low"),
            "fp16": Figure(256.0, "vendor's figure for Ascend 910; no bf16 on this chip", "medium"),
        },
        bandwidth=Figure(1.2e12, "vendor pages, about 1.2 TB/s", "medium"),
        link=Figure(90e9, "HCCS 3 x 240 Gb/s", "medium"),
        network=Figure(12.5e9, "vendor pages: a 100 Gb/s RoCE port on each device", "medium"),
        reported_names=("Ascend910A", "Ascend910ProA", "Ascend910PremiumA"),
    ),
    _ascend_910b("ascend-910b1", 363.7, "low", reported_names=("Ascend910B1",)),
    _ascend_910b("ascend-910b2", 353.9, "high", reported_names=("Ascend910B2", "Ascend910B2C")),
    _ascend_910b("ascend-910b3", 294.9, "high", reported_names=("Ascend910B3",)),
    _ascend_910b(
        "ascend-910b4",
        245.8,
        "medium",
        memory=_ASCEND_32GB,
        bandwidth=0.8e12,
        reported_names=("Ascend910B4",),
    ),
    _ascend_910b("ascend-910b4-64gb", 245.8, "medium", reported_names=("Ascend910B4-1",)),
    # One die: torch shows the two dies of the package as two devices.
    _ascend_910b(
        "ascend-910c",
        363.7,
        "medium",
        memory=Figure(_gib(60.96), _ASCEND_TOTAL, "medium"),
        reported_names=tuple(f"Ascend910_{model}" for model in (9391, 9392, 9381, 9382, 9372, 9362)),
    ),
    _gpu(
        "a100-40gb",
        _A100,
        memory=Figure(_gib(39.3), _LOGS, "medium"),
        fp32=19.5,
        half=312.0,
        bandwidth=1.555e12,
        link=Figure(300e9, "NVLink 3, 600 GB/s both directions", "high"),
        efficiency=_reached(0.87, "medium", _MEASURED),
        network=_DGX_A100,
        reported_names=("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"),
    ),
    _gpu(
        "a100-80gb",
        _A100,
        memory=Figure(_gib(79.1), _LOGS, "medium"),
        fp32=19.5,
        half=312.0,
        bandwidth=2.039e12,
        link=Figure(300e9, "NVLink 3, 600 GB/s both directions", "high"),
        efficiency=_reached(0.87, "medium", _MEASURED),
        network=_DGX_A100,
        reported_names=("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
    ),
    _gpu(
        "h100",
        _H100,
        memory=Figure(_gib(79.1), _LOGS, "medium"),
        fp32=67.0,
        half=989.4,
        bandwidth=3.35e12,
        link=Figure(450e9, "NVLink 4, 900 GB/s both directions", "high"),
        efficiency=_reached(0.80, "medium", _MEASURED),
        network=_DGX_H100,
        reported_names=("NVIDIA H100 80GB HBM3",),
    ),
    _gpu(
        "h200",
        _H200,
        memory=Figure(_gib(139.7), _LOGS, "medium"),
        fp32=67.0,
        half=989.4,
        bandwidth=4.8e12,
        link=Figure(450e9, "NVLink 4, 900 GB/s both directions", "high"),
        efficiency=_reached(0.80, "medium", _MEASURED),
        network=_DGX_H100,
        reported_names=("NVIDIA H200",),
    ),
    _gpu(
        "l40s",
        _L40S,
        memory=Figure(_gib(44.4), _LOGS, "medium"),
        fp32=91.6,
        half=362.0,
        bandwidth=864e9,
        link=_PCIE,
        efficiency=_reached(0.7, "low", "assumed: power-limited cards fall further below their rate than A100"),
        reported_names=("NVIDIA L40S",),
    ),
    _gpu(
        "rtx-3090",
        _GA102,
        memory=Figure(_gib(23.5), _LOGS, "medium"),
        fp32=35.6,
        half=71.2,
        bandwidth=936e9,
        link=_PCIE,
        efficiency=_reached(0.85, "low", "assumed: as A100, of the same generation"),
        reported_names=("NVIDIA GeForce RTX 3090",),
    ),
    _gpu(
        "rtx-4090",
        _ADA,
        memory=Figure(_gib(23.5), _LOGS, "medium"),
        fp32=82.6,
        half=165.2,
        bandwidth=1008e9,
        link=_PCIE,
        efficiency=_reached(0.85, "low", "assumed: as A100; the rate is at boost clock"),
        reported_names=("NVIDIA GeForce RTX 4090",),
    ),
)


def catalogue() -> tuple[DeviceSpec, ...]:
    """Every device that trainfit knows by name, this machine not included."""
    return _CATALOGUE


def find_reported(name: str) -> DeviceSpec | None:
    """The catalogue's row for what get_device_name() reports, or None."""
    return next((spec for spec in _CATALOGUE if name in spec.reported_names), None)


def find_device(name: str, count: int = 1) -> Hardware:
    """Hardware by catalogue name, by the name that the driver reports, or this machine's: "this", "cpu", "cuda", "npu".

    Spelling is forgiving about case, spaces and underscores. Raises DeviceError with the nearest name, for a kind that
    is not here, and for a count that no run can have.
    """
    key = _key(name)
    kind = next((kind for kind in get_args(Kind) if kind == key), None)
    if kind is not None or key == "this":
        from trainfit.hardware.local import this_machine

        return Hardware(this_machine(kind).spec, count)
    for spec in _CATALOGUE:
        if key == spec.name or key in map(_key, spec.reported_names):
            return Hardware(spec, count)
    raise DeviceError(f"unknown device {name!r}{_nearest(key)}; `trainfit devices` lists all")


def _key(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.strip().lower())


def _nearest(key: str) -> str:
    names = [*(spec.name for spec in _CATALOGUE), *get_args(Kind), "this"]
    if begun := [name for name in names if key and name.startswith(key)]:
        return f"; it could be {', '.join(begun)}"
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return f"; the nearest is {close[0]}" if close else ""
