"""Compressed activations: fewer bytes, an error that is bounded, and nothing coded that is not worth it (OF-06)."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain import CPU
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import trainfit.techniques.compression as compression
from trainfit.errors import RecomputeError
from trainfit.rehearsal.tracker import StorageTracker
from trainfit.techniques.activation import forget_recompute, recompute_block
from trainfit.techniques.compression import watch_compression
from trainfit.techniques.quantised import dequantise, fp8_values, quantise

DIM, HEADS, ROWS = 64, 2, 256
LOSSES = {"keep_bf16": 0.0066, "keep_int8": 0.026, "keep_fp8": 0.103}  # of gradients: as verify() tolerates


class Block(nn.Module):
    """A Llama's, written with torch's own modules: views of one storage, a tensor that three matmuls save."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.after = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.gate, self.up, self.down = nn.Linear(DIM, 160), nn.Linear(DIM, 160), nn.Linear(160, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def made(make: Callable[[], nn.Module] = Block, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return make().to(dtype)


def under(tier: str, block: nn.Module) -> nn.Module:
    if tier != "keep":
        recompute_block(block, tier, CPU)
    return block


def hidden(dtype: torch.dtype = torch.float32) -> Tensor:
    """No leaf, as in a model: autograd would hold it."""
    x = torch.randn(2, ROWS, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    return x + torch.zeros(1, dtype=dtype, requires_grad=True)


def gradients(block: nn.Module, x: Tensor) -> list[Tensor]:
    block.zero_grad()
    block(x).float().square().mean().backward()
    return [p.grad.clone() for p in block.parameters() if p.grad is not None]


def relative(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = list(zip(found, expected, strict=True))
    error = sum((one.double() - other.double()).square().sum() for one, other in pairs)
    return float((error / sum(other.double().square().sum() for _, other in pairs)).sqrt())


def held_bytes(block: nn.Module, dtype: torch.dtype) -> int:
    """What a forward leaves behind, its output not counted, its input counted if something holds it."""
    tracker = StorageTracker()
    tracker.register(block.parameters(), "parameters")
    before = tracker.live_bytes()
    with tracker:
        output = block(hidden(dtype))
        gc.collect()
        return tracker.live_bytes() - before - output.nbytes


@pytest.mark.parametrize(
    ("tier", "dtype", "fewer"),
    [
        ("keep_int8", torch.float32, 3.5),
        ("keep_fp8", torch.float32, 3.5),
        ("keep_bf16", torch.float32, 1.9),
        ("keep_int8", torch.bfloat16, 1.9),
        ("keep_fp8", torch.bfloat16, 1.9),
    ],
)
def test_saved_bytes_fall_and_forward_does_not_change(tier: str, dtype: torch.dtype, fewer: float):
    plain, ours = made(dtype=dtype), under(tier, made(dtype=dtype))
    assert torch.equal(plain(hidden(dtype)), ours(hidden(dtype)))
    assert held_bytes(plain, dtype) > fewer * held_bytes(ours, dtype)


@pytest.mark.parametrize("tier", LOSSES)
def test_originals_are_freed_after_they_were_packed(tier: str, monkeypatch: pytest.MonkeyPatch):
    """OF-06: an original that something still refers to makes compression cost memory."""
    originals: list[Any] = []
    honest = compression._Codes.__init__

    def init(codes: Any, tensor: Tensor, original: Any, *rest: Any) -> None:
        originals.append(original)
        honest(codes, tensor, original, *rest)

    monkeypatch.setattr(compression._Codes, "__init__", init)
    output = under(tier, made())(hidden())
    assert len(originals) == 12  # x, x / its norm, norm, qkv, attention; the first three again; gate, up, silu, product
    assert [original.expired() for original in originals] == [True] * len(originals)
    assert output.grad_fn is not None


@pytest.mark.parametrize("tier", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_near_and_the_same_every_time(tier: str, dtype: torch.dtype):
    plain = gradients(made(dtype=dtype), hidden(dtype))
    block = under(tier, made(dtype=dtype))
    first, second = gradients(block, hidden(dtype)), gradients(block, hidden(dtype))
    rounding = 0.0 if dtype == torch.float32 else 2.0**-7
    assert 0 < relative(first, plain) <= LOSSES[tier] + rounding
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_storage_is_coded_once_however_often_it_is_saved():
    with watch_compression() as watch:
        output = under("keep_int8", made())(hidden())
    numbers = 2 * ROWS * (2 * 3 * DIM + 3 * DIM + DIM + 4 * 160)
    assert watch.original_bytes == 4 * numbers
    assert watch.compressed_bytes == numbers * (1 + 4 / 128)
    del output
    assert not compression._MADE, "codes outlive the graph"


def test_two_blocks_share_the_codes_of_what_both_save():
    """As decoder blocks do, which all take what the encoder made."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return x + self.key(memory)

    blocks, memory = [under("keep_int8", Reads()) for _ in range(3)], hidden()
    with watch_compression() as watch:
        x = hidden()
        for block in blocks:
            x = block(x, memory)
    assert watch.original_bytes == memory.nbytes


def test_what_is_not_worth_it_is_left_as_it_is():
    """Integers, booleans, small tensors, constants without a gradient, and parameters, views of them too."""
    table = torch.randn(2, ROWS, DIM)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.randn(128, DIM)), nn.Parameter(torch.ones(2, ROWS, DIM))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.where(x > 0, x * table, x)  # a mask, a constant
            x = x * self.scale
            x = x.gather(1, (x.detach() * 7).long() % ROWS)  # indices
            return x + (x.mean(1) @ self.weight.view(DIM, 128)).sum()  # few numbers, a view of a parameter

    plain, ours = gradients(made(Mixed), hidden()), under("keep_int8", made(Mixed))
    with watch_compression() as watch:
        assert torch.equal(made(Mixed)(hidden()), ours(hidden()))
    assert watch.original_bytes == 2 * hidden().nbytes  # what `scale` multiplies, and what is gathered from
    assert relative(gradients(ours, hidden()), plain) < 0.01


def test_what_someone_else_holds_costs_no_more_than_plain_training():
    """A list of hidden states keeps what autograd saves: codes would come on top."""
    seen: list[Tensor] = []

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(y := self.one(x))
            return self.two(y)

    plain, ours = made(Kept), under("keep_int8", made(Kept))
    kept = held_bytes(plain, torch.float32)
    seen.clear()
    held = held_bytes(ours, torch.float32)
    assert kept - held == hidden().nbytes * (1 - (1 + 4 / 128) / 4)  # the input's codes, and the original of y
    assert relative(gradients(ours, hidden())[2:], gradients(plain, hidden())[2:]) == 0.0  # the original's bits


def test_what_is_changed_in_place_has_the_numbers_of_when_it_was_saved():
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            y = self.one(x)
            z = self.two(y)
            with torch.no_grad():
                y.zero_()  # what `two` saved: plain training refuses its backward
            return z * 1.0

    class Copies(Overwrites):
        def forward(self, x: Tensor) -> Tensor:
            y = self.one(x)
            return self.two(y) * 1.0

    found = gradients(under("keep_int8", made(Overwrites)), hidden())
    assert relative(found, gradients(made(Copies), hidden())) < 0.026


def test_a_small_tensor_that_is_changed_in_place_is_refused():
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(DIM, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.one(x)
            z = y.exp()
            self.seen = z.detach()
            return z

    block = under("keep_int8", Small())
    output = block(hidden())
    block.seen.zero_()
    with pytest.raises(RecomputeError, match="changed in place before backward"):
        output.sum().backward()


def test_what_someone_else_holds_and_changes_in_place_is_refused():
    """Its codes are gone, so what it was when it was saved is nowhere."""

    class Shown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(DIM, 160), nn.Linear(160, DIM)

        def forward(self, x: Tensor) -> Tensor:
            y = self.one(x).relu()
            self.seen = y.detach()
            return self.two(y)

    block = under("keep_int8", made(Shown))
    output = block(hidden())
    block.seen.zero_()
    with pytest.raises(RecomputeError, match="changed in place before backward"):
        output.sum().backward()


def test_second_derivatives_are_refused():
    x = hidden()
    with pytest.raises(RecomputeError, match="second derivatives"):
        torch.autograd.grad(under("keep_int8", made())(x).square().sum(), x, create_graph=True)


def test_a_weight_that_autocast_casts_is_not_kept_and_comes_back_to_the_bit():
    class Few(nn.Module):
        """Activations too small for codes, so that all that differs are the casts."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(DIM, 1024), nn.Linear(1024, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(F.relu(self.one(x)))

    x = torch.randn(3, DIM, requires_grad=True)

    def run(block: nn.Module) -> tuple[list[Tensor], int]:
        block.zero_grad()
        tracker = StorageTracker()
        with tracker:
            with CPU.autocast("bf16"):
                loss = block(x).float().square().mean()
            gc.collect()
            held = tracker.live_bytes()
        loss.backward()
        return [p.grad.clone() for p in block.parameters()], held

    (plain, kept), (ours, held) = run(made(Few)), run(under("keep_int8", made(Few)))
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))
    assert kept - held == 2 * 2 * 1024 * DIM


def test_a_copy_of_a_block_is_compressed_too_and_a_rebuilt_one_is_not():
    block = under("keep_int8", made())
    twin = copy.deepcopy(block)
    found = gradients(twin, hidden())
    assert all(torch.equal(one, other) for one, other in zip(found, gradients(block, hidden()), strict=True))
    assert vars(twin)["forward"].block() is twin
    forget_recompute(block)
    assert relative(gradients(block, hidden()), gradients(made(), hidden())) == 0.0
    gone = weakref.ref(twin)
    del twin
    gc.collect()
    assert gone() is None


def test_nothing_is_done_where_nothing_is_saved():
    block = under("keep_int8", made())
    with torch.no_grad(), watch_compression() as watch:
        block(hidden())
    block.requires_grad_(requires_grad=False)
    with watch_compression() as frozen:
        block(hidden().detach())
    assert watch.original_bytes == frozen.original_bytes == 0


# ---- codes ---------------------------------------------------------------------------------------------------------


def test_fp8_codes_are_read_as_torch_reads_them():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = ~codes.float().isnan()
    assert torch.equal(fp8_values(codes)[numbers], codes.float()[numbers])


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_an_error_is_a_part_of_the_largest_of_the_block(kind: str):
    numbers = torch.randn(100, 128, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 100)[:, None]
    read = dequantise(*quantise(numbers, kind, block_size=128), (100, 128), torch.float32, block_size=128)
    largest = numbers.abs().amax(1, keepdim=True)
    bound = largest / 254 if kind == "int8" else torch.maximum(numbers.abs() / 16, largest / 448 * 2.0**-10)
    assert bool(((read - numbers).abs() <= bound * (1 + 1e-5)).all())


@pytest.mark.parametrize("tier", LOSSES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")], ids=str)
def test_what_is_not_finite_does_not_come_back_as_a_number(tier: str, wrong: float):
    packed: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    block = under(tier, nn.Linear(DIM, DIM))
    x = hidden()
    with torch.no_grad():
        x[1, 3, 5] = wrong
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        pass
    block(x).sum().backward()
    assert not bool(block.weight.grad[:, 5].isfinite().any())
