"""Answers as tables: the row that says what ends the search."""

from __future__ import annotations

import pytest
from rich.console import Console, RenderableType

from trainfit.plan.questions import FewestDevices, LongestSequence, Trial
from trainfit.profile import Mesh, Profile
from trainfit.report.question_view import devices_view, sequence_view
from trainfit.step import Strategy

GIB = 2**30


def trial(seq_len: int, peak: int, devices: int = 1) -> Trial:
    profile = Profile(peak * GIB, "loss", "", {"loss": peak * GIB}, {}, GIB)
    return Trial(Strategy(1, mesh=Mesh(replicate=devices)), seq_len, profile, 10 * GIB)


def shown(view: RenderableType) -> str:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(view)
    return captured.get()


LONGER = LongestSequence(512, 256, trial(512, 9), trial(768, 12))
FEWER = FewestDevices(4, trial(512, 9, 4), trial(512, 11, 3))


@pytest.mark.parametrize(
    ("view", "name", "words"),
    [
        (sequence_view(LONGER), "why no more", "768 tokens need 2.0 GiB more than allowed"),
        (sequence_view(LongestSequence(512, 256, trial(512, 9), None)), "why no more", "all positions"),
        (devices_view(FEWER), "why no fewer", "3 need 1.0 GiB more each than allowed, at ZeRO 3"),
        (devices_view(FewestDevices(1, trial(512, 9), None)), "why no fewer", "one is enough"),
    ],
)
def test_what_ends_the_search_has_its_name(view: RenderableType, name: str, words: str):
    (line,) = [line for line in shown(view).splitlines() if "why no" in line]
    assert name in line
    assert words in line
