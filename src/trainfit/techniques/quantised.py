"""A frozen linear whose weight is kept as int8 or NF4 codes, and made again where it is used.

NOTE [ Codes, never both ]
A block of 64 weights, in the order of memory, is codes and one fp32 scale, its largest magnitude.
  int8  code = round(127 * w / scale): 1 + 4/64 bytes a weight
  nf4   code = index of the nearest of 16 quantiles of a normal distribution to w / scale, two to a byte, the first in
        the high bits: 0.5 + 4/64 bytes a weight.  Source: arXiv:2305.14314, appendix E
Forward makes the weight in the compute dtype, multiplies and drops it; backward does so again. Autograd is given
codes and scales, which live anyway. Both are Parameters without gradient, since those a recompute region leaves alone.
Codes are turned into weights a piece at a time, so that fp32 weights and indices never are whole.

Why not a library's: bitsandbytes' Linear4bit is a tensor subclass that FakeTensorMode refuses, and its matmul hides
what it allocates in one operator, so a rehearsal would not see it. torchao's int8 linear does both, but keeps scales by
row, and its NF4 has no int8 beside it. The arithmetic here is bitsandbytes', and a test holds it to that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Quantisation = Literal["int8", "nf4"]
Code = Literal["int8", "nf4", "fp8"]  # fp8: e4m3 of what is left when a block is divided by its largest magnitude
BLOCK_SIZE = 64
_PIECE = 2**22  # weights that are made at once
_FP8, _FP8_LARGEST = torch.float8_e4m3fn, 448.0
NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def quantise(
    weight: Tensor, kind: Code, *, block_size: int = BLOCK_SIZE, piece: int | None = None
) -> tuple[Tensor, Tensor]:
    """Codes (int8 or fp8, one a weight; or uint8, two a byte) and fp32 scales, one for each block of weights.

    piece: how many weights are made codes of at once. A block with what is not finite becomes not a number.
    Raises ValueError where block_size does not divide the number of weights.
    """
    if weight.numel() % block_size:
        raise ValueError(f"{weight.numel()} weights are no multiple of {block_size}")
    flat = weight.detach().reshape(-1)
    scales = torch.empty(flat.numel() // block_size, dtype=torch.float32, device=flat.device)
    packed = kind == "nf4"
    dtype = {"int8": torch.int8, "nf4": torch.uint8, "fp8": _FP8}[kind]
    codes = torch.empty(flat.numel() // (2 if packed else 1), dtype=dtype, device=flat.device)
    for begin, end in _pieces(flat.numel(), piece or _PIECE):
        blocks = flat[begin:end].float().view(-1, block_size)
        largest = blocks.abs().amax(1)
        scales[begin // block_size : end // block_size] = largest
        normal = blocks / torch.where(largest > 0, largest, 1.0).unsqueeze(1)
        if packed:
            pairs = _nearest(normal).view(-1, 2)
            codes[begin // 2 : end // 2] = pairs[:, 0] * 16 + pairs[:, 1]
        elif kind == "fp8":
            codes[begin:end] = normal.mul_(_FP8_LARGEST).view(-1).to(_FP8)
        else:
            codes[begin:end] = normal.mul_(127.0).round_().view(-1).to(torch.int8)
    return codes, scales


def dequantise(
    codes: Tensor,
    scales: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    table: Tensor | None = None,
    *,
    block_size: int = BLOCK_SIZE,
    piece: int | None = None,
) -> Tensor:
    """The weight, computed in fp32 and rounded once. table: what pair_table() gave, for NF4 codes."""
    if table is None and codes.dtype == torch.uint8:
        table = pair_table(codes.device)
    weight = torch.empty(shape, dtype=dtype, device=codes.device)
    flat = weight.view(-1)
    for begin, end in _pieces(flat.numel(), piece or _PIECE):
        block_scales = scales[begin // block_size : end // block_size].unsqueeze(1)
        into = flat[begin:end].view(-1, block_size)
        if table is not None:
            normal = F.embedding(codes[begin // 2 : end // 2].int(), table).view(-1, block_size)
            into.copy_(normal.mul_(block_scales))
        elif codes.dtype == _FP8:
            blocks = fp8_values(codes[begin:end]).view(-1, block_size)
            into.copy_(blocks.mul_(block_scales / _FP8_LARGEST))
        else:
            blocks = codes[begin:end].float().view(-1, block_size)  # a product of two dtypes would copy one inside
            into.copy_(blocks.mul_(block_scales / 127.0))
    return weight


def fp8_values(codes: Tensor) -> Tensor:
    """e4m3 codes as fp32, to the bit where they are numbers.

    A CPU's own conversion takes 4 ns an element, ten times this: the bits moved into those of fp16, whose exponent has
    one bit more and another bias, 2**8 of the value.
    """
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)  # the sign was copied
    return bits.view(torch.float16).float().mul_(2.0**8)


def _pieces(num_weights: int, piece: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, num_weights, piece):
        yield begin, min(begin + piece, num_weights)


def _nearest(normal: Tensor) -> Tensor:
    """Indices into NF4_VALUES, uint8; of two values as near, the lower."""
    values = torch.tensor(NF4_VALUES, device=normal.device)
    return torch.bucketize(normal, (values[1:] + values[:-1]) / 2, out_int32=True).to(torch.uint8)


def pair_table(device: torch.device) -> Tensor:
    """Both weights of every byte, (256, 2). Made once: a device would wait for it."""
    values = torch.tensor(NF4_VALUES, device=device)
    return torch.stack([values.repeat_interleave(16), values.repeat(16)], 1)


class QuantisedLinear(nn.Linear):
    """In the place of a frozen nn.Linear. See NOTE [ Codes, never both ].

    It has no weight, but codes and scales. bias: as it was, or None. table: what pair_table() gives; all share one.
    """

    def __init__(self, linear: nn.Linear, kind: Quantisation, table: Tensor) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.kind = linear.in_features, linear.out_features, kind
        codes, scales = quantise(linear.weight, kind)
        self.register_parameter("weight", None)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.register_parameter("bias", linear.bias)
        self.register_buffer("table", table if kind == "nf4" else None, persistent=False)
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = _QuantisedMatmul.apply(  # type: ignore[no-untyped-call]
            input, self.codes, self.scales, self.bias, (self.out_features, self.in_features), self.table
        )
        return output

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, kind={self.kind}"


class _QuantisedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        codes: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        shape: tuple[int, int],
        table: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.shape, ctx.dtype, ctx.table = shape, input.dtype, table
        device_type = input.device.type
        autocast = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if autocast else input.dtype
        # Dropped when the matmul is done: without gradient mode nothing saves it.
        return F.linear(input, dequantise(codes, scales, shape, dtype, table), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        codes, scales = ctx.saved_tensors
        bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        if not ctx.needs_input_grad[0]:
            return None, None, None, bias, None, None
        weight = dequantise(codes, scales, ctx.shape, gradient.dtype, ctx.table)
        return (gradient @ weight).to(ctx.dtype), None, None, bias, None, None
