"""trainfit measure: predicted against measured, on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from trainfit.cli.answer import print_answer
from trainfit.cli.console import notes, status
from trainfit.cli.options import (
    MAX_STEPS,
    AccumulationOption,
    ActivationOption,
    JsonOption,
    LocalDeviceOption,
    LossChunksOption,
    MicroBatchOption,
    ModelArgument,
    PrecisionOption,
    SeqLenOption,
    StepOptions,
    check_range,
)

StepsOption = Annotated[int, typer.Option(metavar="N", help="Steps that are timed after the one that is measured.")]


def measure(
    model: ModelArgument,
    seq_len: SeqLenOption = None,
    micro_batch: MicroBatchOption = None,
    accumulation: AccumulationOption = 1,
    precision: PrecisionOption = None,
    activation: ActivationOption = "keep",
    loss_chunks: LossChunksOption = "1",
    device: LocalDeviceOption = None,
    steps: StepsOption = 3,
    json: JsonOption = False,
) -> int:
    """Run the step for real on this machine and compare what it took with what was predicted.

    The peak comes from the device's allocator, on a CPU from PyTorch's allocation events; the prediction knows neither.

    [dim]trainfit measure gpt2 --seq-len 256 --micro-batch 4 --activation pointwise[/]
    """
    check_range("--steps", steps, 0, MAX_STEPS)
    options = StepOptions(model, seq_len, micro_batch, accumulation, precision, activation, loss_chunks)
    with status(notes(), "Importing torch") as say:
        from trainfit.cli.setup import local_device, open_recipe, prepare, require_free
        from trainfit.rehearsal import measure as run_steps
        from trainfit.rehearsal import rehearse
        from trainfit.report import compare, comparison_view

        recipe = open_recipe(model)
        here, hardware = local_device(device, recipe)
        say(f"Building {model}")
        setup = prepare(options, recipe, hardware, say)
        say(f"Rehearsing one step of {setup.workload.name}")
        predicted = rehearse(setup.workload, setup.strategy, hardware, max_grad_norm=setup.max_grad_norm)
        require_free(predicted.peak_bytes, here, "the step")
        say(f"Running {steps + 2} steps of {setup.workload.name}")
        measured = run_steps(setup.workload, setup.strategy, here, steps=steps, max_grad_norm=setup.max_grad_norm)
    comparison = compare(predicted, measured)
    view = comparison_view(comparison)
    print_answer(setup, hardware, "predicted against measured", view, comparison.to_json(), json=json)
    return 0
