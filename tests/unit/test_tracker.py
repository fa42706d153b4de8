"""StorageTracker on sequences whose answer is known, and its replay against a simulation that knows no shortcuts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainfit.profile import CATEGORIES
from trainfit.rehearsal.events import Event, in_place_additions
from trainfit.rehearsal.operator_cost import OperatorCost
from trainfit.rehearsal.operators import temporary_bytes
from trainfit.rehearsal.recording import allocations
from trainfit.rehearsal.tracker import StorageTracker

KIB = 1024
COST = OperatorCost({"fp32": 1e9}, bytes_per_second=1e6, launch_seconds=1e-3)


def kib(count: int) -> Tensor:
    return torch.zeros(count * KIB, dtype=torch.uint8)


# ---- known sequences ------------------------------------------------------------------------------------------------


def test_peak_is_what_is_live_together():
    tracker = StorageTracker()
    with tracker:
        a = kib(3)
        b = kib(5)
        del a
        c = kib(4)
        assert tracker.live_bytes() == 9 * KIB
        del b, c
    assert tracker.live_bytes() == 0
    assert tracker.profile().peak_bytes == 9 * KIB
    assert tracker.profile().resident_bytes == 0


def test_a_view_pins_its_whole_base_and_costs_nothing():
    tracker = StorageTracker()
    with tracker:
        base = kib(8)
        view = base[:KIB].view(2, -1).t()
        assert tracker.live_bytes() == 8 * KIB
        del base
        assert tracker.live_bytes() == 8 * KIB
        del view
        assert tracker.live_bytes() == 0


def test_in_place_operators_take_no_memory():
    tracker = StorageTracker()
    with tracker:
        a = kib(8)
        a.add_(1).mul_(2)
        a[:5].zero_()
        assert tracker.live_bytes() == 8 * KIB
    assert tracker.profile().peak_bytes == 8 * KIB


def test_what_was_live_before_counts_when_it_is_registered_and_once():
    weight = kib(6)
    tracker = StorageTracker()
    tracker.register([weight, weight[:10], weight.view(2, -1)], "parameters")
    with tracker:
        other = kib(1)
    assert tracker.live_bytes() == 7 * KIB
    profile = tracker.profile()
    assert profile.categories["parameters"] == 6 * KIB
    assert sum(profile.categories.values()) == profile.peak_bytes == 7 * KIB
    del other


@pytest.mark.parametrize(("num_bytes", "rounded"), [(0, 0), (1, 512), (512, 512), (513, 1024)])
def test_sizes_are_rounded_as_the_allocator_does(num_bytes: int, rounded: int):
    tracker = StorageTracker(rounding=512)
    with tracker:
        held = torch.empty(num_bytes, dtype=torch.uint8)
        assert tracker.live_bytes() == rounded
        del held
        assert tracker.live_bytes() == 0


def test_phases_have_peaks_of_their_own():
    tracker = StorageTracker()
    with tracker:
        a = kib(2)
        tracker.observe("backward")
        b = kib(7)
        del b
        tracker.observe("optimizer")
        c = kib(1)
    profile = tracker.profile()
    assert profile.phases == {"forward": 2 * KIB, "backward": 9 * KIB, "optimizer": 3 * KIB}
    assert profile.peak_phase == "backward"
    del a, c


def test_a_resized_tensor_counts_with_its_new_size():
    tracker = StorageTracker()
    with tracker:
        tensor = kib(1)
        tensor.resize_(4 * KIB)
        assert tracker.live_bytes() == 4 * KIB


def test_categories_add_up_to_the_peak():
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    tracker = StorageTracker()
    tracker.register(model.parameters(), "parameters")
    inputs = torch.ones(32, 16)
    with tracker:
        output = model(inputs)
        tracker.observe("loss")
        loss = output.square().sum()
        tracker.observe("backward")
        loss.backward()
    profile = tracker.profile()
    assert set(profile.categories) == set(CATEGORIES)
    assert sum(profile.categories.values()) == profile.peak_bytes
    assert profile.categories["parameters"] == sum(p.nbytes for p in model.parameters())
    assert profile.categories["activations"] > 0


# ---- gradients that are added in place ------------------------------------------------------------------------------


def backward_peak(size: int = 1000) -> int:
    """x is used four times by operators that save nothing: its gradient is added up three times in backward."""
    tracker = StorageTracker()
    leaf = torch.zeros(size, requires_grad=True)
    with tracker:
        x = leaf * 1.0
        outputs = torch.stack([x * number for number in (2.0, 3.0, 4.0, 5.0)]).sum(0)
        del x
        middle = len(tracker.log)
        tracker.observe("backward")
        outputs.backward(torch.ones_like(outputs))
        return tracker.peak_bytes(since=middle)


def test_fake_gradients_are_counted_as_real_ones_are():
    """See NOTE [ Fake gradients are added in place ]: without it the fake peak is one gradient higher."""
    real = backward_peak()
    with FakeTensorMode():
        assert backward_peak() == real


def events_of(*changes: tuple[int, int] | tuple[int, int, int]) -> list[Event]:
    """(storage, bytes) or (storage, bytes, the addend whose place it may take)."""
    return [Event(change[0], change[1], "backward", "op", *change[2:]) for change in changes]


def test_a_sum_takes_the_place_of_the_addend_that_dies():
    addition = events_of((0, 8), (1, 8), (2, 8, 0), (1, -8), (0, -8))
    assert [(event.storage, event.num_bytes) for event in in_place_additions(addition)] == [
        (0, 8),
        (1, 8),
        (0, -8),
        (2, 8),
        (1, -8),
    ]
    # An addend that lives on past the next operator is held by somebody else.
    kept = events_of((0, 8), (1, 8), (2, 8, 0), (3, 8), (0, -8))
    assert in_place_additions(kept) == kept
    # Autograd adds into the first gradient only.
    other = events_of((0, 8), (1, 8), (2, 8, 0), (1, -8))
    assert in_place_additions(other) == other


@dataclass
class Simulation:
    """Memory cell by cell: the naive answer. Emits what the tracker would have seen of the same program."""

    live: dict[int, int] = field(default_factory=dict)
    peak: int = 0
    events: list[Event] = field(default_factory=list)
    next: int = 0

    def allocate(self, num_bytes: int, into: int | None = None) -> int:
        self.live[self.next] = num_bytes
        self.events.append(Event(self.next, num_bytes, "backward", "op", into))
        self.next += 1
        return self.next - 1

    def free(self, storage: int) -> None:
        self.events.append(Event(storage, -self.live.pop(storage), "backward", "op"))

    def note(self) -> None:
        self.peak = max(self.peak, sum(self.live.values()))

    def add(self, first: int, dying: list[int]) -> None:
        """A sum of two equal storages; where the first dies it lies where that lay, so nothing new is live for it."""
        self.allocate(self.live[first], first)
        if first not in dying:
            self.note()
        for storage in dying:
            self.free(storage)
        self.note()


@st.composite
def programs(draw: st.DrawFn) -> Simulation:
    simulation = Simulation()
    for _ in range(draw(st.integers(1, 25))):
        kind = draw(st.sampled_from(("allocate", "free", "add")))
        held = sorted(simulation.live)
        if kind == "allocate" or len(held) < 2:
            simulation.allocate(draw(st.sampled_from((8, 8, 24, 64))))
            simulation.note()
        elif kind == "free":
            simulation.free(draw(st.sampled_from(held)))
        else:
            first = draw(st.sampled_from(held))
            equals = [other for other in held if simulation.live[other] == simulation.live[first] and other != first]
            if equals:
                second = draw(st.sampled_from(equals))
                dying = draw(st.sampled_from(([], [first], [second], [first, second], [second, first])))
                simulation.add(first, dying)
                simulation.allocate(8)  # the next operator: what dies later was held by somebody else
                simulation.note()
    return simulation


@given(programs())
def test_replay_of_additions_equals_the_naive_simulation(simulation: Simulation):
    tracker = StorageTracker()
    tracker.record.log = list(simulation.events)
    assert tracker.peak_bytes() == simulation.peak
    ordered = in_place_additions(simulation.events)
    assert sorted(ordered, key=repr) == sorted(simulation.events, key=repr)
    live = 0
    for event in ordered:
        live += event.num_bytes
        assert live >= 0
    assert live == sum(simulation.live.values())


# ---- costs ----------------------------------------------------------------------------------------------------------


def test_an_allocation_without_a_write_is_free():
    tracker = StorageTracker(cost=COST)
    with FakeTensorMode(), tracker:
        torch.empty(64, 64)
    assert tracker.seconds_of()["forward"] == 0.0


def test_a_matmul_takes_its_arithmetic_or_its_traffic_and_views_are_free():
    tracker = StorageTracker(cost=COST)
    with FakeTensorMode():
        a, b = torch.empty(64, 64), torch.empty(64, 64)
        with tracker:
            a.view(-1)[:7].detach()
            assert tracker.seconds_of()["forward"] == 0.0
            a @ b
    assert tracker.seconds_of()["forward"] == pytest.approx(1e-3 + max(2 * 64**3 / 1e9, 3 * 64 * 64 * 4 / 1e6))


def test_adding_another_dtype_casts_on_the_host():
    into, low = torch.zeros(10), torch.zeros(10, dtype=torch.bfloat16)
    assert temporary_bytes(torch.ops.aten.add_.Tensor, (into, low)) == 40
    assert temporary_bytes(torch.ops.aten.add_.Tensor, (into, into)) == 0


@pytest.mark.parametrize("name", ["add", "mul_", "div", "sub_"])
def test_operands_of_two_dtypes_are_cast_inside(name: str):
    wide, row = torch.ones(128, 64), torch.ones(128, 1)
    func = getattr(torch.ops.aten, name).Tensor
    for args in ((wide.bfloat16(), wide), (wide.bfloat16(), row), (wide, row.bfloat16()), (wide, wide)):
        changes = allocations(partial(func, *args))
        assert temporary_bytes(func, args) == max(accumulate(changes), default=0) - sum(changes)
