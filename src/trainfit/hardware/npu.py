"""Every quirk of Ascend NPUs, so that no other file asks `is this an NPU?`. Imports no torch.

torch_npu renames PrivateUse1 to `npu` and puts its module at torch.npu; torch loads it by itself through the
`torch.backends` entry point, so trainfit never imports it.
"""

from __future__ import annotations

from types import ModuleType

from trainfit.profile import Precision

DISTRIBUTED_BACKEND = "hccl"
# Kernels of torch_npu that ignore what a GradScaler hands them: fp16 steps would be neither unscaled nor skipped.
FUSED_ADAMW_IGNORES_GRAD_SCALER = True

# Bytes that its allocator adds to each request. Chips from Ascend 910_95 on add none; none of them is in the catalogue.
# Source: AddPadSize in torch_npu/csrc/core/npu/NPUCachingAllocator.cpp.
ALLOCATION_PADDING = 32


def precisions(module: ModuleType) -> tuple[Precision, ...]:
    """What this NPU computes in. The 910A has no bf16: its cube takes fp16 and int8 only."""
    return ("fp32", "bf16", "fp16") if module.is_bf16_supported() else ("fp32", "fp16")


def why_missing() -> str:
    return "an Ascend NPU needs torch_npu installed, and TORCH_DEVICE_BACKEND_AUTOLOAD not set to 0"
