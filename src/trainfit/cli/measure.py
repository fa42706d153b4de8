"""trainfit measure: predicted against measured, on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from trainfit.cli.answer import print_answer
from trainfit.cli.console import notes, status
from trainfit.cli.options import (
    MAX_STEPS,
    HtmlOption,
    JsonOption,
    LocalDeviceOption,
    StepOptions,
    check_range,
    takes_step,
)
from trainfit.cli.page import check_page, write_page

StepsOption = Annotated[int, typer.Option(metavar="N", help="Steps that are timed after the one that is measured.")]


@takes_step(mesh=True)
def measure(
    options: StepOptions,
    *,
    device: LocalDeviceOption = None,
    steps: StepsOption = 3,
    json: JsonOption = False,
    html: HtmlOption = None,
) -> int:
    """Run the step for real on this machine and compare what it took with what was predicted.

    The peak comes from the device's allocator, on a CPU from PyTorch's allocation events; the prediction knows neither.
    With --devices N it starts N processes here, and compares the one with the highest peak.

    [dim]trainfit measure gpt2 --seq-len 256 --micro-batch 4 --activation pointwise[/]
    """
    check_range("--steps", steps, 0, MAX_STEPS)
    check_page(html)
    with status(notes(), "Importing torch") as say:
        from rich.console import Group

        from trainfit.cli.setup import local_device, open_recipe, prepare, require_free
        from trainfit.rehearsal import measure_ranks, rehearse
        from trainfit.report import compare, comparison_page, comparison_view, ranks_table

        recipe = open_recipe(options.model)
        here, hardware = local_device(device, recipe)
        say(f"Building {options.model}")
        setup = prepare(options, recipe, hardware, say)
        workload, strategy, norm = setup.workload, setup.strategy, setup.max_grad_norm
        say(f"Rehearsing one step of {workload.name}")
        predicted = rehearse(workload, strategy, hardware, max_grad_norm=norm)
        # The ranks' processes share a CPU's memory; other devices have their own.
        sharing = strategy.mesh.size if hardware.is_host else 1
        require_free(predicted.peak_bytes * sharing, here, "the step")
        say(f"Running {steps + 2} steps of {workload.name}")
        ranks = measure_ranks(workload, strategy, here, steps=steps, max_grad_norm=norm)
        measured = max(ranks, key=lambda profile: profile.peak_bytes)
        if measured.rank != predicted.rank:
            predicted = rehearse(workload, strategy, hardware, rank=measured.rank, max_grad_norm=norm)
    comparison = compare(predicted, measured)
    if html is not None:
        write_page(html, comparison_page(comparison, strategy, **setup.about(hardware)))
    view = Group(comparison_view(comparison), *([ranks_table(ranks)] if len(ranks) > 1 else []))
    answer = {**comparison.to_json(), "ranks": [profile.to_json() for profile in ranks]}
    print_answer(setup, hardware, "predicted against measured", view, answer, json=json)
    return 0
