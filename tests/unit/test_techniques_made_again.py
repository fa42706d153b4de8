"""Tier discard: outputs of norms and activation functions are not kept, and come back with the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from test_techniques_compression import DIM, ROWS, Block, gradients, held_bytes, hidden, made, under
from torch import Tensor, nn

from trainfit.errors import RecomputeError


class Classic(nn.Module):
    """Layer norms with and without an eps of their own, GELU in both forms, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(DIM, eps=1e-3), nn.LayerNorm(DIM)
        self.up, self.down, self.out = nn.Linear(DIM, 128), nn.Linear(128, DIM), nn.Linear(DIM, DIM)
        self.exact, self.tanh, self.drop = nn.GELU(), nn.GELU(approximate="tanh"), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.out(self.tanh(self.one(x))))
        return x + self.drop(self.down(self.exact(self.up(self.two(x)))))


def seeded(block: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(3)
    return gradients(block, hidden(dtype))


@pytest.mark.parametrize("make", [Block, Classic])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_plain_training_to_the_bit(make: Callable[[], nn.Module], dtype: torch.dtype):
    plain, block = seeded(made(make, dtype), dtype), under("discard", made(make, dtype))
    for _ in range(2):
        assert all(torch.equal(one, other) for one, other in zip(seeded(block, dtype), plain, strict=True))


@pytest.mark.parametrize(
    ("make", "numbers"),
    [(Block, 2 * 2 * DIM + 2 * 160), (Classic, DIM + DIM + 128 + DIM)],
    ids=["norms, x over them, silu, product", "two norms, two GELUs"],
)
def test_outputs_are_not_held(make: Callable[[], nn.Module], numbers: int):
    """Of the tanh GELU also its input goes: it is a norm's output."""
    kept, held = (held_bytes(under(tier, made(make)), torch.float32) for tier in ("keep", "discard"))
    assert kept - held == 4 * 2 * ROWS * numbers


def test_an_input_that_was_changed_in_place_is_refused():
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            y = self.one(x)
            z = self.two(F.silu(y))
            y.data.copy_(y)  # unseen by autograd, as plain training has it
            with torch.no_grad():
                y.zero_()
            return z

    with pytest.raises(RecomputeError, match="changed in place before backward"):
        gradients(under("discard", made(Overwrites)), hidden())


def test_an_output_that_was_written_in_place_is_kept():
    """What made it would make what it was before; to autograd both are the same node's."""

    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            y = F.silu(self.one(x))
            with torch.no_grad():
                y.mul_(0.5)
            return self.two(y)

    plain = gradients(made(Halved), hidden())
    assert all(
        torch.equal(*pair) for pair in zip(gradients(under("discard", made(Halved)), hidden()), plain, strict=True)
    )


def test_a_product_with_a_constant_is_kept():
    """The node has not saved what it would take: only the constant."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x * 0.5)

    plain = gradients(made(Scaled), hidden())
    found = gradients(under("discard", made(Scaled)), hidden())
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    assert held_bytes(made(Scaled), torch.float32) == held_bytes(under("discard", made(Scaled)), torch.float32)
