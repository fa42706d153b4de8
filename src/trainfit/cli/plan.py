"""trainfit plan: the best way to fit, what it should cost, and what lost."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainfit.cli.beside import second_process
from trainfit.cli.console import notes, output, print_json, status
from trainfit.cli.options import (
    MAX_DEVICES,
    POLICY_NAMES,
    AttentionOption,
    CastOption,
    CompileOption,
    DeviceOption,
    HtmlOption,
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
from trainfit.cli.page import check_page, write_page
from trainfit.cli.plan_export import Exports, exports_json, print_exports
from trainfit.errors import DoesNotFitError, RecipeError
from trainfit.units import parse_bytes, parse_count

if TYPE_CHECKING:
    from trainfit.cli.setup import Say
    from trainfit.hardware import Hardware
    from trainfit.plan import Plan
    from trainfit.plan.compare import PolicyResult
    from trainfit.plan.policies import Policy
    from trainfit.second_process import SecondProcess
    from trainfit.train import Recipe
    from trainfit.workload import Workload

TokensOption = Annotated[
    str | None, typer.Option("--tokens-per-step", metavar="N", help="Tokens in one optimizer step, such as 500k or 4M.")
]
MayChangeOption = Annotated[
    list[str] | None,
    typer.Option("--may-change", metavar="precision|optimizer|activations|compile", help="What the plan may change."),
]
MaxGradNormOption = Annotated[
    str | None, typer.Option("--max-grad-norm", metavar="NORM|none", show_default="1", help="Clip gradients by it.")
]
CompareOption = Annotated[bool, typer.Option("--compare", help="Show known activation policies beside the plan.")]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option("--policy", metavar="POLICY", help=f"Compare with this one; may be repeated. {POLICY_NAMES}."),
]
OperatorsOption = Annotated[
    bool | None,
    typer.Option(
        "--operators/--no-operators",
        show_default="where the device is calibrated",
        help="Choose what blocks keep operator by operator, by their costs.",
    ),
]
ExportOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SYSTEM", help="Settings for deepspeed, accelerate, torchtitan, megatron, mindspeed or trl, to stdout."
    ),
]
ExportToOption = Annotated[
    Path | None, typer.Option("--export-to", metavar="PATH", help="File, or folder, for what --export makes.")
]


def plan(
    model: ModelArgument,
    device: DeviceOption = None,
    devices: SharingDevicesOption = 1,
    seq_len: SeqLenOption = None,
    tokens_per_step: TokensOption = None,
    memory: MemoryOption = None,
    precision: PrecisionOption = None,
    optimizer: OptimizerOption = None,
    cast: CastOption = None,
    compile: CompileOption = None,
    offload: OffloadOption = None,
    attention: AttentionOption = None,
    may_change: MayChangeOption = None,
    max_grad_norm: MaxGradNormOption = None,
    compare: CompareOption = False,
    policy: PolicyOption = None,
    operators: OperatorsOption = None,
    export: ExportOption = None,
    export_to: ExportToOption = None,
    json: JsonOption = False,
    html: HtmlOption = None,
) -> int:
    """Choose how to train within a device's memory: micro batch, recomputation, loss chunks, precision, optimizer.

    The few best strategies are rehearsed before one is chosen. Exit code 2 when none fits; it says by how much.

    [dim]trainfit plan llama-2-13b --device ascend-910b3 --seq-len 4096 --tokens-per-step 1M[/]
    [dim]trainfit plan gpt2 --seq-len 512 --tokens-per-step 64k --export deepspeed > ds_config.json[/]
    """
    check_range("--devices", devices, 1, MAX_DEVICES)
    check_page(html)
    policies = _policies(compare, policy)
    exports = Exports(tuple(dict.fromkeys(export or ())), export_to)
    if not json:
        exports.check_stdout()
    with second_process(devices) as beside, status(notes(), "Importing torch") as say:
        from trainfit.cli.setup import find_hardware, open_recipe
        from trainfit.plan.compare import compare_policies
        from trainfit.report import plan_page

        recipe = open_recipe(model)
        if policies and recipe is not None and recipe.per_batch is not None:
            raise RecipeError("policies are not compared with a table of tiers; leave per_batch out, or --compare")
        norm = gradient_norm(max_grad_norm, recipe)
        hardware = find_hardware(device, recipe, devices)
        changes = tuple(may_change or ())
        options = (tokens_per_step, memory, precision, changes, optimizer, cast, compile, offload, attention, norm)
        workload, made = choose_plan(
            model, recipe, seq_len, *options, hardware, say, operators=operators, beside=beside
        )
        rows: tuple[PolicyResult, ...] = ()
        if policies:
            rows = compare_policies(workload, hardware, made, policies, max_grad_norm=norm, on_progress=say)
    exported = exports.make(made, hardware, norm) if made.fits else []
    paths = exports.write(exported)
    if html is not None:
        write_page(html, plan_page(made, rows))
    if json:
        compared = {"policies": [row.to_json() for row in rows]} if policies else {}
        print_json(made.to_json() | compared | exports_json(exported, paths))
    elif not exports.fill_stdout:
        _show(made, rows)
    if not made.fits:
        raise DoesNotFitError(made.reason)
    if not json:
        print_exports(exported, paths)
    return 0


def _show(made: Plan, rows: tuple[PolicyResult, ...]) -> None:
    from trainfit.report import alternatives_table, plan_view, policies_table

    console = output()
    console.print(plan_view(made))
    if made.alternatives:
        console.print("", alternatives_table(made))
    if rows:
        console.print("", policies_table(rows, made.strategy, made.target.seq_len, made.allowed_bytes))


def choose_plan(
    model: str,
    recipe: Recipe | None,
    seq_len: int | None,
    tokens_per_step: str | None,
    memory: str | None,
    precision: str | None,
    may_change: tuple[str, ...],
    optimizer: str | None,
    cast: str | None,
    compiled: str | None,
    offload: str | None,
    attention: str | None,
    max_grad_norm: float | None,
    hardware: Hardware,
    say: Say,
    *,
    operators: bool | None = None,
    beside: SecondProcess | None = None,
) -> tuple[Workload, Plan]:
    """The plan, and the workload that it is for."""
    from trainfit.cli.setup import (
        choose_budget,
        choose_for,
        choose_precision,
        open_workload,
        recipe_target,
        time_notes,
    )
    from trainfit.plan import Target
    from trainfit.profile import Layout
    from trainfit.step.strategy_text import parse_compile, parse_offload, parse_variant

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
        layouts = () if hardware.count > 1 else (Layout(),)
        target = Target(budget_bytes, tokens, workload.seq_len, taken, changes, layouts)
    said: dict[str, Any] = {} if optimizer is None else {"optimizer": parse_variant(optimizer)}
    said |= {} if cast is None else {"cast": cast}
    said |= {} if compiled is None else {"compile": parse_compile(compiled)}
    said |= {} if offload is None else {"offload": parse_offload(offload)}
    said |= {} if attention is None else {"attention": attention}
    said |= {} if operators is None else {"operators": operators}
    target = replace(target, **said)
    made = choose_for(recipe, workload, hardware, target, say, max_grad_norm=max_grad_norm, beside=beside)
    return workload, replace(made, notes=(*budget_notes, *precision_notes, *time_notes(hardware), *made.notes))


def _policies(compare: bool, named: list[str] | None) -> list[Policy]:
    from trainfit.plan.policies import USUAL, parse_policy

    return [parse_policy(text) for text in named or (USUAL if compare else ())]


def gradient_norm(text: str | None, recipe: Recipe | None) -> float | None:
    """What gradients are clipped by; None for nothing. Raises RecipeError for what is no such norm."""
    if text is None:
        return recipe.max_grad_norm if recipe else 1.0
    if text == "none":
        return None
    try:
        norm = float(text)
    except ValueError:
        norm = math.nan
    if not 0 < norm < math.inf:
        raise RecipeError(f"--max-grad-norm {text} is no norm to clip by; give a number above 0, such as 1, or none")
    return norm


def _tokens(text: str | None, recipe: Recipe | None) -> int:
    if text is not None:
        return parse_count(text)
    if recipe is None:
        raise RecipeError("--tokens-per-step is missing; give the tokens of one optimizer step, such as 500k or 4M")
    return recipe.tokens_per_step
