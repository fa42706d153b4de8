"""trainfit verify: the planned step against plain training."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from trainfit.cli.answer import print_answer
from trainfit.cli.console import notes, status
from trainfit.cli.options import JsonOption, LocalDeviceOption, StepOptions, check_range, takes_step
from trainfit.errors import TrainfitError

if TYPE_CHECKING:
    from trainfit.cli.setup import Setup
    from trainfit.hardware import Hardware

MAX_STEPS = 1000
StepsOption = Annotated[int, typer.Option(metavar="N", help="Optimizer steps that are compared.")]


@takes_step(mesh=False)
def verify(
    options: StepOptions, *, device: LocalDeviceOption = None, steps: StepsOption = 2, json: JsonOption = False
) -> int:
    """Compare losses and gradients of the step with those of plain training on the same weights and tokens.

    Exit code 1 when they differ by more than their arithmetic allows.

    [dim]trainfit verify recipes/quickstart.yaml[/]
    """
    check_range("--steps", steps, 1, MAX_STEPS)
    with status(notes(), "Importing torch") as say:
        from trainfit.cli.setup import local_device, open_recipe, prepare, require_free
        from trainfit.rehearsal import verify as run_verify
        from trainfit.report import verify_view

        recipe = open_recipe(options.model)
        here, hardware = local_device(device, recipe)
        say(f"Building {options.model}")
        setup = prepare(options, recipe, hardware, say)
        require_free(_needed_bytes(setup, hardware), here, "comparing with plain training")
        say(f"Running {steps} steps of {setup.workload.name}, planned and plain")
        report = run_verify(setup.workload, setup.strategy, here, steps=steps)
    what = "planned step against plain training"
    print_answer(setup, hardware, what, verify_view(report), report.to_json(), json=json)
    if not report.passed and report.compression is not None:
        found = report.compression
        raise TrainfitError(
            f"compressed activations change gradients by {found.gradient_error:.2e} of their size, tolerated are "
            f"{found.tolerance:.2e}, and losses by {report.loss_difference:.2e}; take a tier of more bits"
        )
    if not report.passed:
        raise TrainfitError(
            f"not the same as plain training: gradients differ by {report.gradient_difference:.2e} in "
            f"{report.worst_parameter}, losses by {report.loss_difference:.2e}, allowed {report.tolerance:.0e}; "
            "report it with this command"
        )
    return 0


def _needed_bytes(setup: Setup, hardware: Hardware) -> int:
    """Both models at once: the plain step's peak, beside what the planned side keeps and its gradients."""
    from trainfit.rehearsal import rehearse
    from trainfit.step import parse_tiers

    strategy = setup.strategy
    plain = replace(strategy, tiers=parse_tiers("keep", len(strategy.tiers)), loss_chunks=1)
    plain_peak = rehearse(setup.workload, plain, hardware).peak_bytes
    planned = rehearse(setup.workload, strategy, hardware)
    return plain_peak + planned.resident_bytes + planned.categories["parameters"]
