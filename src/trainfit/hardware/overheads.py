"""What an operator takes around its kernel: Python, modules, dispatch, autograd. Measured on a block with one token.

Kernels of a few numbers take next to nothing, so the block's seconds over its number of operators, views included, are
what each costs by being there. Real blocks are no different: their Python runs on the host all the same.
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

_DIM, _HEADS, _BLOCKS = 8, 2, 8


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
        self.q, self.k, self.v, self.o = (nn.Linear(_DIM, _DIM, bias=False) for _ in range(4))

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
        self.gate, self.up, self.down = (nn.Linear(_DIM, _DIM, bias=False) for _ in range(3))
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

    def forward() -> Tensor:
        output = hidden
        for block in blocks:
            output = block(output, table, table)
        return output.sum()

    with torch.enable_grad():
        loss = forward()
        backward = partial(torch.autograd.grad, loss, list(blocks.parameters()), retain_graph=True)
        return {
            name: seconds([call]) / _operators(call) for name, call in (("forward", forward), ("backward", backward))
        }


def _operators(call: Callable[[], Any]) -> int:
    counter = _Count()
    with counter:
        call()
    return counter.count
