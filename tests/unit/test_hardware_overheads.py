"""What operators take around their kernels, by part of the step and bytes touched."""

import pytest
import torch
from torch import nn

from trainfit.hardware import accelerator, overheads
from trainfit.hardware.overheads import operator_overheads, part_of_step, touched_bytes
from trainfit.rehearsal.operator_cost import _NEAR_BYTES, _Memory, _part
from trainfit.techniques.activation import SEARCHED, recompute_block
from trainfit.techniques.recompute import running_region

aten = torch.ops.aten


@pytest.fixture
def few_rounds(monkeypatch):
    monkeypatch.setattr(overheads, "_ROUNDS", 1)
    monkeypatch.setattr(overheads, "SEQUENCES", (0, 1))


def test_every_part_and_tier_is_measured_over_growing_bytes(few_rounds):
    ticks = iter(range(10**9))
    device = accelerator("cpu")
    tiers = {tier: lambda block, tier=tier: recompute_block(block, tier, device) for tier in SEARCHED}
    found = operator_overheads(lambda: float(next(ticks)), device, tiers)
    parts = {f"{part}.{tier}" for part in ("forward", "recompute") for tier in SEARCHED}
    assert found.keys() == {"forward", "backward", "no_grad"} | parts
    for table in found.values():
        assert len(table.axes[0]) == 2
        assert table.axes[0][0] < table.axes[0][1]


def test_kernels_are_not_counted_as_overhead(few_rounds):
    """A clock that ticks at each reading: two readings a kernel, so that none is longer than on a single token."""
    ticks = iter(range(10**9))
    found = operator_overheads(lambda: float(next(ticks)), accelerator("cpu"))
    # Without the mode a half of a step reads the clock once: one tick, shared among all its operators.
    assert 0 < found["forward"].smallest < 0.05
    assert found["forward"].seconds[0] == found["forward"].seconds[1]


def test_the_part_of_a_step_and_its_tier_are_known_where_an_operator_runs():
    seen = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            region = running_region()
            seen.add((part_of_step(), None if region is None else region.plan.tier))
            return func(*args, **(kwargs or {}))

    def step(block: nn.Module) -> set:
        seen.clear()
        with Watch():
            block(torch.ones(2, 4)).sum().backward()
        return set(seen)

    block = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4))
    assert step(block) == {("forward", None), ("backward", None)}
    recompute_block(block, "full", accelerator("cpu"))
    assert {("forward", "full"), ("recompute", "full"), ("backward", None)} <= step(block)
    with torch.no_grad(), Watch():
        seen.clear()
        block(torch.ones(2, 4))
    assert seen == {("no_grad", None)}


class Routed(nn.Module):
    """Its choice is kept under every tier that recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.scores(hidden).topk(1, -1).values


@pytest.mark.parametrize(
    ("block", "tier"), [(nn.Sequential(nn.Linear(4, 4), nn.SiLU()), "full"), (Routed(), "attention")]
)
def test_looking_for_a_routers_choice_costs_what_looking_for_attention_does(block: nn.Module, tier: str):
    seen = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(_part())
            return func(*args, **(kwargs or {}))

    recompute_block(block, "full", accelerator("cpu"))
    block(torch.ones(2, 4)).sum().backward()  # finds out where to look
    with Watch():
        block(torch.ones(2, 4)).sum().backward()
    assert seen - {"forward", "backward"} == {f"forward.{tier}", f"recompute.{tier}"}


def test_a_view_touches_nothing():
    a = torch.ones(8, 16)
    assert touched_bytes(aten.add.Tensor, (a, a), {}, a) == 3 * a.nbytes
    assert touched_bytes(aten.view.default, (a, [-1]), {}, a.view(-1)) == 0


def test_memory_is_near_until_enough_else_was_touched():
    memory, tensor, other = _Memory(), torch.ones(1024), torch.ones(1024)
    assert not memory.are_near([tensor])
    memory.touches([tensor], tensor.nbytes)
    assert memory.are_near([tensor])
    assert not memory.are_near([tensor, other])
    assert memory.are_near([tensor, torch.ones(1)])  # too small to matter
    memory.touches([other], _NEAR_BYTES + 1)
    assert not memory.are_near([tensor])


def test_the_mean_of_touched_bytes_forgets():
    memory = _Memory()
    assert memory.mean_with(6400) == 100
    for _ in range(63):
        assert memory.mean_with(0) == 100
    assert memory.mean_with(0) == 0
