"""trainfit plan: the best way to fit, what it should cost, and what lost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainfit.cli.beside import imports, second_process
from trainfit.cli.console import notes, output, print_json, status
from trainfit.cli.options import POLICY_NAMES, HtmlOption, JsonOption
from trainfit.cli.page import check_page, write_page
from trainfit.cli.plan_export import Exports, exports_json, print_exports
from trainfit.cli.planning import PlanOptions, choose_plan, takes_plan
from trainfit.errors import DoesNotFitError, RecipeError

if TYPE_CHECKING:
    from trainfit.plan import Plan
    from trainfit.plan.compare import PolicyResult
    from trainfit.plan.policies import Policy

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


@takes_plan()
def plan(
    options: PlanOptions,
    *,
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
    check_page(html)
    exports = Exports(tuple(dict.fromkeys(export or ())), export_to)
    if not json:
        exports.check_stdout()
    made, rows, exported = _planned(options, compare, policy, operators, exports)
    paths = exports.write(exported)
    if html is not None:
        from trainfit.report import plan_page

        write_page(html, plan_page(made, rows))
    if json:
        compared = {"policies": [row.to_json() for row in rows]} if compare or policy else {}
        print_json(made.to_json() | compared | exports_json(exported, paths))
    elif not exports.fill_stdout:
        _show(made, rows)
    if not made.fits:
        raise DoesNotFitError(made.reason)
    if not json:
        print_exports(exported, paths)
    return 0


def _planned(
    options: PlanOptions, compare: bool, named: list[str] | None, operators: bool | None, exports: Exports
) -> tuple[Plan, tuple[PolicyResult, ...], list[Any]]:
    """The plan, the policies beside it, and what is exported of it.

    Whatever imports torch comes after the second process has begun to.
    """
    with second_process(options.devices) as beside, status(notes(), "Importing torch") as say:
        with imports():
            from trainfit.cli.setup import find_hardware, open_recipe
            from trainfit.plan.compare import compare_policies

        policies = _policies(compare, named)
        recipe = open_recipe(options.model)
        if policies and recipe is not None and recipe.per_batch is not None:
            raise RecipeError("policies are not compared with a table of tiers; leave per_batch out, or --compare")
        norm = options.gradient_norm(recipe)
        hardware = find_hardware(options.device, recipe, options.devices)
        workload, made = choose_plan(options, recipe, hardware, say, operators=operators, beside=beside)
        rows: tuple[PolicyResult, ...] = ()
        if policies:
            rows = compare_policies(workload, hardware, made, policies, max_grad_norm=norm, on_progress=say)
    return made, rows, exports.make(made, hardware, norm) if made.fits else []


def _show(made: Plan, rows: tuple[PolicyResult, ...]) -> None:
    from trainfit.report import alternatives_table, plan_view, policies_table

    console = output()
    console.print(plan_view(made))
    if made.alternatives:
        console.print("", alternatives_table(made))
    if rows:
        console.print("", policies_table(rows, made.strategy, made.target.seq_len, made.allowed_bytes))


def _policies(compare: bool, named: list[str] | None) -> list[Policy]:
    from trainfit.plan.policies import USUAL, parse_policy

    return [parse_policy(text) for text in named or (USUAL if compare else ())]
