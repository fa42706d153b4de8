"""What a second process answers, refuses and leaves to this one."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

import pytest

from tiny_models import TINY_CONFIGS
from trainfit.cli.beside import imports
from trainfit.errors import RecipeError
from trainfit.hardware import find_device
from trainfit.plan import Target, choose, sketch
from trainfit.plan.judged import judged
from trainfit.plan.search import Search
from trainfit.plan.sketch import _trace
from trainfit.plan.variants import Tracers
from trainfit.profile import Layout, Mesh, Pipeline, TensorParallel
from trainfit.rehearsal import rehearse
from trainfit.rehearsal.trace import Tracer
from trainfit.second_process import SecondProcess, _answered, submit, without_collection
from trainfit.step import Strategy, parse_tiers
from trainfit.workload import workload_from_config


def where(value: int) -> tuple[int, int]:
    return os.getpid(), 2 * value


def echo(data: bytes) -> tuple[int, bytes]:
    return os.getpid(), data


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


def test_what_only_this_process_can_import_is_computed_here(beside, monkeypatch):
    module = ModuleType("only_here")
    exec("import os\ndef where(): return os.getpid()", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    assert beside.submit(module.where)() == os.getpid()
    assert beside.submit(where, 1)()[0] != os.getpid(), "it goes on"


def test_what_a_pipe_cannot_hold_waits_for_nobody(beside):
    """Unless requests were taken while an answer waits to be read, both processes would wait for each other."""
    large = b"x" * 2**20
    answers = [beside.submit(echo, large) for _ in range(4)]
    for answer in answers:
        process, data = answer()
        assert process != os.getpid()
        assert data == large


def test_ctrl_c_does_not_reach_it():
    process = SecondProcess()
    os.kill(process._process.pid, signal.SIGINT)  # while it starts
    assert process.submit(where, 1)()[0] == process._process.pid
    process.close()


def test_an_interrupted_answer_is_not_taken_for_the_next_one():
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    process = SecondProcess()
    slow, after = process.submit(time.sleep, 60), process.submit(where, 2)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            slow()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert after() == (os.getpid(), 4)
    assert process._process.exitcode == -signal.SIGKILL


ASKING = """
import os, time
from trainfit.second_process import SecondProcess
process = SecondProcess()
assert process.submit(os.getpid)() != os.getpid()
process.submit(time.sleep, 60)
print("asked", flush=True)
time.sleep(60)
"""


def test_it_ends_without_a_word_when_who_asks_is_killed():
    """Both have the same output, which ends with the last of them."""
    asking = subprocess.Popen(
        [sys.executable, "-c", ASKING],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert asking.stdout is not None
    assert asking.stdout.readline() == "asked\n"
    asking.kill()
    began = time.monotonic()
    assert asking.communicate()[0] == ""
    assert time.monotonic() - began < 20


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


def test_the_tracer_that_is_begun_there_is_the_one_that_is_asked(monkeypatch):
    """Of a new workload, and what a target leaves open."""
    made: list[Tracer] = []

    def make(*args: Any, **kwargs: Any) -> Tracer:
        made.append(Tracer(*args, **kwargs))
        return made[-1]

    class Inside(SecondProcess):
        """Answers in this process what it gets as bytes."""

        def __init__(self) -> None: ...

        def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Any]:
            request = pickle.dumps((function, [pickle.dumps(each) for each in args], kwargs))
            is_right, value = pickle.loads(_answered(request))
            assert is_right
            return lambda: value

    monkeypatch.setattr(sketch, "Tracer", make)  # the search's own is made elsewhere
    workload = workload_from_config({**TINY_CONFIGS["llama"], "num_hidden_layers": 4}, seq_len=64, name="tiny-llama")
    target, hardware = Target(2**30, 8 * 64, 64, "bf16", layouts=()), find_device("ascend-910b3", 2)
    Search(Tracers(workload, hardware, target), hardware, target, 2**30, beside=Inside())
    assert len(made) == 1
    assert made[0]._traces


def test_what_is_traced_is_of_the_hardware_and_the_workload_that_were_asked_for():
    workload = workload_from_config(TINY_CONFIGS["llama"], seq_len=64, name="tiny-llama")
    asked = (1, "bf16", (1,))

    def check(device: str) -> None:
        tracer = Tracer(workload, find_device(device), precision="bf16", tiers=("keep",))
        found = _trace(workload, tracer.hardware, tracer.variant, tracer.settings, None, *asked)
        assert found == tracer.trace(*asked, accumulates=True)

    check("h100")
    check("ascend-910b3")
    workload = workload.with_seq_len(32)  # which begins with what is known of the longer one
    check("ascend-910b3")


def test_the_last_stage_is_judged_whoever_rehearses_it(beside):
    """Head, loss and logits make it the larger one here."""
    sizes = {"num_hidden_layers": 2, "vocab_size": 8192}
    workload = workload_from_config({**TINY_CONFIGS["llama"], **sizes}, seq_len=64, name="tiny-llama")
    hardware = find_device("ascend-910b3", 2)
    strategy = Strategy(32, 4, "bf16", parse_tiers("keep", 2), mesh=Mesh(pipeline=2), pipeline=Pipeline())
    first, last = (rehearse(workload, strategy, hardware, rank=rank) for rank in (0, 1))
    assert last.needed_bytes > first.needed_bytes
    for other in (None, beside):
        found = judged(workload, strategy, hardware, beside=other)
        assert (found.rank, found.needed_bytes) == (1, last.needed_bytes)
        assert found.step_seconds == max(first.step_seconds, last.step_seconds)


def test_what_is_imported_is_not_looked_through_for_garbage():
    assert gc.get_freeze_count() == 0  # a library call freezes nothing
    try:
        with without_collection():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    with imports():  # a script's main() is no command
        assert gc.isenabled()
    assert gc.get_freeze_count() == 0
