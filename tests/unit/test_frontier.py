"""benchmarks/frontier.py: verdicts by hand-made figures, and that the builders all do plain training's step."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from PIL import Image

import frontier
from contest import page, plans, pool, worker
from contest.picture import not_beaten
from contest.setting import MODELS, Case
from contest.variants import PEERS, PLAIN, Variant, plan_variant
from contest.verdict import Point, other_losses, point_of, points_of, verdicts
from reference_model import ReferenceConfig


def row(
    name: str, role: str, ratio: float, megabytes: float, *, held: float = 0.0, loss: float = 9.0
) -> dict[str, Any]:
    return {
        "name": name, "family": "plans" if role == "plan" else "checkpoint", "role": role, "about": {"words": name},
        "seconds": [2 * ratio, 5 * ratio, 9.0], "plain_seconds": [2.0, 5.0, 1.0], "loss": loss,
        "peaks": [megabytes * 1e6] * 3, "held": held * 1e6,
    }  # fmt: skip


def rows(*each: dict[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    return {one["name"]: one for one in each}


PLAIN_ROW = row("plain", "plain", 1.0, 500)


def test_time_is_the_median_of_rounds_ratios() -> None:
    assert point_of(row("a", "peer", 1.25, 10), 0).ratio == 1.25  # one round of three was disturbed


@pytest.mark.parametrize(
    ("plan", "met", "words"),
    [
        ((1.10, 85.0), True, "met"),
        ((1.11, 85.0), False, "MISSED: 0.9% slower"),
        ((1.10, 93.5), False, "MISSED: 10.0% above 0.85"),
    ],
)
def test_a_plan_must_be_as_fast_in_85_percent(plan: tuple[float, float], met: bool, words: str) -> None:
    found = points_of(rows(PLAIN_ROW, row("peer", "peer", 1.1, 100), row("p", "plan", *plan)))
    verdict = verdicts(found)[1]
    assert verdict.met == met
    assert page.verdict_words(verdict) == words


def test_the_smallest_plan_that_wins_is_named_and_else_the_nearest() -> None:
    plans = [row("large", "plan", 0.9, 80), row("small", "plan", 1.0, 40), row("slow", "plan", 2.0, 1)]
    assert verdicts(points_of(rows(PLAIN_ROW, row("peer", "peer", 1.0, 100), *plans)))[1].plan.name == "small"
    assert verdicts(points_of(rows(PLAIN_ROW, row("peer", "peer", 0.98, 40), *plans)))[1].plan.name == "small"


def test_what_a_plan_keeps_between_steps_counts_and_what_a_peer_keeps_does_not() -> None:
    assert point_of(row("plan", "plan", 1.0, 100, held=10), plain_held=6e6).megabytes == 104
    assert point_of(row("plan", "plan", 1.0, 100, held=5), plain_held=6e6).megabytes == 100
    assert point_of(row("peer", "peer", 1.0, 100, held=10), plain_held=6e6).megabytes == 100


def test_another_loss_than_plains_is_another_step() -> None:
    found = rows(PLAIN_ROW, row("near", "peer", 1, 1, loss=9.00001), row("far", "peer", 1, 1, loss=9.001))
    assert other_losses(found, "fp32") == ["far"]
    assert other_losses(found, "bf16") == []


def test_the_line_of_plans_leaves_out_what_another_beats() -> None:
    points = [Point(str(n), "plans", "plan", ratio, size) for n, (ratio, size) in enumerate([(1, 9), (2, 5), (3, 7)])]
    assert [point.name for point in not_beaten(points)] == ["1", "0"]


def test_page_has_tables_between_its_marks_and_a_picture(tmp_path: Any) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "frontier.md").write_text(f"before\n{page.BEGIN}old{page.END}\nafter\n")
    failed = {**row("gone", "peer", 1, 1), "seconds": [], "error": "no such thing"}
    each = rows(PLAIN_ROW, row("peer", "peer", 1.2, 200), row("p", "plan", 1.0, 100), failed)
    case = {"model": "reference", "precision": "fp32", "device": "cpu"}
    page.write_page({"reference-fp32": {"case": case, "rows": each}}, docs)
    written = (docs / "frontier.md").read_text()
    assert written.startswith("before")
    assert written.endswith("after\n")
    assert "old" not in written
    assert "2 of 2 peers are met" in written
    assert "gone did not run: no such thing" in written
    with Image.open(docs / "images" / "frontier-reference-fp32.png") as image:
        assert len(image.convert("RGB").getcolors(10**7)) > 20


def test_report_exits_1_where_a_peer_is_missed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"model": "reference", "precision": "fp32", "device": "cpu"}
    for plan, code in ((row("p", "plan", 1.0, 90), 0), (row("p", "plan", 1.3, 90), 1)):
        path = tmp_path / "kept.json"
        kept = {"reference-fp32": {"case": case, "rows": rows(PLAIN_ROW, row("peer", "peer", 1.2, 200), plan)}}
        path.write_text(json.dumps(kept))
        monkeypatch.setattr(sys, "argv", ["frontier.py", "--report", "--json", str(path)])
        assert frontier.main() == code


def test_parts_are_picked_by_family_name_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"model": "reference", "precision": "fp32", "device": "cpu"}
    monkeypatch.setattr(sys, "argv", ["frontier.py", "--peers", "checkpoint", "torchtitan", "--only", "of 2|Full"])
    names = [variant.name for variant in frontier._variants(case, frontier._options())]
    assert names == ["checkpoint, 1 of 2 blocks", "torchtitan FullAC"]
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--device", "cuda"])
    assert len(frontier._variants(case, frontier._options())) == 1


def test_rows_of_a_later_run_replace_those_of_their_names_and_all_plans() -> None:
    old = {name: {"role": role, "run": 1} for name, role in (("plain", "plain"), ("a", "peer"), ("p", "plan"))}
    new = {name: {"role": role, "run": 2} for name, role in (("plain", "plain"), ("q", "plan"))}
    merged = frontier._merged(old, new)
    assert {name: each["run"] for name, each in merged.items()} == {"plain": 2, "q": 2, "a": 1}


def test_a_worker_that_dies_leaves_its_last_words(tmp_path: Any) -> None:
    variant = Variant("plain", "broken", "peer", "hand_written:nothing", environment="here")
    (tmp_path / "here" / "bin").mkdir(parents=True)
    (tmp_path / "here" / "bin" / "python").write_text("#!/bin/sh\necho too bad >&2\nexit 3\n")
    (tmp_path / "here" / "bin" / "python").chmod(0o755)
    case = {"model": "reference", "precision": "fp32", "device": "cpu"}
    contest = pool.Contest(case, tmp_path, tmp_path, rounds=1, alive=1, deadline=math.inf, say=print)
    assert contest._start(variant) is None
    assert contest.rows["broken"]["error"] == "too bad"
    (tmp_path / "here" / "bin" / "python").write_text("#!/bin/sh\nexec sleep 60\n")
    contest.deadline = time.monotonic() + 0.2
    assert contest._start(variant) is None
    assert "time was over" in contest.rows["broken"]["error"]
    elsewhere = Variant("titan", "not installed", "peer", "titan:policy", environment="torchtitan")
    assert contest._start(elsewhere) is None
    assert "install.sh" in contest.rows["not installed"]["error"]


class _Lives:
    """A worker that does so many steps before it dies."""

    peak_resident_bytes = 10**6

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def step(self) -> dict[str, Any]:
        self.steps -= 1
        if self.steps < 0:
            raise pool.WorkerError("killed")
        return {"seconds": 1.0, "peak": 5}

    def close(self) -> None:
        pass


def _contest_of(monkeypatch: Any, tmp_path: Any, steps: dict[str, int], free: list[int]) -> dict[str, Any]:
    """Rows of a contest whose workers do so many steps, those of 0 do not start. free: bytes, the last for ever."""
    case = {"model": "reference", "precision": "fp32", "device": "cpu"}
    contest = pool.Contest(case, tmp_path, tmp_path, rounds=2, alive=1, deadline=math.inf, say=print)

    def start(variant: Variant) -> Any:
        contest.rows[variant.name] = pool._empty_row(variant)
        many = steps.get(variant.name, 99)
        return _Lives(many) if many else None

    monkeypatch.setattr(contest, "_start", start)
    monkeypatch.setattr(pool, "_ROOM_SECONDS", 0.05)
    monkeypatch.setattr(pool.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(pool, "_available_bytes", lambda: free.pop(0) if len(free) > 1 else free[0])
    return contest.run([Variant("plain", name, "peer", "hand_written:plain") for name in steps])


def test_a_contest_goes_on_where_variants_do_not_start_or_die(monkeypatch: Any, tmp_path: Any) -> None:
    steps = {"never starts": 0, "dies": 1, "lives": 99}
    rows = _contest_of(monkeypatch, tmp_path, steps, [2**40, 0, 2**40])  # what failed holds memory for a moment
    assert rows["lives"]["seconds"] == [1.0, 1.0]
    assert rows["dies"]["seconds"] == []
    assert rows["dies"]["error"] == "killed"
    assert rows["plain"]["seconds"] == [1.0] * 4, "plain's rounds are those with others beside it"


def test_a_contest_without_room_keeps_what_it_has(monkeypatch: Any, tmp_path: Any) -> None:
    rows = _contest_of(monkeypatch, tmp_path, {"first": 99, "second": 99, "third": 99}, [2**40, 0])
    assert rows["first"]["seconds"] == [1.0, 1.0]
    assert all("no room" in rows[name]["error"] for name in ("second", "third"))


def test_peers_and_plans_of_this_environment_do_plain_trainings_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three losses: the second and third tell of gradients too. What is compiled takes too long to be here."""
    monkeypatch.setattr(plans, "_MAY_CHANGE", frozenset())
    monkeypatch.setitem(MODELS, "tiny", ReferenceConfig(4, 32, 2, 64, vocab_size=101, seq_len=16, batch_size=8))
    case = Case("tiny", "fp32", "cpu")
    others = [variant for variant in PEERS if variant.environment is None and variant.family != "compile"]
    planned = [plan_variant(plan) for plan in plans.plan_all(case, (1.0, 0.3))]
    assert any(plan.arguments["strategy"]["accumulation_steps"] > 1 for plan in planned)

    def losses(variant: Variant) -> torch.Tensor:
        step = worker.builder(variant.builder)(case, **variant.arguments)
        return torch.stack([step() for _ in range(3)])

    expected = losses(PLAIN)
    assert expected[2] < expected[0]
    for variant in [*others, *planned]:
        torch.testing.assert_close(
            losses(variant), expected, rtol=1e-6, atol=0, msg=lambda m, v=variant: f"{v.name}: {m}"
        )


