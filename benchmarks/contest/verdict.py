"""Peers against plans: pure arithmetic on what was measured. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_SHARE = 0.85  # of a peer's peak that a plan may have which is no slower
MAX_LOSS_DIFFERENCE = {"fp32": 1e-5, "bf16": 1e-3}


@dataclass(frozen=True)
class Point:
    """What a variant takes.

    ratio: the median over rounds of its seconds / plain's in the same round. megabytes: its peak above what was live
    between steps. words: of a plan, its strategy.
    """

    name: str
    family: str
    role: str
    ratio: float
    megabytes: float
    words: str = ""


@dataclass(frozen=True)
class Verdict:
    """A peer, and the plan that beats it or comes nearest.

    slower, larger: by which factor the nearest plan misses; below 1 where it does not.
    """

    peer: Point
    plan: Point
    slower: float
    larger: float

    @property
    def met(self) -> bool:
        return self.slower <= 1 and self.larger <= 1


def point_of(row: Mapping[str, Any], plain_held: float) -> Point:
    """plain_held: what plain training keeps between steps beside weights and states: caches of libraries.

    What a plan keeps beyond that counts as its peak; a peer is given it.
    """
    ratio = statistics.median(mine / plain for mine, plain in zip(row["seconds"], row["plain_seconds"], strict=True))
    kept = max(0, row["held"] - plain_held) if row["role"] == "plan" else 0
    megabytes = (statistics.median(row["peaks"]) + kept) / 1e6
    return Point(row["name"], row["family"], row["role"], ratio, megabytes, row["about"].get("words", ""))


def points_of(rows: Mapping[str, Mapping[str, Any]]) -> list[Point]:
    """Of all that ran."""
    return [point_of(row, rows["plain"]["held"]) for row in rows.values() if row["seconds"]]


def verdicts(points: Sequence[Point]) -> list[Verdict]:
    """For each peer: of the plans that beat it the smallest, else the one that misses by least."""
    plans = [point for point in points if point.role == "plan"]
    return [_verdict(peer, plans) for peer in points if peer.role in ("plain", "peer") and plans]


def _verdict(peer: Point, plans: Sequence[Point]) -> Verdict:
    most = MAX_SHARE * peer.megabytes
    each = [Verdict(peer, plan, plan.ratio / peer.ratio, plan.megabytes / most) for plan in plans]
    if met := [verdict for verdict in each if verdict.met]:
        return min(met, key=lambda verdict: verdict.plan.megabytes)
    return min(each, key=lambda verdict: max(1, verdict.slower) * max(1, verdict.larger))


def other_losses(rows: Mapping[str, Mapping[str, Any]], precision: str) -> list[str]:
    """Names of those whose first loss is not plain's: they did another step.

    Empty where no row has a loss: of such a case medians alone were kept.
    """
    if not any("loss" in row for row in rows.values()):
        return []
    plain = rows["plain"]["loss"]
    allowed = MAX_LOSS_DIFFERENCE[precision] * abs(plain)
    return [name for name, row in rows.items() if "loss" in row and abs(row["loss"] - plain) > allowed]
