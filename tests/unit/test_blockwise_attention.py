"""Blockwise attention against attention written out, in fp64, and what it keeps."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainfit.errors import ModelError
from trainfit.hardware import find_device
from trainfit.rehearsal.events import Work
from trainfit.rehearsal.recording import allocations
from trainfit.rehearsal.rehearse import fake_tensors, new_tracker
from trainfit.techniques.attention import as_scaled_dot_product
from trainfit.techniques.blockwise_attention import BACKWARD, FORWARD, INSIDE, blockwise_attention
from trainfit.techniques.blockwise_tiles import Scores, plan_rows, tile_shape

DOUBLE = torch.float64


def written_out(
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
) -> Tensor:
    """All scores at once: eager attention, with SDPA's zeros for rows that see nothing."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    behind = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])
    seen = torch.ones_like(behind, dtype=torch.bool)
    if causal or window:
        seen &= behind >= 0
    if window:
        seen &= behind < window
    if mask is not None:
        seen = seen & mask
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), -1)
    return torch._safe_softmax(scores, -1)[..., : key.shape[2]] @ value


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[Tensor], dict[str, Any]]:
    """Tensors that want gradients, with the other arguments of one call."""
    size = st.integers(1, 3)
    batch, key_heads, groups = draw(size), draw(size), draw(size)
    queries, keys = draw(st.integers(1, 150)), draw(st.integers(1, 150))
    dim, value_dim = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    heads = key_heads * groups
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def made(*shape: int, heads_last: bool = False) -> Tensor:
        if heads_last:
            shape = (shape[0], shape[2], shape[1], shape[3])
        tensor = torch.randn(shape, generator=generator, dtype=DOUBLE)
        return (tensor.transpose(1, 2) if heads_last else tensor).requires_grad_()

    last = draw(st.booleans())
    tensors = [
        made(batch, heads, queries, dim, heads_last=last),
        made(batch, key_heads, keys, dim, heads_last=last),
        made(batch, key_heads, keys, value_dim, heads_last=last),
    ]
    whole = (batch, heads, queries, keys)
    kwargs: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "window": draw(st.sampled_from([0, 0, 1, 20, 100])),
        "softcap": draw(st.sampled_from([None, None, 2.0])),
        "scale": draw(st.sampled_from([None, 0.3])),
        "tile": draw(st.sampled_from([2**18, 2**14, 1])),
    }
    if draw(st.booleans()):
        shape = [size if draw(st.booleans()) else 1 for size in whole][draw(st.integers(0, 2)) :]
        kwargs["mask"] = torch.rand(shape, generator=generator) > draw(st.sampled_from([0.1, 0.9]))
    if draw(st.booleans()):
        shape = [size if draw(st.booleans()) else 1 for size in whole]
        kwargs["bias"] = made(*shape)
        tensors.append(kwargs["bias"])
    if draw(st.booleans()):
        kwargs["sinks"] = made(heads)
        tensors.append(kwargs["sinks"])
    return tensors, kwargs


@given(calls())
@settings(max_examples=120, deadline=None)
def test_it_is_attention_written_out_with_all_gradients(call: tuple[list[Tensor], dict[str, Any]]):
    tensors, kwargs = call
    own = blockwise_attention(*tensors[:3], **kwargs)
    kwargs.pop("tile")
    plain = written_out(*tensors[:3], **kwargs)
    torch.testing.assert_close(own, plain, rtol=0, atol=1e-10)
    gradient = torch.randn_like(plain)
    for mine, theirs in zip(torch.autograd.grad(own, tensors, gradient), torch.autograd.grad(plain, tensors, gradient)):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", [(2, 4, 70, 130), (2, 4, 130, 70), (1, 1, 5, 5)])
