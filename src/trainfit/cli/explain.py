"""trainfit explain: what the operators of a plan's blocks cost, which are kept, and what each is worth."""

from __future__ import annotations

from typing import Annotated

import typer

from trainfit.cli.console import notes, output, print_json, print_notes, status
from trainfit.cli.options import JsonOption
from trainfit.cli.planning import PlanOptions, choose_plan, takes_plan
from trainfit.errors import DoesNotFitError
from trainfit.units import parse_bytes

KeepOption = Annotated[
    str | None,
    typer.Option("--keep", metavar="SIZE", show_default="the plan's", help="What a block may keep, such as 64MiB."),
]


@takes_plan(compiles=False)
def explain(options: PlanOptions, *, keep: KeepOption = None, json: JsonOption = False) -> int:
    """Show what a plan's blocks keep, operator by operator: time, bytes, and what keeping it is worth.

    The plan is made as `trainfit plan --operators` makes it. Times are the device's own where it is calibrated.

    [dim]trainfit explain gpt2 --seq-len 512 --tokens-per-step 64k --memory 6GiB[/]
    """
    room = parse_bytes(keep) if keep else None
    with status(notes(), "Importing torch") as say:
        from trainfit.cli.setup import find_hardware, open_recipe
        from trainfit.plan.ledger import ledgers_of
        from trainfit.report.ledger_view import ledger_view
        from trainfit.step.strategy_text import describe_strategy

        recipe = open_recipe(options.model)
        hardware = find_hardware(options.device, recipe, options.devices)
        workload, made = choose_plan(options, recipe, hardware, say, operators=True)
        if not made.fits:
            raise DoesNotFitError(made.reason)
        say("Looking at a block's operators")
        ledgers = ledgers_of(workload, hardware, made.target, made.strategy, room)
    if json:
        about = {"model": made.workload, "device": made.device, "seq_len": made.target.seq_len}
        strategy = {"strategy": made.strategy.to_json(), "plan": made.hash, "notes": list(made.notes)}
        print_json({**about, "ledgers": [ledger.to_json() for ledger in ledgers], **strategy})
        return 0
    console = output()
    console.print(f"[bold]{made.workload}[/] on {made.device}: what a block keeps, operator by operator")
    console.print(f"{describe_strategy(made.strategy)}, sequences of {made.target.seq_len} tokens", style="dim")
    for ledger in ledgers:
        blocks = f"{len(ledger.blocks)} blocks" if len(ledger.blocks) > 1 else f"block {ledger.blocks[0]}"
        console.print(f"\n[bold]{blocks}[/] such as block {ledger.blocks[0]}")
        console.print(ledger_view(ledger))
    print_notes(made.notes, console)
    return 0
