"""What a CPU's kernels allocate inside: what is said of fake tensors is what the real operators take."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from trainfit.rehearsal.host_scratch import scratch_bytes
from trainfit.rehearsal.recording import allocations

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
BATCH, HEADS, DIM = 2, 3, 16
ROW_SUMS_BYTES = 2 * 256 * 4  # of two threads' blocks in backward, which may have them at once or in turn
pytestmark = pytest.mark.usefixtures("one_thread")


def taken_inside(run: Callable[[], object]) -> int:
    run()
    changes = allocations(run)
    return max(accumulate(changes)) - sum(changes)


def said_of(operator: Any, *args: Any) -> int:
    with FakeTensorMode() as mode:
        return scratch_bytes(operator, tuple(mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args))


def heads_of(num_tokens: int, dtype: torch.dtype, *, tokens_first: bool) -> Tensor:
    """(batch, heads, tokens, dim)."""
    if tokens_first:
        return torch.zeros(BATCH, num_tokens, HEADS, DIM, dtype=dtype).transpose(1, 2)
    return torch.zeros(BATCH, HEADS, num_tokens, DIM, dtype=dtype)


def attention_calls(num_tokens: int, dtype: torch.dtype, *, tokens_first: bool) -> tuple[tuple[Any, ...], ...]:
    """Arguments of a forward and of its backward."""
    query, key = (heads_of(length, dtype, tokens_first=True) for length in (num_tokens, num_tokens + 40))
    output, logsumexp = FORWARD(query, key, key)
    grad_output = heads_of(num_tokens, dtype, tokens_first=tokens_first)
    return (query, key, key), (grad_output, query, key, key, output, logsumexp, 0.0, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [24, 300, 1400])  # one block of either; several of queries; several of keys too
@pytest.mark.parametrize("tokens_first", [True, False])  # where they are not, backward copies the output's gradient
def test_scratch_bytes_of_attention_are_what_its_kernel_allocates(
    dtype: torch.dtype, num_tokens: int, tokens_first: bool
):
    forward, backward = attention_calls(num_tokens, dtype, tokens_first=tokens_first)
    assert said_of(FORWARD, *forward) == taken_inside(lambda: FORWARD(*forward)) > 0
    assert said_of(BACKWARD, *backward) == taken_inside(lambda: BACKWARD(*backward)) > 0


def test_each_thread_of_attention_has_scratch_of_its_own():
    torch.set_num_threads(2)
    forward, backward = attention_calls(300, torch.float32, tokens_first=True)
    assert said_of(FORWARD, *forward) == taken_inside(lambda: FORWARD(*forward))
    taken = taken_inside(lambda: BACKWARD(*backward))
    assert said_of(BACKWARD, *backward) == pytest.approx(taken, abs=ROW_SUMS_BYTES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scratch_bytes_of_matmuls_are_what_the_library_allocates(dtype: torch.dtype):
    first, second = torch.zeros(96, 64, dtype=dtype), torch.zeros(64, 48, dtype=dtype)
    taken = taken_inside(lambda: torch.mm(first, second))
    assert said_of(aten.mm.default, first, second) == taken
    assert said_of(aten.mm.out, first, second) == taken
    assert said_of(aten.bmm.default, first[None], second[None]) == taken_inside(
        lambda: torch.bmm(first[None], second[None])
    )
    assert said_of(aten.add.Tensor, first, first) == 0


def test_a_matmul_that_would_take_long_is_not_asked_about():
    first = torch.empty(2**11, 2**11, dtype=torch.bfloat16)
    assert said_of(aten.mm.default, first, first) == 0
