"""Which block of the model is running, forward and backward.

NOTE [ Where backward is ]
Autograd numbers its nodes in the order in which forward makes them. What the count was when a block's forward began
and ended says which block a node belongs to when it runs; recomputation runs inside such a node. Nodes made during
backward itself have higher numbers, and those that add up gradients the highest: they belong to whatever ran before.
Nothing is added to the graph, so what is live does not change.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]

from trainfit.workload import Anatomy

_LAST_NUMBER = re.compile(r"(\d+)\D*$")


class Whereabouts:
    """place: such as "block 31", "embedding" or "head"; "" between them."""

    def __init__(self) -> None:
        self.place = ""
        self._since: list[int] = []  # numbers of autograd's nodes, ascending
        self._places: list[str] = []  # and the place that each begins

    @contextmanager
    def watching(self, modules: dict[str, nn.Module]) -> Iterator[None]:
        """Follow the forward of these modules, by place."""
        with ExitStack() as stack:
            for place, module in modules.items():
                stack.callback(module.register_forward_pre_hook(self._entering(place), prepend=True).remove)
                stack.callback(module.register_forward_hook(self._entering("")).remove)
            yield

    def look(self) -> str:
        """The place now; see NOTE [ Where backward is ]."""
        node: Any = torch._C._current_autograd_node()
        if node is not None and self._since and self._since[0] <= (number := node._sequence_nr()) < self._since[-1]:
            self.place = self._places[bisect_right(self._since, number) - 1]
        return self.place

    def _entering(self, place: str) -> Any:
        def hook(*_: Any) -> None:
            self.place = place
            self._since.append(_get_sequence_nr())
            self._places.append(place)

        return hook


def places_of(model: nn.Module, anatomy: Anatomy) -> dict[str, nn.Module]:
    """Blocks by their number in the whole model, embedding and head."""
    named = [(f"block {number}", name) for number, name in zip(_numbers(anatomy.blocks), anatomy.blocks)]
    named += [(place, name) for place in ("embedding", "head") if (name := getattr(anatomy, place)) is not None]
    return {place: model.get_submodule(name) for place, name in named}


def _numbers(blocks: tuple[str, ...]) -> list[int]:
    """The numbers in their names, which a pipeline stage keeps; positions where these do not tell blocks apart."""
    found = [int(match[1]) for name in blocks if (match := _LAST_NUMBER.search(name))]
    return found if len(set(found)) == len(blocks) else list(range(len(blocks)))
