"""The course of memory: few points, none of them made up, and the peak among them; and which block ran."""

from __future__ import annotations

import json
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainfit.hardware import accelerator, find_device
from trainfit.profile import CATEGORIES, Profile
from trainfit.rehearsal import measure, rehearse
from trainfit.rehearsal.course import MAX_MOMENTS, course_of, highs_and_lows
from trainfit.rehearsal.events import Event
from trainfit.rehearsal.whereabouts import Whereabouts
from trainfit.step import Strategy
from trainfit.step.strategy_text import parse_tiers
from trainfit.workload import workload_from_module

VOCAB, DIM, BLOCKS = 97, 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def rehearsed(tiers: str = "keep", **knobs) -> Profile:
    workload = workload_from_module(Model, seq_len=64, vocab_size=VOCAB)
    return rehearse(workload, Strategy(4, 1, tiers=parse_tiers(tiers, BLOCKS), **knobs), find_device("cpu"))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=300), st.integers(4, 40))
def test_few_points_leave_out_no_height(totals, limit):
    chosen = highs_and_lows(totals, limit)
    assert chosen == sorted(set(chosen))
    assert len(chosen) <= limit
    assert {chosen[0], chosen[-1]} == {0, len(totals) - 1}
    assert totals.index(max(totals)) in chosen
    # Whatever lies between two points that were kept is not above all of what was kept around it.
    stretches = (limit - 2) // 2
    width = -(-len(totals) // stretches)
    for position, total in enumerate(totals):
        near = [totals[each] for each in chosen if abs(each - position) <= width]
        assert min(near) <= total <= max(near)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 100), st.sampled_from(CATEGORIES)), min_size=1))
def test_categories_add_up_at_every_moment(steps):
    events, live, category_of = [], {}, {}
    for number, (slot, size, category) in enumerate(steps):
        if slot in live:
            storage, was = live.pop(slot)
            events.append(Event(storage, -was, "forward", "op"))
        else:
            live[slot] = number, size
            category_of[number] = category
            events.append(Event(number, size, "forward", "op"))
    totals = list(accumulate(event.num_bytes for event in events))
    course = course_of(events, lambda birth: category_of[birth.storage], limit=10)
    assert [moment.total_bytes for moment in course] == [totals[each] for each in highs_and_lows(totals, 10)]
    assert all(size > 0 for moment in course for size in moment.categories.values())


@pytest.mark.parametrize("tiers", ["keep", "2*full,2*keep", "pointwise"])
def test_the_peak_is_one_of_the_moments(tiers):
    profile = rehearsed(tiers)
    highest = max(profile.timeline, key=lambda moment: moment.total_bytes)
    assert highest.total_bytes == profile.peak_bytes
    assert (highest.phase, highest.place) == (profile.peak_phase, profile.peak_place)
    assert highest.categories == {name: size for name, size in profile.categories.items() if size}
    assert 4 < len(profile.timeline) <= MAX_MOMENTS
    for phase, highest_bytes in profile.phases.items():
        assert max(m.total_bytes for m in profile.timeline if m.phase == phase) <= highest_bytes
    seconds = [moment.seconds for moment in profile.timeline]
    assert seconds == sorted(seconds)
    assert 0 < seconds[-1] <= profile.step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("tiers", ["keep", "2*full,2*keep", "attention"])
def test_blocks_run_forward_in_order_and_backward_in_reverse(tiers):
    def blocks(phase):
        places = [m.place.split(",")[0] for m in profile.timeline if m.phase == phase and m.place.startswith("block")]
        return list(dict.fromkeys(places))

    profile = rehearsed(tiers)
    expected = [f"block {number}" for number in range(BLOCKS)]
    assert blocks("forward") == expected
    assert blocks("backward") == expected[::-1]
    assert blocks("loss") == blocks("optimizer") == []


def test_nodes_that_backward_makes_belong_to_the_block_that_made_them():
    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(where.look())
            with torch.enable_grad():
                again = ctx.saved_tensors[0].detach().requires_grad_()
                output = again.sin() * 2
                output.register_hook(lambda _: seen.append(where.look()))
                output.backward(gradient)
            return again.grad

    class Calls(nn.Module):
        def forward(self, x):
            return Nested.apply(x)

    seen: list[str] = []
    where, first, second = Whereabouts(), Calls(), Calls()
    with where.watching({"block 0": first, "block 1": second}):
        output = second(first(torch.ones(3, requires_grad=True))).sum()
        output.register_hook(lambda _: seen.append(where.look()))
        output.backward()
    assert seen == ["", "block 1", "block 1", "block 0", "block 0"]
    assert not first._forward_hooks
    assert not first._forward_pre_hooks


def test_a_measured_step_has_a_course_too():
    workload = workload_from_module(Model, seq_len=64, vocab_size=VOCAB)
    profile = measure(workload, Strategy(4, 1, tiers=parse_tiers("keep", BLOCKS)), accelerator("cpu"), steps=0)
    assert max(moment.total_bytes for moment in profile.timeline) == profile.peak_bytes
    assert all(size >= 0 for moment in profile.timeline for size in moment.categories.values())
    assert list(dict.fromkeys(m.phase for m in profile.timeline)) == ["forward", "loss", "backward", "optimizer"]


def test_json_goes_there_and_back_and_older_profiles_have_no_course():
    profile = rehearsed()
    data = json.loads(json.dumps(profile.to_json()))
    assert Profile.from_json(data) == profile
    del data["timeline"]
    assert Profile.from_json(data).timeline == ()
