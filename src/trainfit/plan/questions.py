"""Questions that users ask: the longest sequence, the largest batch, the fewest devices, one card against another.

They are answered by rehearsals of the leanest exact step: one sequence at a time, every block recomputed in full, the
loss in many chunks, over several devices ZeRO stage 3. What that step has no room for, no plan has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainfit.errors import DoesNotFitError, InputError
from trainfit.hardware import Hardware, accelerator
from trainfit.plan.choose import choose
from trainfit.plan.judged import judged
from trainfit.plan.largest import largest_within
from trainfit.plan.plan import Plan
from trainfit.plan.policies import Situation, parse_policy
from trainfit.plan.reasons import states_bytes
from trainfit.plan.target import Target
from trainfit.profile import AllocatorSettings, Attention, Layout, Offload, Profile
from trainfit.rehearsal.attention_scores import attention_holds_scores
from trainfit.step import Strategy, prepare
from trainfit.step.strategy_text import describe_strategy
from trainfit.techniques.chunked_loss import auto_chunks
from trainfit.units import format_bytes
from trainfit.workload import Workload

MAX_SEQUENCE = 2**24
MAX_BATCH = 2**16
_USUAL_SEQUENCE = 4096  # the first that is tried
PLAIN, LEANEST = "plain", "leanest"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Trial:
    """A strategy that was rehearsed. allowed_bytes: what it may need."""

    strategy: Strategy
    seq_len: int
    predicted: Profile
    allowed_bytes: int

    @property
    def fits(self) -> bool:
        return self.predicted.needed_bytes <= self.allowed_bytes

    @property
    def over_bytes(self) -> int:
        """By how much it needs more than it may; below zero for what is left."""
        return self.predicted.needed_bytes - self.allowed_bytes

    @property
    def tokens_per_step(self) -> int:
        return self.strategy.sequences_per_step * self.seq_len

    def to_json(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy.to_json(),
            "seq_len": self.seq_len,
            "tokens_per_step": self.tokens_per_step,
            "predicted": self.predicted.to_json(),
            "allowed_bytes": self.allowed_bytes,
            "fits": self.fits,
        }


@dataclass(frozen=True)
class LongestSequence:
    """seq_len: the longest that fits, to a whole number of `granularity` tokens. next: one step longer, None where the
    model has no more positions."""

    seq_len: int
    granularity: int
    found: Trial
    next: Trial | None

    def to_json(self) -> dict[str, Any]:
        return {
            "seq_len": self.seq_len,
            "granularity": self.granularity,
            "found": self.found.to_json(),
            "next": None if self.next is None else self.next.to_json(),
        }


@dataclass(frozen=True)
class Batch:
    """The largest micro batch of one way to train. found: None where not even one sequence fits; next: one more."""

    way: str
    found: Trial | None
    next: Trial | None

    @property
    def micro_batch_size(self) -> int:
        return 0 if self.found is None else self.found.strategy.micro_batch_size

    def to_json(self) -> dict[str, Any]:
        return {
            "way": self.way,
            "micro_batch_size": self.micro_batch_size,
            "found": None if self.found is None else self.found.to_json(),
            "next": None if self.next is None else self.next.to_json(),
        }


@dataclass(frozen=True)
class FewestDevices:
    """fewer: the step on one device less, None for a single one."""

    devices: int
    found: Trial
    fewer: Trial | None

    def to_json(self) -> dict[str, Any]:
        return {
            "devices": self.devices,
            "found": self.found.to_json(),
            "fewer": None if self.fewer is None else self.fewer.to_json(),
        }


@dataclass(frozen=True)
class Card:
    """One device's plan; plan is None where the device cannot do it at all, and why then says so."""

    device: str
    plan: Plan | None
    why: str = ""

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.fits

    @property
    def tokens_per_second(self) -> float | None:
        """Of all devices together; None where nothing fits or nobody timed it."""
        if self.plan is None or not self.fits or not self.plan.predicted.step_seconds:
            return None
        return self.plan.predicted.tokens / self.plan.predicted.step_seconds

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "fits": self.fits,
            "tokens_per_second": self.tokens_per_second,
            "plan": None if self.plan is None else self.plan.to_json(),
            "why": self.why,
        }


