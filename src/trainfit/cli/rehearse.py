"""trainfit rehearse: what one step needs, from the step itself on fake tensors."""

from __future__ import annotations

from trainfit.cli.console import notes, output, print_json, print_notes, status
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
        from trainfit.report import profile_view, strategy_line

        recipe = open_recipe(model)
        hardware = find_hardware(device, recipe)
        say(f"Building {model}")
        setup = prepare(options, recipe, hardware, say)
        say(f"Rehearsing one step of {setup.workload.name}")
        profile = run_rehearsal(setup.workload, setup.strategy, hardware, max_grad_norm=setup.max_grad_norm)
    if json:
        about = {"model": setup.workload.name, "device": hardware.spec.name, "seq_len": setup.workload.seq_len}
        strategy = setup.strategy.to_json()
        print_json({**profile.to_json(), **about, "strategy": strategy, "notes": list(setup.notes)})
        return 0
    console = output()
    console.print(f"[bold]{setup.workload.name}[/] on {hardware.spec.name}: one optimizer step, rehearsed")
    console.print(strategy_line(setup.strategy, setup.workload.seq_len), style="dim")
    console.print(profile_view(profile, budget_bytes=hardware.usable_bytes))
    print_notes(setup.notes, console)
    return 0
