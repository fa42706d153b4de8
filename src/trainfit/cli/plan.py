"""trainfit plan: the best way to fit, what it should cost, and what lost."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from trainfit.cli.console import notes, output, print_json, status
from trainfit.cli.options import (
    MAX_DEVICES,
    DeviceOption,
    JsonOption,
    ModelArgument,
    PrecisionOption,
    SeqLenOption,
    check_range,
)
from trainfit.errors import DoesNotFitError, RecipeError
from trainfit.units import parse_bytes, parse_count

if TYPE_CHECKING:
    from trainfit.cli.setup import Say
    from trainfit.hardware import Hardware
    from trainfit.plan import Plan
    from trainfit.train import Recipe

DevicesOption = Annotated[int, typer.Option(metavar="N", help="Devices that share the tokens of a step.")]
TokensOption = Annotated[
    str | None, typer.Option("--tokens-per-step", metavar="N", help="Tokens in one optimizer step, such as 500k or 4M.")
]
MemoryOption = Annotated[
    str | None, typer.Option(metavar="SIZE", show_default="what it has", help="Budget of one device, such as 60GiB.")
]
MayChangeOption = Annotated[
    list[str] | None,
    typer.Option("--may-change", metavar="precision|optimizer", help="What the plan may change."),
]


def plan(
    model: ModelArgument,
    device: DeviceOption = None,
    devices: DevicesOption = 1,
    seq_len: SeqLenOption = None,
    tokens_per_step: TokensOption = None,
    memory: MemoryOption = None,
    precision: PrecisionOption = None,
    may_change: MayChangeOption = None,
    json: JsonOption = False,
) -> int:
    """Choose how to train within a device's memory: micro batch, recomputation, loss chunks, precision, optimizer.

    The few best strategies are rehearsed before one is chosen. Exit code 2 when none fits; it says by how much.

    [dim]trainfit plan llama-2-13b --device ascend-910b3 --seq-len 4096 --tokens-per-step 1M[/]
    """
    check_range("--devices", devices, 1, MAX_DEVICES)
    with status(notes(), "Importing torch") as say:
        from trainfit.cli.setup import find_hardware, open_recipe
        from trainfit.report import alternatives_table, plan_view

        recipe = open_recipe(model)
        hardware = find_hardware(device, recipe, devices)
        options = (tokens_per_step, memory, precision, tuple(may_change or ()))
        made = _choose(model, recipe, seq_len, *options, hardware, say)
    if json:
        print_json(made.to_json())
    else:
        console = output()
        console.print(plan_view(made))
        if made.alternatives:
            console.print("", alternatives_table(made))
    if not made.fits:
        raise DoesNotFitError(made.reason)
    return 0


def _choose(
    model: str,
    recipe: Recipe | None,
    seq_len: int | None,
    tokens_per_step: str | None,
    memory: str | None,
    precision: str | None,
    may_change: tuple[str, ...],
    hardware: Hardware,
    say: Say,
) -> Plan:
    from trainfit.cli.setup import choose_budget, choose_precision, open_workload, recipe_target, time_notes
    from trainfit.plan import Target, choose
    from trainfit.plan.layout import default_layouts

    say(f"Building {model}")
    wanted_bytes = parse_bytes(memory) if memory else recipe.memory if recipe else None
    budget_bytes, budget_notes = choose_budget(wanted_bytes, hardware)
    taken, precision_notes = choose_precision(precision or (recipe.precision if recipe else "auto"), hardware)
    tokens = _tokens(tokens_per_step, recipe)
    workload = open_workload(model, recipe, seq_len)
    changes = frozenset(may_change or (recipe.may_change if recipe else ()))
    if recipe is not None:
        asked, _ = recipe_target(recipe, workload, hardware)
        target = replace(asked, budget_bytes=budget_bytes, tokens_per_step=tokens, precision=taken, may_change=changes)
    else:
        target = Target(budget_bytes, tokens, workload.seq_len, taken, changes, default_layouts(hardware.count))
    norm = recipe.max_grad_norm if recipe else 1.0
    made = choose(workload, hardware, target, max_grad_norm=norm, on_progress=say)
    return replace(made, notes=(*budget_notes, *precision_notes, *time_notes(hardware), *made.notes))


def _tokens(text: str | None, recipe: Recipe | None) -> int:
    if text is not None:
        return parse_count(text)
    if recipe is None:
        raise RecipeError("--tokens-per-step is missing; give the tokens of one optimizer step, such as 500k or 4M")
    return recipe.tokens_per_step
