"""How an optimizer keeps a moment: fp32, bf16, or 8 bits with a scale for each block of a row.

NOTE [ Blocks lie within rows ]
A block is up to BLOCK elements next to each other in the last dimension. So the scales of a parameter that is sharded
by rows are sharded like it, and a checkpoint of any number of ranks reads into any other. Vectors stay fp32: there is
nothing to save.

NOTE [ The root of the second moment ]
AdamW divides by the root of its second moment. It is the root that 8 bits keep: half the range in orders of magnitude,
and what is not zero is never rounded to zero, where a step would be divided by eps alone.

NOTE [ Codes by the bits of a number ]
A search among 256 values takes 150 ns an element on a CPU, 95 % of an update. So the code is looked up by the upper
bits of the number, exponent and 10 of its 23 fraction bits, in a table that such a search has filled. Where a border
between two codes lies within one entry of the table, the code may be the second nearest, off by 2**-11 of the number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from trainfit.profile import StateStorage
from trainfit.techniques.stored_weights import States

BLOCK = 1024
_FP8 = torch.float8_e4m3fn
_DROPPED_BITS = 13  # of an fp32 number's fraction
_LOWEST_BITS = (127 - 24) << 23  # of 2**-24, below half the smallest value of the map
_ENTRIES = 2**15  # a power of two that holds all from 2**-24 to 1


class Moment(Protocol):
    """A moment's states are named after it: name, name_scale. tables: tensors that all parameters' are read by."""

    name: str

    @property
    def tables(self) -> Sequence[Tensor]: ...

    def first(self, like: Tensor) -> dict[str, Tensor]:
        """Zeros for a parameter or this rank's part of it."""

    def read(self, states: States) -> Tensor:
        """fp32, to be changed in place and given to write()."""

    def write(self, value: Tensor, states: States) -> None: ...


class FloatMoment:
    """As it is, in fp32 or bf16."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype
        self.tables: Sequence[Tensor] = ()

    def first(self, like: Tensor) -> dict[str, Tensor]:
        return {self.name: torch.zeros_like(like, dtype=self.dtype, memory_format=torch.contiguous_format)}

    def read(self, states: States) -> Tensor:
        return states[self.name].float()  # itself where it is fp32

    def write(self, value: Tensor, states: States) -> None:
        if self.dtype != torch.float32:
            states[self.name].copy_(value)


class BlockMoment:
    """Eight bits an element, an fp32 scale for each block. Of rows: (rows, columns)."""

    def __init__(self, name: str, *, fp8: bool, keeps_root: bool) -> None:
        """keeps_root: see NOTE [ The root of the second moment ]; such a moment has no sign."""
        self.name, self._scale, self._fp8, self._keeps_root = name, f"{name}_scale", fp8, keeps_root
        self._maps: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def tables(self) -> Sequence[Tensor]:
        return [table for tables in self._maps.values() for table in tables]

    def first(self, like: Tensor) -> dict[str, Tensor]:
        *rows, columns = like.shape
        codes = torch.zeros(like.shape, dtype=_FP8 if self._fp8 else torch.uint8, device=like.device)
        if not self._fp8:
            codes.fill_(_zero_code(signed=not self._keeps_root))
            self._tables(like.device)
        scale = torch.zeros(*rows, num_blocks(columns), dtype=torch.float32, device=like.device)
        return {self.name: codes, self._scale: scale}

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Values by code, and codes by the bits of a number; see NOTE [ Codes by the bits of a number ].

        Made once, before the first step: a copy from the host makes it wait.
        """
        if device not in self._maps:
            values = torch.tensor(dynamic_map(signed=not self._keeps_root), dtype=torch.float32, device=device)
            borders = (values[1:] + values[:-1]) / 2
            entries = torch.arange(_ENTRIES, dtype=torch.int32, device=device)
            sizes = (
                ((entries << _DROPPED_BITS) + _LOWEST_BITS + (1 << (_DROPPED_BITS - 1))).view(torch.float32)
            ).clone()
            sizes[0] = 0.0
            numbers = sizes if self._keeps_root else torch.cat([sizes, -sizes])
            self._maps[device] = values, torch.bucketize(numbers, borders, out_int32=True).to(torch.uint8)
        return self._maps[device]

    def read(self, states: States) -> Tensor:
        codes, scale = states[self.name], states[self._scale]
        value = codes.float() if self._fp8 else self._values(codes)
        _blocks(value, lambda part, at: part.mul_(scale[:, at].unsqueeze(-1)))
        return value.square_() if self._keeps_root else value

    def write(self, value: Tensor, states: States) -> None:
        codes, scale = states[self.name], states[self._scale]
        if self._keeps_root:
            value = value.sqrt_()
        # fp8 has its own exponents, so a block's largest becomes the largest of fp8, not one.
        top = torch.finfo(_FP8).max if self._fp8 else 1.0

        def divide(part: Tensor, at: slice) -> None:
            largest = part.abs().amax(-1).div_(top)
            scale[:, at] = largest
            part.div_(largest.clamp_(min=torch.finfo(torch.float32).tiny).unsqueeze(-1))

        _blocks(value, divide)
        if self._fp8:
            smallest = 2.0**-9  # the smallest that e4m3 has
            codes.copy_(torch.where(value > 0, value.clamp(min=smallest), value) if self._keeps_root else value)
        else:
            codes.copy_(self._nearest_codes(value))

    def _values(self, codes: Tensor) -> Tensor:
        # Indexing would make a 64-bit copy of the codes first.
        return self._tables(codes.device)[0].index_select(0, codes.reshape(-1).int()).view(codes.shape)

    def _nearest_codes(self, value: Tensor) -> Tensor:
        """value (rows, columns), from -1 to 1, contiguous."""
        bits = value.view(torch.int32)
        entries = bits.bitwise_and(0x7FFFFFFF).sub_(_LOWEST_BITS).clamp_(min=0)
        entries.bitwise_right_shift_(_DROPPED_BITS).clamp_(max=_ENTRIES - 1)
        if not self._keeps_root:
            entries.add_(bits.bitwise_right_shift(31).bitwise_and_(_ENTRIES))
        codes = self._tables(value.device)[1].index_select(0, entries.view(-1)).view(value.shape)
        if self._keeps_root:
            codes = torch.maximum(codes, (value > 0).to(torch.uint8))  # only zero is zero
        return codes


