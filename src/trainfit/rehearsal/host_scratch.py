"""What kernels allocate inside on this machine's CPU and free before they return: asked of them, once for each shape.

Low-precision matmuls: oneDNN packs operands into scratch memory whose size depends on the processor, the threads and
the shape; there is no formula to read off. It stays below a few hundred kB a thread, so it shows in models of a few MB
only, and a matmul that would take long is not asked about.

Attention: for each thread, of a block of queries by a block of keys the scores and, in forward, the output so far, in
backward the scores' gradients; in half precision the scores once more, and what its matmuls pack. Backward also copies
the output's gradient where (batch, tokens, heads, dim) is not contiguous. In fp16 forward may pack keys and values with
C++'s new, which PyTorch's allocator does not see: nor does this. Source:
aten/src/ATen/native/cpu/FlashAttentionKernel.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from trainfit.rehearsal.recording import allocations

_MATMULS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
    }
)
# Those that write into what is there already pack their operands like those that do not.
_LIKE = {torch.ops.aten.mm.out: torch.ops.aten.mm.default, torch.ops.aten.addmm_.default: torch.ops.aten.addmm.default}
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# Blocks are of 32, from 192 queries on of 64, from 768 on of 256 queries, by at most 512 keys: none grows beyond.
_MAX_ASKED_TOKENS = 1024
_LOW_PRECISION = (torch.bfloat16, torch.float16)
_MAX_MULTIPLICATIONS = 2**30  # a tenth of a second at worst

_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def scratch_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that a kernel on fake tensors would allocate and free inside; 0 for those that are not known to."""
    if func is _ATTENTION:
        return _attention_scratch_bytes(args[0], args[1], backward=False)
    if func is _ATTENTION_BACKWARD:
        grad_output = args[0]
        is_copied = not grad_output.transpose(1, 2).is_contiguous()
        copied_bytes = grad_output.numel() * grad_output.element_size() if is_copied else 0
        return copied_bytes + _attention_scratch_bytes(args[1], args[2], backward=True)
    return _matmul_scratch_bytes(_LIKE.get(func, func), args)


def _matmul_scratch_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Of a matmul in bf16 or fp16; 0 in fp32 and for other operators."""
    if func not in _MATMULS or not all(isinstance(arg, Tensor) for arg in args):
        return 0
    last = args[-1]
    if last.dtype not in _LOW_PRECISION or args[-2].numel() * last.shape[-1] > _MAX_MULTIPLICATIONS:
        return 0
    layouts = tuple((tuple(arg.shape), tuple(arg.stride()), arg.dtype) for arg in args)
    return _known_matmul_bytes(func, layouts, torch.get_num_threads())


@cache
def _known_matmul_bytes(func: Any, layouts: tuple[_Layout, ...], num_threads: int) -> int:
    with unset_fake_temporarily():
        operands = [torch.empty_strided(shape, stride, dtype=dtype).zero_() for shape, stride, dtype in layouts]
        return _measured_scratch_bytes(lambda: func(*operands))


def _attention_scratch_bytes(query: Tensor, key: Tensor, *, backward: bool) -> int:
    """query, key: (batch, heads, tokens, dim).

    Each thread has its own, most of it allocated for all before they begin. What a thread allocates meanwhile is taken
    to be live in all at once: a backward's sums of rows, up to 1 KiB, and what half precision's matmuls pack.
    """
    num_tokens = min(query.shape[2], _MAX_ASKED_TOKENS), min(key.shape[2], _MAX_ASKED_TOKENS)
    return torch.get_num_threads() * _attention_bytes_per_thread(backward, num_tokens, query.shape[3], query.dtype)


@cache
def _attention_bytes_per_thread(backward: bool, num_tokens: tuple[int, int], head_dim: int, dtype: torch.dtype) -> int:
    """num_tokens: of queries, of keys."""
    with unset_fake_temporarily(), _one_thread():
        query, key = (torch.zeros(1, length, 1, head_dim, dtype=dtype).transpose(1, 2) for length in num_tokens)
        if not backward:
            return _measured_scratch_bytes(lambda: _ATTENTION(query, key, key))
        output, logsumexp = _ATTENTION(query, key, key)
        grad_output = torch.zeros_like(query)  # its layout as well
        return _measured_scratch_bytes(
            lambda: _ATTENTION_BACKWARD(grad_output, query, key, key, output, logsumexp, 0.0, is_causal=False)
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    """For as long as it is open: a kernel's peak would depend on how its threads meet."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _measured_scratch_bytes(run: Callable[[], object]) -> int:
    """The most that is live while it runs, less what its result keeps."""
    run()  # the first call of a shape also builds its kernel
    changes = allocations(run)
    return max(accumulate(changes), default=0) - sum(changes)