def test_what_is_measured_is_in_the_file_after_each_round(tmp_path: Any) -> None:
    """Beside what another case or an earlier run has left there; rows that have no round yet are not."""
    path = tmp_path / "build" / "kept.json"
    case = {"model": "reference", "precision": "fp32", "device": "cpu"}
    kept: dict[str, Any] = {"other": {}, "one": {"case": case, "rows": {"old": {"role": "peer", "seconds": [1.0]}}}}
    contest = pool.Contest(case, tmp_path, tmp_path, rounds=2, alive=1, deadline=math.inf, say=print)
    contest.keep = partial(frontier._keep, path, kept, "one", kept["one"])
    alive = [Variant("plain", name, "plain", "hand_written:plain") for name in ("ends", "stays")]
    contest.rows = {name: pool._empty_row(alive[0]) for name in ("ends", "stays", "waits")}
    rounds = contest._rounds([(alive[0], _Lives(1)), (alive[1], _Lives(9))])  # type: ignore[list-item]
    assert [variant.name for variant, _ in rounds] == ["stays"]
    rows = json.loads(path.read_text())["one"]["rows"]
    assert {name: len(row["seconds"]) for name, row in rows.items()} == {"old": 1, "ends": 0, "stays": 2}
    assert list(path.parent.iterdir()) == [path]
