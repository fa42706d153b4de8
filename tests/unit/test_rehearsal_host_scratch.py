"""What a CPU's kernels allocate inside: what is said of fake tensors is what the real operators take."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from trainfit.rehearsal.host_scratch import scratch_bytes
from trainfit.rehearsal.recording import allocations

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
BATCH, HEADS, DIM = 2, 3, 16
pytestmark = pytest.mark.usefixtures("one_thread")


def taken_inside(run: Callable[[], object]) -> int:
    run()
    changes = allocations(run)
    return max(accumulate(changes)) - sum(changes)


def heads_of(tokens: int, dtype: torch.dtype, *, tokens_first: bool) -> Tensor:
    """(batch, heads, tokens, dim)."""
    if tokens_first:
        return torch.zeros(BATCH, tokens, HEADS, DIM, dtype=dtype).transpose(1, 2)
    return torch.zeros(BATCH, HEADS, tokens, DIM, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [24, 300, 1400])  # one block of either; several of queries; several of keys too
@pytest.mark.parametrize("tokens_first", [True, False])  # a gradient that is not is copied
def test_what_attention_takes_inside_is_what_it_is_said_to(dtype: torch.dtype, tokens: int, tokens_first: bool):
    query, key = (heads_of(length, dtype, tokens_first=True) for length in (tokens, tokens + 40))
    output, logsumexp = FORWARD(query, key, key)
    gradient = heads_of(tokens, dtype, tokens_first=tokens_first)
    backward = (gradient, query, key, key, output, logsumexp, 0.0, False)
    forward_bytes = taken_inside(lambda: FORWARD(query, key, key))
    backward_bytes = taken_inside(lambda: BACKWARD(*backward))
    assert forward_bytes > 0
    assert backward_bytes > 0
    with FakeTensorMode() as mode:

        def fake(value: object) -> object:
            return mode.from_tensor(value) if isinstance(value, Tensor) else value

        assert scratch_bytes(FORWARD, tuple(map(fake, (query, key, key)))) == forward_bytes
        assert scratch_bytes(BACKWARD, tuple(map(fake, backward))) == backward_bytes
        contiguous = heads_of(tokens, dtype, tokens_first=True)
        one = scratch_bytes(BACKWARD, (fake(contiguous), *map(fake, backward[1:])))
        torch.set_num_threads(2)
        assert scratch_bytes(BACKWARD, (fake(contiguous), *map(fake, backward[1:]))) == 2 * one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_matmul_takes_inside_is_what_it_is_said_to(dtype: torch.dtype):
    first, second = torch.zeros(96, 64, dtype=dtype), torch.zeros(64, 48, dtype=dtype)
    taken = taken_inside(lambda: torch.mm(first, second))
    with FakeTensorMode() as mode:
        operands = (mode.from_tensor(first), mode.from_tensor(second))
        assert scratch_bytes(torch.ops.aten.mm.default, operands) == taken
        assert scratch_bytes(torch.ops.aten.add.Tensor, operands) == 0
