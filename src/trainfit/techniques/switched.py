"""Blocks whose tier changes between micro batches, and the table that says which tier a micro batch gets.

NOTE [ A tier for each micro batch ]
A SwitchedForward has a block's plan for every tier that a table gives it, made once; to switch is to say which of them
runs next. Nothing is allocated and no module is touched, so what was patched around a block later (casts, shards,
hooks) stays as it is. What a forward left for backward belongs to the plan that ran, so backward never asks which tier
is set meanwhile. All tiers give the same bits, so neither the choice nor a change of it shows in a gradient.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch import nn

from trainfit.profile import Tier, TokenBucket


class SwitchedForward:
    """In the place of a block's forward. See NOTE [ A tier for each micro batch ].

    forward: the block's own, unbound: takes the block first; tier "keep" runs it as it is.
    plans: by tier what runs in its place.
    """

    def __init__(
        self, block: nn.Module, forward: Callable[..., Any], plans: Mapping[Tier, Callable[..., Any]], tier: Tier
    ) -> None:
        # Weak: the block has this in its own attributes.
        self._block = weakref.ref(block)
        self.forward, self.plans, self.tier = forward, dict(plans), tier

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan = self.plans.get(self.tier)
        if plan is not None:
            return plan(*args, **kwargs)
        assert self.tier == "keep", f"no plan was made for tier {self.tier}"
        return self.forward(self._block(), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> SwitchedForward:
        # A copied block comes here while it is copied, so memo has it already.
        block = self._block()
        assert block is not None
        forward, plans = deepcopy(self.forward, memo), deepcopy(self.plans, memo)
        return SwitchedForward(deepcopy(block, memo), forward, plans, self.tier)


class TierSwitch:
    """Sets the tiers of all blocks before each micro batch.

    table: ascending in max_tokens. level: how many rows further down a micro batch is given than it needs; the row
    after the last is tightest, which also serves micro batches that no row is for.
    """

    def __init__(
        self, table: Sequence[TokenBucket], forwards: Sequence[SwitchedForward], tightest: Sequence[Tier]
    ) -> None:
        self.table = tuple(table)
        self.level = 0
        self._limits = [bucket.max_tokens for bucket in table]
        self._rows = [*(bucket.tiers for bucket in table), tuple(tightest)]
        self._forwards = tuple(forwards)

    @property
    def max_level(self) -> int:
        """At which every micro batch has the tightest tiers."""
        return len(self.table)

    def tiers_of(self, num_tokens: int) -> tuple[Tier, ...]:
        """Those of a micro batch of so many tokens, padding included."""
        return self._rows[min(bisect_left(self._limits, num_tokens) + self.level, len(self._rows) - 1)]

    def before(self, num_tokens: int) -> None:
        """The next forward is of a micro batch of so many tokens, padding included."""
        for forward, tier in zip(self._forwards, self.tiers_of(num_tokens)):
            forward.tier = tier
