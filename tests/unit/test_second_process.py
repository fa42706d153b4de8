"""What a second process answers, refuses and leaves to this one."""

from __future__ import annotations

import os
import signal

import pytest

from tiny_models import TINY_CONFIGS
from trainfit.errors import RecipeError
from trainfit.hardware import find_device
from trainfit.plan import Target, choose
from trainfit.profile import Layout, Mesh, Pipeline, TensorParallel
from trainfit.second_process import SecondProcess, submit
from trainfit.workload import workload_from_config


def where(value: int) -> tuple[int, int]:
    return os.getpid(), 2 * value


def refused() -> None:
    raise RecipeError("no such thing; give another")


def unsendable() -> object:
    return lambda: None


def remembered(box: list[int]) -> int:
    box.append(1)
    return len(box)


@pytest.fixture(scope="module")
def beside():
    process = SecondProcess(("json",))
    yield process
    process.close()


def test_answers_come_from_the_other_process_whatever_is_asked_for_first(beside):
    first, second = beside.submit(where, 1), beside.submit(where, 2)
    assert second()[1] == 4
    process, value = first()
    assert value == 2
    assert process != os.getpid()


def test_what_it_raises_is_raised_here_and_the_next_is_answered(beside):
    wrong, right = beside.submit(refused), beside.submit(where, 3)
    with pytest.raises(RecipeError, match="no such thing"):
        wrong()
    assert right()[1] == 6


def test_what_cannot_be_sent_is_computed_here(beside):
    assert beside.submit(lambda: os.getpid())() == os.getpid()
    assert callable(beside.submit(unsendable)())
    assert beside.submit(len, b"x" * 100_000)() == 100_000  # more than a pipe takes at once


def test_an_argument_that_is_given_again_is_the_same_object_there(beside):
    box: list[int] = []
    assert [beside.submit(remembered, box)() for _ in range(2)] == [1, 2]


def test_without_one_it_is_computed_when_it_is_asked_for():
    seen: list[int] = []
    answer = submit(None, seen.append, 1)
    assert not seen
    answer()
    assert seen == [1]


def test_what_a_dead_one_owes_is_computed_here():
    process = SecondProcess()
    assert process.submit(where, 1)()[0] != os.getpid()
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.join()
    answers = [process.submit(where, value) for value in (2, 3)]
    assert [answer() for answer in answers] == [(os.getpid(), 4), (os.getpid(), 6)]
    process.close()


@pytest.mark.parametrize("mesh", [Mesh(pipeline=2), Mesh(tensor=2)], ids=["two stages", "two tensor ranks"])
def test_a_plan_is_the_same_with_one(beside, mesh: Mesh, monkeypatch):
    workload = workload_from_config({**TINY_CONFIGS["llama"], "num_hidden_layers": 4}, seq_len=64, name="tiny-llama")
    layout = Layout(mesh, tensor=TensorParallel(sequence=mesh.tensor > 1), pipeline=Pipeline())
    target = Target(2**30, 8 * 64, 64, "bf16", layouts=(layout,))
    hardware = find_device("ascend-910b3", 2)
    alone = choose(workload, hardware, target)
    asked: list[str] = []
    submit_it = beside.submit
    monkeypatch.setattr(
        beside, "submit", lambda function, *a, **b: asked.append(function.__name__) or submit_it(function, *a, **b)
    )
    shared = choose(workload, hardware, target, beside=beside)
    assert shared.to_json() == alone.to_json()
    assert ("rehearse" in asked) == (mesh.pipeline > 1)
    assert asked.count("_trace") == mesh.tensor  # of two sequences, and of a tensor rank's part
