"""Operators that devices have as one kernel: what each takes, saves and allocates, on fake tensors.

Only shapes, dtypes and lifetimes are right; there are no numbers in a rehearsal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class FlashAttention(torch.autograd.Function):
    """flash-attn 2: saves q, k, v, its output and one fp32 per query; its backward sums dq in fp32.

    query (batch, tokens, heads, dim); key, value (batch, tokens, kv_heads, dim). With fewer key heads its backward
    makes dk and dv for every query head and sums them.  Source: csrc/flash_attn/flash_api.cpp, mha_bwd.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        batch, tokens, heads, _ = query.shape
        logsumexp = torch.empty(batch, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, _, logsumexp = ctx.saved_tensors
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        inside = [torch.empty_like(query, dtype=torch.float32), torch.empty_like(logsumexp)]
        if key.shape != query.shape:
            inside += [torch.empty_like(query), torch.empty_like(query)]
        del inside
        return grad_query, grad_key, grad_value


class FusedNorm(torch.autograd.Function):
    """One kernel for a norm: saves its input and an fp32 or two for each token, and computes in registers."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, torch.empty(hidden.shape[:-1], dtype=torch.float32))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden, weight, _ = ctx.saved_tensors
        return torch.empty_like(hidden), torch.empty_like(weight) if weight.requires_grad else None


class FusedGate(torch.autograd.Function):
    """silu(gate) * up as one kernel: saves both, computes silu again."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return torch.empty_like(gate), torch.empty_like(up)


class FusedActivation(torch.autograd.Function):
    """bias + gelu as one kernel: saves its input."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (hidden,) = ctx.saved_tensors
        return torch.empty_like(hidden)


class FusedRotary(torch.autograd.Function):
    """Rotates in place, saves nothing of the batch's size."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


class QuantisedLinear(torch.autograd.Function):
    """x @ W.T for a W that is packed: unpacked to x's dtype in forward and again in backward, and dropped at once.

    Source: bitsandbytes/autograd/_functions.py, MatMul4Bit; AutoGPTQ's and fms-acceleration's triton kernels do the
    same from gptq's codes.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, packed: Tensor, rows: int, keeps_input: bool) -> Tensor:
        ctx.rows = rows
        ctx.dtype = hidden.dtype
        ctx.columns = hidden.shape[-1]
        if keeps_input:
            ctx.save_for_backward(hidden)
        weight = torch.empty(rows, hidden.shape[-1], dtype=hidden.dtype)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        weight = torch.empty(ctx.rows, ctx.columns, dtype=ctx.dtype)
        return gradients[0] @ weight, None, None, None


class DropoutInPlace(torch.autograd.Function):
    """native_dropout: saves a mask of one byte an element."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(hidden, dtype=torch.bool))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.saved_tensors  # noqa: B018  # read, so that they are checked to be there
        return torch.empty_like(gradients[0])


class GatherTokens(torch.autograd.Function):
    """Sequence parallel: every rank's tokens; along a dimension that is not the first, so joined by a copy."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        batch, tokens, dim = hidden.shape
        gathered = hidden.new_empty(batch * ranks, tokens, dim)
        return torch.cat(gathered.chunk(ranks), 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _scatter(gradients[0], ctx.ranks), None


class ScatterTokens(torch.autograd.Function):
    """Sequence parallel: the sum over ranks, of which each keeps its tokens."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return _scatter(hidden, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        batch, tokens, dim = gradients[0].shape
        gathered = gradients[0].new_empty(batch * ctx.ranks, tokens, dim)
        return torch.cat(gathered.chunk(ctx.ranks), 1), None


def _scatter(hidden: Tensor, ranks: int) -> Tensor:
    batch, tokens, dim = hidden.shape
    flat = torch.cat(hidden.chunk(ranks, 1))
    del hidden
    return flat.new_empty(batch, tokens // ranks, dim)


def dropout(hidden: Tensor, probability: float) -> Tensor:
    """As a device's fused dropout runs it."""
    if probability == 0.0:
        return hidden
    dropped: Tensor = DropoutInPlace.apply(hidden)  # type: ignore[no-untyped-call]
    return dropped
