"""Why a plan is as it is, in words and figures: what lost, what binds, what more memory would buy, what would fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from trainfit.hardware import Hardware
from trainfit.plan.cost import MUST_WIN
from trainfit.plan.plan import Alternative, MoreMemory
from trainfit.plan.search import Bounded, Candidate, Search, best_of_each
from trainfit.plan.space import Point
from trainfit.plan.target import Target
from trainfit.profile import TIER_ACCURACY, Accuracy, Profile
from trainfit.step.strategy import Strategy
from trainfit.step.strategy_text import describe_strategy, describe_variant
from trainfit.techniques.optimizer import ACCURACY_WORDS, accuracy_of, bytes_per_parameter
from trainfit.units import format_bytes

_OTHERS = 6  # layouts of other kinds that are shown
_GIB, _MIB = 2**30, 2**20


def alternatives_of(
    search: Search, rehearsed: Mapping[Strategy, Profile], chosen: Candidate, profile: Profile
) -> Iterator[Alternative]:
    """What was rehearsed and lost, then the best of each other way to set one thing."""
    # The fast model's seconds, brought to the rehearsal's scale by the candidate whose both figures are known.
    scale = profile.step_seconds / chosen.step_seconds if chosen.step_seconds else 1.0
    seen = {chosen.strategy}
    for candidate in _losers(search, rehearsed, chosen):
        if candidate.strategy in seen:
            continue
        seen.add(candidate.strategy)
        exact = rehearsed.get(candidate.strategy)
        peak = exact.needed_bytes if exact else candidate.peak_bytes + search.excess_of(candidate.point)
        seconds = exact.step_seconds if exact else candidate.step_seconds * scale
        words = _why_lost(candidate, peak, seconds, search.allowed_bytes, chosen, profile)
        yield Alternative(candidate.strategy, peak, seconds, exact is not None, words)


def compile_choice_notes(target: Target, strategy: Strategy, profile: Profile, hardware: Hardware) -> Iterator[str]:
    """What a plan's reader is to know of compiling, and why it was left aside where that was not the search's doing."""
    if not strategy.compile.blocks and "compile" in target.may_change and hardware.count > 1:
        yield "compiling is left aside: compiled blocks run on one device"
    yield from compile_notes(strategy, profile, hardware)


def compile_notes(strategy: Strategy, profile: Profile, hardware: Hardware) -> Iterator[str]:
    """What compiled blocks cost before they win, and how far their rehearsal is from the device's own kernels."""
    if not strategy.compile.blocks:
        return
    yield (
        f"blocks are compiled: the first step takes about {profile.compile_seconds:.0f} s longer; gradients are equal "
        "to the rounding of sums"
    )
    if not hardware.is_host:
        yield (
            f"compiled blocks were rehearsed as for a CPU: {hardware.spec.kind} kernels fuse in other groups, so "
            "temporaries inside a block may differ; what blocks save for backward is the same"
        )


def _losers(search: Search, rehearsed: Mapping[Strategy, Profile], chosen: Candidate) -> Iterator[Candidate]:
    assert chosen.case is not None
    here = chosen.case.point
    for candidate in search.emitted:
        if candidate.strategy in rehearsed:
            yield candidate
    points = [bounded for bounded in search.points if bounded.point.kind not in search.refused]
    same_kind = [bounded for bounded in points if bounded.point.kind == here.kind]
    for bounded in _near(best_of_each(same_kind, lambda point: point.strategy.micro_batch_size), here):
        yield search.estimated(bounded)
    yield from search.uniform(chosen.case)
    for key, bounded in best_of_each(points, lambda point: point.strategy.optimizer).items():
        if key != here.strategy.optimizer:
            yield search.estimated(bounded)
    for key, bounded in best_of_each(points, lambda point: point.strategy.compile).items():
        if key != here.strategy.compile:
            yield search.estimated(bounded)
    for key, bounded in best_of_each(points, lambda point: point.strategy.attention).items():
        if key != here.strategy.attention:
            yield search.estimated(bounded)
    others = [(key, bounded) for key, bounded in best_of_each(points, _family).items() if key != _family(here)]
    for _, bounded in others[:_OTHERS]:
        yield search.estimated(bounded)