@dataclass(frozen=True)
class Setting:
    """What a question is about.

    target: budget, precision, optimizer, casts. tokens_per_step of a target count where `accumulates` says so;
    else a step is one micro batch. layout: of the devices. dim: width of the hidden states that the head takes; None
    where it cannot be cut off.
    """

    workload: Workload
    hardware: Hardware
    target: Target
    layout: Layout
    dim: int | None
    max_grad_norm: float | None = 1.0
    accumulates: bool = False
    on_progress: Progress = lambda message: None

    @property
    def allowed_bytes(self) -> int:
        return self.target.allowed_bytes(self.hardware.spec.kind)

    def with_seq_len(self, seq_len: int) -> Setting:
        return replace(self, workload=self.workload.with_seq_len(seq_len), target=replace(self.target, seq_len=seq_len))

    def strategy(self, way: str, micro_batch_size: int = 1) -> Strategy:
        """The leanest one, plain training, or a policy's tiers with the loss in as many chunks as save memory."""
        target, layout, seq_len = self.target, self.layout, self.workload.seq_len
        blocks = len(self.workload.anatomy().blocks)
        policy = parse_policy({LEANEST: "full", PLAIN: "keep"}.get(way, way))
        chunks = 1 if way == PLAIN else self.lean_chunks(micro_batch_size * seq_len)
        steps = 1
        if self.accumulates:
            steps = max(1, -(-target.sequences_per_rank(layout) // micro_batch_size))
        if layout.mesh.pipeline > 1:
            steps = next(n for n in range(steps, 2**32) if layout.pipeline.fits(n, layout.mesh.pipeline))
        casts = target.precision != "fp32" and target.optimizer.weights == "fp32"
        return Strategy(
            micro_batch_size,
            steps,
            target.precision,
            policy.tiers(Situation(blocks)),
            chunks,
            target.optimizer,
            target.cast if casts else "operator",
            target.loss_scale if target.precision == "fp16" else None,
            target.frozen_weights,
            mesh=layout.mesh,
            zero=layout.zero,
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            allocator=target.allocator or AllocatorSettings(),
            offload=target.offload or Offload(),
            attention=self.attention if way != PLAIN else "model",
        )

    @property
    def attention(self) -> Attention:
        """The target's; blockwise where that is left open and the model's own holds all scores."""
        if self.target.attention != "auto":
            return self.target.attention
        return "blockwise" if attention_holds_scores(self.workload, self.hardware) else "model"

    def auto_chunks(self, tokens: int) -> int:
        """What loss chunks `auto` takes; 1 where the head cannot be cut off."""
        return 1 if self.dim is None else auto_chunks(tokens, self.workload.vocab_size, self.dim)

    def lean_chunks(self, tokens: int) -> int:
        """Four times as many pieces, with little left of the logits."""
        return 1 if self.dim is None else max(1, min(tokens, 4 * self.auto_chunks(tokens)))

    def try_out(self, strategy: Strategy) -> Trial:
        """Rehearse it."""
        self.on_progress(f"rehearsing {describe_strategy(strategy)}, sequences of {self.workload.seq_len}")
        norm = None if strategy.optimizer.update == "backward" else self.max_grad_norm
        profile = judged(self.workload, strategy, self.hardware, max_grad_norm=norm)
        return Trial(strategy, self.workload.seq_len, profile, self.allowed_bytes)


def head_dim(workload: Workload) -> int | None:
    """The width of the hidden states that the head takes; None where it cannot be cut off."""
    split = prepare(workload, accelerator("cpu"), workload.meta_model()).split
    return None if isinstance(split, str) else split.dim


def longest_sequence(setting: Setting, *, granularity: int = 256) -> LongestSequence:
    """Raises DoesNotFitError where not even `granularity` tokens do, or all that the model has, if those are fewer."""
    most = setting.workload.max_seq_len or MAX_SEQUENCE
    granularity = min(granularity, most)
    trials: dict[int, Trial] = {}

    def needed(steps: int) -> int:
        at = setting.with_seq_len(min(steps * granularity, most))
        trials[steps] = at.try_out(at.strategy(LEANEST))
        return trials[steps].predicted.needed_bytes

    start = max(1, _USUAL_SEQUENCE // granularity)
    steps = largest_within(needed, setting.allowed_bytes, highest=-(-most // granularity), start=start)
    if not steps:
        raise _nothing_fits(f"not even {granularity} tokens fit", trials[1])
    return LongestSequence(trials[steps].seq_len, granularity, trials[steps], trials.get(steps + 1))


def largest_batches(setting: Setting, ways: Sequence[str] = (PLAIN, LEANEST)) -> tuple[Batch, ...]:
    """For each way the largest micro batch. Raises DoesNotFitError where none of them has room for one sequence."""
    found = []
    smallest: Trial | None = None
    for way in ways:
        batch, first = _largest_batch(setting, way)
        found.append(batch)
        if smallest is None or first.over_bytes < smallest.over_bytes:
            smallest = first
    if smallest is not None and not any(batch.found for batch in found):
        raise _nothing_fits(f"not even one sequence of {setting.workload.seq_len} tokens fits", smallest)
    return tuple(found)


def _largest_batch(setting: Setting, way: str) -> tuple[Batch, Trial]:
    trials: dict[int, Trial] = {}

    def needed(size: int) -> int:
        trials[size] = setting.try_out(setting.strategy(way, size))
        return trials[size].predicted.needed_bytes

    highest = setting.target.sequences_per_rank(setting.layout) if setting.accumulates else MAX_BATCH
    size = largest_within(needed, setting.allowed_bytes, highest=highest)
    return Batch(way, trials.get(size), trials.get(size + 1)), trials[1]


def fewest_devices(setting: Setting, layout_of: Callable[[int], Layout], *, at_most: int = 1024) -> FewestDevices:
    """layout_of: how so many devices are arranged; more of them must not need more memory each.

    Raises DoesNotFitError where at_most of them are too few, which is so when one sequence does not fit by itself.
    """
    trials: dict[int, Trial] = {}

    def fits(count: int) -> bool:
        if count not in trials:
            hardware = replace(setting.hardware, count=count)
            at = replace(setting, hardware=hardware, layout=layout_of(count))
            trials[count] = at.try_out(at.strategy(LEANEST))
        return trials[count].fits

    if fits(1):
        return FewestDevices(1, trials[1], None)
    low, high = 1, 0
    for count in _counts(trials[1], at_most):
        if count <= low:
            continue
        if fits(count):
            high = count
            break
        low = count
    if not high:
        raise _nothing_fits(f"not even {low} devices are enough at ZeRO 3", trials[low], devices="")
    while high - low > 1:
        # What is asked next: one less than what fits, then halves.
        middle = high - 1 if high - 1 not in trials else (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return FewestDevices(high, trials[high], trials[low])


def _counts(alone: Trial, at_most: int) -> Iterator[int]:
    """What sharding all that stays would need, then twice as many until there are no more."""
    stays = alone.predicted.resident_bytes
    room = alone.allowed_bytes - (alone.predicted.needed_bytes - stays)
    count = max(2, -(-stays // room)) if room > 0 else 2
    while count < at_most:
        yield count
        count *= 2
    yield at_most


def compare_cards(
    workload: Workload,
    targets: Sequence[tuple[Hardware, Target]],
    *,
    max_grad_norm: float | None = 1.0,
    on_progress: Progress = lambda message: None,
) -> tuple[Card, ...]:
    """A plan for each device, each with its own budget. Raises DoesNotFitError where none of them has one that fits."""
    cards = []
    for hardware, target in targets:
        name = hardware.spec.name

        def say(message: str, name: str = name) -> None:
            on_progress(f"{name}: {message}")

        try:
            plan = choose(workload, hardware, target, max_grad_norm=max_grad_norm, on_progress=say)
            cards.append(Card(name, plan, "" if plan.fits else plan.reason))
        except InputError as error:
            cards.append(Card(name, None, str(error)))
    if not any(card.fits for card in cards):
        raise DoesNotFitError("; ".join(f"{card.device}: {card.why}" for card in cards))
    return tuple(cards)


def _nothing_fits(what: str, trial: Trial, devices: str = " or more --devices") -> DoesNotFitError:
    """devices: that advice, or nothing where more of them have been tried."""
    return DoesNotFitError(
        f"{what}: {describe_strategy(trial.strategy)} needs {format_bytes(trial.predicted.needed_bytes)}, "
        f"{format_bytes(states_bytes(trial.predicted))} of it parameters, gradients and optimizer states, and "
        f"{format_bytes(trial.allowed_bytes)} are allowed; give it more --memory{devices}, or --optimizer "
        "weights=bf16_stochastic,states=int8"
    )
