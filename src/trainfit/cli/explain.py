"""trainfit explain: what the operators of a plan's blocks cost, which are kept, and what each is worth."""

from __future__ import annotations

from typing import Annotated

import typer

from trainfit.cli.console import notes, output, print_json, print_notes, status
from trainfit.cli.options import (
    MAX_DEVICES,
    AttentionOption,
    CastOption,
    DeviceOption,
    JsonOption,
    MemoryOption,
    ModelArgument,
    OffloadOption,
    OptimizerOption,
    PrecisionOption,
    SeqLenOption,
    SharingDevicesOption,
    check_range,
)
from trainfit.cli.plan import MaxGradNormOption, MayChangeOption, TokensOption, choose_plan, gradient_norm
from trainfit.errors import DoesNotFitError
from trainfit.units import parse_bytes

KeepOption = Annotated[
    str | None,
    typer.Option("--keep", metavar="SIZE", show_default="the plan's", help="What a block may keep, such as 64MiB."),
]


def explain(
    model: ModelArgument,
    device: DeviceOption = None,
    devices: SharingDevicesOption = 1,
    seq_len: SeqLenOption = None,
    tokens_per_step: TokensOption = None,
    memory: MemoryOption = None,
    precision: PrecisionOption = None,
    optimizer: OptimizerOption = None,
    cast: CastOption = None,
    offload: OffloadOption = None,
    attention: AttentionOption = None,
    may_change: MayChangeOption = None,
    max_grad_norm: MaxGradNormOption = None,
    keep: KeepOption = None,
    json: JsonOption = False,
) -> int:
    """Show what a plan's blocks keep, operator by operator: time, bytes, and what keeping it is worth.

    The plan is made as `trainfit plan --operators` makes it. Times are the device's own where it is calibrated.

    [dim]trainfit explain gpt2 --seq-len 512 --tokens-per-step 64k --memory 6GiB[/]
    """
    check_range("--devices", devices, 1, MAX_DEVICES)
    room = parse_bytes(keep) if keep else None
    with status(notes(), "Importing torch") as say:
        from trainfit.cli.setup import find_hardware, open_recipe
        from trainfit.plan.ledger import ledgers_of
        from trainfit.report.ledger_view import ledger_view
        from trainfit.step.strategy_text import describe_strategy

        recipe = open_recipe(model)
        norm = gradient_norm(max_grad_norm, recipe)
        hardware = find_hardware(device, recipe, devices)
        changes = tuple(may_change or ())
        options = (tokens_per_step, memory, precision, changes, optimizer, cast, None, offload, attention, norm)
        workload, made = choose_plan(model, recipe, seq_len, *options, hardware, say, operators=True)
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