def _family(point: Point) -> tuple[object, ...]:
    """Layouts of one idea, whatever its sizes."""
    mesh, zero = point.strategy.mesh, point.strategy.zero
    return zero, mesh.tensor > 1, mesh.pipeline > 1, mesh.replicate > 1 and mesh.shard > 1


def _near(by_size: Mapping[int, Bounded], here: Point) -> list[Bounded]:
    """The next smaller and the next larger micro batch."""
    size = here.strategy.micro_batch_size
    smaller, larger = [s for s in by_size if s < size], [s for s in by_size if s > size]
    return [by_size[each] for each in (*sorted(smaller)[-1:], *sorted(larger)[:1])]


def _why_lost(
    candidate: Candidate, peak: int, seconds: float, allowed: int, chosen: Candidate, profile: Profile
) -> str:
    best = profile.step_seconds
    variant = candidate.strategy.optimizer
    if peak > allowed:
        words = f"needs {format_bytes(peak - allowed)} more than allowed"
    elif seconds < best and candidate.weight > chosen.weight:
        words = f"{1 - seconds / best:.1%} faster, too little for what is {_accuracy(candidate.strategy)}"
    elif seconds < best:
        faster = f"estimated {1 - seconds / best:.1%} faster"
        words = f"{faster}; not rehearsed: by what others' rehearsals taught it would not win, or these were enough"
    else:
        words = f"{seconds / best - 1:.1%} slower" if best else "slower"
    return words + (f" ({_accuracy(candidate.strategy)})" if variant != chosen.strategy.optimizer else "")


def _accuracy(strategy: Strategy) -> Accuracy:
    """The least exact of what optimizer, precision and tiers do to what is learnt."""
    found = {TIER_ACCURACY.get(tier, "exact") for tier in strategy.tiers}
    return max({*found, accuracy_of(strategy.optimizer, strategy.precision)}, key=MUST_WIN.__getitem__)


