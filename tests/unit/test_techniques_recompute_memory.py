"""What a recomputed block holds, for how long, and that it stays the block it was."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recompute_blocks import (
    DIM,
    ROWS,
    TIERS,
    Feedforward,
    Remembers,
    assert_same,
    inputs,
    no_collector,
    run,
    twins,
)
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from trainfit.errors import RecomputeError

# ---- what is held ---------------------------------------------------------------------------------------------------


def saved_bytes(block: nn.Module, x: Tensor) -> tuple[int, Any]:
    """Bytes of all tensors alive after forward that were not before, inputs and outputs not counted."""
    gc.collect()
    before = {id(tensor.untyped_storage()) for tensor in _tensors()}
    output = block(x)
    outputs = output if isinstance(output, tuple) else (output,)
    before |= {id(tensor.untyped_storage()) for tensor in (x, *outputs)}
    storages = {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in _tensors()}
    return sum(num_bytes for key, num_bytes in storages.items() if key not in before), output


def _tensors() -> list[Tensor]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


def plain_saved_bytes(block: nn.Module, x: Tensor) -> int:
    """What autograd itself saves, parameters and the input not counted."""
    known = {t.untyped_storage().data_ptr() for t in (x, *block.parameters())}
    seen: dict[int, int] = {}
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x)
    return sum(seen.values())


class ThreeMatmuls(nn.Module):
    """up (DIM, 4 DIM), gelu, down (4 DIM, DIM): keeps `up`; `down` is behind the last saved tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_each_tier_holds_what_it_says(training: bool):
    """CK-11, in eval mode with grad on too. A trailing matmul is not kept: recompute stops before it."""
    x = inputs()
    plain, pointwise = twins(ThreeMatmuls, "pointwise")
    _, full = twins(ThreeMatmuls, "full")
    for block in (plain, pointwise, full):
        block.train(training)
    row = 4 * ROWS * DIM
    assert plain_saved_bytes(plain, x) == 4 * row + 4 * row  # output of up, output of gelu
    assert saved_bytes(pointwise, x)[0] == 4 * row  # output of up
    assert saved_bytes(full, x)[0] == 0


def test_nothing_is_held_without_grad():
    _, block = twins(ThreeMatmuls, "pointwise")
    with torch.no_grad():
        assert saved_bytes(block, inputs())[0] == 0


@pytest.mark.parametrize("tier", TIERS)
def test_values_die_as_backward_proceeds(tier: str):
    """When backward has passed the second half of a block, what that half saved is gone."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
            self.late: list[weakref.ref[Any]] = []
            self.alive: list[bool] = []

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x).tanh()
            if hidden.requires_grad:
                hidden.register_hook(self.reached)
            late = self.second(hidden * 1.0).exp()  # exp saves its output
            self.late.append(weakref.ref(late.untyped_storage()))
            return late * 2.0

        def reached(self, gradient: Tensor) -> None:
            self.alive.append(any(storage() is not None for storage in self.late))

    _, block = twins(Halves, tier)
    with no_collector():
        block(inputs()).sum().backward()
    assert block.alive
    assert not any(block.alive)


@pytest.mark.parametrize("tier", TIERS)
def test_a_step_leaves_no_cycle(tier: str):
    _, block = twins(Feedforward, tier)
    with no_collector():
        x = inputs()
        hidden = x * 1.0
        input_alive = weakref.ref(hidden.untyped_storage())
        output = block(hidden)
        output_alive = weakref.ref(output.untyped_storage())
        loss = output.square().sum()
        del hidden, output
        assert input_alive() is not None
        loss.backward()
        del loss
        assert input_alive() is None
        assert output_alive() is None


@pytest.mark.parametrize("tier", TIERS)
def test_a_graph_that_is_never_walked_dies_with_its_output(tier: str):
    _, block = twins(Feedforward, tier)
    with no_collector():
        hidden = inputs() * 1.0
        alive = weakref.ref(hidden.untyped_storage())
        output = block(hidden)
        del hidden
        assert alive() is not None
        del output
        assert alive() is None


@pytest.mark.parametrize("tier", TIERS)
def test_a_failed_recompute_leaves_no_cycle(tier: str):
    _, block = twins(Remembers, tier)
    with no_collector():
        hidden = inputs() * 1.0
        alive = weakref.ref(hidden.untyped_storage())
        output = block(hidden).sum()
        with pytest.raises(RecomputeError) as caught:
            output.backward()
        del caught, output, hidden
        block.cache.clear()
        assert alive() is None


@pytest.mark.parametrize("tier", TIERS)
def test_a_model_dies_with_its_last_reference(tier: str):
    """After out of memory a smaller step is built when the old one is deleted; nobody calls the collector."""
    _, block = twins(Feedforward, tier)
    with no_collector():
        alive = weakref.ref(block.up.weight.untyped_storage())
        run(block)
        del block
        assert alive() is None


@pytest.mark.parametrize("tier", TIERS)
def test_a_copy_runs_on_its_own_weights(tier: str):
    """copy.deepcopy, as for averaged weights: the copy must not compute with the original's parameters."""
    plain, block = twins(Feedforward, tier)
    twin = copy.deepcopy(block)
    for other in (plain, twin):
        with torch.no_grad():
            other.up.weight.mul_(2.0)
    assert_same(run(twin), run(plain))
    assert block.up.weight.grad is None


def test_the_block_stays_what_it_is():
    plain, block = twins(Feedforward, "full")
    assert type(block) is type(plain)
    assert [name for name, _ in block.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert block.state_dict().keys() == plain.state_dict().keys()