def moments(storage: StateStorage) -> tuple[Moment, Moment]:
    """AdamW's first and second."""
    if storage in ("fp32", "bf16"):
        dtype = torch.float32 if storage == "fp32" else torch.bfloat16
        return FloatMoment("exp_avg", dtype), FloatMoment("exp_avg_sq", dtype)
    fp8 = storage == "fp8"
    return BlockMoment("exp_avg", fp8=fp8, keeps_root=False), BlockMoment("exp_avg_sq", fp8=fp8, keeps_root=True)


def num_blocks(columns: int) -> int:
    return -(-columns // BLOCK)


def _blocks(value: Tensor, change: Callable[[Tensor, slice], object]) -> None:
    """Calls change(part (rows, blocks, elements), slice of the blocks) for whole blocks together, then a short one."""
    columns = value.shape[1]
    whole = columns // BLOCK
    if whole:
        change(value[:, : whole * BLOCK].unflatten(1, (whole, BLOCK)), slice(0, whole))
    if columns > whole * BLOCK:
        change(value[:, whole * BLOCK :].unsqueeze(1), slice(whole, whole + 1))


def dynamic_map(*, signed: bool) -> list[float]:
    """256 values from -1 (or 0) to 1, dense around zero. Source: arXiv:2110.02861, section 2.1, dynamic tree
    quantisation: a leading run of zeros is a power of ten, the bits after it a linear fraction of it."""
    values = [0.0, 1.0]
    for exponent in range(7):
        count = 2**exponent if signed else 2 ** (exponent + 1)
        means = [10.0 ** (exponent - 6) * (0.1 + 0.9 * (index + 0.5) / count) for index in range(count)]
        values += means
        if signed:
            values += [-mean for mean in means]
    return sorted(values)


def _zero_code(*, signed: bool) -> int:
    return dynamic_map(signed=signed).index(0.0)
