"""Cutting a model into pipeline stages, in place.

NOTE [ The model's own forward ]
Every stage runs the forward that the model came with, so that masks, rotary tables and whatever else blocks are given
come out right, and only what happens at blocks differs: a call of a block before the stage hands its input on, the
stage's first block takes the hidden states that were received instead of those that it is given, and a call of the
first block after the stage leaves the forward. So what a model computes before its blocks is computed on every stage,
and has no effect after the first: its parameters are dropped there, and read as zeros that take no memory.

A rank with several stages runs them on one and the same model, one at a time. Blocks are told apart in __call__ and not
in forward: hooks of a block that is passed by, such as the gathering of its parameters, must not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from trainfit.errors import ModelError, RecipeError
from trainfit.workload import Anatomy
from trainfit.workload.flow import BlockFlow, hidden_input, replace_hidden


@dataclass(frozen=True)
class Part:
    """One stage: blocks first to stop - 1 of the model. number counts stages, of which there are count."""

    number: int
    count: int
    first: int
    stop: int

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    @property
    def blocks(self) -> range:
        return range(self.first, self.stop)


def divide(num_blocks: int, num_stages: int) -> list[Part]:
    """Consecutive blocks for each stage, as many for each as can be.

    Blocks that are left over go to the last stage but one, the one before it and so on; the first stage, which has the
    embedding, and the last one, which has the head, come last. Raises RecipeError for fewer blocks than stages.
    """
    if num_blocks < num_stages:
        raise RecipeError(
            f"{num_stages} pipeline stages for a model of {num_blocks} blocks; use mesh.pipeline times "
            f"pipeline.stages_per_rank of {num_blocks} or less"
        )
    each, left = divmod(num_blocks, num_stages)
    lucky = [*range(num_stages - 2, 0, -1), 0, num_stages - 1][:left]
    parts: list[Part] = []
    for number in range(num_stages):
        first = parts[-1].stop if parts else 0
        parts.append(Part(number, num_stages, first, first + each + (number in lucky)))
    return parts


class StageEndError(Exception):
    """Not an error but a jump: the forward has reached a block of the next stage."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Route:
    """Where in the model the stage that runs now begins and ends."""

    def __init__(self, flow: BlockFlow) -> None:
        self._items = flow.items
        self._part: Part | None = None
        self._received: Tensor | None = None

    @contextmanager
    def through(self, part: Part, received: Tensor | None) -> Iterator[None]:
        """Calls of the model run this stage, on hidden states that were received; None for the first stage."""
        self._part, self._received = part, received
        try:
            yield
        finally:
            self._part = self._received = None

    @property
    def part(self) -> Part:
        if self._part is None:
            raise ModelError("a pipeline stage cannot be called by itself; call TrainStep or TrainStep.evaluate")
        return self._part

    def call(self, number: int, block: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block's turn in the model's forward."""
        if number < self.part.first:
            hidden = hidden_input(args, kwargs)
            return (hidden, *[None] * (self._items[number] - 1)) if self._items[number] else hidden
        if number >= self.part.stop:
            raise StageEndError(hidden_input(args, kwargs))
        if number == self.part.first and self._received is not None:
            args, kwargs = replace_hidden(args, kwargs, self._received)
        return block(*args, **kwargs)

    def embed(self, embedding: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The embedding's turn: after the first stage any tensor of the right shape does."""
        return embedding(*args, **kwargs) if self._received is None else self._received.detach()


@cache
def _on_route(block_class: Any) -> Any:
    """The same class, with calls that ask the route first."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        route, number = self._pipeline_place
        return route.call(number, super(routed, self).__call__, args, kwargs)

    routed: Any = type(block_class.__name__, (block_class,), {"__call__": call})
    return routed


def cut(
    model: nn.Module, anatomy: Anatomy, flow: BlockFlow, mine: list[Part], device: torch.device
) -> tuple[Route, Anatomy]:
    """Leave in the model what some stages need. Names stay those of the whole model.

    Returns the route that runs the stages, and the anatomy of what is left. Raises ModelError for weights that are
    tied to one of a block, RecipeError if nothing is left that trains.
    """
    route = Route(flow)
    inside = {
        name: number
        for number, block in enumerate(anatomy.blocks)
        for name, _ in model.get_submodule(block).named_parameters(block)
    }
    for tie in anatomy.ties:
        if len({inside.get(name) for name in tie}) > 1:
            raise ModelError(f"{tie[0]} and {tie[1]} are one tensor and not both outside of the blocks; no pipeline")
    own = [number for part in mine for number in part.blocks]
    for number, name in enumerate(anatomy.blocks):
        _put_on_route(model.get_submodule(name), route, number, is_own=number in own)
    _drop_outside(model, {name for name in outside_parameters(flow, mine, model) if name not in inside}, inside, device)
    _stub_embedding(model, anatomy, flow, route)
    left = dict(model.named_parameters(remove_duplicate=False))
    if not any(parameter.requires_grad for parameter in left.values()):
        raise RecipeError(
            f"nothing trains in blocks {own[0]} to {own[-1]} of the model, which are one rank's part of the pipeline; "
            "use fewer stages"
        )
    return route, _part_of(anatomy, model, own)


def outside_parameters(flow: BlockFlow, mine: list[Part], model: nn.Module) -> set[str]:
    """Names of what stages need outside of blocks; the last one also has what nobody uses."""
    keep: set[str] = set()
    if any(part.is_first for part in mine):
        keep |= flow.before
    if any(part.is_last for part in mine):
        every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        keep |= flow.after | (every - flow.before)
    return keep


def _put_on_route(block: Any, route: Route, number: int, *, is_own: bool) -> None:
    block.__class__ = _on_route(type(block))  # type: ignore[arg-type]
    block._pipeline_place = (route, number)
    if not is_own:
        # Its settings stay: models look at the layer type of each block.
        for held in (block._modules, block._parameters, block._buffers):
            held.clear()


def _drop_outside(model: nn.Module, keep: set[str], inside: dict[str, int], device: torch.device) -> None:
    zeros: dict[int, Tensor] = {}
    for prefix, module in model.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            name = f"{prefix}.{leaf}".removeprefix(".")
            if parameter is None or name in keep or name in inside:
                continue
            del module._parameters[leaf]
            zero = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
            setattr(module, leaf, zeros.setdefault(id(parameter), zero))


def _stub_embedding(model: nn.Module, anatomy: Anatomy, flow: BlockFlow, route: Route) -> None:
    if anatomy.embedding is None:
        return
    embedding: Any = model.get_submodule(anatomy.embedding)
    if (getattr(embedding, "embedding_dim", None),) == flow.token_shape:
        embedding.forward = partial(route.embed, embedding.forward)


def _part_of(anatomy: Anatomy, model: nn.Module, own: list[int]) -> Anatomy:
    left = dict(model.named_parameters(remove_duplicate=False))

    def has(module: str | None) -> bool:
        return module is not None and any(name.startswith(f"{module}.") for name in left)

    return replace(
        anatomy,
        blocks=tuple(anatomy.blocks[number] for number in own),
        structures=tuple(anatomy.structures[number] for number in own),
        embedding=anatomy.embedding if has(anatomy.embedding) else None,
        head=anatomy.head if has(anatomy.head) else None,
        ties=tuple(tie for tie in anatomy.ties if tie[0] in left),
        num_parameters=sum(parameter.numel() for parameter in {id(p): p for p in left.values()}.values()),
    )
