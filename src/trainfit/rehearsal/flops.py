"""Multiplications and additions of operators: those that a kernel does, and those that the model asks for.

They differ in attention, whose backward kernels make the scores again: five matmuls over them where the model has four.
A causal mask halves them: what it hides is not computed, or for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

GROUPED_MM = torch.ops.aten._grouped_mm.default
aten = torch.ops.aten

# Where the query stands among the arguments of an attention, and whether it is its backward.
ATTENTION: Mapping[Any, tuple[int, bool]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (0, False),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (1, True),
    aten._scaled_dot_product_flash_attention.default: (0, False),
    aten._scaled_dot_product_flash_attention_backward.default: (1, True),
    aten._scaled_dot_product_efficient_attention.default: (0, False),
    aten._scaled_dot_product_efficient_attention_backward.default: (1, True),
}
# Matmuls that PyTorch's counter does not know: where their first matrix stands.
_BY_SECOND: Mapping[Any, int] = {GROUPED_MM: 0, aten.addmm_.default: 1, aten.baddbmm_.default: 1}
_FORWARD_MATMULS = 2
_BACKWARD_MATMULS = {"kernel": 5, "model": 4}


def kernel_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> float:
    """What the kernel computes. PyTorch's own counts, and those of operators that it counts otherwise or not at all."""
    return _flops(func, args, kwargs, output, "kernel")


def model_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> float:
    """What of it the model asks for, however it is computed."""
    return _flops(func, args, kwargs, output, "model")


def _flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, whose: str) -> float:
    if func in ATTENTION:
        query_at, is_backward = ATTENTION[func]
        query, key = args[query_at], args[query_at + 1]
        batch, heads, length, dim = query.shape
        matmuls = _BACKWARD_MATMULS[whose] if is_backward else _FORWARD_MATMULS
        share = 0.5 if is_causal(func, args, kwargs) else 1.0
        return float(2.0 * matmuls * batch * heads * length * key.shape[2] * dim * share)
    if func in _BY_SECOND:
        first, second = args[_BY_SECOND[func]], args[_BY_SECOND[func] + 1]
        return float(2.0 * first.numel() * second.shape[-1])
    if (count := flop_registry.get(func._overloadpacket)) is not None:
        return float(count(*args, **kwargs, out_val=output))
    return 0.0


def is_causal(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an attention looks back only."""
    at = [argument.name for argument in func._schema.arguments].index("is_causal")
    return bool(kwargs.get("is_causal", len(args) > at and args[at]))
