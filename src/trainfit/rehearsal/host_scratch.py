"""What kernels allocate inside on this machine's CPU and free before they return: asked of them, once for each shape.

Low-precision matmuls: oneDNN packs operands into scratch memory whose size depends on the processor, the threads and
the shape; there is no formula to read off. It stays below a few hundred kB a thread, so it shows in models of a few MB
only, and a matmul that would take long is not asked about.

Attention: scores of a block of queries by a block of keys, for each thread; in backward their gradients too, and the
gradient of the output once more where its (batch, tokens, heads, dim) is not contiguous. Source:
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
_MAX_TOKENS = 1024  # blocks have at most 256 queries and 512 keys: longer sequences have more blocks, not larger ones
_LOW_PRECISION = (torch.bfloat16, torch.float16)
_MAX_MULTIPLICATIONS = 2**30  # a tenth of a second at worst

_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def scratch_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that a kernel on fake tensors would allocate and free inside; 0 for those that are not known to."""
    if func is _ATTENTION:
        return _asked_of_attention(args[0], args[1], backward=False)
    if func is _ATTENTION_BACKWARD:
        gradient = args[0]
        copied = 0 if gradient.transpose(1, 2).is_contiguous() else gradient.numel() * gradient.element_size()
        return copied + _asked_of_attention(args[1], args[2], backward=True)
    return _of_matmul(_LIKE.get(func, func), args)


def _of_matmul(func: Any, args: tuple[Any, ...]) -> int:
    """None in fp32."""
    if func not in _MATMULS or not all(isinstance(arg, Tensor) for arg in args):
        return 0
    last = args[-1]
    if last.dtype not in _LOW_PRECISION or args[-2].numel() * last.shape[-1] > _MAX_MULTIPLICATIONS:
        return 0
    layouts = tuple((tuple(arg.shape), tuple(arg.stride()), arg.dtype) for arg in args)
    return _of_layouts(func, layouts, torch.get_num_threads())


@cache
def _of_layouts(func: Any, layouts: tuple[_Layout, ...], num_threads: int) -> int:
    with unset_fake_temporarily():
        operands = [torch.empty_strided(shape, stride, dtype=dtype).zero_() for shape, stride, dtype in layouts]
        return _measured(lambda: func(*operands))


def _asked_of_attention(query: Tensor, key: Tensor, *, backward: bool) -> int:
    """query, key: (batch, heads, tokens, dim). Each thread has blocks of its own; that all are at theirs counts."""
    num_tokens = min(query.shape[2], _MAX_TOKENS), min(key.shape[2], _MAX_TOKENS)
    return torch.get_num_threads() * _of_attention(backward, num_tokens, query.shape[3], query.dtype)


@cache
def _of_attention(backward: bool, num_tokens: tuple[int, int], dim: int, dtype: torch.dtype) -> int:
    """On one thread. num_tokens: of queries, of keys."""
    with unset_fake_temporarily(), _one_thread():
        query, key = (torch.zeros(1, length, 1, dim, dtype=dtype).transpose(1, 2) for length in num_tokens)
        output, logsumexp = _ATTENTION(query, key, key)
        if not backward:
            return _measured(lambda: _ATTENTION(query, key, key))
        gradient = torch.zeros_like(query)  # its layout as well
        return _measured(
            lambda: _ATTENTION_BACKWARD(gradient, query, key, key, output, logsumexp, 0.0, is_causal=False)
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    """How many meet inside a kernel is a matter of luck."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _measured(run: Callable[[], object]) -> int:
    """The most that is live while it runs beyond what it returns."""
    run()  # the first call of a shape also builds its kernel
    changes = allocations(run)
    return max(accumulate(changes), default=0) - sum(changes)
