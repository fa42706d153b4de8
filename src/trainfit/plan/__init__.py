"""From a budget and a target to the best strategy, with the reasons."""

from trainfit.plan.choose import choose
from trainfit.plan.plan import Alternative, Plan
from trainfit.plan.target import Target

__all__ = ["Alternative", "Plan", "Target", "choose"]
