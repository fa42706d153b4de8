"""Tables of a case: on the terminal, and in docs/frontier.md between its marks, with a picture for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from contest.verdict import MAX_SHARE, Point, Verdict, points_of, verdicts

BEGIN, END = "<!-- tables: benchmarks/frontier.py --docs -->", "<!-- end of tables -->"
_TITLES = {"reference": "8 blocks of 256", "wide": "12 blocks of 512", "large": "8 blocks of 2048"}
_PEER_HEADS = ("peer", "x plain", "peak MB", "plan", "x plain", "peak MB", "of its peak", "verdict")
_PLAN_HEADS = ("plan", "strategy", "x plain", "peak MB", "of plain's")


def case_tables(key: str, rows: Mapping[str, Mapping[str, Any]]) -> Iterator[Table]:
    points = points_of(rows)
    peers = Table(*_PEER_HEADS, title=f"{key}: peers, and the smallest plan that is no slower", title_justify="left")
    for verdict in verdicts(points):
        peers.add_row(*_peer_row(verdict), style="" if verdict.met else "red")
    for point in points:
        if point.role == "beside":
            peers.add_row(point.name, f"{point.ratio:.3f}", f"{point.megabytes:.1f}", *[""] * 4, "beside", style="dim")
    yield peers
    plans = Table(*_PLAN_HEADS, title=f"{key}: plans", title_justify="left")
    for row in _plan_rows(points):
        plans.add_row(*row)
    yield plans
    if failed := {name: row["error"] for name, row in rows.items() if "error" in row}:
        table = Table("does not run", "why", title=key, title_justify="left")
        for name, error in failed.items():
            table.add_row(name, error[:100])
        yield table


def _peer_row(verdict: Verdict) -> list[str]:
    peer, plan = verdict.peer, verdict.plan
    numbers = [f"{peer.ratio:.3f}", f"{peer.megabytes:.1f}"]
    plan_numbers = [f"{plan.ratio:.3f}", f"{plan.megabytes:.1f}", f"{plan.megabytes / peer.megabytes:.2f}"]
    return [peer.name, *numbers, plan.name, *plan_numbers, verdict_words(verdict)]


def verdict_words(verdict: Verdict) -> str:
    if verdict.met:
        return "met"
    missing = [f"{verdict.slower - 1:.1%} slower"] if verdict.slower > 1 else []
    missing += [f"{verdict.larger - 1:.1%} above {MAX_SHARE}"] if verdict.larger > 1 else []
    return f"MISSED: {', '.join(missing)}"


def _plan_rows(points: Sequence[Point]) -> Iterator[list[str]]:
    plain = next(point for point in points if point.role == "plain")
    for point in sorted((each for each in points if each.role == "plan"), key=lambda each: -each.megabytes):
        share = f"{point.megabytes / plain.megabytes:.0%}"
        yield [point.name, point.words, f"{point.ratio:.3f}", f"{point.megabytes:.1f}", share]


def write_page(kept: Mapping[str, Any], docs: Path) -> None:
    """Replace what is between the marks of docs/frontier.md, and draw docs/images/frontier-CASE.png."""
    from contest.picture import draw  # needs Pillow, as only pictures do

    page = docs / "frontier.md"
    head, rest = page.read_text().split(BEGIN)
    tail = rest.split(END)[1]
    parts = []
    for key, each in kept.items():
        points, case = points_of(each["rows"]), each["case"]
        title = ", ".join([_TITLES[case["model"]], case["precision"], *({case["device"]} - {"cpu"})])
        picture = f"images/frontier-{key}.png"
        draw(points, title, docs / picture)
        parts += [f"## {title}", f"![Step time against peak memory, {title}]({picture})"]
        found = verdicts(points)
        parts.append(f"{sum(verdict.met for verdict in found)} of {len(found)} peers are met.")
        parts.append(_markdown(_PEER_HEADS, [_peer_row(verdict) for verdict in found]))
        parts.append(_markdown(_PLAN_HEADS, list(_plan_rows(points))))
        beside = [[p.name, f"{p.ratio:.3f}", f"{p.megabytes:.1f}"] for p in points if p.role == "beside"]
        if beside:
            parts.append(_markdown(("beside", "x plain", "peak MB"), beside))
        parts += [f"{name} did not run: {row['error']}" for name, row in each["rows"].items() if "error" in row]
    page.write_text(head + BEGIN + "\n\n" + "\n\n".join(parts) + "\n\n" + END + tail)


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell."""
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    lines = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths))} |" for row in [heads, *rows]]
    return "\n".join([lines[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *lines[1:]])
