"""Per-batch plans: the tiers of all blocks by the tokens of the micro batch that is about to run.

See NOTE [ A tier for each micro batch ] in switched.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from torch import nn

from trainfit.errors import RecipeError
from trainfit.hardware import Accelerator
from trainfit.profile import TIER_ACCURACY, Tier, TokenBucket
from trainfit.techniques.activation import forget_recompute, recompute_block, unbound_forward
from trainfit.techniques.base import Asked, Build, Draft, Stage
from trainfit.techniques.switched import SwitchedForward, TierSwitch

TIGHTEST: Tier = "full"  # of all blocks, where even the table's last row is too much


class TierTable:
    """Gives each block all tiers that the table has for it, and the step a switch between them."""

    stage: ClassVar[Stage] = Stage.BLOCK
    setting: ClassVar[str] = "tier_table"

    def choices(self, so_far: Draft, asked: Asked) -> Iterable[tuple[TokenBucket, ...]]:
        """None to choose from: tables are made of solutions for several numbers of tokens, after the search."""
        yield ()

    def apply(self, build: Build, setting: tuple[TokenBucket, ...]) -> None:
        """Raises RecipeError for a table of another number of blocks and for tiers that cannot be switched."""
        if not setting:
            return
        if len(setting[0].tiers) != len(build.blocks):
            raise RecipeError(
                f"the tier table is for {len(setting[0].tiers)} blocks, the model has {len(build.blocks)}; plan again"
            )
        tightest = (TIGHTEST,) * len(build.blocks)
        columns = zip(*(bucket.tiers for bucket in setting), tightest)
        forwards = [
            switched(block, tiers, build.accelerator, name)
            for name, block, tiers in zip(build.anatomy.blocks, build.blocks, columns)
        ]
        build.tier_switch = TierSwitch(setting, forwards, tightest)


def switched(block: nn.Module, tiers: Iterable[Tier], accelerator: Accelerator, name: str) -> SwitchedForward:
    """Put a block under all of these tiers, in place; the first is set."""
    tiers = tuple(tiers)
    if lossy := sorted(set(tiers) & set(TIER_ACCURACY)):
        raise RecipeError(f"tier {lossy[0]} changes gradients, which must not depend on a table's rows; take another")
    forget_recompute(block)
    plans: dict[Tier, Callable[..., Any]] = {}
    for tier in sorted(set(tiers) - {"keep"}):
        before = vars(block).get("forward")
        recompute_block(block, tier, accelerator, name=name)
        plan = vars(block).get("forward")
        if plan is None or plan is before:
            forget_recompute(block)
            raise RecipeError(
                f"tier {tier} recomputes parts of a block, which a tier table cannot switch; take another"
            )
        plans[tier] = plan
        forget_recompute(block)
    block.forward = made = SwitchedForward(block, unbound_forward(block), plans, tiers[0])
    return made
