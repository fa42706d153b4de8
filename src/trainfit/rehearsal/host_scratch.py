"""What low-precision matmuls allocate inside on this machine's CPU: asked of the library, once for each shape.

oneDNN packs operands into scratch memory whose size depends on the processor, the threads and the shape; there is no
formula to read off. It stays below a few hundred kB a thread, so it shows in models of a few MB only, and a matmul that
would take long is not asked about.
"""

from __future__ import annotations

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
_LOW_PRECISION = (torch.bfloat16, torch.float16)
_MAX_MULTIPLICATIONS = 2**30  # a tenth of a second at worst

_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def scratch_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that a matmul on fake tensors would allocate and free inside; 0 in fp32 and for other operators."""
    func = _LIKE.get(func, func)
    if func not in _MATMULS or not all(isinstance(arg, Tensor) for arg in args):
        return 0
    last = args[-1]
    if last.dtype not in _LOW_PRECISION or args[-2].numel() * last.shape[-1] > _MAX_MULTIPLICATIONS:
        return 0
    layouts = tuple((tuple(arg.shape), tuple(arg.stride()), arg.dtype) for arg in args)
    return _measured(func, layouts, torch.get_num_threads())


@cache
def _measured(func: Any, layouts: tuple[_Layout, ...], num_threads: int) -> int:
    with unset_fake_temporarily():
        operands = [torch.empty_strided(shape, stride, dtype=dtype).zero_() for shape, stride, dtype in layouts]
        func(*operands)  # the first call of a shape also builds its kernel
        changes = allocations(lambda: func(*operands))
    live = list(accumulate(changes))
    return max(live, default=0) - sum(changes)
