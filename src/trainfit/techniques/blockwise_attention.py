"""Blockwise attention: softmax(queries @ keys) @ values in memory that grows with the sequence, not with its square.

Online softmax in forward; backward makes the scores again. The arithmetic is in blockwise_tiles.py.

NOTE [ One operator ]
Forward and backward are one operator each, so that tiers which keep attention's output see one output to keep. What
they allocate inside is no part of their schema: a rehearsal looks up `INSIDE` and runs the tiles themselves, one of
each kind, in place of the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from trainfit.errors import ModelError
from trainfit.hardware import Kind
from trainfit.techniques import blockwise_tiles
from trainfit.techniques.blockwise_tiles import Repeated, Scores, Tensors, accumulation_dtype

# Scores of a tile. A CPU's stay in its near caches; a device needs larger ones to be busy.
TILE: Mapping[Kind, int] = {"cpu": 2**18, "cuda": 2**24, "npu": 2**24}


_SETTINGS = "float scale, bool causal, int window, float softcap, float dropout, int tile, bool upcast"
_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, Tensor? sinks, Tensor? seed"
_NUM_INPUTS = len(Tensors._fields)
_SETTINGS_AT = _NUM_INPUTS + 2  # output and logsum are before them, in backward


def _of_schema(given: Sequence[Any]) -> tuple[Tensors, Scores]:
    """_INPUTS and _SETTINGS, as an operator gets them."""
    query, key, value, mask, bias, sinks, seed = given[:_NUM_INPUTS]
    drawn = 0 if seed is None else -1 if isinstance(seed, FakeTensor) else int(seed)
    return Tensors(query, key, value, mask, bias, sinks, drawn), Scores(*given[_NUM_INPUTS:])


def _forward(*given: Any, repeated: Repeated | None = None) -> tuple[Tensor, Tensor]:
    """given: _INPUTS, _SETTINGS."""
    tensors, scores = _of_schema(given)
    with torch.autocast(tensors.query.device.type, enabled=False):
        return blockwise_tiles.forward(tensors, scores, repeated)


def _backward(
    gradient: Tensor, *given: Any, repeated: Repeated | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """given: _INPUTS, output, logsum, _SETTINGS, bias_gradient."""
    inputs, (output, logsum) = given[:_NUM_INPUTS], given[_NUM_INPUTS:_SETTINGS_AT]
    *settings, bias_gradient = given[_SETTINGS_AT:]
    tensors, scores = _of_schema((*inputs, *settings))
    with torch.autocast(tensors.query.device.type, enabled=False):
        return blockwise_tiles.backward(gradient, tensors, output, logsum, scores, bias_gradient, repeated)


_library = torch.library.Library("trainfit", "FRAGMENT")
_library.define(f"blockwise_attention({_INPUTS}, {_SETTINGS}) -> (Tensor, Tensor)")
_library.define(
    f"blockwise_attention_backward(Tensor gradient, {_INPUTS}, Tensor output, Tensor logsum, {_SETTINGS}, "
    "bool bias_gradient) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.impl("blockwise_attention", _forward, "CompositeExplicitAutograd")
_library.impl("blockwise_attention_backward", _backward, "CompositeExplicitAutograd")

FORWARD = torch.ops.trainfit.blockwise_attention.default
BACKWARD = torch.ops.trainfit.blockwise_attention_backward.default


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, heads, num_queries, _ = query.shape
    output = query.new_empty(batch, num_queries, heads, value.shape[-1]).transpose(1, 2)
    return output, query.new_empty(batch, heads, num_queries, dtype=accumulation_dtype(query.dtype))


def _fake_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    bias: Tensor | None,
    sinks: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    none = query.new_empty(0)
    of_bias = none if bias is None or not rest[-1] else torch.empty_like(bias, memory_format=torch.contiguous_format)
    of_sinks = torch.empty_like(none if sinks is None else sinks)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), of_bias, of_sinks


torch.library.register_fake("trainfit::blockwise_attention", _fake_forward, lib=_library)
torch.library.register_fake("trainfit::blockwise_attention_backward", _fake_backward, lib=_library)

# By operator: what runs inside, which takes `repeated` besides; and of its matmuls the share that the model asks for.
INSIDE: Mapping[Any, tuple[Callable[..., Any], float]] = {FORWARD: (_forward, 1.0), BACKWARD: (_backward, 4 / 5)}


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        sinks: Tensor | None,
        seed: Tensor | None,
        scores: Scores,
    ) -> Tensor:
        ctx.settings = astuple(scores)
        output: Tensor
        output, logsum = FORWARD(query, key, value, mask, bias, sinks, seed, *ctx.settings)
        ctx.save_for_backward(query, key, value, mask, bias, sinks, seed, output, logsum)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad
        found = BACKWARD(gradient, *ctx.saved_tensors, *ctx.settings, needed[4])
        of_query, of_key, of_value, of_bias, of_sinks = found
        return (
            *(of_query, of_key, of_value, None, of_bias if needed[4] else None),
            *(of_sinks if needed[5] else None, None, None),
        )


def blockwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: int = 0,
    softcap: float | None = None,
    dropout: float = 0.0,
    kind: Kind = "cpu",
    tile: int | None = None,
) -> Tensor:
    """Attention without all scores at once. See Scores and Tensors for what the arguments mean.

    query (batch, heads, q, dim), key (batch, key heads, k, dim), value (batch, key heads, k, value dim) -> (batch,
    heads, q, value dim). kind: of the device, which decides how large tiles are. bias and sinks get gradients where
    they want one; second derivatives there are none. A row that sees nothing gives zeros, as it does in
    F.scaled_dot_product_attention. Under autocast query, key and value are cast, as that function's are.
    Raises ModelError for shapes that do not go together.
    """
    _check(query, key, value, mask, bias)
    device = query.device.type
    if torch.is_autocast_enabled(device):
        low = torch.get_autocast_dtype(device)
        query, key, value = (each.to(low) for each in (query, key, value))
    scores = Scores(
        query.shape[-1] ** -0.5 if scale is None else float(scale),
        causal or window > 0,
        window,
        softcap or 0.0,
        dropout,
        tile or TILE[kind],
        kind == "cpu",
    )
    # Drawn where no device has to be waited for. What is stashed for recompute brings it back.
    seed = torch.randint(0, 2**62, (), device="cpu") if dropout else None
    output: Tensor = _Attention.apply(query, key, value, _four(mask), _four(bias), sinks, seed, scores)  # type: ignore[no-untyped-call]
    return output


def _four(tensor: Tensor | None) -> Tensor | None:
    """With leading dimensions of one, up to four."""
    return tensor if tensor is None or tensor.dim() == 4 else tensor[(None,) * (4 - tensor.dim())]


def _check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None) -> None:
    shapes = ", ".join(str(tuple(each.shape)) for each in (query, key, value))
    if not query.dim() == key.dim() == value.dim() == 4:
        raise ModelError(f"blockwise attention takes tensors of four dimensions, got {shapes}; set attention: model")
    whole = query.shape[:3] + key.shape[2:3]
    if (
        query.shape[0] != key.shape[0]
        or key.shape[:3] != value.shape[:3]
        or query.shape[3] != key.shape[3]
        or query.shape[1] % max(1, key.shape[1])
    ):
        raise ModelError(f"query, key and value of attention do not go together: {shapes}")
    for name, tensor in (("mask", mask), ("bias", bias)):
        if tensor is None:
            continue
        fits = tensor.dim() <= 4 and all(own in (1, all_) for own, all_ in zip(tensor.shape[::-1], whole[::-1]))
        if not fits:
            raise ModelError(f"the {name} of attention, {tuple(tensor.shape)}, does not broadcast to {tuple(whole)}")
