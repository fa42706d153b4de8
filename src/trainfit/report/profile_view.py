"""A Profile as people read it: the peak and where it is, phases, and what the bytes are."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from trainfit.profile import PHASES, Profile, Reserved
from trainfit.report.peak_words import explain_peak
from trainfit.report.pieces import bar, memory_bars, ranged, share, table
from trainfit.step.strategy import Strategy
from trainfit.units import format_bytes, format_count, format_seconds


def profile_view(
    profile: Profile, *, budget_bytes: int | None = None, strategy: Strategy | None = None
) -> RenderableType:
    """Peak against the budget, bytes and time by phase, bytes by category at the peak, and the peak in words."""
    parts: list[RenderableType] = [_headline(profile)]
    if profile.reserved is not None:
        parts.append(Text(reserved_words(profile.reserved)))
    if budget_bytes is not None:
        parts.append(_budget_line(profile.needed_bytes, budget_bytes))
    if (speed := speed_words(profile)) is not None:
        parts.append(Text(speed))
    at_peak = memory_bars(profile.categories, title=f"At the peak ({profile.peak_phase})")
    talk = [collectives_table(profile)] if profile.collectives else []
    words = Text(" ".join(explain_peak(profile, strategy)))
    return Group(*parts, phase_table(profile), at_peak, words, *talk)


def _headline(profile: Profile) -> Text:
    of_rank = f"of rank {profile.rank} " if profile.collectives else ""
    text = Text.assemble(
        (f"Peak {of_rank}", ""), (format_bytes(profile.peak_bytes), "bold"), f" in {profile.peak_phase}"
    )
    place = profile.peak_place
    text.append(f" ({place})" if place else "")
    text.append(f"; {format_bytes(profile.resident_bytes)} between steps")
    if profile.step_seconds and not profile.step_seconds_high:
        text.append(f"; {format_seconds(profile.step_seconds)} a step")
    return text


def reserved_words(reserved: Reserved) -> str:
    """What the allocator holds, what of it is not in use, and what it last grew for."""
    unused = f"{format_bytes(reserved.unused_bytes)} of it unused at the peak"
    if reserved.other_streams_bytes:
        unused += f" ({format_bytes(reserved.other_streams_bytes)} belong to streams that communicate)"
    stream = "a communicating stream" if reserved.stream else "the computing stream"
    return (
        f"Allocator holds {format_bytes(reserved.reserved_bytes)}, {unused}; last grew in {reserved.phase} "
        f"({reserved.place}) for {format_bytes(reserved.request_bytes)} on {stream}, where "
        f"{format_bytes(reserved.pool_free_bytes)} were free, {format_bytes(reserved.largest_free_bytes)} in one piece"
    )


def speed_words(profile: Profile) -> str | None:
    """Time of a step, tokens a second of all devices and MFU, each with its range; None where nobody predicted them."""
    if not profile.step_seconds_high or profile.tokens_per_second is None:
        return None
    low, high = profile.step_seconds_low, profile.step_seconds_high
    words = [f"step {ranged(profile.step_seconds, low, high, format_seconds)}"]
    tokens = profile.tokens_per_second
    words.append(f"{ranged(tokens.expected, tokens.low, tokens.high, format_count)} tokens/s")
    if profile.mfu is not None:
        words.append(f"MFU {ranged(profile.mfu.expected, profile.mfu.low, profile.mfu.high, share)}")
    return "; ".join(words)


def _budget_line(peak_bytes: int, budget_bytes: int) -> Text:
    left = budget_bytes - peak_bytes
    fits = f"fits, {format_bytes(left)} left" if left >= 0 else f"does not fit: {format_bytes(-left)} too much"
    style = "green" if left >= 0 else "red"
    return Text.assemble((fits, style), f" of {format_bytes(budget_bytes)} usable")


def phase_table(profile: Profile) -> RenderableType:
    """The highest live bytes and the time of each phase."""
    made = table("phase", "highest", "time")
    made.add_column("", justify="left", no_wrap=True)
    for phase in PHASES:
        size, seconds = profile.phases.get(phase, 0), profile.phase_seconds.get(phase, 0.0)
        if size:
            marks = Text(bar(size / profile.peak_bytes), style="bold cyan" if phase == profile.peak_phase else "cyan")
            made.add_row(phase, format_bytes(size), format_seconds(seconds) if seconds else "", marks)
    return made


def collectives_table(profile: Profile) -> RenderableType:
    """What one rank sends and receives in a step, and how much of its time nothing hides."""
    made = table("collective", "calls", "payload", "ranks", "time", title="Collectives of a step")
    for kind, each in profile.collectives.items():
        groups = ", ".join(map(str, each.group_sizes))
        seconds = format_seconds(each.seconds) if each.seconds else ""
        made.add_row(kind, str(each.count), format_bytes(each.bytes), groups, seconds)
    if not profile.communication_seconds:
        return made
    exposed, total = profile.exposed_communication_seconds, profile.communication_seconds
    return Group(made, Text(f"{format_seconds(exposed)} of {format_seconds(total)} not hidden behind computation"))


def ranks_table(profiles: Sequence[Profile]) -> RenderableType:
    """The peak of every rank."""
    made = table("rank", "peak memory", "phase", "between steps", title="Ranks")
    for profile in profiles:
        resident = format_bytes(profile.resident_bytes)
        made.add_row(str(profile.rank), format_bytes(profile.peak_bytes), profile.peak_phase, resident)
    return made
