"""What a device's kernels and libraries take that no tensor of a rehearsal shows, and where that is known from.

A rehearsal runs the CPU's operators. Another device's kernels have the same inputs and outputs, but
  scratch        memory that they allocate inside and free before they return,
  kept           more, or less, beside an output, for their backward,
  fused          functions that are one kernel there and several operators on a CPU,
  libraries      workspaces that stay from the first call on.
Each is a table by kind of device. What is less than a thousandth of a usual peak is left out: reductions, norms of
foreach operators, topk, cumsum. Losses have no hidden memory: log_softmax, its backward and nll_loss's are tensors.
An NPU's kernels have their scratch outside of the caching allocator (NPUWorkspaceAllocator): it belongs to the
device's overhead, as contexts do. What communicators hold is left to the margin (plan/target.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainfit.hardware import DeviceSpec, Kind
from trainfit.rehearsal.operators import temporary_bytes

_aten = torch.ops.aten
Sizes = tuple[int, ...]
Scratch = Callable[[tuple[Any, ...]], Sizes]  # of an operator's arguments
Kept = Callable[[Any], int]  # of an operator's outputs: what the second one has more, or less


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _flash_backward(args: tuple[Any, ...]) -> Sizes:
    """softmax_d and dq_accum in fp32, and with fewer key heads dk and dv for every query head.

    Half precision only: others take another kernel. Source: mha_bwd in aten/src/ATen/native/transformers/cuda/
    flash_attn/flash_api.cpp.
    """
    query, key = args[1], args[2]
    if query.element_size() != 2:
        return ()
    batch, heads, length, dim = query.shape
    length, rounded = _up(length, 128), _up(dim, 32) if dim <= 192 else 256
    expanded = batch * key.shape[2] * heads * dim * 2
    groups = (expanded, expanded) if key.shape[1] != heads else ()
    return (4 * batch * heads * length, 4 * batch * length * heads * rounded, *groups)


def _embedding_backward(args: tuple[Any, ...]) -> Sizes:
    """Above 3072 ids they are sorted, and rows of the gradient summed in fp32 for each id, ten at a time.

    Source: embedding_dense_backward_cuda in aten/src/ATen/native/cuda/Embedding.cu, embedding_backward_cuda_kernel in
    EmbeddingBackwardKernel.cu.
    """
    gradient, indices, num_weights = args[:3]
    ids = indices.numel()
    if ids <= 3072:
        return ()
    different = min(ids, num_weights)
    parts = ids // 10 + different
    index = indices.element_size()
    return (*(3 * (ids * index,)), *(2 * (different * index,)), parts * index, parts * gradient.shape[-1] * 4)


def _sort(args: tuple[Any, ...]) -> Sizes:
    """Radix sort has keys and positions twice. Source: aten/src/ATen/native/cuda/Sort.cpp, cub's DoubleBuffer."""
    tensor = next(arg for arg in args if isinstance(arg, Tensor))
    return (tensor.nbytes, tensor.numel() * 8)


_CUDA_SCRATCH: Mapping[Any, Scratch] = {
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.sort.default: _sort,
    _aten.sort.stable: _sort,
}
_SCRATCH: Mapping[Kind, Mapping[Any, Scratch]] = {"cpu": {}, "cuda": _CUDA_SCRATCH, "npu": {}}


def _npu_softmax(output: Any) -> int:
    """The maximum and the sum of each row, eight times in fp32 each, where others keep one logarithm of the sum.

    Source: softmax_max, softmax_sum in op-plugin's FlashAttentionKernelNpuOpApi.cpp.
    """
    logsumexp = output[1]
    return int(logsumexp.numel() * 2 * 8 * 4 - logsumexp.nbytes)


def _npu_dropout_mask(output: Any) -> int:
    """A bit for each element, in whole 128. Source: DropoutKernelNpuOpApi.cpp of op-plugin."""
    mask = output[1]
    return int(_up(mask.numel(), 128) // 8 - mask.nbytes)


_NPU_KEPT: Mapping[Any, Kept] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _npu_softmax,
    _aten.native_dropout.default: _npu_dropout_mask,
}
_KEPT: Mapping[Kind, Mapping[Any, Kept]] = {"cpu": {}, "cuda": {}, "npu": _NPU_KEPT}


def scratch_sizes(kind: Kind, func: Any, args: tuple[Any, ...]) -> Sizes:
    """What a device's kernel allocates inside, all of it live at once."""
    if kind == "cpu":
        num_bytes = temporary_bytes(func, args)
        return (num_bytes,) if num_bytes else ()
    sizes = _SCRATCH[kind].get(func)
    return () if sizes is None else sizes(args)


def kept_bytes(kind: Kind, func: Any, output: Any) -> int:
    """What a device keeps more than the CPU does beside an operator's second output."""
    more = _KEPT[kind].get(func)
    return 0 if more is None else more(output)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """One kernel that keeps a mask of a byte an element; a CPU keeps noise in the input's dtype.

    Source: is_fused_kernel_acceptable in aten/src/ATen/native/Dropout.cpp.
    """
    if training and 0.0 < p < 1.0 and not inplace and input.numel():
        return torch.native_dropout(input, p, True)[0]
    return _DROPOUT(input, p, training, inplace)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **rest: Any,
) -> Tensor:
    """A device's fused kernel takes dropout and keeps a seed; a CPU's does not, and all scores would be there.

    Source: use_flash_attention in aten/src/ATen/native/transformers/sdp_utils_cpp.cpp.
    """
    return _ATTENTION(query, key, value, attn_mask, 0.0, is_causal, **rest)


_DROPOUT, _ATTENTION = F.dropout, F.scaled_dot_product_attention
_FUSED: Mapping[str, Callable[..., Any]] = {"dropout": _dropout, "scaled_dot_product_attention": _attention}
FUSED: Mapping[Kind, Mapping[str, Callable[..., Any]]] = {"cpu": {}, "cuda": _FUSED, "npu": _FUSED}

# cuBLAS has a workspace for each handle and stream: forward and backward run on two threads, each with its own handle.
# 32 MiB on compute capability 9.0, 10 and 12, else 2 x 4096 + 8 x 16 KiB; the environment's CUBLAS_WORKSPACE_CONFIG
# would change it. cuBLASLt shares it. Source: parseChosenWorkspaceSize, aten/src/ATen/cuda/CublasHandlePool.cpp.
_BLAS_HANDLES = 2
_BLAS_BYTES, _BLAS_BYTES_FROM_HOPPER = (2 * 4096 + 8 * 16) * 1024, 8 * 4096 * 1024
_FROM_HOPPER = ("h100", "h200", "h800", "h20", "gh200", "b100", "b200", "gb200", "b300", "rtx-50")


def library_bytes(spec: DeviceSpec, *, side_streams: int = 0) -> Sizes:
    """Workspaces of libraries that a device's caching allocator holds as long as the process lives.

    side_streams: on which matmuls run too; each has a workspace of its own.
    """
    if spec.kind != "cuda":
        return ()
    names = {name.lower().replace(" ", "-").replace("nvidia-", "") for name in (spec.name, *spec.reported_names)}
    recent = any(name.startswith(_FROM_HOPPER) for name in names)
    return (_BLAS_HANDLES + side_streams) * (_BLAS_BYTES_FROM_HOPPER if recent else _BLAS_BYTES,)
