"""The peak in words: what is live, why then, and what would lower it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest

from trainfit.errors import RecipeError
from trainfit.profile import Category, OptimizerVariant, Profile
from trainfit.report.names import NAMES
from trainfit.step.strategy import Strategy
from trainfit.units import format_bytes

_WORTH_SAYING = 0.05  # a part of the peak smaller than this explains nothing


def explain_peak(profile: Profile, strategy: Strategy | None = None) -> list[str]:
    """A few sentences. Without a strategy nothing is said of what would lower the peak."""
    sentences = [_where(profile), _what(profile), _why(profile)]
    if strategy is not None and (remedies := list(_remedies(profile, strategy))):
        sentences.append(f"What would lower it: {'; '.join(remedies[:3])}.")
    return [sentence for sentence in sentences if sentence]


def _where(profile: Profile) -> str:
    place, _, operator = profile.peak_place.rpartition(", ")
    inside = f" of {'' if place.startswith('block') else 'the '}{place}" if place else ""
    running = f", while {operator} runs" if operator else ""
    return f"The peak, {format_bytes(profile.peak_bytes)}, comes in the {profile.peak_phase} phase{inside}{running}."


def _what(profile: Profile) -> str:
    """The parts that are worth naming, largest first."""
    large = [
        f"{NAMES[name]} {format_bytes(size)} ({100 * size / profile.peak_bytes:.0f} %)"
        for name, size in sorted(profile.categories.items(), key=lambda item: -item[1])
        if size >= _WORTH_SAYING * profile.peak_bytes
    ]
    return f"Live then: {', '.join(large)}." if large else ""


def _why(profile: Profile) -> str:
    block = re.match(r"block (\d+)", profile.peak_place)
    if profile.peak_phase == "forward":
        return "Each block adds what it saves for backward, and nothing is freed before backward begins."
    if profile.peak_phase == "loss":
        return (
            "All that the blocks save for backward is there by then, and logits and their gradient come on top; "
            "the blocks' backward frees the former only after the latter."
        )
    if profile.peak_phase == "optimizer":
        return "All gradients are complete by then, and what the update makes on the way comes on top."
    if profile.peak_place.startswith("embedding"):
        return "The gradient of the embedding is as large as its weight, and comes last, on top of all other gradients."
    if block is None:
        return "The gradients of later modules are there already, and little of what forward saved is free yet."
    number = int(block[1])
    works = "all it works with, recomputed tensors too, is live at once"
    return f"While block {number} runs backward {works}, and {_beside(profile, number)}."


def _beside(profile: Profile, block: int) -> str:
    """What lies beside a block's working set: the largest of what comes and goes through the step."""
    passing: tuple[Category, ...] = ("activations", "gradients", "communication")
    largest = max(passing, key=lambda name: profile.categories.get(name, 0))
    if largest == "communication":
        return "gathered parameters and a gradient that is about to be shared take their buffers"
    if largest == "gradients":
        return f"the gradients of {'the blocks after it' if block else 'all blocks'} are there"
    return "what the blocks before it saved is still there"


def _remedies(profile: Profile, strategy: Strategy) -> Iterator[str]:
    """Changes of the strategy that are not made yet: the first for each part, largest part first, then the second."""
    parts = sorted(profile.categories.items(), key=lambda item: -item[1])
    found = [
        list(_REMEDIES[name](strategy, profile)) for name, size in parts if size >= _WORTH_SAYING * profile.peak_bytes
    ]
    yield from dict.fromkeys(remedy for rank in zip_longest(*found) for remedy in rank if remedy is not None)


def _of_parameters(strategy: Strategy, profile: Profile) -> Iterator[str]:
    if strategy.zero.stage < 3 and strategy.mesh.data > 1:
        yield "share parameters over devices (ZeRO 3)"
    if strategy.optimizer.weights == "fp32":
        yield from _variant(strategy, "weights of 2 bytes, at some accuracy", weights="bf16_stochastic")


def _of_optimizer(strategy: Strategy, profile: Profile) -> Iterator[str]:
    if strategy.optimizer.states == "fp32":
        yield from _variant(strategy, "optimizer states of 8 bits", states="int8")
    if strategy.zero.stage < 1 and strategy.mesh.data > 1:
        yield "share optimizer states over devices (ZeRO 1)"
    if not profile.is_on_host:
        yield from _variant(strategy, "optimizer states in host memory", place="host")


def _of_gradients(strategy: Strategy, profile: Profile) -> Iterator[str]:
    if strategy.zero.stage < 2 and strategy.mesh.data > 1:
        yield "share gradients over devices (ZeRO 2)"
    yield from _variant(strategy, "gradients of 2 bytes", gradients="half")
    yield from _variant(strategy, "the update in backward, which drops each gradient", update="backward")


def _variant(strategy: Strategy, words: str, **change: str) -> Iterator[str]:
    """A change of the optimizer, where it is one and the rest of the strategy allows it."""
    changed: OptimizerVariant = replace(strategy.optimizer, **change)  # type: ignore[arg-type]
    if changed == strategy.optimizer:
        return
    with suppress(RecipeError):
        replace(strategy, optimizer=changed)
        yield f"{words} ({', '.join(f'{key}={value}' for key, value in change.items())})"


def _of_activations(strategy: Strategy, profile: Profile) -> Iterator[str]:
    if set(strategy.tiers) - {"full"}:
        yield "recompute more blocks, or more of each"
    yield from _smaller_batch(strategy)


def _of_temporaries(strategy: Strategy, profile: Profile) -> Iterator[str]:
    yield from _smaller_batch(strategy)


def _of_loss(strategy: Strategy, profile: Profile) -> Iterator[str]:
    yield f"the loss in more than {strategy.loss_chunks} chunk{'s' if strategy.loss_chunks > 1 else ''}"
    yield from _smaller_batch(strategy)


def _of_communication(strategy: Strategy, profile: Profile) -> Iterator[str]:
    if strategy.zero.stage == 3 and strategy.zero.prefetch:
        yield "gather fewer blocks ahead (prefetch)"


def _smaller_batch(strategy: Strategy) -> Iterator[str]:
    if strategy.micro_batch_size > 1:
        yield f"a micro batch smaller than {strategy.micro_batch_size}, with more accumulation"
    else:
        yield "shorter sequences"


_REMEDIES: Mapping[Category, Callable[[Strategy, Profile], Iterator[str]]] = {
    "parameters": _of_parameters,
    "optimizer": _of_optimizer,
    "gradients": _of_gradients,
    "activations": _of_activations,
    "temporary": _of_temporaries,
    "loss": _of_loss,
    "communication": _of_communication,
}
