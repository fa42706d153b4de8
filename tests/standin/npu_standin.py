"""A stand-in `npu` device in host memory, for tests on machines without an Ascend NPU.

Import it before anything touches an accelerator. It renames PrivateUse1 for the rest of the process, and then torch,
and with it this_machine(), takes the npu for the machine's accelerator: import it only in a process of its own.

It is a real PrivateUse1 backend: allocator with 512-byte rounding, exact current and peak bytes and a cap, its own RNG,
autocast, and a process group `hccl` that hands its work to gloo. It cannot show stream races, pinned memory,
fragmentation, HCCL buffers or NPU numerics: kernels are the CPU's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from standin_build import load_extension
from torch.utils.checkpoint import DefaultDeviceType

DEFAULT_LIMIT_BYTES = 64 * 2**30

torch.utils.rename_privateuse1_backend("npu")
_extension = load_extension()

import npu_api  # noqa: E402  needs the backend's name and the extension

torch._register_device_module("npu", npu_api)
torch.utils.generate_methods_for_privateuse1_backend(
    unsupported_dtype=[torch.quint8, torch.quint4x2, torch.quint2x4, torch.qint32, torch.qint8]
)
DefaultDeviceType.set_device_type("npu")


def set_limit(num_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
    """Caps every device at num_bytes: an allocation beyond raises torch.OutOfMemoryError."""
    _extension.set_limit(num_bytes)


def num_fallbacks() -> int:
    """Operators that ran on the CPU's kernels so far."""
    return int(_extension.fallbacks())


def _process_group(options: Any, _: Any) -> Any:
    gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    return _extension.ProcessGroupHCCL(gloo, options.group_rank, options.group_size)


dist.Backend.register_backend("hccl", _process_group, extended_api=True, devices=["npu"])
