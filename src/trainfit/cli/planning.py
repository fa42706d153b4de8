"""From the options of a plan to the plan: what `plan` and `explain` share. Imports no torch before it plans."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainfit.cli.beside import imports
from trainfit.cli.options import (
    AttentionOption,
    CastOption,
    CompileOption,
    OffloadOption,
    QuestionOptions,
    Verb,
    question_options,
    takes,
)
from trainfit.errors import RecipeError
from trainfit.units import parse_bytes, parse_count

if TYPE_CHECKING:
    from trainfit.cli.setup import Say
    from trainfit.hardware import Hardware
    from trainfit.plan import Plan, Target
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


@dataclass(frozen=True)
class PlanOptions(QuestionOptions):
    """A plan as the command line asks for it; None where nothing was said."""

    cast: str | None = None
    compile: str | None = None
    offload: str | None = None
    attention: str | None = None
    may_change: list[str] | None = None
    max_grad_norm: str | None = None

    def gradient_norm(self, recipe: Recipe | None) -> float | None:
        """What gradients are clipped by; None for nothing. Raises RecipeError for what is no such norm."""
        text = self.max_grad_norm
        if text is None:
            return recipe.max_grad_norm if recipe else 1.0
        if text == "none":
            return None
        try:
            norm = float(text)
        except ValueError:
            norm = math.nan
        if not 0 < norm < math.inf:
            raise RecipeError(
                f"--max-grad-norm {text} is no norm to clip by; give a number above 0, such as 1, or none"
            )
        return norm

    def changes(self) -> dict[str, Any]:
        """What of a Target the options say themselves, beside budget, tokens and precision."""
        from trainfit.step.strategy_text import parse_compile, parse_offload, parse_variant

        parsers: dict[str, Callable[[str], Any]] = {
            "optimizer": parse_variant,
            "cast": str,
            "compile": parse_compile,
            "offload": parse_offload,
            "attention": str,
        }
        said = {name: getattr(self, name) for name in parsers}
        return {name: parsers[name](text) for name, text in said.items() if text is not None}


_PLAN: dict[str, Any] = {
    **question_options(TokensOption),
    "cast": CastOption,
    "compile": CompileOption,
    "offload": OffloadOption,
    "attention": AttentionOption,
    "may_change": MayChangeOption,
    "max_grad_norm": MaxGradNormOption,
}


def takes_plan(*, compiles: bool = True) -> Callable[[Verb], Verb]:
    """Turns verb(options: PlanOptions, *, ...) into a command with MODEL, the options of a plan and the verb's own.

    compiles: whether blocks may be compiled.
    """
    return takes(PlanOptions, {name: option for name, option in _PLAN.items() if compiles or name != "compile"})


def choose_plan(
    options: PlanOptions,
    recipe: Recipe | None,
    hardware: Hardware,
    say: Say,
    *,
    operators: bool | None = None,
    beside: SecondProcess | None = None,
) -> tuple[Workload, Plan]:
    """The plan, and the workload that it is for.

    operators: whether they are chosen one by one; None for the usual. beside: see choose().
    """
    from trainfit.cli.setup import choose_budget, choose_for, choose_precision, open_workload, time_notes

    say(f"Building {options.model}")
    wanted = parse_bytes(options.memory) if options.memory else recipe.memory if recipe else None
    budget_bytes, budget_notes = choose_budget(wanted, hardware)
    precision = options.precision or (recipe.precision if recipe else "auto")
    taken, precision_notes = choose_precision(precision, hardware)
    tokens = _tokens(options.tokens_per_step, recipe)
    with imports():  # of transformers
        workload = open_workload(options.model, recipe, options.seq_len)
    said: dict[str, Any] = {"budget_bytes": budget_bytes, "tokens_per_step": tokens, "precision": taken}
    said |= {"may_change": frozenset(options.may_change)} if options.may_change else {}
    said |= options.changes() | ({} if operators is None else {"operators": operators})
    target = replace(_target(recipe, workload, hardware, said), **said)
    norm = options.gradient_norm(recipe)
    made = choose_for(recipe, workload, hardware, target, say, max_grad_norm=norm, beside=beside)
    return workload, replace(made, notes=(*budget_notes, *precision_notes, *time_notes(hardware), *made.notes))


def _target(recipe: Recipe | None, workload: Workload, hardware: Hardware, said: dict[str, Any]) -> Target:
    """What the recipe asks for, or what is usual, where the options say nothing."""
    from trainfit.cli.setup import recipe_target
    from trainfit.plan import Target
    from trainfit.profile import Layout

    if recipe is not None:
        return recipe_target(recipe, workload, hardware)[0]
    layouts = () if hardware.count > 1 else (Layout(),)
    sizes = said["budget_bytes"], said["tokens_per_step"], workload.seq_len
    return Target(*sizes, said["precision"], layouts=layouts)


def _tokens(text: str | None, recipe: Recipe | None) -> int:
    if text is not None:
        return parse_count(text)
    if recipe is None:
        raise RecipeError("--tokens-per-step is missing; give the tokens of one optimizer step, such as 500k or 4M")
    return recipe.tokens_per_step
