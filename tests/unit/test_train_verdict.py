"""What is seen of the ranks decides: who is named, when, and that slow is not wrong."""

from __future__ import annotations

import pytest

from trainfit.train.place import Place, Report, Trace
from trainfit.train.verdict import Peers, Sighting, WatchSettings, judge

SETTINGS = WatchSettings()
NAMES = ("layers.0", "layers.1", "layers.2", "layers.3")
NOW = 1000.0


def peers(size, *, in_step=True, stages=1):
    return Peers(tuple(rank * stages // size for rank in range(size)), NAMES, in_step)


def seen(*reports, beat_age=0.1, still=0.1):
    ages = beat_age if isinstance(beat_age, tuple) else (beat_age,) * len(reports)
    return {rank: Sighting(r, NOW - age, NOW - still) for rank, (r, age) in enumerate(zip(reports, ages))}


def at(block, *entered, step=7, before=(), **others):
    place = Place(step, "training", "forward", NAMES[block], 1)
    traces = (Trace(step, len(entered), entered), Trace(step - 1, len(before), before))
    return Report(place=place, traces=traces, first_step=False, **others)


def verdict(sightings, **settings):
    return judge(sightings, NOW, SETTINGS, peers(len(sightings), **settings))


def test_ranks_that_move_together_are_left_alone():
    assert verdict(seen(at(2, 0, 1, 2), at(1, 0, 1), at(2, 0, 1, 2))) is None


def test_the_silent_one_is_named_with_its_place_after_its_time():
    ranks = seen(at(2, 0, 1, 2), at(1, 0, 1), beat_age=(0.1, 9.9))
    assert verdict(ranks) is None
    line = verdict(seen(at(2, 0, 1, 2), at(1, 0, 1), beat_age=(0.1, 10.1)))
    assert "rank 1 for 10.1 s" in line
    assert "last seen: rank 1 in the forward of layers.1 (step 7, micro batch 1)" in line


def test_a_collective_that_broke_shortens_the_wait_for_the_silent_one():
    broken = at(2, 0, 1, 2, state="failed", error="gloo", by_others=True)
    assert verdict(seen(broken, at(1, 0, 1), beat_age=(0.1, 1.9))) is None
    assert "nothing heard from rank 1" in verdict(seen(broken, at(1, 0, 1), beat_age=(0.1, 2.1)))


def test_the_rank_that_differs_from_most_is_named_last_with_the_module():
    ranks = seen(at(1, 0, 1), at(1, 0, 1), at(2, 0, 2), at(1, 0, 1))
    assert "forward 2 of its blocks ranks 0-1, 3 entered layers.1 where rank 2 entered layers.2" in verdict(ranks)
    assert verdict(ranks, in_step=False) is None


def test_a_step_that_one_rank_ended_before_the_others_is_a_difference():
    ended = at(0, step=8, before=(0, 1))
    line = verdict(seen(at(2, 0, 1, 2), ended))
    assert "in step 7: as forward 3 of its blocks rank 0 entered layers.2 where rank 1 had ended the step" in line
    assert verdict(seen(at(1, 0, 1), ended)) is None  # it may still be on its way to the end of that step


def test_stages_of_a_pipeline_run_other_blocks():
    ranks = seen(at(0, 0, 1), at(2, 2, 3))
    assert verdict(ranks, stages=2) is None
    assert verdict(ranks) is not None


@pytest.mark.parametrize(
    ("still", "others", "ends"),
    [
        (14.0, {}, False),
        (16.0, {}, True),
        (16.0, {"longest_gap_seconds": 5.0}, False),  # moves take long in this run
        (21.0, {"longest_gap_seconds": 5.0}, True),
        (59.0, {"first_step": True}, False),
        (61.0, {"first_step": True}, True),
        (500.0, {"may_wait": True}, False),
    ],
)
def test_a_stall_ends_the_run_when_it_is_longer_than_this_run_is_used_to(still, others, ends):
    slow = Report(**{**vars(at(1, 0, 1)), **others})
    line = verdict(seen(at(2, 0, 1, 2), slow, still=still))
    assert (line is not None) == ends
    if ends:
        assert line.startswith(f"no rank has moved for {still:.1f} s")
        assert "rank 0 in the forward of layers.2" in line
        assert "rank 1 in the forward of layers.1" in line


def test_one_place_is_slow_and_not_wrong_unless_all_wait_in_collectives_of_other_lines():
    def waiting(source, in_collective):
        return at(1, 0, 1, source=source, in_collective=in_collective)

    assert verdict(seen(waiting("a.py:1", True), waiting("a.py:1", True), still=500.0)) is None
    assert verdict(seen(waiting("a.py:1", True), waiting("b.py:2", False), still=500.0)) is None
    assert "at b.py:2" in verdict(seen(waiting("a.py:1", True), waiting("b.py:2", True), still=500.0))


def test_a_rank_that_stopped_steps_before_the_others_is_named():
    done = at(1, 0, 1, step=6, state="done")
    assert "rank 1 ended training after step 6 while others go on: rank 0" in verdict(
        seen(at(0, 0, before=(0, 1)), done)
    )
    assert verdict(seen(at(1, 0, 1, step=6), done)) is None
