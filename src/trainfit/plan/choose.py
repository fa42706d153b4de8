"""choose(): search with the fast model, rehearse the best, keep the reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from trainfit.errors import RecipeError
from trainfit.hardware import Hardware
from trainfit.plan.plan import Alternative, Plan
from trainfit.plan.search import Candidate, search
from trainfit.plan.target import Target
from trainfit.plan.variants import Tracers, skipping
from trainfit.profile import AllocatorSettings, OptimizerVariant, Profile
from trainfit.rehearsal.rehearse import rehearse
from trainfit.step.strategy import Strategy, describe_strategy, describe_variant, parse_tiers
from trainfit.techniques.optimizer import ACCURACY_WORDS, accuracy_of, bytes_per_parameter
from trainfit.units import format_bytes
from trainfit.workload import Workload

_REHEARSALS = 3  # of candidates that fit, before the fastest of them is chosen
_ATTEMPTS = 8  # rehearsals in all

Progress = Callable[[str], None]


def choose(
    workload: Workload,
    hardware: Hardware,
    target: Target,
    *,
    max_grad_norm: float | None = 1.0,
    on_progress: Progress = lambda message: None,
) -> Plan:
    """The fastest strategy whose rehearsal stays within the budget less its margin.

    Plan.fits is False when there is none; the plan then holds the smallest one. Raises DeviceError for a precision that
    the device lacks and RecipeError for a target of another sequence length than the workload's.
    """
    hardware.require(target.precision)
    if workload.make_optimizer is not None and "optimizer" in target.may_change:
        raise RecipeError(
            f"{workload.name} brings an optimizer of its own, which no plan changes; take optimizer out of may_change"
        )
    if target.seq_len != workload.seq_len:
        raise RecipeError(
            f"the target's seq_len is {target.seq_len}, the workload's {workload.seq_len}; make them equal"
        )
    allowed = target.allowed_bytes(hardware.spec.kind)
    on_progress("tracing one block")
    tracers = Tracers(workload, hardware, target)
    found = search(tracers, hardware, target, allowed, clips=max_grad_norm is not None)
    num_trained = tracers.of(target.optimizer).facts.num_trained
    if not found:
        raise _too_few_micro_batches(target)

    def exact(strategy: Strategy) -> Profile:
        on_progress(f"rehearsing {describe_strategy(strategy)}")
        return rehearse(workload, strategy, hardware, max_grad_norm=max_grad_norm)

    plain = _plain(len(workload.anatomy().blocks), target, hardware, exact)
    expands = target.allocator is None and not hardware.is_host
    chosen, profile, rehearsed = _rehearse_best(found, allowed, exact, expands=expands)
    fits = profile.needed_bytes <= allowed
    return Plan(
        allowed_bytes=allowed,
        target=target,
        device=hardware.spec.name,
        workload=workload.name,
        strategy=chosen.strategy,
        predicted=profile,
        plain=plain,
        alternatives=tuple(_alternatives(found, rehearsed, chosen, profile, allowed)),
        reason=_why(chosen, profile, plain, allowed) if fits else _why_not(profile, target, hardware),
        notes=(
            *_notes(target),
            *_accuracy_note(target, chosen.strategy, num_trained),
            *_allocator_note(chosen.strategy, profile, rehearsed, allowed),
        ),
    )


def _too_few_micro_batches(target: Target) -> RecipeError:
    layout = target.layouts[0]
    has, stages = target.sequences_per_rank(layout), layout.mesh.pipeline
    enough = next(count for count in range(has + 1, 2**62) if layout.pipeline.fits(count, stages))
    return RecipeError(
        f"tokens_per_step {target.tokens_per_step} are {has} sequences for each pipeline of {stages} stages, which "
        f"cannot be cut into micro batches that keep {layout.pipeline.schedule} busy; give "
        f"{enough * layout.mesh.data * target.seq_len}, or fewer stages"
    )


def _rehearse_best(
    found: list[Candidate], allowed: int, exact: Callable[[Strategy], Profile], *, expands: bool = False
) -> tuple[Candidate, Profile, dict[Strategy, Profile]]:
    """Rehearse the fastest that should fit; of those that do, take the fastest. Else the smallest of all.

    expands: one that only fragmentation keeps from fitting may have expandable segments.
    """
    rehearsed: dict[Strategy, Profile] = {}

    def attempt(candidate: Candidate) -> tuple[Candidate, Profile]:
        profile = rehearsed[candidate.strategy] = exact(candidate.strategy)
        if not expands or not profile.peak_bytes <= allowed < profile.needed_bytes:
            return candidate, profile
        expanded = with_expandable_segments(candidate)
        smaller = rehearsed[expanded.strategy] = exact(expanded.strategy)
        return (expanded, smaller) if smaller.needed_bytes < profile.needed_bytes else (candidate, profile)

    good: dict[tuple[object, ...], Candidate] = {}
    excess: dict[tuple[object, ...], int] = {}  # by how much a kind's rehearsal was above the fast model
    for candidate in found:
        kind = _kind(candidate.strategy)
        if kind in good or candidate.peak_bytes + excess.get(kind, 0) > allowed:
            continue
        tried, profile = attempt(candidate)
        excess[kind] = profile.needed_bytes - candidate.peak_bytes
        if profile.needed_bytes <= allowed:
            good[kind] = tried
        if len(good) == _REHEARSALS or len(rehearsed) >= _ATTEMPTS:
            break
    if good:
        best = min(good.values(), key=lambda each: rehearsed[each.strategy].step_seconds * each.weight)
        return best, rehearsed[best.strategy], rehearsed
    smallest = min(found, key=lambda candidate: (candidate.peak_bytes, candidate.step_seconds))
    if smallest.strategy not in rehearsed:
        return *attempt(smallest), rehearsed
    expanded = with_expandable_segments(smallest)
    smallest = expanded if expanded.strategy in rehearsed else smallest
    return smallest, rehearsed[smallest.strategy], rehearsed


def with_expandable_segments(candidate: Candidate) -> Candidate:
    allocator = replace(candidate.strategy.allocator, expandable_segments=True)
    return replace(candidate, strategy=replace(candidate.strategy, allocator=allocator))


def _kind(strategy: Strategy) -> tuple[object, ...]:
    """Candidates of one kind differ in tiers only; the fastest of each whose rehearsal fits is compared."""
    return (
        strategy.micro_batch_size,
        strategy.precision,
        strategy.optimizer,
        strategy.loss_chunks,
        strategy.mesh,
        strategy.zero.stage,
    )


def _plain(num_blocks: int, target: Target, hardware: Hardware, exact: Callable[[Strategy], Profile]) -> Alternative:
    """No technique, the whole step as one micro batch."""
    keep = parse_tiers("keep", num_blocks)
    replicas = max(layout.mesh.data for layout in target.layouts)
    strategy = Strategy(
        -(-target.sequences_per_step // replicas),
        precision=target.precision,
        tiers=keep,
        optimizer=skipping(OptimizerVariant(target.optimizer.kind), target.precision, hardware),
    )
    profile = exact(strategy)
    return Alternative(
        strategy,
        profile.needed_bytes,
        profile.step_seconds,
        True,
        "plain training: a device's share at once, no technique",
    )


def _alternatives(
    found: list[Candidate], rehearsed: dict[Strategy, Profile], chosen: Candidate, profile: Profile, allowed: int
) -> Iterator[Alternative]:
    """What was rehearsed and lost, and the best of each uniform tier."""
    uniform: dict[object, Candidate] = {}
    for candidate in found:
        tiers = set(candidate.strategy.tiers)
        if len(tiers) == 1 and (candidate.peak_bytes <= allowed or tiers == {"keep"}):
            uniform.setdefault(min(tiers), candidate)
    # Of each other way to keep weights and states the best that should fit, or else the best of all.
    variants: dict[object, Candidate] = {}
    for fits in (True, False):
        for candidate in found:
            if candidate.strategy.optimizer != chosen.strategy.optimizer and (candidate.peak_bytes <= allowed) is fits:
                variants.setdefault(candidate.strategy.optimizer, candidate)
    known = [candidate for candidate in found if candidate.strategy in rehearsed]
    losers = [*known, *variants.values(), *uniform.values()]
    for candidate in dict.fromkeys(losers):
        if candidate.strategy == chosen.strategy:
            continue
        seen = rehearsed.get(candidate.strategy)
        peak = seen.needed_bytes if seen else candidate.peak_bytes
        # The fast model's seconds, brought to the rehearsal's scale by the candidate whose both figures are known.
        scale = profile.step_seconds / chosen.step_seconds if chosen.step_seconds else 1.0
        seconds = seen.step_seconds if seen else candidate.step_seconds * scale
        why = _why_lost(peak, seconds, allowed, profile.step_seconds)
        if peak <= allowed and seconds < profile.step_seconds and candidate.weight > chosen.weight:
            strategy = candidate.strategy
            gain = 1 - seconds / profile.step_seconds
            why = f"{gain:.1%} faster, too little for what is {accuracy_of(strategy.optimizer, strategy.precision)}"
        if candidate.strategy.optimizer != chosen.strategy.optimizer:
            why += f" ({accuracy_of(candidate.strategy.optimizer, candidate.strategy.precision)})"
        yield Alternative(candidate.strategy, peak, seconds, seen is not None, why)


def _why_lost(peak: int, seconds: float, allowed: int, best_seconds: float) -> str:
    if peak > allowed:
        return f"needs {format_bytes(peak - allowed)} more than allowed"
    return f"{max(0.0, seconds / best_seconds - 1):.1%} slower" if best_seconds else "slower"


def _why(chosen: Candidate, profile: Profile, plain: Alternative, allowed: int) -> str:
    share = plain.step_seconds / profile.step_seconds - 1 if profile.step_seconds else 0.0
    return (
        f"the fastest that stays within {format_bytes(allowed)}: {describe_strategy(chosen.strategy)}; "
        f"its peak of {format_bytes(profile.peak_bytes)} comes in the {profile.peak_phase} phase; "
        f"plain training needs {format_bytes(plain.peak_bytes)} and would take {abs(share):.0%} "
        f"{'less' if share < 0 else 'more'} time"
    )


def _why_not(profile: Profile, target: Target, hardware: Hardware) -> str:
    states = sum(profile.categories[name] for name in ("parameters", "optimizer", "gradients"))
    allowed = target.allowed_bytes(hardware.spec.kind)
    needed = int(profile.needed_bytes * target.budget_bytes / allowed) + 1
    remedy = f"give it {format_bytes(needed)}"
    if states > allowed:
        devices = hardware.count * -(-profile.needed_bytes // allowed)
        remedy += f", shard it over at least {devices} such devices (mesh.shard), or take a smaller model"
    else:
        remedy += ", or shorten seq_len"
    return (
        f"does not fit: the smallest strategy needs {format_bytes(profile.needed_bytes)} "
        f"({format_bytes(states)} of it parameters, gradients and optimizer states), "
        f"{format_bytes(profile.needed_bytes - allowed)} more than the {format_bytes(allowed)} allowed of a budget of "
        f"{format_bytes(target.budget_bytes)}; {remedy}"
    )


def _accuracy_note(target: Target, strategy: Strategy, num_trained: int) -> tuple[str, ...]:
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


def _allocator_note(
    strategy: Strategy, profile: Profile, rehearsed: dict[Strategy, Profile], allowed: int
) -> tuple[str, ...]:
    """What expandable segments were chosen for."""
    before = rehearsed.get(replace(strategy, allocator=AllocatorSettings()))
    if before is None or before is profile:
        return ()
    return (
        f"expandable segments: with PyTorch's default ones the allocator would hold "
        f"{format_bytes(before.needed_bytes)}, "
        f"{format_bytes(before.needed_bytes - allowed)} more than allowed, of which no more than "
        f"{format_bytes(before.peak_bytes)} are in use; with them {format_bytes(profile.needed_bytes)}",
    )


def _notes(target: Target) -> tuple[str, ...]:
    tokens = target.sequences_per_step * target.seq_len
    if tokens == target.tokens_per_step:
        return ()
    asked = f"{target.tokens_per_step} tokens a step are not a whole number of sequences of {target.seq_len}"
    return (f"{asked}; the plan takes {target.sequences_per_step} sequences, {tokens} tokens",)
