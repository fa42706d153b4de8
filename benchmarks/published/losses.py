"""From the last hidden state to a loss, as several frameworks do it. Each takes (hidden, head, labels)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from published.model import Linear
from published.records import Run

IGNORED = -100


def loss_of(run: Run) -> Callable[[Tensor, Linear, Tensor], Any]:
    """hidden (batch, tokens, dim), labels (batch, tokens). Returns what a trainer holds during backward, loss first."""
    if run.loss in ("hf", "triton"):
        return lambda hidden, head, labels: _shifted(hidden, head, labels, run)
    if run.loss == "float" and run.tensor > 1:
        return _split_float
    return _LOSSES[run.loss]


def _shifted(hidden: Tensor, head: Linear, labels: Tensor, run: Run) -> Any:
    """transformers: logits in fp32, shifted by a copy. The half logits live on where a caller holds them."""
    logits = head(hidden)
    held = logits if run.keeps_logits else None
    logits = logits.float()
    shifted = logits[:, :-1].contiguous().view(-1, logits.shape[-1])
    targets = labels[:, 1:].reshape(-1)
    cross_entropy = _TritonLoss.apply if run.loss == "triton" else F.cross_entropy
    return cross_entropy(shifted, targets), held


class _TritonLoss(torch.autograd.Function):
    """Unsloth's kernel: saves the logits, and writes their gradient over them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits, torch.empty(logits.shape[0], dtype=torch.float32))
        return torch.zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.saved_tensors[0].detach(), None


class _FusedLinearLoss(torch.autograd.Function):
    """Liger: chunk by chunk, gradients in forward.  Source: liger_kernel/ops/fused_linear_cross_entropy.py."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        flat = hidden.flatten(0, 1)
        tokens, dim = flat.shape
        grad_hidden = torch.zeros_like(flat)
        grad_weight = torch.zeros_like(weight) if weight.requires_grad else None
        chunk = 2 ** math.ceil(math.log2(math.ceil(tokens / math.ceil(weight.shape[0] / dim))))
        for start in range(0, tokens, chunk):
            part = flat[start : start + chunk]
            logits = part @ weight.t()
            wide = logits.float()
            del logits
            half = wide.to(flat.dtype)
            grad_hidden[start : start + chunk] = half @ weight
            if grad_weight is not None:
                torch.addmm(grad_weight, half.t(), part, out=grad_weight)
            del wide, half
        ctx.save_for_backward(*(each for each in (grad_hidden.view_as(hidden), grad_weight) if each is not None))
        return torch.zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        saved = ctx.saved_tensors
        return saved[0], saved[1] if len(saved) > 1 else None, None


def _liger(hidden: Tensor, head: Linear, labels: Tensor) -> Any:
    return (_FusedLinearLoss.apply(hidden, head.weight, labels),)  # type: ignore[no-untyped-call]


def _float(hidden: Tensor, head: Linear, labels: Tensor) -> Any:
    """torchtitan: cross entropy of fp32 logits, the half ones dropped before backward."""
    logits = head(hidden).flatten(0, 1)
    return (F.cross_entropy(logits.float(), labels.flatten()),)


class _LossParallel(torch.autograd.Function):
    """DTensor's cross entropy of logits that are split by vocabulary, operator by operator.

    Source: torch/distributed/tensor/parallel/loss.py, _log_softmax and _nll_loss_and_log_softmax_backward.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        sums = shifted.exp().sum(-1, keepdim=True)
        ctx.save_for_backward(shifted - sums.log())
        return torch.zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (log_softmax,) = ctx.saved_tensors
        chosen = torch.zeros_like(log_softmax)
        return (chosen + log_softmax.exp()) * gradients[0], None


def _split_float(hidden: Tensor, head: Linear, labels: Tensor) -> Any:
    logits = head(hidden).flatten(0, 1)
    return (_LossParallel.apply(logits.float(), labels.flatten()),)  # type: ignore[no-untyped-call]


def _output_float(hidden: Tensor, head: Linear, labels: Tensor) -> Any:
    """The model's output is fp32 logits, which the trainer holds during backward."""
    logits = head(hidden).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class _CompiledLoss(torch.autograd.Function):
    """Compiled cross entropy: half logits and two fp32 a token are saved, its gradient comes out half."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        stats = torch.empty(2, logits.shape[0], dtype=torch.float32)
        ctx.save_for_backward(logits, stats)
        return torch.zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return torch.empty_like(ctx.saved_tensors[0]), None


def _fused(hidden: Tensor, head: Linear, labels: Tensor) -> Any:
    logits = head(hidden).flatten(0, 1)
    return (_CompiledLoss.apply(logits, labels.flatten()),)  # type: ignore[no-untyped-call]


def _chunked_logits(hidden: Tensor, head: Linear, labels: Tensor) -> Any:
    """torchtune: the head gives logits in 8 pieces along tokens; each piece's loss upcasts alone."""
    pieces = [head(part) for part in hidden.chunk(8, dim=1)]
    losses = [
        _CompiledLoss.apply(piece.flatten(0, 1), part.flatten())  # type: ignore[no-untyped-call]
        for piece, part in zip(pieces, labels.chunk(8, dim=1))
    ]
    return torch.stack(losses).sum(), pieces


def _chunked_head(hidden: Tensor, head: Linear, labels: Tensor) -> Any:
    """litgpt with lm_head_chunk_size: logits and losses in pieces of 128 tokens, all of them held."""
    pieces = [head(part) for part in hidden.split(128, dim=1)]
    losses = [
        F.cross_entropy(piece.flatten(0, 1), part.flatten(), reduction="none").sum()
        for piece, part in zip(pieces, labels.split(128, dim=1))
    ]
    return torch.stack(losses).sum(), pieces


def _bf16(hidden: Tensor, head: Linear, labels: Tensor) -> Any:
    """litgpt without chunks: cross entropy of half logits, which the trainer holds."""
    logits = head(hidden)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class _VocabParallelLoss(torch.autograd.Function):
    """Megatron: logits become fp32, exponentials and then gradients in their place."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits.float())
        ctx.dtype = logits.dtype
        return torch.zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.saved_tensors[0].to(ctx.dtype), None


def _parallel(hidden: Tensor, head: Linear, labels: Tensor) -> Any:
    """The model gives losses, not logits, so nobody holds these."""
    logits = head(hidden).transpose(0, 1).contiguous()
    return (_VocabParallelLoss.apply(logits, labels),)  # type: ignore[no-untyped-call]


_LOSSES: Mapping[str, Callable[[Tensor, Linear, Tensor], Any]] = {
    "liger": _liger,
    "float": _float,
    "output_float": _output_float,
    "fused": _fused,
    "chunked_logits": _chunked_logits,
    "chunked_head": _chunked_head,
    "bf16": _bf16,
    "parallel": _parallel,
}