@pytest.mark.parametrize("kind", ["none", "causal", "boolean", "additive", "learnt"])
def test_it_is_scaled_dot_product_attention(shape: tuple[int, ...], kind: str):
    """Its math path, which is where it is to be used; causal counts from the first query and key there."""
    batch, heads, queries, keys = shape
    torch.manual_seed(0)
    tensors = [torch.randn(batch, heads, n, 8, dtype=DOUBLE, requires_grad=True) for n in (queries, keys, keys)]
    kwargs: dict[str, Any] = {"is_causal": kind == "causal"}
    if kind == "boolean":
        kwargs["attn_mask"] = torch.rand(batch, 1, queries, keys) > 0.9
        kwargs["attn_mask"][0, 0, 1] = False  # a row that sees nothing
    elif kind in ("additive", "learnt"):
        kwargs["attn_mask"] = torch.randn(heads, queries, keys, dtype=DOUBLE, requires_grad=kind == "learnt")
    inputs = tensors + ([kwargs["attn_mask"]] if kind == "learnt" else [])
    with sdpa_kernel(SDPBackend.MATH):
        plain = F.scaled_dot_product_attention(*tensors, **kwargs)
    own = as_scaled_dot_product(*tensors, **kwargs)
    torch.testing.assert_close(own, plain, rtol=0, atol=1e-10)
    for mine, theirs in zip(torch.autograd.grad(own.sum(), inputs), torch.autograd.grad(plain.sum(), inputs)):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


def test_its_gradients_are_those_of_finite_differences():
    torch.manual_seed(0)
    query = torch.randn(1, 4, 6, 3, dtype=DOUBLE, requires_grad=True)
    key, value = (torch.randn(1, 2, 7, size, dtype=DOUBLE, requires_grad=True) for size in (3, 2))
    bias = torch.randn(1, 4, 1, 7, dtype=DOUBLE, requires_grad=True)
    mask = torch.rand(6, 7) > 0.3

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        torch.manual_seed(1)  # dropout's seed
        return blockwise_attention(
            query, key, value, mask=mask, bias=bias, causal=True, window=4, softcap=3.0, dropout=0.3
        )

    assert torch.autograd.gradcheck(attend, (query, key, value, bias))


