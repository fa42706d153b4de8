"""The kernels that a calibration times: how to make their operands, and how to call them.

A table is named after its kernel and dtype, "silu.bf16". Its size is elements of the largest operand, which stand in
rows of at most ROW, the last dimension of hidden states. Optimizers and collectives of tensors count all elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROW = 256
VOCAB_ROW = 4096
EXPERTS_ROW = 64  # scores of experts, of which a router takes a few
# Rows of so few elements fill no vector: on an AMD EPYC in fp32 a softmax over 8 takes 0.15 us a row, over 64 it takes
# 0.05. Rows of less than NARROW are priced as such of NARROW_ROW.
NARROW, NARROW_ROW = 32, 8
_VALUE = 0.5

Make = Callable[[int, torch.dtype, torch.device], tuple[Any, ...]]
Kernel = tuple[Make, Callable[..., Any]]
aten = torch.ops.aten


def _full(elements: int, dtype: torch.dtype, device: torch.device, row: int = ROW) -> Tensor:
    width = min(elements, row)
    return torch.full((elements // width, width), _VALUE, dtype=dtype, device=device)


def operands(pattern: str, row: int = ROW) -> Make:
    """One letter an operand. n: all elements; r: one for each row; c: one row; i: an index for each row, one of as many
    rows; f: all, in fp32."""

    def make(elements: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        like = _full(elements, dtype, device, row)
        rows = like.shape[0]
        forms: dict[str, Callable[[], Tensor]] = {
            "n": lambda: torch.full_like(like, _VALUE),
            "r": lambda: torch.full_like(like[:, :1], _VALUE),
            "c": lambda: torch.full_like(like[0], _VALUE),
            "i": lambda: torch.arange(rows, device=device).flip(0).contiguous(),
            "f": lambda: torch.full_like(like, _VALUE, dtype=torch.float32),
        }
        return tuple(forms[letter]() for letter in pattern)

    return make


def apart(elements: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor]:
    """Rows of 16 that do not lie beside each other: a kernel goes over each in a loop of its own."""
    width = min(elements, 16)
    return (torch.full((elements // width, 2 * width), _VALUE, dtype=dtype, device=device)[:, :width],)


def _normed(elements: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    hidden = _full(elements, dtype, device)
    weight = torch.ones_like(hidden[0])
    _, mean, deviation = torch.native_layer_norm(hidden, [hidden.shape[1]], weight, weight, 1e-5)
    return hidden, weight, mean, deviation


def _norm_backward(hidden: Tensor, weight: Tensor, mean: Tensor, deviation: Tensor) -> Any:
    shape = [hidden.shape[1]]
    return aten.native_layer_norm_backward(hidden, hidden, shape, mean, deviation, weight, weight, [True, True, True])


def _losses(elements: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    scores = _full(elements, dtype, device, VOCAB_ROW)
    total = torch.ones((), dtype=dtype, device=device)
    return scores, torch.zeros(scores.shape[0], dtype=torch.long, device=device), total


def _updated(elements: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    parameter = torch.nn.Parameter(_full(elements, dtype, device))
    parameter.grad = torch.full_like(parameter, _VALUE)
    return (torch.optim.AdamW([parameter], lr=1e-6, fused=True),)


def _listed(elements: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    return ([_full(elements, dtype, device)], torch.ones((), device=device))


# Every dtype that the device computes in has a table of each of these.
KERNELS: Mapping[str, Kernel] = {
    "copy": (operands("n"), torch.clone),
    "fill": (operands("n"), torch.zeros_like),
    "unary": (operands("n"), torch.neg),
    "unary_": (operands("n"), lambda x: x.mul_(1.0)),
    "binary": (operands("nn"), torch.add),
    "binary_": (operands("nn"), lambda x, y: x.add_(y, alpha=0.0)),
    "random": (operands("n"), lambda x: x.bernoulli_(0.9)),
    "compare": (operands("nn"), torch.lt),
    "compare_number": (operands("n"), lambda x: x.gt(0.0)),
    "power": (operands("n"), lambda x: x.pow(3)),
    "sqrt": (operands("n"), torch.sqrt),
    "exp": (operands("n"), torch.exp),
    "tanh": (operands("n"), torch.tanh),
    "tanh_backward": (operands("nn"), aten.tanh_backward),
    "silu": (operands("n"), F.silu),
    "silu_backward": (operands("nn"), aten.silu_backward),
    "gelu": (operands("n"), F.gelu),
    "gelu_backward": (operands("nn"), aten.gelu_backward),
    "gelu_tanh": (operands("n"), lambda x: F.gelu(x, approximate="tanh")),
    "gelu_tanh_backward": (operands("nn"), lambda x, y: aten.gelu_backward(x, y, approximate="tanh")),
    "softmax": (operands("n"), lambda x: x.softmax(-1)),
    "safe_softmax": (operands("n"), lambda x: aten._safe_softmax(x, -1)),
    "softmax_backward": (operands("nn"), lambda x, y: aten._softmax_backward_data(x, y, -1, x.dtype)),
    "softmax_narrow": (operands("n", NARROW_ROW), lambda x: x.softmax(-1)),
    "softmax_backward_narrow": (
        operands("nn", NARROW_ROW),
        lambda x, y: aten._softmax_backward_data(x, y, -1, x.dtype),
    ),
    "log_softmax": (operands("n", VOCAB_ROW), lambda x: x.log_softmax(-1)),
    "log_softmax_backward": (
        operands("nn", VOCAB_ROW),
        lambda x, y: aten._log_softmax_backward_data(x, y, -1, x.dtype),
    ),
    "nll_loss_backward": (
        _losses,
        lambda scores, labels, total: aten.nll_loss_backward(total, scores, labels, None, 1, -100, total),
    ),
    "layer_norm": (_normed, lambda x, w, *_: F.layer_norm(x, [x.shape[1]], w, w)),
    "layer_norm_backward": (_normed, _norm_backward),
    "sum_rows": (operands("n"), lambda x: x.sum(-1, keepdim=True)),
    "mean_rows": (operands("n"), lambda x: x.mean(-1, keepdim=True)),
    "sum_columns": (operands("n"), lambda x: x.sum(0)),
    "norm": (operands("n"), torch.linalg.vector_norm),
    "norm_rows": (operands("n"), lambda x: torch.linalg.vector_norm(x, dim=-1)),
    "norm_columns": (operands("n"), lambda x: torch.linalg.vector_norm(x, dim=0)),
    "cumulate": (operands("n"), lambda x: x.cumsum(-1)),
    "embedding": (operands("ni"), lambda x, index: F.embedding(index, x)),
    "embedding_backward": (
        operands("ni"),
        lambda x, index: aten.embedding_dense_backward(x, index, x.shape[0], -1, False),
    ),
    "index": (operands("ni"), lambda x, index: x[index]),
    "index_put": (operands("nin"), lambda x, index, y: x.index_put((index,), y, accumulate=True)),
    "sort": (operands("n"), lambda x: x.sort(-1)),
    "topk": (operands("n", EXPERTS_ROW), lambda x: x.topk(min(8, x.shape[-1]), -1)),
    "foreach_norm": (_listed, lambda tensors, _: torch._foreach_norm(tensors)),
    "foreach_scale": (_listed, lambda tensors, scale: torch._foreach_mul_(tensors, scale)),
}
# In fp32, which updates go through whatever the model computes in.
FP32_KERNELS: Mapping[str, Kernel] = {"adamw": (_updated, lambda optimizer: optimizer.step())}
# In half precisions: to and from fp32.
HALF_KERNELS: Mapping[str, Kernel] = {
    "from_fp32": (lambda n, dtype, device: (_full(n, torch.float32, device), dtype), lambda x, dtype: x.to(dtype)),
    "to_fp32": (operands("n"), lambda x: x.to(torch.float32)),
}

# What is also timed on memory that was touched just before: chains of these are what blocks and updates in pieces
# consist of. Activations, exponentials and forward norms compute more than they move, and take as long there.
NEAR = frozenset(
    {
        *("copy", "fill", "unary", "unary_", "binary", "binary_", "compare", "compare_number", "sqrt", "power"),
        *("sum_rows", "mean_rows", "sum_columns", "index", "from_fp32", "to_fp32", "adamw"),
        *("silu_backward", "tanh_backward", "softmax_backward"),
    }
)

LAYOUTS: Mapping[str, Callable[[int, int, int], tuple[Sequence[int], Sequence[int]]]] = {
    # What backward has of a linear layer: its input's gradient, its forward, its weight's gradient. t: transposed.
    "nn": lambda m, n, k: ((k, 1), (n, 1)),
    "nt": lambda m, n, k: ((k, 1), (1, k)),
    "tn": lambda m, n, k: ((1, m), (n, 1)),
}


def matrices(layout: str, m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Operands of a matmul, (m, k) and (k, n), in one of LAYOUTS."""
    left, right = LAYOUTS[layout](m, n, k)
    made = [
        torch.full((size,), _VALUE, dtype=dtype, device=device).as_strided(shape, stride)
        for size, shape, stride in ((m * k, (m, k), left), (k * n, (k, n), right))
    ]
    return made[0], made[1]
