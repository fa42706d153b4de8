"""What an operator takes around its kernel: Python, modules, dispatch, autograd. Measured on a block with one token.

Kernels of a few numbers take next to nothing, so the block's seconds over its number of operators, views included, are
what each costs by being there. Real kernels displace what Python and the dispatcher had in the caches; so between the
block's operators a CPU copies some memory, whose own time is subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.hardware.runtime import Accelerator

_DIM, _HEADS, _BLOCKS = 8, 2, 4
_DISPLACED_BYTES = 2**20


class _Displace(torch.autograd.Function):
    """Passes a tensor on, and its gradient, after copying one buffer into the other."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, source: Tensor, target: Tensor) -> Tensor:
        ctx.buffers = source, target
        target.copy_(source)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        source, target = ctx.buffers
        target.copy_(source)
        return gradients[0], None, None


class _Linear(nn.Linear):
    """A linear layer after which the caches are displaced."""

    def __init__(self) -> None:
        super().__init__(_DIM, _DIM, bias=False)
        self.buffers_to_copy: tuple[Tensor, Tensor] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        output = super().forward(hidden)
        if self.buffers_to_copy is None:
            return output
        return torch.as_tensor(_Displace.apply(output, *self.buffers_to_copy))  # type: ignore[no-untyped-call]


class _Norm(nn.Module):
    """As models write it: root mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_DIM))

    def forward(self, hidden: Tensor) -> Tensor:
        dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * hidden.to(dtype)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (_Linear() for _ in range(4))

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        shape = (*hidden.shape[:-1], _HEADS, _DIM // _HEADS)
        query, key, value = (linear(hidden).view(shape).transpose(1, 2) for linear in (self.q, self.k, self.v))
        query = query * cosine + _turned(query) * sine
        key = key * cosine + _turned(key) * sine
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return torch.as_tensor(self.o(attended.transpose(1, 2).reshape(hidden.shape)))


def _turned(tensor: Tensor) -> Tensor:
    half = tensor.shape[-1] // 2
    return torch.cat((-tensor[..., half:], tensor[..., :half]), dim=-1)


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (_Linear() for _ in range(3))
        self.activation = nn.SiLU()

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.as_tensor(self.down(self.activation(self.gate(hidden)) * self.up(hidden)))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Norm(), _Norm()
        self.attention, self.mlp = _Attention(), _Mlp()

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.first(hidden), cosine, sine)
        return torch.as_tensor(hidden + self.mlp(self.second(hidden)))


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operator_overheads(
    seconds: Callable[[Sequence[Callable[[], Any]]], float], device: Accelerator
) -> Mapping[str, float]:
    """Seconds for each operator of a forward under autograd, and of a backward. seconds: of the mean of some calls."""
    with torch.device(device.device):
        blocks = nn.ModuleList(_Block() for _ in range(_BLOCKS))
        hidden, table = torch.full((1, 1, _DIM), 0.5), torch.full((1, _DIM // _HEADS), 0.5)
    linears = [module for module in blocks.modules() if isinstance(module, _Linear)]
    copied = 0.0
    if device.kind == "cpu":
        source, target = torch.zeros(2, _DISPLACED_BYTES, dtype=torch.uint8).unbind()
        copied = len(linears) * seconds([partial(target.copy_, source)])
        for linear in linears:
            linear.buffers_to_copy = (source, target)

    def forward() -> Tensor:
        output = hidden
        for block in blocks:
            output = block(output, table, table)
        return output.sum()

    with torch.enable_grad():
        backward = partial(torch.autograd.grad, forward(), list(blocks.parameters()), retain_graph=True)
        return {
            name: max(0.0, _least(seconds, call) - copied) / _operators(call)
            for name, call in (("forward", forward), ("backward", backward))
        }


def _least(seconds: Callable[[Sequence[Callable[[], Any]]], float], call: Callable[[], Any]) -> float:
    """Of a few measurements, since each is of few calls."""
    return min(seconds([call]) for _ in range(4))


def _operators(call: Callable[[], Any]) -> int:
    counter = _Count()
    with counter:
        call()
    return counter.count
