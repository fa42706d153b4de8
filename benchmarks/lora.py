"""LoRA on text that the base has not seen: what it learns, and what it needs. python benchmarks/lora.py [STEPS]

Trains the quickstart's model on the Python standard library (for STEPS updates, 60 unless said), exports it, and
adapts it by recipes/lora.yaml to C++ headers that come with torch. Prints held-out loss before and after, the share of
parameters that train, and predicted and measured peaks beside those of full fine-tuning at the same micro batch and
tiers. Exits 1 when the loss falls by less than a tenth, more than 3 % train, or a prediction is 1 % off.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from trainfit.cli.setup import plan_recipe
from trainfit.hardware import Ranks, accelerator, this_machine
from trainfit.profile import FrozenStorage
from trainfit.rehearsal import measure, rehearse
from trainfit.step import Strategy, build_step
from trainfit.step.strategy_text import describe_strategy
from trainfit.train import Recipe, load_recipe, recipe_workload, train
from trainfit.train.data import prepare_data
from trainfit.train.evaluate import held_out_loss
from trainfit.train.export import export_safetensors, find_checkpoint
from trainfit.workload import Workload

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
MB = 10**6
CPU, HERE = accelerator("cpu"), this_machine("cpu")
MIN_GAIN, MAX_SHARE, MAX_ERROR = 0.1, 0.03, 0.01


def main() -> int:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    with tempfile.TemporaryDirectory() as folder:
        base = train_base(Path(folder), steps)
        torch_folder = Path(str(find_spec("torch").origin)).parent  # type: ignore[union-attr]
        recipe = load_recipe(
            RECIPES / "lora.yaml",
            [
                f"model={base}",
                f"weights={base}",
                f"data.tokenizer.path={base}/tokenizer.json",
                f"data.paths={torch_folder}/include/c10",
                f"run_folder={folder}/lora",
            ],
        )
        return adapt(recipe, Path(folder))


def train_base(folder: Path, steps: int) -> Path:
    """The quickstart's model after some updates, as transformers has it."""
    evaluate = f"evaluation.every={steps}"
    recipe = load_recipe(RECIPES / "quickstart.yaml", [f"steps={steps}", evaluate, f"run_folder={folder}/quickstart"])
    workload = recipe_workload(recipe)
    strategy = plan_recipe(recipe, workload, HERE, lambda message: None).strategy
    report = train(recipe, strategy, workload, CPU, measure=False)
    print(f"base: {steps} updates on the standard library, held-out loss {report.held_out_loss:.3f}", flush=True)
    exported = export_safetensors(find_checkpoint(folder / "quickstart"), folder / "base")
    return exported.folder


def adapt(recipe: Recipe, folder: Path) -> int:
    workload = recipe_workload(recipe)
    plan = plan_recipe(recipe, workload, HERE, lambda message: None)
    share = trained_share(workload)
    print(f"adapter: {workload.name.partition('+')[2]}, {share:.2%} of the parameters train")
    print(f"step: {describe_strategy(plan.strategy)}", flush=True)
    before = first_loss(recipe, workload, plan.strategy, folder)
    report = train(recipe, plan.strategy, workload, CPU, plan=plan.to_json())
    after = report.held_out_loss
    assert after is not None
    assert report.measured is not None
    gain = 1 - after / before
    print(f"held-out loss on C++: {before:.3f} before, {after:.3f} after {report.steps} updates ({gain:.1%} less)")
    errors = [plan.predicted.peak_bytes / report.measured.peak_bytes - 1]
    print(f"in the run: predicted {plan.predicted.peak_bytes / MB:.1f} MB, measured ", end="")
    print(f"{report.measured.peak_bytes / MB:.1f} MB ({errors[0]:+.2%})\n", flush=True)
    errors += memory_table(recipe, workload, plan.strategy)
    failed = gain < MIN_GAIN or share > MAX_SHARE or max(map(abs, errors)) > MAX_ERROR
    return int(failed)


def trained_share(workload: Workload) -> float:
    parameters = list(workload.meta_model().parameters())
    return sum(p.numel() for p in parameters if p.requires_grad) / sum(p.numel() for p in parameters)


def first_loss(recipe: Recipe, workload: Workload, strategy: Strategy, folder: Path) -> float:
    """Of the base itself: an adapter begins as nothing."""
    data_folder = folder / "first"
    data_folder.mkdir()
    data = prepare_data(recipe, data_folder, max_vocab_size=workload.vocab_size, resume=False)
    step = build_step(workload, strategy, CPU)
    indices = data.held_out.spread(recipe.evaluation.batches * recipe.sequences_per_step)
    return held_out_loss(step.evaluate, data.held_out, indices, strategy.micro_batch_size, Ranks())


def memory_table(recipe: Recipe, workload: Workload, strategy: Strategy) -> list[float]:
    """Peaks and what stays between steps, all at one micro batch and one tier; the errors of the predictions."""
    full = recipe_workload(recipe.model_copy(update={"adapter": None}))
    half = replace(strategy, precision="bf16")
    rows: list[tuple[str, Workload, Strategy]] = [("full fine-tuning, fp32", full, strategy)]
    rows += [("full fine-tuning, bf16", full, half), ("LoRA, fp32 base", workload, strategy)]
    storages: tuple[FrozenStorage, ...] = ("half", "int8", "nf4")
    rows += [(f"LoRA in bf16, {kind} base", workload, replace(half, frozen_weights=kind)) for kind in storages]
    print(f"{'MB':24}{'predicted':>10}{'measured':>10}{'error':>9}{'parameters':>12}{'optimizer':>11}{'resident':>10}")
    errors = []
    for name, what, how in rows:
        predicted = rehearse(what, how, HERE)
        measured = measure(what.copy(start=None), how, CPU, steps=0)
        errors.append(predicted.peak_bytes / measured.peak_bytes - 1)
        peaks = f"{predicted.peak_bytes / MB:10.1f}{measured.peak_bytes / MB:10.1f}{errors[-1]:+9.2%}"
        parts = f"{measured.categories['parameters'] / MB:12.1f}{measured.categories['optimizer'] / MB:11.1f}"
        print(f"{name:24}{peaks}{parts}{measured.resident_bytes / MB:10.1f}", flush=True)
    return errors


if __name__ == "__main__":
    sys.exit(main())
