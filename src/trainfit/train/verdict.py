"""When ranks that no longer move together must be ended, and the line that says why: a function of what was seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainfit.train.place import Place, Report, Trace

_PATIENCE_OF_FIRST_STEP = 4  # it compiles kernels and fills caches, and there is no gap yet to go by
_GAPS_OF_PATIENCE = 4


@dataclass(frozen=True)
class WatchSettings:
    """stall_seconds: without a move on any rank, at different places, before they are ended; longer where moves take
    longer. silent_seconds: without a heartbeat. beat_seconds: between two heartbeats. exit_code: of an ended process.
    """

    stall_seconds: float = 15.0
    silent_seconds: float = 10.0
    beat_seconds: float = 0.5
    exit_code: int = 1


@dataclass
class Sighting:
    """The last report of a rank, and when (on the looking rank's clock) its heartbeat and place last changed."""

    report: Report
    beat_at: float
    moved_at: float

    def update(self, report: Report, now: float) -> None:
        if report.beat != self.report.beat:
            self.beat_at = now
        if report.moves != self.report.moves or report.state != self.report.state:
            self.moved_at = now
        self.report = report


@dataclass(frozen=True)
class Peers:
    """Which ranks run the same blocks, and whether they must run them in the same order.

    key: by rank; equal for ranks with the same blocks (one pipeline stage). names: of this rank's blocks.
    in_step: running one on some ranks only is wrong by itself, since parameters are gathered for it.
    """

    key: tuple[int, ...]
    names: tuple[str, ...]
    in_step: bool


def judge(
    seen: Mapping[int, Sighting],
    now: float,
    settings: WatchSettings,
    peers: Peers,
    *,
    own: int = 0,
    sees_all: bool = True,
) -> str | None:
    """The line that ends the run, or None.

    seen: the ranks that are watched; own: which of them looks; sees_all: nobody is left out, save who has not come yet.
    """
    for rank, sighting in seen.items():
        if rank != own and sighting.report.state == "failed" and not sighting.report.by_others:
            return failure_line(rank, sighting.report.place, sighting.report.error)
    failed = max((now - s.moved_at for s in seen.values() if s.report.state == "failed"), default=None)
    few_beats = min(4 * settings.beat_seconds, settings.silent_seconds)
    diverged = divergence(seen, peers, own)
    # A collective that broke on some rank says that one is gone: then a few beats without news are enough.
    if silent := _silent(seen, now, settings.silent_seconds if failed is None else few_beats, own):
        return f"{silent}; {diverged}" if diverged else silent
    # Who is silent for a little while only may soon be silent for good, and that is the better explanation.
    all_heard = all(now - s.beat_at <= few_beats for s in seen.values() if s.report.state != "done")
    stalled_seconds = _stalled_seconds(seen, now, settings) if sees_all and all_heard else 0.0
    if diverged and (peers.in_step or stalled_seconds or (failed or 0.0) > 2 * few_beats):
        return (
            f"{diverged}; every rank must run the same modules and as many micro batches (ZeRO stage 0 lets some skip)"
        )
    return _ended_early(seen) or (_stall(seen, stalled_seconds) if stalled_seconds else None)


def failure_line(rank: int, place: Place, error: str) -> str:
    return f"rank {rank} failed {place}: {error}"


def _silent(seen: Mapping[int, Sighting], now: float, limit: float, own: int) -> str | None:
    gone = {r: s for r, s in seen.items() if r != own and s.report.state != "done" and now - s.beat_at > limit}
    if not gone:
        return None
    seconds = max(now - sighting.beat_at for sighting in gone.values())
    places = places_of((rank, sighting.report) for rank, sighting in gone.items())
    others = places_of((rank, sighting.report) for rank, sighting in seen.items() if rank not in gone)
    return (
        f"nothing heard from {_ranks(gone)} for {seconds:.1f} s: killed, stopped or cut off; last seen: {places}"
        f"{f'; meanwhile {others}' if others else ''}"
    )


def divergence(seen: Mapping[int, Sighting], peers: Peers, own: int) -> str | None:
    """The first module that some ranks entered where others, with the same blocks, entered another or ended a step."""
    groups: dict[int, list[int]] = defaultdict(list)
    for rank in seen:
        groups[peers.key[rank]].append(rank)
    for key, ranks in groups.items():
        names = peers.names if key == peers.key[own] else ()
        for first, other in ((ranks[0], rank) for rank in ranks[1:]):
            if found := _first_difference(seen[first].report, seen[other].report):
                return _difference_line(seen, ranks, names, *found)
    return None


def _first_difference(one: Report, other: Report) -> tuple[int, int] | None:
    """Step and position."""
    for a in one.traces:
        for b in other.traces:
            if a.step == b.step and (position := _where_apart(a, b, _is_over(a, one), _is_over(b, other))) is not None:
                return a.step, position
    return None


def _is_over(trace: Trace, report: Report) -> bool:
    return trace.step < report.traces[0].step or report.state == "done"


def _where_apart(a: Trace, b: Trace, a_is_over: bool, b_is_over: bool) -> int | None:
    for position in range(max(a.length - len(a.tail), b.length - len(b.tail), 0), min(a.length, b.length)):
        if a.at(position) != b.at(position):
            return position
    if (a.length < b.length and a_is_over) or (b.length < a.length and b_is_over):
        return min(a.length, b.length)
    return None


def _difference_line(
    seen: Mapping[int, Sighting], ranks: list[int], names: tuple[str, ...], step: int, position: int
) -> str:
    entered: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        report = seen[rank].report
        for trace in report.traces:
            if trace.step == step:
                block = trace.at(position)
                if block is not None:
                    name = names[block] if block < len(names) else f"block {block}"
                    entered[f"entered {name}"].append(rank)
                elif _is_over(trace, report):
                    entered["had ended the step"].append(rank)
                break
    parts = [
        f"{_ranks(who)} {what}" for what, who in sorted(entered.items(), key=lambda item: (-len(item[1]), item[1]))
    ]
    return f"ranks disagree in step {step}: as forward {position + 1} of its blocks " + " where ".join(parts)


def _ended_early(seen: Mapping[int, Sighting]) -> str | None:
    done = {rank: s.report for rank, s in seen.items() if s.report.state == "done"}
    if not done:
        return None
    last = min(report.place.step for report in done.values())
    further = {r: s.report for r, s in seen.items() if s.report.place.step > last}
    if not further:
        return None
    first = [rank for rank, report in done.items() if report.place.step == last]
    return (
        f"{_ranks(first)} ended training after step {last} while others go on: {places_of(further.items())}; "
        "every rank needs data for as many steps"
    )


def _stalled_seconds(seen: Mapping[int, Sighting], now: float, settings: WatchSettings) -> float:
    """For how long no rank has moved, if that is too long and they are not at one place; else 0."""
    if any(sighting.report.may_wait for sighting in seen.values()):
        return 0.0
    reports = [sighting.report for sighting in seen.values()]
    # Where all wait for each other in collectives, each must be called from the same line.
    all_wait = all(report.in_collective for report in reports)
    if len({(report.state == "done", report.place, all_wait and report.source) for report in reports}) < 2:
        return 0.0  # slow, or stuck in one collective: the process group's own timeout is for that
    patience = max(settings.stall_seconds, _GAPS_OF_PATIENCE * max(report.longest_gap_seconds for report in reports))
    if any(report.first_step for report in reports):
        patience = max(patience, _PATIENCE_OF_FIRST_STEP * settings.stall_seconds)
    still = min(now - sighting.moved_at for sighting in seen.values())
    return still if still > patience else 0.0


def _stall(seen: Mapping[int, Sighting], seconds: float) -> str:
    places = places_of((rank, sighting.report) for rank, sighting in seen.items())
    return (
        f"no rank has moved for {seconds:.1f} s and they are at different places: {places}; one of them hangs, "
        "skipped a module or has another number of micro batches"
    )


def places_of(reports: Iterable[tuple[int, Report]]) -> str:
    """Ranks by place, the fewest first: "rank 1 waiting for data (step 3), ranks 0, 2-7 in the forward of ..."."""
    by_place: dict[str, list[int]] = defaultdict(list)
    for rank, report in reports:
        if report.state == "done":
            where = f"done after step {report.place.step}"
        else:
            shows_source = report.source and report.state == "running"
            where = f"{report.place}{f' at {report.source}' if shows_source else ''}"
        by_place[where].append(rank)
    fewest_first = sorted(by_place.items(), key=lambda item: (len(item[1]), item[1]))
    shown = [f"{_ranks(who)} {where}" for where, who in fewest_first[:4]]
    rest = sum(len(who) for _, who in fewest_first[4:])
    return ", ".join(shown) + (f" and {rest} more elsewhere" if rest else "")


def _ranks(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0, 2-7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if len(runs) == 1 and len(runs[0]) == 1 else f"ranks {text}"
