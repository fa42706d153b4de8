"""How an optimizer keeps weights: what lies in the model, and what beside it makes an fp32 value of it again.

NOTE [ bf16 and 16 bits more ]
The upper half of an fp32 number is a bf16 number. With h the nearest bf16 and r the difference of their bit patterns as
integers, which takes 16 bits, (h, r) is the fp32 number to the bit, in 4 bytes instead of the 6 of a bf16 weight beside
its fp32 master. Half-way cases must go away from zero: rounding them to even would give some h 65537 neighbours, one
more than r can tell apart. Masters are rounded the same way, so that both variants train alike to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from trainfit.profile import WeightStorage

States = Mapping[str, Tensor]
# The generator of the device for a piece that is rounded by chance
Chance = Callable[[], torch.Generator]


class Weights(Protocol):
    """half: dtype of the weights in the model; None leaves them fp32."""

    @property
    def half(self) -> torch.dtype | None: ...

    def split(self, value: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """What lies in the model for an fp32 value, and what beside it."""

    def read(self, weight: Tensor, states: States) -> Tensor:
        """The fp32 value, to be changed in place and given to write()."""

    def write(self, value: Tensor, weight: Tensor, states: States, chance: Chance) -> None: ...


class WholeWeights:
    half = None

    def split(self, value: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return value, {}

    def read(self, weight: Tensor, states: States) -> Tensor:
        return weight

    def write(self, value: Tensor, weight: Tensor, states: States, chance: Chance) -> None: ...


class MasterWeights:
    """An fp32 master beside a half weight."""

    def __init__(self, half: torch.dtype) -> None:
        self.half = half

    def split(self, value: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self._rounded(value), {"master": value.clone()}

    def read(self, weight: Tensor, states: States) -> Tensor:
        return states["master"]

    def write(self, value: Tensor, weight: Tensor, states: States, chance: Chance) -> None:
        weight.copy_(self._rounded(value))

    def _rounded(self, value: Tensor) -> Tensor:
        return nearest_bf16(value) if self.half == torch.bfloat16 else value.to(self.half)


class ResidualWeights:
    """See NOTE [ bf16 and 16 bits more ]."""

    half = torch.bfloat16

    def split(self, value: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        weight, residual = split_bits(value)
        return weight, {"residual": residual}

    def read(self, weight: Tensor, states: States) -> Tensor:
        return join_bits(weight, states["residual"])

    def write(self, value: Tensor, weight: Tensor, states: States, chance: Chance) -> None:
        upper, residual = split_bits(value)
        weight.copy_(upper)
        states["residual"].copy_(residual)


class KahanWeights:
    """What rounding to bf16 took away is kept in bf16 and added next time (Kahan, 1965)."""

    half = torch.bfloat16

    def split(self, value: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        weight = value.to(self.half)
        return weight, {"compensation": (value - weight.float()).to(self.half)}

    def read(self, weight: Tensor, states: States) -> Tensor:
        return weight.float().add_(states["compensation"])

    def write(self, value: Tensor, weight: Tensor, states: States, chance: Chance) -> None:
        weight.copy_(value)
        states["compensation"].copy_(value.sub_(weight))


class StochasticWeights:
    """Rounded up with the probability of what is cut off, so that the mean is right without a second copy."""

    half = torch.bfloat16

    def split(self, value: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return value.to(self.half), {}

    def read(self, weight: Tensor, states: States) -> Tensor:
        return weight.float()

    def write(self, value: Tensor, weight: Tensor, states: States, chance: Chance) -> None:
        weight.copy_(by_chance_bf16(value, chance()))


WEIGHTS: Mapping[WeightStorage, Weights] = {
    "fp32": WholeWeights(),
    "bf16_master": MasterWeights(torch.bfloat16),
    "fp16_master": MasterWeights(torch.float16),
    "bf16_residual": ResidualWeights(),
    "bf16_kahan": KahanWeights(),
    "bf16_stochastic": StochasticWeights(),
}


def nearest_bf16(value: Tensor) -> Tensor:
    """fp32 to the nearest bf16; half-way cases away from zero."""
    return _keeping_nan(value, _upper_half(_bits(value) + 0x8000))


def by_chance_bf16(value: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 to one of the two bf16 neighbours, the nearer one more often. What is bf16 already stays."""
    chance = torch.randint(0x10000, value.shape, generator=generator, dtype=torch.int32, device=value.device)
    return _keeping_nan(value, _upper_half(chance.add_(_bits(value))))


def split_bits(value: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 as (bf16, int16). See NOTE [ bf16 and 16 bits more ]."""
    weight = nearest_bf16(value)
    return weight, (_bits(value) - _shifted(weight)).to(torch.int16)


def join_bits(weight: Tensor, residual: Tensor) -> Tensor:
    """The inverse of split_bits, a new tensor."""
    return _shifted(weight).add_(residual).view(torch.float32)


def _bits(value: Tensor) -> Tensor:
    assert value.dtype == torch.float32, "half weights are made from fp32 ones"
    return value.view(torch.int32)


def _keeping_nan(value: Tensor, rounded: Tensor) -> Tensor:
    """The largest NaNs would carry into the sign: a model that diverged would go on with zeros."""
    return rounded.masked_fill_(value.isnan(), float("nan"))


def _upper_half(bits: Tensor) -> Tensor:
    return bits.bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)


def _shifted(weight: Tensor) -> Tensor:
    return weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
