"""Strategy, and build_step: the one way from a strategy to a step."""

from trainfit.step.build import build_step, prepare
from trainfit.step.overflow import Overflow, find_overflow
from trainfit.step.strategy import Strategy
from trainfit.step.strategy_text import format_tiers, parse_tiers
from trainfit.step.train_step import StepResult, TrainStep
from trainfit.step.underflow import Underflow, count_underflow

__all__ = [
    "Overflow",
    "StepResult",
    "Strategy",
    "TrainStep",
    "Underflow",
    "build_step",
    "count_underflow",
    "find_overflow",
    "format_tiers",
    "parse_tiers",
    "prepare",
]
