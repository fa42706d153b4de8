"""Policies: names with parameters for tiers of all blocks, so that known ones can be compared on one interface.

Some need nothing but the number of blocks; `memory`, `cost` and `ratio` look at what tiers save and cost (Prices).
Where a name is another system's, what it does is read off that system's source; see docs/design/policies.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal

from trainfit.errors import RecipeError
from trainfit.profile import TIERS, Tier
from trainfit.step.strategy_text import parse_tiers, tiers_named

ArgumentKind = Literal["none", "count", "ratio"]
Tiers = tuple[Tier, ...]


@dataclass(frozen=True)
class Prices:
    """What a policy may look at: bytes that each block saves under a tier, and seconds that it then takes.

    saved, seconds: by tier, first to last block. peak_bytes: of a step with these tiers. allowed_bytes: what it may be.
    """

    saved: Mapping[Tier, Sequence[int]]
    seconds: Mapping[Tier, Sequence[float]]
    peak_bytes: Callable[[Tiers], int]
    allowed_bytes: int


@dataclass(frozen=True)
class Situation:
    """The model that a policy is for. stages: how many blocks each pipeline stage has; None for one that has all."""

    num_blocks: int
    stages: tuple[int, ...] | None = None
    prices: Prices | None = None

    @property
    def stage_sizes(self) -> tuple[int, ...]:
        return self.stages or (self.num_blocks,)


@dataclass(frozen=True)
class Policy:
    """One way to pick tiers. argument: a count, a ratio, the text of a list of tiers, or None."""

    name: str
    argument: int | float | str | None = None

    def __str__(self) -> str:
        """The text that parse_policy reads back."""
        if self.name == _LIST:
            return str(self.argument)
        return self.name if self.argument is None else f"{self.name}:{self.argument}"

    @property
    def needs_prices(self) -> bool:
        """Whether it has to know what tiers save and cost."""
        return self.name in _KINDS and _KINDS[self.name].needs_prices

    @property
    def words(self) -> str:
        """What it does, in a few words."""
        return _KINDS[self.name].words if self.name in _KINDS else "as listed"

    @property
    def named(self) -> frozenset[Tier]:
        """The tiers that its text names; none where it picks them."""
        return tiers_named(str(self.argument)) if self.name == _LIST else frozenset(set(TIERS) & {self.name})

    def tiers(self, situation: Situation) -> Tiers:
        """One for each block. Raises RecipeError for a list of another length, and for prices that are missing."""
        if self.name == _LIST:
            return parse_tiers(str(self.argument), situation.num_blocks)
        kind = _KINDS[self.name]
        if kind.needs_prices and situation.prices is None:
            raise RecipeError(
                f"policy {self} depends on what tiers save and cost, which only a plan knows; use it with "
                "`trainfit plan --policy`, or activation in a recipe, or give tiers such as every:2"
            )
        return kind.pick(self, situation)


_LIST = "list"


def parse_policy(text: str) -> Policy:
    """A policy from "every:2" or "6*full,2*pointwise". Raises RecipeError with the nearest for any other text."""
    text = text.strip()
    if "*" in text or "," in text:
        return Policy(_LIST, text)
    if text in _KINDS and _KINDS[text].argument == "none":
        return Policy(text)
    name, _, argument = text.rpartition(":")
    if name in _KINDS and _KINDS[name].argument != "none":
        return Policy(name, _parse_argument(text, argument, _KINDS[name]))
    raise RecipeError(_unknown(text))


def policy_names() -> tuple[str, ...]:
    """All of them as they are written, with K and R for what is to be filled in."""
    return tuple(_written(name, kind) for name, kind in _KINDS.items())


def _written(name: str, kind: _Kind) -> str:
    return name + {"none": "", "count": ":K", "ratio": ":R"}[kind.argument]


def _unknown(text: str) -> str:
    near = get_close_matches(text.rpartition(":")[0] or text, _KINDS, n=1, cutoff=0.5)
    near = near or get_close_matches(text, _KINDS, n=1, cutoff=0.4)
    known = ", ".join(policy_names())
    hint = f"did you mean {_written(near[0], _KINDS[near[0]])}? Known are {known}" if near else f"known are {known}"
    return f"unknown activation policy {text!r}; {hint}, or a list such as 6*full,2*pointwise"


def _parse_argument(text: str, argument: str, kind: _Kind) -> int | float:
    if kind.argument == "count":
        if not re.fullmatch(r"\d{1,6}", argument) or int(argument) < 1:
            raise RecipeError(f"policy {text!r} needs a whole number from 1; use {text.rpartition(':')[0]}:1 or more")
        return int(argument)
    if not re.fullmatch(r"\d*\.?\d+(e-?\d+)?", argument) or not 0.0 <= float(argument) <= 1.0:
        raise RecipeError(f"policy {text!r} needs a share from 0 to 1, such as {text.rpartition(':')[0]}:0.5")
    return float(argument)


def _uniform(tier: Tier) -> Callable[[Policy, Situation], Tiers]:
    return lambda policy, situation: (tier,) * situation.num_blocks


def _every(policy: Policy, situation: Situation) -> Tiers:
    """Blocks 0, K, 2K, ... in full."""
    return tuple("keep" if block % _count(policy) else "full" for block in range(situation.num_blocks))


def _every_last(policy: Policy, situation: Situation) -> Tiers:
    """torchtitan counts its wrapped blocks from one: blocks K - 1, 2K - 1, ..."""
    return tuple("keep" if (block + 1) % _count(policy) else "full" for block in range(situation.num_blocks))


def _first_of_each_stage(policy: Policy, situation: Situation) -> Tiers:
    runs = [_early_full(min(_count(policy), size), size) for size in situation.stage_sizes]
    return tuple(tier for run in runs for tier in run)


def _uniform_chunks(policy: Policy, situation: Situation) -> Tiers:
    if (size := _count(policy)) > 1:
        raise RecipeError(
            f"policy {policy} recomputes {size} blocks as one region, all that they save live at once in backward; "
            "trainfit's regions are single blocks: use megatron:uniform:1"
        )
    return _early_full(situation.num_blocks, situation.num_blocks)


def _early_full(full: int, num_blocks: int) -> Tiers:
    return tuple("full" if block < full else "keep" for block in range(num_blocks))


def _count(policy: Policy) -> int:
    assert isinstance(policy.argument, int)
    return policy.argument


def _by_memory(policy: Policy, situation: Situation) -> Tiers:
    """As few early blocks in full as the budget wants; all of them where it wants more."""
    prices, blocks = _prices(situation), situation.num_blocks
    for full in range(blocks + 1):
        if prices.peak_bytes(_early_full(full, blocks)) <= prices.allowed_bytes:
            return _early_full(full, blocks)
    return _early_full(blocks, blocks)


def _by_cost(policy: Policy, situation: Situation) -> Tiers:
    """What is cheapest for each byte it saves, until the step fits."""
    prices = _prices(situation)
    return _cheapest_first(situation, lambda tiers: prices.peak_bytes(tiers) <= prices.allowed_bytes)


def _by_ratio(policy: Policy, situation: Situation) -> Tiers:
    """What is cheapest for each byte it saves, until no more than a share of what `keep` saves is left."""
    prices = _prices(situation)
    assert isinstance(policy.argument, float)
    bound = policy.argument * sum(prices.saved["keep"])
    return _cheapest_first(situation, lambda tiers: _saved(prices, tiers) <= bound)


def _cheapest_first(situation: Situation, is_enough: Callable[[Tiers], bool]) -> Tiers:
    """Greedy: each move takes one block to a tier that saves more, at the least seconds for each byte; early blocks
    before late ones where that is equal."""
    prices = _prices(situation)
    tiers: list[Tier] = ["keep"] * situation.num_blocks
    while not is_enough(tuple(tiers)):
        moves = [move for block, tier in enumerate(tiers) for move in _moves(prices, block, tier)]
        if not moves:
            break
        _, block, tier = min(moves, key=lambda move: move[:2])
        tiers[block] = tier
    return tuple(tiers)


def _moves(prices: Prices, block: int, now: Tier) -> list[tuple[float, int, Tier]]:
    found = []
    for tier in prices.saved:
        freed = prices.saved[now][block] - prices.saved[tier][block]
        if freed > 0:
            cost = max(0.0, prices.seconds[tier][block] - prices.seconds[now][block])
            found.append((cost / freed, block, tier))
    return found


def _saved(prices: Prices, tiers: Tiers) -> int:
    return sum(prices.saved[tier][block] for block, tier in enumerate(tiers))


def _prices(situation: Situation) -> Prices:
    assert situation.prices is not None
    return situation.prices


@dataclass(frozen=True)
class _Kind:
    pick: Callable[[Policy, Situation], Tiers]
    words: str
    argument: ArgumentKind = "none"
    needs_prices: bool = field(default=False, kw_only=True)


_KINDS: Mapping[str, _Kind] = {
    **{tier: _Kind(_uniform(tier), f"{tier} for every block") for tier in TIERS},
    "none": _Kind(_uniform("keep"), "nothing is recomputed"),
    "every": _Kind(_every, "every K-th block in full", "count"),
    "memory": _Kind(_by_memory, "early blocks in full, as few as fit", needs_prices=True),
    "cost": _Kind(_by_cost, "the cheapest for each byte saved, until it fits", needs_prices=True),
    "ratio": _Kind(_by_ratio, "a share R of activation bytes kept, the cheapest go first", "ratio", needs_prices=True),
    "huggingface": _Kind(_uniform("full"), "gradient_checkpointing_enable(): every block in full"),
    "torchtitan": _Kind(_uniform("selective"), "SelectiveAC: by operators"),
    "torchtitan:full": _Kind(_uniform("full"), "FullAC"),
    "torchtitan:selective": _Kind(_every_last, "selective_ac_option K: every K-th block in full", "count"),
    "megatron:selective": _Kind(_uniform("recompute_core"), "granularity selective: the core of attention"),
    "megatron:selective:mlp": _Kind(_uniform("recompute_mlp"), "granularity selective, modules mlp"),
    "megatron:uniform": _Kind(_uniform_chunks, "granularity full, method uniform, K layers a unit", "count"),
    "megatron:block": _Kind(_first_of_each_stage, "granularity full, method block, K layers a stage", "count"),
}
# What `plan --compare` shows where no policy is named.
USUAL: tuple[str, ...] = (
    "none",
    "huggingface",
    "torchtitan",
    "torchtitan:selective:2",
    "megatron:selective",
    "megatron:selective:mlp",
    "recompute_attention",
    "pointwise",
    "every:2",
    "ratio:0.5",
    "memory",
    "cost",
)
