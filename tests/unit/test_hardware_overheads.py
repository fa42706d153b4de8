"""What operators take around their kernels, by part of the step and bytes touched."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainfit.hardware import accelerator, overheads
from trainfit.hardware.overheads import _hooks_at_work, operator_overheads, part_of_step, touched_bytes
from trainfit.operators import KeptOperators
from trainfit.profile import Tier
from trainfit.rehearsal.operator_cost import _NEAR_BYTES, _Memory, _part
from trainfit.techniques.activation import CALIBRATED, SEARCHED, recompute_block
from trainfit.techniques.recompute import priced_tier

aten = torch.ops.aten


def free(func, args, kwargs, output) -> float:
    return 0.0


@pytest.fixture
def few_rounds(monkeypatch):
    monkeypatch.setattr(overheads, "_ROUNDS", 1)
    monkeypatch.setattr(overheads, "SEQUENCES", (0, 1))


def test_every_part_and_tier_is_measured_over_growing_bytes(few_rounds):
    ticks = iter(range(10**9))
    device = accelerator("cpu")
    tiers = {tier: lambda block, tier=tier: recompute_block(block, tier, device) for tier in CALIBRATED}
    found = operator_overheads(lambda: float(next(ticks)), device, free, tiers)
    parts = {f"forward.{tier}" for tier in CALIBRATED} | {f"recompute.{tier}" for tier in SEARCHED}
    assert found.keys() == {"forward", "backward", "no_grad"} | parts
    for table in found.values():
        assert len(table.axes[0]) == 2
        assert table.axes[0][0] < table.axes[0][1]


def test_what_kernels_take_is_not_counted_as_overhead(few_rounds):
    """A clock that ticks at each reading: a half of a step takes one tick, of which its kernels take their share."""

    def found(price) -> float:
        ticks = iter(range(10**9))
        return operator_overheads(lambda: float(next(ticks)), accelerator("cpu"), price)["forward"].smallest

    whole = found(free)
    assert 0 < whole < 0.05
    matmuls = found(lambda func, args, kwargs, output: 0.01 if func is aten.mm.default else 0.0)
    num_matmuls = overheads.BLOCKS * 7  # linear layers
    assert matmuls == pytest.approx(whole * (1 - 0.01 * num_matmuls))


def test_hooks_take_as_much_more_of_one_token_as_of_the_next_size():
    assert _hooks_at_work([3.0, 9.0, 12.0], [2.0, 5.0, 7.0]) == [6.0, 9.0, 12.0]
    assert _hooks_at_work([7.0, 9.0], [2.0, 5.0]) == [7.0, 9.0]  # more was measured
    assert _hooks_at_work([3.0], [2.0]) == [3.0]  # a device knows one size


def test_a_device_whose_host_runs_ahead_has_no_kernels_in_its_seconds(few_rounds):
    """Its price would be taken from seconds that do not hold it."""

    def found(kind: str) -> float:
        device, ticks = accelerator("cpu"), iter(range(10**9))
        device = SimpleNamespace(device=device.device, kind=kind)
        return operator_overheads(lambda: float(next(ticks)), device, lambda *call: 0.001)["forward"].smallest

    assert found("cpu") < found("npu")


def test_the_part_of_a_step_and_its_tier_are_known_where_an_operator_runs():
    seen = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add((part_of_step(), priced_tier()))
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


CHOSEN = KeptOperators("chosen_1", ("aten.addmm.default#1",))


@pytest.mark.parametrize(
    ("block", "tier", "like"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4)), "chosen_1", "pointwise"),
        (nn.Sequential(nn.Linear(4, 4), nn.SiLU()), "full", "full"),
        (Routed(), "full", "attention"),  # one function is looked at, as there
        (nn.Sequential(nn.Linear(4, 4), nn.SiLU()), "selective", "pointwise"),
        (nn.Sequential(nn.Linear(4, 4096), nn.SiLU(), nn.Linear(4096, 4)), "discard", "discard"),
    ],
)
def test_operators_cost_like_those_of_a_tier_that_is_calibrated(block: nn.Module, tier: Tier, like: Tier):
    seen = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(_part())
            return func(*args, **(kwargs or {}))

    recompute_block(block, tier, accelerator("cpu"), chosen=CHOSEN if tier == CHOSEN.tier else None)
    block(torch.ones(2, 4)).sum().backward()  # finds out where to look
    with Watch():
        block(torch.ones(2, 4)).sum().backward()
    assert like in CALIBRATED
    expected = {f"forward.{like}"} | ({f"recompute.{like}"} if like in SEARCHED else set())
    assert seen - {"forward", "backward", "no_grad"} == expected


def test_a_view_touches_nothing():
    a = torch.ones(8, 16)
    assert touched_bytes(aten.add.Tensor, (a, a), {}, a) == 3 * a.nbytes
    assert touched_bytes(aten.view.default, (a, [-1]), {}, a.view(-1)) == 0


def test_memory_is_near_until_enough_else_was_touched():
    memory, tensor, other, made = _Memory(), torch.ones(1024), torch.ones(1024), torch.ones(1024)

    def share(*operands, recycled=False):
        return memory.near_share(operands, [made], recycled=recycled)

    assert share(tensor) == share() == 0
    assert share(recycled=True) == 1
    memory.touches([tensor], tensor.nbytes)
    assert share(tensor) == 1 / 2  # what it makes lies where nobody was
    assert share(tensor, other) == 1 / 3
    assert share(tensor, recycled=True) == 1
    assert share(tensor, other, recycled=True) == 2 / 3
    assert memory.near_share([tensor], [tensor], recycled=False) == 1  # in place
    memory.touches([other], _NEAR_BYTES + 1)
    assert share(tensor) == 0
    assert share(tensor, recycled=True) == 1 / 2


def test_the_mean_of_touched_bytes_forgets():
    memory = _Memory()
    assert memory.mean_with(6400) == 100
    for _ in range(63):
        assert memory.mean_with(0) == 100
    assert memory.mean_with(0) == 0
