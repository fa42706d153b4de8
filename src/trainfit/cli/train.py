"""trainfit train: a recipe to a finished run, planned before and compared after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainfit.cli.console import notes, output, print_json, quiet, status
from trainfit.cli.failure import INTERRUPTED
from trainfit.cli.options import JsonOption, RecipeArgument
from trainfit.errors import InputError, RecipeError
from trainfit.units import format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from trainfit.cli.setup import Say
    from trainfit.hardware import Hardware, Launch
    from trainfit.plan import Plan
    from trainfit.profile import Profile
    from trainfit.report import Comparison
    from trainfit.train import Recipe, TrainReport
    from trainfit.workload import Workload

OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Recipe keys to set, such as optimizer.eps=1e-9.")
]
PlanOption = Annotated[
    Path | None, typer.Option("--plan", metavar="FILE", help="Take this plan instead of choosing one.")
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on with the run in the recipe's run_folder.")]


def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    plan: PlanOption = None,
    resume: ResumeOption = False,
    json: JsonOption = False,
) -> int:
    """Train as a recipe says, within its memory, and show that the prediction was right.

    Ctrl-C saves and stops; --resume goes on to the bit.

    [dim]trainfit train recipes/quickstart.yaml steps=50 memory=200MiB[/]
    """
    with status(notes(), "Importing torch") as say:
        from trainfit.cli.progress import TrainingDisplay
        from trainfit.cli.setup import local_device, require_free
        from trainfit.hardware import Launch
        from trainfit.report import plan_view
        from trainfit.train import train as run_training

        launch = Launch.from_environment()
        settings = _shared_recipe(launch, recipe, overrides or ())
        folder = Path(settings.run_folder).expanduser()
        resume = _goes_on(launch, folder) or resume
        device, hardware = local_device(None, settings, launch)
        budgets = launch.gather("budget", str(hardware.usable_bytes))
        workload = _checked_workload(launch, settings, folder, resume, say)
        least = replace(hardware, count=launch.size, limit_bytes=min(map(int, budgets)))
        made = _shared_plan(launch, settings, workload, least, plan, resume, say)
        require_free(made.predicted.peak_bytes, device, "the planned step")
    console = quiet() if not launch.is_first else notes() if json else output()
    console.print(plan_view(made), "")
    with TrainingDisplay(console, made.budget_bytes) as display:
        report = run_training(
            settings,
            made.strategy,
            workload,
            device,
            plan=made.to_json(),
            on_event=display.on_event,
            resume=resume,
            launch=launch,
        )
    predicted = made.predicted
    if launch.is_first and report.measured_shapes and settings.data.lengths == "documents":
        console.print("rehearsing the micro batches of the update that was recorded", style="dim")
        predicted = _of_shapes(report, made, settings, workload, hardware)
    return _finish(report, made, predicted, console, json=json) if launch.is_first else INTERRUPTED * report.interrupted


def _checked_workload(launch: Launch, settings: Recipe, folder: Path, resume: bool, say: Say) -> Workload:
    """The model that the recipe describes. What a run could not begin with is said before it is planned."""
    from trainfit.techniques.offload_pool import new_file
    from trainfit.train import RunFolder, recipe_workload
    from trainfit.train.loop import check_weights

    if settings.offload is not None and settings.offload.place == "disk":
        new_file(settings.offload.directory).close()
    say("Building the model")
    workload = recipe_workload(settings)
    if not resume:
        launch.share("weights", lambda: check_weights(workload))
    if not resume and launch.is_first:
        RunFolder(folder).refuse_before_planning()
    return workload


def _shared_plan(
    launch: Launch, settings: Recipe, workload: Workload, hardware: Hardware, path: Path | None, resume: bool, say: Say
) -> Plan:
    """One plan for all ranks. hardware: of the one that has least."""
    from trainfit.plan import Plan

    def make_plan() -> str:
        return dumps(_plan(settings, workload, hardware, path, resume, say).to_json())

    return Plan.from_json(loads(launch.share("plan", make_plan)))


def _shared_recipe(launch: Launch, path: str, overrides: Sequence[str]) -> Recipe:
    """The recipe, the same on all ranks. Rank 0 reads it first, so that what is wrong with it is said once."""
    from trainfit.train import load_recipe

    first = launch.share("recipe", lambda: load_recipe(path, overrides).hash)
    settings = load_recipe(path, overrides)
    if settings.hash != first:
        raise RecipeError(f"{path} says something else to rank {launch.rank} than to rank 0; give all one recipe")
    return settings


def _goes_on(launch: Launch, folder: Path) -> bool:
    """What torchrun starts anew after a failure goes on where the last save was, if there is one; all ranks or none.

    torchrun counts restarts for each machine, and only on those whose own ranks failed.
    """
    from trainfit.train.checkpoint import CHECKPOINTS_FOLDER, list_checkpoints

    is_restart = any(int(count) for count in launch.gather("restarts", str(launch.restarts)))
    has_saved = launch.share("saved", lambda: str(bool(list_checkpoints(folder / CHECKPOINTS_FOLDER))))
    return is_restart and has_saved == "True"


def _plan(recipe: Recipe, workload: Workload, hardware: Hardware, path: Path | None, resume: bool, say: Say) -> Plan:
    from trainfit.cli.plan_check import refuse_other_plan
    from trainfit.cli.setup import plan_recipe, read_plan

    if path is not None:
        made = read_plan(path)
        refuse_other_plan(made, recipe, workload, hardware)
        return made
    earlier = Path(recipe.run_folder).expanduser() / "plan.json"
    if resume and earlier.is_file():
        # The plan that the run began with: another one, though as good, would sum in another order.
        made = read_plan(earlier)
        try:
            refuse_other_plan(made, recipe, workload, hardware)
        except InputError:
            return plan_recipe(recipe, workload, hardware, say, optimizer=made.strategy.optimizer)
        return made
    return plan_recipe(recipe, workload, hardware, say)


def _of_shapes(report: TrainReport, plan: Plan, recipe: Recipe, workload: Workload, hardware: Hardware) -> Profile:
    """The prediction for the very micro batches of the update that was recorded: with documents each is another.

    Its time is for as many tokens, padding included, as the plan's steps have.
    """
    import torch

    from trainfit.rehearsal import rehearse
    from trainfit.workload import MicroBatch

    ids = [torch.zeros(shape, dtype=torch.long) for shape in report.measured_shapes]
    window = [MicroBatch.of(each, each.clone()) for each in ids]
    ranks = replace(hardware, count=plan.strategy.mesh.size)
    profile = rehearse(workload, plan.strategy, ranks, max_grad_norm=recipe.max_grad_norm, micro_batches=window)
    share = plan.target.sequences_per_step * plan.target.seq_len / profile.tokens
    return profile.with_phase_seconds({phase: seconds * share for phase, seconds in profile.phase_seconds.items()})


def _finish(report: TrainReport, plan: Plan, predicted: Profile, console: Console, *, json: bool) -> int:
    from trainfit.report import compare

    comparison = None
    if report.measured is not None:
        comparison = compare(predicted, _with_mean_time(report, plan))
    if json:
        print_json(_to_json(report, plan, comparison))
    else:
        _print_summary(report, comparison, console)
    if report.interrupted:
        progress = f"interrupted at step {report.steps} of {report.planned_steps}"
        notes().print(f"{progress}, saved in {report.run_folder}; go on with --resume", markup=False)
        return INTERRUPTED
    return 0


def _with_mean_time(report: TrainReport, plan: Plan) -> Profile:
    """The measured profile with the time of the later steps: recording the second one slowed it down."""
    assert report.measured is not None
    if not report.tokens_per_second:
        return replace(report.measured, step_seconds=0.0)
    tokens = plan.target.sequences_per_step * plan.target.seq_len
    return replace(report.measured, step_seconds=tokens / report.tokens_per_second)


def _to_json(report: TrainReport, plan: Plan, comparison: Comparison | None) -> dict[str, Any]:
    error = None if comparison is None else comparison.relative_error
    return {**report.to_json(), "plan": plan.to_json(), "relative_error": error}


def _print_summary(report: TrainReport, comparison: Comparison | None, console: Console) -> None:
    from trainfit.report import comparison_view, facts

    console.print("")
    if comparison is not None:
        console.print(comparison_view(comparison))
    rows = [
        ("held-out loss", _held_out(report)),
        ("speed", f"{report.tokens_per_second:,.0f} tokens/s"),
        ("time", f"{format_seconds(report.total_seconds)}, of it {format_seconds(report.seconds)} in training steps"),
        ("run folder", str(report.run_folder)),
    ]
    if report.skipped_steps:
        rows.insert(1, ("skipped", f"{report.skipped_steps} of {report.steps} steps overflowed in fp16"))
    console.print("", facts(rows))


def _held_out(report: TrainReport) -> str:
    if report.held_out_loss is None:
        return f"not reached; the unigram model of the same text has {report.unigram_loss:.3f}"
    return f"{report.held_out_loss:.3f} nats a token; the unigram model of the same text has {report.unigram_loss:.3f}"
