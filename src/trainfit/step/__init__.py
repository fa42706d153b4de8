"""Strategy, and build_step: the one way from a strategy to a step."""

from trainfit.step.build import build_step, prepare
from trainfit.step.strategy import Strategy, format_tiers, parse_tiers
from trainfit.step.train_step import StepResult, TrainStep

__all__ = ["StepResult", "Strategy", "TrainStep", "build_step", "format_tiers", "parse_tiers", "prepare"]
