"""The quickstart recipe in every precision and optimizer variant: held-out loss, memory and speed in one table.

    python benchmarks/variants.py [STEPS] [NAME ...]

STEPS: updates of each run, 160 as in the recipe. All runs have the same data, seed, micro batches (1 x 8), tiers and
pieces of the loss, so that memory and speed differ by the variant alone. Seconds of a step are compared in rounds of
all variants. Held-out losses are to be within 1 % of fp32's, or 2 % where moments have 8 bits; exits 1 if one is not.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table

from trainfit.hardware import accelerator, this_machine
from trainfit.profile import Profile
from trainfit.rehearsal import rehearse
from trainfit.rehearsal.measure import random_window
from trainfit.step import Strategy, build_step, parse_tiers
from trainfit.techniques.optimizer import accuracy_of, bytes_per_parameter
from trainfit.train import Recipe, TrainReport, load_recipe, recipe_workload, train

CPU = accelerator("cpu")
ROUNDS = 5
RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
RESIDUAL = {"weights": "bf16_residual"}


@dataclass(frozen=True)
class Variant:
    """Recipe keys of one run. bound: how far its held-out loss may be from that of fp32."""

    keys: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, str] = field(default_factory=dict)
    bound: float = 0.01

    @property
    def overrides(self) -> list[str]:
        optimizer = [f"optimizer.{key}={value}" for key, value in self.optimizer.items()]
        return [f"{key}={value}" for key, value in self.keys.items()] + optimizer


BF16, FP16 = {"precision": "bf16"}, {"precision": "fp16"}
VARIANTS = {
    "fp32": Variant(),
    "bf16": Variant(BF16),
    "bf16, cast by block": Variant({**BF16, "cast": "block"}),
    "fp16": Variant(FP16),
    "fp16, scaled by block": Variant({**FP16, "loss_scale.per_block": "true"}),
    "fp16 + masters": Variant(FP16, {"weights": "fp16_master"}),
    "bf16 + masters": Variant(BF16, {"weights": "bf16_master"}),
    "bf16 + residual": Variant(BF16, RESIDUAL),
    "bf16 + Kahan": Variant(BF16, {"weights": "bf16_kahan"}),
    "bf16, by chance": Variant(BF16, {"weights": "bf16_stochastic"}),
    "int8 states": Variant({}, {"states": "int8"}, 0.02),
    "fp8 states": Variant({}, {"states": "fp8"}, 0.02),
    "residual, int8, half": Variant(BF16, {**RESIDUAL, "states": "int8", "gradients": "half"}, 0.02),
}


def main() -> int:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 160
    names = sys.argv[2:] or list(VARIANTS)
    seconds = step_seconds(names)
    rows: list[Row] = []
    with TemporaryDirectory() as folder:
        for name in names:
            print(f"training {name} ...", file=sys.stderr, flush=True)
            rows.append(train_variant(Path(folder), name, steps, seconds[name]))
            print(f"{name}: held-out {rows[-1].report.held_out_loss:.4f}", file=sys.stderr, flush=True)
    show(rows, steps)
    return int(any(row.misses(rows[0]) for row in rows))


@dataclass(frozen=True)
class Row:
    """One run. seconds: of a step, the least of the rounds."""

    name: str
    strategy: Strategy
    predicted: Profile
    report: TrainReport
    seconds: float

    def difference(self, other: Row) -> float:
        assert self.report.held_out_loss is not None
        assert other.report.held_out_loss is not None
        return self.report.held_out_loss / other.report.held_out_loss - 1

    def misses(self, other: Row) -> bool:
        return abs(self.difference(other)) > VARIANTS[self.name].bound


def recipe_of(name: str, *more: str) -> Recipe:
    return load_recipe(RECIPE, [*VARIANTS[name].overrides, *more])


def strategy_of(recipe: Recipe) -> Strategy:
    """The same micro batches, tiers and pieces of the loss for all."""
    scale = None if recipe.loss_scale is None else recipe.loss_scale.loss_scale()
    tiers = parse_tiers("keep", len(recipe_workload(recipe).anatomy().blocks))
    return Strategy(1, 8, recipe.precision, tiers, 2, recipe.optimizer.variant(), recipe.cast, scale)


def step_seconds(names: list[str]) -> dict[str, float]:
    """Steps of all variants round-robin: by name the least seconds."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(ROUNDS):
        for name in names:
            print(f"round {round_number + 1} of {ROUNDS}: {name}", file=sys.stderr, flush=True)
            recipe = recipe_of(name)
            strategy, workload = strategy_of(recipe), recipe_workload(recipe)
            torch.manual_seed(0)
            step = build_step(workload, strategy, CPU)
            window = random_window(workload, strategy, seed=round_number)
            step(window)
            began = time.perf_counter()
            step(window)
            found[name].append(time.perf_counter() - began)
    return {name: min(seconds) for name, seconds in found.items()}


def train_variant(folder: Path, name: str, steps: int, seconds: float) -> Row:
    at_end = [f"steps={steps}", f"evaluation.every={steps}", f"save.every={steps}"]
    recipe = recipe_of(name, *at_end, f"run_folder={folder / name.replace(' ', '-')}")
    workload, strategy = recipe_workload(recipe), strategy_of(recipe)
    predicted = rehearse(workload, strategy, this_machine("cpu"))
    return Row(name, strategy, predicted, train(recipe, strategy, workload, CPU), seconds)


def show(rows: list[Row], steps: int) -> None:
    table = Table(title=f"recipes/quickstart.yaml, {steps} updates of 8 x 256 tokens", title_justify="left")
    texts = ("variant", "accuracy")
    figures = ("bytes/param", "held-out", "vs fp32", "bound", "peak MB", "predicted", "between MB", "x fp32 time")
    for column in texts + figures:
        table.add_column(column, justify="left" if column in texts else "right")
    for row in rows:
        measured, variant = row.report.measured, row.strategy.optimizer
        assert measured is not None
        bound = f"{VARIANTS[row.name].bound:.0%}"
        table.add_row(
            row.name,
            accuracy_of(variant, row.strategy.precision),
            f"{bytes_per_parameter(variant).total:.2f}",
            f"{row.report.held_out_loss:.4f}",
            f"{row.difference(rows[0]):+.2%}",
            f"{bound} missed" if row.misses(rows[0]) else bound,
            f"{measured.peak_bytes / 1e6:.1f}",
            f"{row.predicted.peak_bytes / measured.peak_bytes - 1:+.3%}",
            f"{measured.resident_bytes / 1e6:.1f}",
            f"{row.seconds / rows[0].seconds:.2f}",
        )
    Console(width=140).print(table)
    print(f"the unigram model of the same text has {rows[0].report.unigram_loss:.4f}")


if __name__ == "__main__":
    raise SystemExit(main())
