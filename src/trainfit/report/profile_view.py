"""A Profile as people read it: the peak and where it is, phases, and what the bytes are."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from trainfit.profile import PHASES, Profile
from trainfit.report.pieces import bar, memory_bars, table
from trainfit.units import format_bytes, format_seconds


def profile_view(profile: Profile, *, budget_bytes: int | None = None) -> RenderableType:
    """Peak against the budget, bytes and time by phase, bytes by category at the peak."""
    parts: list[RenderableType] = [_headline(profile)]
    if budget_bytes is not None:
        parts.append(_budget_line(profile.peak_bytes, budget_bytes))
    at_peak = memory_bars(profile.categories, title=f"At the peak ({profile.peak_phase})")
    return Group(*parts, phase_table(profile), at_peak)


def _headline(profile: Profile) -> Text:
    text = Text.assemble(("Peak ", ""), (format_bytes(profile.peak_bytes), "bold"), f" in {profile.peak_phase}")
    place = profile.peak_place
    text.append(f" ({place})" if place else "")
    text.append(f"; {format_bytes(profile.resident_bytes)} between steps")
    if profile.step_seconds:
        text.append(f"; {format_seconds(profile.step_seconds)} a step")
    return text


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