def more_memory(search: Search, chosen: Candidate, profile: Profile) -> MoreMemory | None:
    """What the next GiB would buy, or the next eighth of a small budget, in powers of two; the layout stays."""
    assert chosen.case is not None
    budget = search.target.budget_bytes
    extra = _GIB if budget >= 8 * _GIB else max(_MIB, 2 ** ((budget // 8).bit_length() - 1))
    best = next(search.best_first(more_bytes=extra, kind=chosen.case.point.kind), None)
    if best is None or not chosen.step_seconds:
        return None
    saved = max(0.0, 1 - best.step_seconds / chosen.step_seconds) * profile.step_seconds
    return MoreMemory(
        extra, profile.step_seconds - saved, describe_strategy(best.strategy if saved else chosen.strategy)
    )


def why(chosen: Candidate, profile: Profile, plain: Alternative, allowed: int) -> str:
    share = plain.step_seconds / profile.step_seconds - 1 if profile.step_seconds else 0.0
    time = f"{abs(share):.0%} {'less' if share < 0 else 'more'} time" if abs(share) >= 0.005 else "as long"
    return (
        f"the fastest that stays within {format_bytes(allowed)}: {describe_strategy(chosen.strategy)}; "
        f"its peak of {format_bytes(profile.peak_bytes)} comes in the {profile.peak_phase} phase; "
        f"plain training needs {format_bytes(plain.peak_bytes)} and would take {time}"
    )


def states_bytes(profile: Profile) -> int:
    """Of a profile's peak, what any step needs: parameters, gradients and optimizer states."""
    return sum(profile.categories[name] for name in ("parameters", "optimizer", "gradients"))


def why_not(profile: Profile, target: Target, hardware: Hardware) -> str:
    states = states_bytes(profile)
    allowed = target.allowed_bytes(hardware.spec.kind)
    needed = int(profile.needed_bytes * target.budget_bytes / allowed) + 1
    remedies = _remedies(profile, states, target, hardware)
    return (
        f"does not fit: the smallest strategy needs {format_bytes(profile.needed_bytes)} "
        f"({format_bytes(states)} of it parameters, gradients and optimizer states), "
        f"{format_bytes(profile.needed_bytes - allowed)} more than the {format_bytes(allowed)} allowed of a budget of "
        f"{format_bytes(target.budget_bytes)}; give it {format_bytes(needed)}{remedies}"
    )


def _remedies(profile: Profile, states: int, target: Target, hardware: Hardware) -> str:
    """What else there is, each where it would help."""
    allowed = target.allowed_bytes(hardware.spec.kind)
    remedies = []
    if states > allowed:
        devices = hardware.count * -(-profile.needed_bytes // allowed)
        remedies.append(f"shard it over at least {devices} such devices (--devices, or mesh.shard)")
    if "optimizer" not in target.may_change and target.optimizer.kind == "adamw":
        remedies.append("let the optimizer change (--may-change optimizer)")
    if states > allowed:
        remedies.append("train an adapter on a quantised model (adapter, with frozen_weights: nf4)")
    else:
        remedies.append("shorten seq_len")
    return f", {', '.join(remedies[:-1])}, or {remedies[-1]}" if len(remedies) > 1 else f", or {remedies[0]}"


def accuracy_note(target: Target, strategy: Strategy, num_trained: int) -> tuple[str, ...]:
    """What a change of precision or optimizer does to what is learnt."""
    changed = (strategy.optimizer, strategy.precision) != (target.optimizer, target.precision)
    if not changed:
        return ()
    size = bytes_per_parameter(strategy.optimizer).total
    what = ", ".join([strategy.precision, *describe_variant(strategy.optimizer)])
    accuracy = ACCURACY_WORDS[accuracy_of(strategy.optimizer, strategy.precision)]
    noted = f"{what}: {size:.1f} bytes a parameter, {accuracy}"
    if strategy.optimizer.place == "device":
        return (noted,)
    moments = bytes_per_parameter(replace(strategy.optimizer, place="device")).moments
    host = int((4 + moments) * num_trained)
    return (noted, f"masters and moments take {format_bytes(host)} of host memory for each copy of the model")


def tiers_note(strategy: Strategy) -> tuple[str, ...]:
    """What tiers of fewer bits do to gradients."""
    fewer_bits = [tier for tier in strategy.tiers if tier in TIER_ACCURACY]
    if not fewer_bits:
        return ()
    return (
        f"{len(fewer_bits)} of {len(strategy.tiers)} blocks keep saved tensors in fewer bits "
        f"({', '.join(sorted(set(fewer_bits)))}): gradients are rounded; `trainfit verify` says by how much",
    )


def allocator_note(before: Profile, expanded: Profile, chosen: Profile, allowed: int) -> tuple[str, ...]:
    """What expandable segments were chosen for: one strategy without and with them, and what became of it."""
    if before is expanded:
        return ()
    after = "" if chosen is expanded else f", {format_bytes(chosen.needed_bytes)} with what was chosen after that"
    return (
        f"expandable segments: with PyTorch's default ones the allocator would hold "
        f"{format_bytes(before.needed_bytes)}, "
        f"{format_bytes(before.needed_bytes - allowed)} more than allowed, of which no more than "
        f"{format_bytes(before.peak_bytes)} are in use; with them {format_bytes(expanded.needed_bytes)}{after}",
    )


def attention_note(target: Target, strategy: Strategy) -> tuple[str, ...]:
    """What blockwise attention was chosen for."""
    if target.attention != "auto" or strategy.attention == "model":
        return ()
    return (
        "blockwise attention: the model's own would hold the scores of every query and key; attention: model keeps it",
    )


def binds(chosen: Candidate, profile: Profile) -> str:
    """The event that limits: that of the block where the rehearsal has its peak, else the fast model's."""
    block = re.match(r"block \d+", profile.peak_place)
    if block is not None and profile.peak_phase in ("forward", "backward"):
        return f"{profile.peak_phase} of {block[0]}"
    return chosen.binding(profile.peak_phase)


def notes_of(target: Target) -> tuple[str, ...]:
    tokens = target.sequences_per_step * target.seq_len
    if tokens == target.tokens_per_step:
        return ()
    asked = f"{target.tokens_per_step} tokens a step are not a whole number of sequences of {target.seq_len}"
    taken = f"{target.sequences_per_step} sequence{'s' if target.sequences_per_step > 1 else ''}"
    return (f"{asked}; the plan takes {taken}, {tokens} tokens",)
