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
    TrainReport,
)
from trainfit.train.loop import train
from trainfit.train.metrics import read_metrics
from trainfit.train.model import recipe_workload
from trainfit.train.reading import load_recipe
from trainfit.train.recipe import Recipe

__all__ = [
    "Archived",
    "Evaluated",
    "Event",
    "Interrupted",
    "Measured",
    "Preparing",
    "Recipe",
    "Resumed",
    "Saved",
    "Started",
    "StepDone",
    "TrainReport",
    "load_recipe",
    "read_metrics",
    "recipe_workload",
    "train",
]
