"""A block in small, plain and under a tier, for the tests of recompute."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainfit.hardware import accelerator
from trainfit.techniques.activation import recompute_block

CPU = accelerator("cpu")
DIM, ROWS = 16, 6
TIERS = ("pointwise", "attention", "full", "selective")


class Feedforward(nn.Module):
    """Two matmuls with dropout between: a block in small."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(F.gelu(self.up(x)), self.p, self.training))


class Remembers(nn.Module):
    """Appends its key to a list and attends over the list, as a key-value cache does (CK-08)."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(DIM, DIM)
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.cache.append(self.key(x))
        keys = torch.cat(self.cache)
        return (x @ keys.T).softmax(-1) @ keys


def twins(make: Callable[[], nn.Module], tier: str) -> tuple[nn.Module, nn.Module]:
    """A plain block, and the same block under a tier."""
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    recomputed = make()
    recompute_block(recomputed, tier, CPU, name="layers.0")
    return plain, recomputed


def inputs(seed: int = 1) -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def run(block: nn.Module, use: Callable[[nn.Module, Tensor], Tensor] | None = None, seed: int = 7) -> list[Tensor]:
    """Output and all gradients of one forward and backward, dropout seeded."""
    x = inputs()
    torch.manual_seed(seed)
    output = use(block, x) if use is not None else block(x).square().sum()
    output.backward()
    found = [output.detach(), x.grad] + [p.grad for p in block.parameters()]
    block.zero_grad()
    return [tensor.clone() for tensor in found if tensor is not None]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected)):
        assert torch.equal(one, other), f"tensor {number} differs by {(one - other).abs().max():.3g}"


def assert_twins_agree(
    make: Callable[[], nn.Module], tier: str, use: Callable[[nn.Module, Tensor], Tensor] | None = None
) -> None:
    """Three rounds, so that what a round leaves behind shows in the next."""
    plain, recomputed = twins(make, tier)
    for seed in (7, 8, 9):
        assert_same(run(recomputed, use, seed), run(plain, use, seed))


@contextmanager
def no_collector() -> Iterator[None]:
    """What dies in here dies by reference counts alone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
