"""The operators of one block: what each takes and makes, and what backward asks for. Plain data for every room."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from trainfit.profile import Tier


@dataclass(frozen=True)
class Operator:
    """One operator of a block's forward, as a recompute would run it.

    name: with its overload, such as "aten.mm.default"; "attention" for the fused kernels of all devices.
    run: it is the how-many-th of its name, from 1.
    place: the module in which it runs, within the block; "" for the block's own forward.
    seconds: of running it again. num_bytes: of what it makes; views of it are no operators of their own.
    inputs: numbers of the operators whose outputs it reads.
    is_saved: whether autograd saves something that it makes, or a view of that.
    may_store: whether its output may be kept. False for what is written in place later, and what every tier keeps.
    may_skip: whether it need not run where nothing asks for its output. False for writes and random numbers.
    """

    name: str
    run: int
    place: str
    seconds: float
    num_bytes: int
    inputs: tuple[int, ...]
    is_saved: bool
    may_store: bool
    may_skip: bool

    @property
    def key(self) -> str:
        """What a strategy calls it by."""
        return f"{self.name}#{self.run}"


@dataclass(frozen=True)
class KeptOperators:
    """What a chosen tier keeps: outputs of these operators, and the block's input.

    kept: operators by their keys. skipped: operators that nobody asks for once those are kept, the first of each chain
    of them: they are put off, and run only if something asks after all.
    """

    tier: Tier
    kept: tuple[str, ...]
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class BlockGraph:
    """The operators of one block, first to last, as far as a recompute would run them.

    NOTE [ What runs again ]
    A recompute makes what backward asks for: outputs that autograd saved. An operator whose output is kept does not
    run; another runs if its output is asked for, by backward or by an operator that runs. Writes in place and random
    numbers run where they are not kept. What comes behind the last saved tensor never runs again, and is not in here.

    stored_bytes: of what every tier keeps, such as a router's choices. Their operators are not in the graph.
    """

    operators: tuple[Operator, ...]
    stored_bytes: int = 0

    def runs_again(self, kept: Collection[int]) -> frozenset[int]:
        """Numbers of the operators that run again where the outputs of some are kept."""
        asked = [operator.is_saved or not operator.may_skip for operator in self.operators]
        runs = set()
        for number in range(len(self.operators) - 1, -1, -1):
            if asked[number] and number not in kept:
                runs.add(number)
                for each in self.operators[number].inputs:
                    asked[each] = True
        return frozenset(runs)

    def seconds(self, kept: Collection[int]) -> float:
        """Of the operators that run again."""
        return sum(self.operators[number].seconds for number in self.runs_again(kept))

    def num_bytes(self, kept: Collection[int]) -> int:
        """Of the outputs of some operators."""
        return sum(self.operators[number].num_bytes for number in kept)

    @cached_property
    def most_bytes(self) -> int:
        """Of all that backward asks for, as far as it may be kept."""
        return sum(each.num_bytes for each in self.operators if each.is_saved and each.may_store)

    def rules(self, tier: Tier, kept: Collection[int]) -> KeptOperators:
        """What a strategy says of it."""
        runs = self.runs_again(kept)
        idle = [number for number in range(len(self.operators)) if number not in runs and number not in kept]
        first = [number for number in idle if not set(self.operators[number].inputs) & set(idle)]
        return KeptOperators(
            tier,
            tuple(self.operators[number].key for number in sorted(kept)),
            tuple(self.operators[number].key for number in first),
        )
