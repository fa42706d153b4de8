"""Which operators to keep: exact against every subset, and the frontier below them all."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfit.operators import BlockGraph, Operator
from trainfit.plan.op_choice import Choice, best_choice, frontier, mixed_seconds, neighbours


@st.composite
def graphs(draw: st.DrawFn) -> BlockGraph:
    operators = []
    for number in range(draw(st.integers(1, 7))):
        earlier = st.integers(0, number - 1) if number else st.nothing()
        inputs = draw(st.sets(earlier, max_size=3)) if number else set()
        operators.append(
            Operator(
                name="aten.mul.Tensor",
                run=number + 1,
                place="",
                seconds=draw(st.integers(0, 20)) * 1e-6,
                num_bytes=draw(st.integers(0, 12)) * 512,
                inputs=tuple(sorted(inputs)),
                is_saved=draw(st.booleans()),
                may_store=draw(st.integers(0, 4)) > 0,
                may_skip=draw(st.integers(0, 4)) > 0,
            )
        )
    return BlockGraph(tuple(operators))


def every_choice(graph: BlockGraph) -> list[Choice]:
    storable = [number for number, operator in enumerate(graph.operators) if operator.may_store]
    subsets = chain.from_iterable(combinations(storable, size) for size in range(len(storable) + 1))
    return [Choice.of(graph, frozenset(kept)) for kept in subsets]


@settings(max_examples=60, deadline=None)
@given(graphs(), st.integers(0, 16 * 512))
def test_no_subset_of_operators_is_better(graph: BlockGraph, room: int):
    found = best_choice(graph, room)
    fitting = [choice for choice in every_choice(graph) if choice.num_bytes <= room]
    assert found.num_bytes <= room
    least = min(choice.seconds for choice in fitting)
    assert found.seconds == pytest.approx(least, abs=1e-12)
    equal = [choice for choice in fitting if choice.seconds <= least + 1e-12]
    assert len(found.kept) == min(len(choice.kept) for choice in equal)


@settings(max_examples=25, deadline=None)
@given(graphs(), st.integers(0, 16 * 512))
def test_no_subset_lies_below_the_frontier(graph: BlockGraph, room: int):
    corners = [(each.num_bytes, each.seconds) for each in frontier(graph)]
    for choice in every_choice(graph):
        assert mixed_seconds(corners, choice.num_bytes) <= choice.seconds + 1e-12
    around = [(each.num_bytes, each.seconds) for each in neighbours(graph, room)]
    assert mixed_seconds(around, room) == pytest.approx(mixed_seconds(corners, room), abs=1e-12)
    assert mixed_seconds(around, room) <= best_choice(graph, room).seconds + 1e-12


def operator(name: str, *inputs: int, saved: bool = False, num_bytes: int = 1024) -> Operator:
    return Operator(name, 1, "", 1e-6, num_bytes, inputs, saved, may_store=True, may_skip=True)


def test_what_nobody_asks_for_does_not_run_again():
    """Of a norm whose statistics are kept the square and the mean; only the first of them has to be named."""
    norm = BlockGraph(
        (
            operator("aten.pow.Tensor_Scalar"),
            operator("aten.mean.dim", 0, num_bytes=4),
            operator("aten.rsqrt.default", 1, saved=True, num_bytes=4),
            operator("aten.mul.Tensor", 2, saved=True),
        )
    )
    assert norm.runs_again({2}) == {3}
    rules = norm.rules("chosen_1", {2})
    assert rules.kept == ("aten.rsqrt.default#1",)
    assert rules.skipped == ("aten.pow.Tensor_Scalar#1",)
    assert best_choice(norm, 4).kept == {2}
    assert best_choice(norm, 3).kept == frozenset()


def test_mixing_needs_a_choice_that_fits():
    with pytest.raises(ValueError, match="every choice needs more than 3 bytes"):
        mixed_seconds([(4, 1.0)], 3)
