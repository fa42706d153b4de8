"""Training: recipe, data, loop, saving and resuming, metrics."""

from trainfit.train.events import (
    Archived,
    Evaluated,
    Event,
    Interrupted,
    Measured,
    Preparing,
    Resumed,
    Saved,
    Started,
    StepDone,
    TiersChanged,
    TrainReport,
)
from trainfit.train.loop import train
from trainfit.train.metrics import read_metrics
from trainfit.train.model import recipe_workload
from trainfit.train.reading import load_recipe
from trainfit.train.recipe import Recipe
from trainfit.train.run_folder import RunFolder

__all__ = [
    "Archived",
    "Evaluated",
    "Event",
    "Interrupted",
    "Measured",
    "Preparing",
    "Recipe",
    "Resumed",
    "RunFolder",
    "Saved",
    "Started",
    "StepDone",
    "TiersChanged",
    "TrainReport",
    "load_recipe",
    "read_metrics",
    "recipe_workload",
    "train",
]
