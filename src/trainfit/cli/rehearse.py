"""trainfit rehearse: what one step needs, from the step itself on fake tensors."""

from __future__ import annotations

from trainfit.cli.answer import print_answer
from trainfit.cli.console import notes, status
from trainfit.cli.options import (
    AccumulationOption,
    ActivationOption,
    DeviceOption,
    JsonOption,
    LossChunksOption,
    MicroBatchOption,
    ModelArgument,
    PrecisionOption,
    SeqLenOption,
    StepOptions,
)


def rehearse(
    model: ModelArgument,
    seq_len: SeqLenOption = None,
    micro_batch: MicroBatchOption = None,
    accumulation: AccumulationOption = 1,
    precision: PrecisionOption = None,
    activation: ActivationOption = "keep",
    loss_chunks: LossChunksOption = "1",
    device: DeviceOption = None,
    json: JsonOption = False,
) -> int:
    """Say what one training step needs: bytes by category and phase, the peak and its place, seconds.

    The very step that would train runs on tensors without memory, so a model of any size fits this machine.

    [dim]trainfit rehearse llama-2-7b --seq-len 4096 --micro-batch 1 --activation full --device h100[/]
    """
    options = StepOptions(model, seq_len, micro_batch, accumulation, precision, activation, loss_chunks)
    with status(notes(), "Importing torch") as say:
        from trainfit.cli.setup import find_hardware, open_recipe, prepare
        from trainfit.rehearsal import rehearse as run_rehearsal
        from trainfit.report import profile_view

        recipe = open_recipe(model)
        hardware = find_hardware(device, recipe)
        say(f"Building {model}")
        setup = prepare(options, recipe, hardware, say)
        say(f"Rehearsing one step of {setup.workload.name}")
        profile = run_rehearsal(setup.workload, setup.strategy, hardware, max_grad_norm=setup.max_grad_norm)
    budget_bytes = (recipe and recipe.memory) or hardware.usable_bytes
    view = profile_view(profile, budget_bytes=budget_bytes)
    print_answer(setup, hardware, "one optimizer step, rehearsed", view, profile.to_json(), json=json)
    return 0
