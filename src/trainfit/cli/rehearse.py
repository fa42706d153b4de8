"""trainfit rehearse: what one step needs, from the step itself on fake tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from trainfit.cli.answer import print_answer
from trainfit.cli.console import notes, status
from trainfit.cli.options import DeviceOption, HtmlOption, JsonOption, StepOptions, check_range, takes_step
from trainfit.cli.page import check_page, write_page

RankOption = Annotated[int, typer.Option(metavar="R", help="Whose step: of several devices, each has its own share.")]


@takes_step(mesh=True)
def rehearse(
    options: StepOptions,
    *,
    device: DeviceOption = None,
    rank: RankOption = 0,
    json: JsonOption = False,
    html: HtmlOption = None,
) -> int:
    """Say what one training step needs: bytes by category and phase, the peak and its place, seconds.

    The very step that would train runs on tensors without memory, so a model of any size fits this machine, and one
    rank of any number of devices.

    [dim]trainfit rehearse llama-2-7b --seq-len 4096 --activation full --device h100 --devices 8 --zero-stage 3[/]
    """
    check_range("--rank", rank, 0, options.devices - 1)
    check_page(html)
    with status(notes(), "Importing torch") as say:
        from trainfit.cli.setup import find_hardware, open_recipe, prepare, time_notes
        from trainfit.plan.reasons import compile_notes
        from trainfit.rehearsal import rehearse as run_rehearsal
        from trainfit.report import profile_page, profile_view

        recipe = open_recipe(options.model)
        hardware = find_hardware(device, recipe, options.devices)
        say(f"Building {options.model}")
        setup = prepare(options, recipe, hardware, say)
        say(f"Rehearsing one step of {setup.workload.name}")
        profile = run_rehearsal(setup.workload, setup.strategy, hardware, rank=rank, max_grad_norm=setup.max_grad_norm)
    compiling = compile_notes(setup.strategy, profile, hardware)
    setup = replace(setup, notes=(*setup.notes, *compiling, *time_notes(hardware)))
    budget_bytes = (recipe and recipe.memory) or hardware.usable_bytes
    if html is not None:
        write_page(html, profile_page(profile, setup.strategy, budget_bytes=budget_bytes, **setup.about(hardware)))
    view = profile_view(profile, budget_bytes=budget_bytes, strategy=setup.strategy)
    print_answer(setup, hardware, "one optimizer step, rehearsed", view, profile.to_json(), json=json)
    return 0