def test_dropout_drops_as_many_as_it_says_and_comes_back_with_its_seed():
    query, key = torch.zeros(2, 4, 300, 8), torch.zeros(2, 4, 300, 8)
    value = torch.ones(2, 4, 300, 8)
    torch.manual_seed(3)
    first = blockwise_attention(query, key, value, dropout=0.25)
    second = blockwise_attention(query, key, value, dropout=0.25)
    torch.manual_seed(3)
    again = blockwise_attention(query, key, value, dropout=0.25)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert first.mean().item() == pytest.approx(1.0, abs=0.005)
    # Each row is the mean of 300 draws of 0 or 4 / 3; rows and heads draw their own.
    assert first[..., 0].std().item() == pytest.approx(math.sqrt(0.25 / 0.75 / 300), rel=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_half_precision_is_as_exact_as_eager_attention(dtype: torch.dtype, kind: Any):
    """The error against fp64 is at most one and a half times eager attention's; sums of ten tiles do not pile up."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, 640, 32, dtype=dtype, requires_grad=True) for _ in range(3)]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]

    def results(inputs: list[Tensor], attend: Any) -> list[Tensor]:
        output = attend(*inputs)
        return [output, *torch.autograd.grad(output, inputs, torch.ones_like(output))]

    def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = (query @ key.mT * 32**-0.5).softmax(-1, dtype=torch.float32).to(query.dtype)
        return weights @ value

    wanted = results(exact, written_out)
    own = results(tensors, lambda *qkv: blockwise_attention(*qkv, kind=kind, tile=64 * 64))
    theirs = results(tensors, eager)
    for mine, other, true in zip(own, theirs, wanted):
        assert (mine - true).abs().max() <= 1.5 * (other - true).abs().max()


def test_memory_grows_with_the_sequence_and_not_with_its_square():
    """What the CPU allocates in forward and backward beside the inputs, at its peak."""

    def peak(length: int, attend: Any) -> int:
        tensors = [torch.randn(1, 4, length, 32, requires_grad=True) for _ in range(3)]
        changes = allocations(lambda: attend(*tensors).backward(torch.ones(1, 4, length, 32)))
        return max(accumulate(changes))

    lengths = (512, 1024, 2048)
    one = [4 * length * 32 * 4 for length in lengths]  # bytes of queries
    own = [peak(length, lambda *qkv: blockwise_attention(*qkv, causal=True)) for length in lengths]
    with sdpa_kernel(SDPBackend.MATH):
        plain = [peak(length, lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True)) for length in lengths]
    tiles = 2 * 4 * 2**18  # two of them in backward, fp32
    assert all(num_bytes < tiles + 8 * each for num_bytes, each in zip(own, one))
    assert all(later > 3.5 * earlier for earlier, later in pairwise(plain))
    assert own[-1] < plain[-1] / 10


@pytest.mark.parametrize("shape", [(3, 8, 200, 200), (1, 4, 130, 300), (2, 4, 300, 70)])
@pytest.mark.parametrize("scores", [{"causal": True}, {"causal": True, "window": 150, "softcap": 5.0}, {}])
def test_few_tiles_stand_for_all_in_a_rehearsal(shape: tuple[int, ...], scores: dict[str, Any]):
    """Peak, seconds and flops of those that run, as often as they count, are those of all."""
    batch, heads, queries, keys = shape
    settings = (0.1, scores.get("causal", False), scores.get("window", 0), scores.get("softcap", 0.0), 0.0, 2**15, True)

    def watched(run: Any) -> tuple[int, dict[Any, float], float]:
        with fake_tensors(), torch.no_grad():
            tracker = new_tracker(find_device("h100"))
            query, gradient, output = (torch.empty(batch, heads, queries, 16) for _ in range(3))
            key, value = (torch.empty(batch, 2, keys, 16) for _ in range(2))
            logsum, bias = torch.empty(batch, heads, queries), torch.empty(1, heads, 1, keys)
            inputs = (query, key, value, None, bias, None, None)
            with tracker:
                run(inputs, (gradient, *inputs, output, logsum))
        works = [entry for entry in tracker.log if isinstance(entry, Work)]
        return tracker.peak_bytes(), tracker.seconds_of(), sum(work.flops for work in works)

    def operators(inputs: Any, for_backward: Any) -> None:
        FORWARD(*inputs, *settings)
        BACKWARD(*for_backward, *settings, True)

    def all_tiles(inputs: Any, for_backward: Any) -> None:
        INSIDE[FORWARD][0](*inputs, *settings)
        INSIDE[BACKWARD][0](*for_backward, *settings, True)

    few, every = watched(operators), watched(all_tiles)
    assert few[0] == every[0]
    assert few[1] == pytest.approx(every[1], rel=1e-9)
    matmuls = 7  # two of forward, five of backward, of which the model has four
    assert few[2] == pytest.approx(every[2] * 6 / matmuls, rel=1e-9)


def test_tiles_that_are_masked_out_are_not_made():
    def made(scores: Scores, queries: int, keys: int) -> int:
        return sum(len(row.columns) for row in plan_rows(scores, queries, keys, 64))

    assert made(Scores(1.0), 1024, 1024) == 16 * 16
    assert made(Scores(1.0, causal=True), 1024, 1024) == 16 * 17 // 2
    assert made(Scores(1.0, causal=True, window=64), 1024, 1024) == 2 * 16 - 1
    assert made(Scores(1.0, causal=True), 64, 1024) == 1


@pytest.mark.parametrize("shape", [(1, 1, 1, 10), (2, 8, 4, 4096), (64, 32, 1, 512), (1, 1, 64, 100000)])
def test_tiles_stay_within_their_bound(shape: tuple[int, int, int, int]):
    batch, key_heads, groups, longest = shape
    size, sequences, heads = tile_shape(Scores(1.0, tile=2**18), batch, key_heads, groups, longest)
    assert sequences * heads * groups * size * size <= 2**18
    assert size <= longest


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"key": (1, 3, 5, 8)}, "do not go together"),
        ({"value": (1, 2, 6, 8)}, "do not go together"),
        ({"query": (4, 5, 8)}, "four dimensions"),
        ({"mask": (2, 1, 5, 5)}, "does not broadcast to"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(change: dict[str, tuple[int, ...]], says: str):
    shapes = {"query": (1, 4, 5, 8), "key": (1, 2, 5, 8), "value": (1, 2, 5, 8), "mask": (5, 5), **change}
    query, key, value, mask = (torch.ones(shape) for shape in shapes.values())
    with pytest.raises(ModelError, match=says):
        blockwise_attention(query, key, value, mask=mask.bool())
