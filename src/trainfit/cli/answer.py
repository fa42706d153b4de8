"""print_answer: what rehearse, measure and verify say of a step, as JSON or as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainfit.cli.console import output, print_json, print_notes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trainfit.cli.setup import Setup
    from trainfit.hardware import Hardware


def print_answer(
    setup: Setup, hardware: Hardware, what: str, view: RenderableType, answer: Mapping[str, Any], *, json: bool
) -> None:
    """One document of the answer and what it is about; or a heading that says `what`, the strategy, view and notes."""
    from trainfit.step.strategy_text import describe_strategy

    name, device, seq_len = setup.workload.name, hardware.spec.name, setup.workload.seq_len
    if json:
        about = {"model": name, "device": device, "seq_len": seq_len, "strategy": setup.strategy.to_json()}
        print_json({**answer, **about, "notes": list(setup.notes)})
        return
    console = output()
    console.print(f"[bold]{name}[/] on {device}: {what}")
    console.print(f"{describe_strategy(setup.strategy)}, sequences of {seq_len} tokens", style="dim")
    console.print(view)
    print_notes(setup.notes, console)
