"""Blockwise attention against attention that holds all scores: benchmarks/fair.sh python benchmarks/attention.py

Forward and backward of one attention, of the kinds where F.scaled_dot_product_attention takes its math path or models
run eager code, over sequence lengths. The ways take turns; a time is the least of all rounds, in the processor's
seconds of this thread. Bytes are the peak of the heap above what was there before, from malloc's own counter.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from heap import Heap
from trainfit.techniques.blockwise_attention import blockwise_attention

HEADS, KEY_HEADS, DIM, WINDOW, SOFTCAP = 8, 4, 64, 512, 50.0
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Kind:
    """One kind of attention: what blockwise is called with, and whether SDPA can express it."""

    name: str
    settings: Mapping[str, Any]
    sdpa: bool


KINDS = (
    Kind("causal", {"causal": True}, True),
    Kind("soft cap", {"causal": True, "softcap": SOFTCAP}, False),
    Kind("soft cap, window", {"causal": True, "softcap": SOFTCAP, "window": WINDOW}, False),
    Kind("learnt bias", {"bias": True}, True),
)


def repeated(key: Tensor) -> Tensor:
    return key.repeat_interleave(HEADS // KEY_HEADS, 1)


def hidden(length: int, window: int) -> Tensor:
    behind = torch.arange(length)[:, None] - torch.arange(length)
    return (behind < 0) | (behind >= window) if window else behind < 0


def eager(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, softcap: float) -> Tensor:
    """As transformers' eager_attention_forward."""
    weights = torch.matmul(query, repeated(key).transpose(2, 3)) * DIM**-0.5
    if softcap:
        weights = torch.tanh(weights / softcap) * softcap
    if mask is not None:
        weights = weights + mask
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, repeated(value))


def math_path(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, repeated(key), repeated(value), **settings)


def ways_of(kind: Kind, length: int, dtype: torch.dtype) -> tuple[dict[str, Attend], list[Tensor]]:
    """Each way to compute it; masks are made once, as models make them. The bias, where it is learnt."""
    settings = dict(kind.settings)
    bias = None
    if settings.pop("bias", False):
        bias = torch.randn(1, HEADS, length, length, dtype=dtype).requires_grad_()
    softcap, window = settings.get("softcap", 0.0), settings.get("window", 0)
    ways: dict[str, Attend] = {"blockwise": partial(blockwise_attention, bias=bias, **settings)}
    if kind.sdpa:
        ways["math"] = partial(math_path, attn_mask=bias, is_causal=bias is None)
    mask = bias
    if bias is None:
        mask = torch.zeros(1, 1, length, length, dtype=dtype)
        mask.masked_fill_(hidden(length, window), torch.finfo(dtype).min)
    ways["eager"] = partial(eager, mask=mask, softcap=softcap)
    return ways, [] if bias is None else [bias]


def run_once(attend: Attend, inputs: list[Tensor]) -> float:
    """Seconds of one forward and backward."""
    start = time.thread_time()
    output = attend(*inputs[:3])
    torch.autograd.backward(output, torch.ones_like(output))
    return time.thread_time() - start


def measure(heap: Heap, kind: Kind, length: int, dtype: torch.dtype, rounds: int) -> dict[str, tuple[float, int]]:
    """Seconds and bytes of each way."""
    ways, learnt = ways_of(kind, length, dtype)
    inputs = [
        torch.randn(1, length, heads, DIM, dtype=dtype).transpose(1, 2).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    inputs += learnt
    seconds = dict.fromkeys(ways, float("inf"))
    peaks: dict[str, int] = {}
    for number in range(rounds + 1):
        for name, attend in ways.items():
            for tensor in inputs:
                tensor.grad = None
            if number == 0:
                before = heap.live()
                heap.reset()
                run_once(attend, inputs)
                peaks[name] = heap.peak() - before
            else:
                seconds[name] = min(seconds[name], run_once(attend, inputs))
    return {name: (seconds[name], peaks[name]) for name in ways}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    torch.manual_seed(0)
    heap = Heap("python benchmarks/attention.py")
    table = Table("attention", "length", "way", "ms", "x blockwise", "peak MiB", "x blockwise")
    for kind in KINDS:
        for length in options.lengths:
            found = measure(heap, kind, length, getattr(torch, options.dtype), options.rounds)
            own = found["blockwise"]
            for name, (seconds, peak) in found.items():
                table.add_row(
                    *(kind.name, str(length), name, f"{1e3 * seconds:.0f}", f"{seconds / own[0]:.2f}"),
                    *(f"{peak / 2**20:.1f}", f"{peak / own[1]:.2f}"),
                )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
