"""What an export is, and the draft that keeps count of what it has said, so that nothing of a plan is lost silently.

NOTE [ What is nearest ]
Where a system cannot do what the plan does, an export gives up speed before memory, and memory before accuracy: it
recomputes more rather than hold more, and keeps more precise numbers rather than train less exactly. Each such choice
is a note.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from trainfit.export.tiers import Tiers
from trainfit.profile import LossScale

if TYPE_CHECKING:
    from trainfit.hardware import Kind
    from trainfit.plan import Plan
    from trainfit.step import Strategy


@dataclass(frozen=True)
class Job:
    """What is exported: a strategy, and what else the other system has to be told.

    model, device, plan_hash: for the heading. max_grad_norm: None where nothing is clipped. sequences: of a step, as
    asked for; None where the strategy's are.
    """

    strategy: Strategy
    seq_len: int
    kind: Kind
    model: str
    device: str
    plan_hash: str
    max_grad_norm: float | None = 1.0
    sequences: int | None = None

    @classmethod
    def of_plan(cls, plan: Plan, kind: Kind, max_grad_norm: float | None = 1.0) -> Job:
        seq_len = plan.target.seq_len
        sequences = plan.target.sequences_per_step
        return cls(plan.strategy, seq_len, kind, plan.workload, plan.device, plan.hash, max_grad_norm, sequences)

    @property
    def tiers(self) -> Tiers:
        return Tiers(self.strategy.tiers)

    @property
    def title(self) -> str:
        return f"trainfit plan {self.plan_hash}: {self.model} on {self.strategy.mesh.size} x {self.device}"

    @property
    def environment(self) -> dict[str, str]:
        """What the allocator's settings are for a process that has yet to start."""
        settings = self.strategy.allocator
        default = type(settings)()
        named = [(name, value) for name, value in vars(settings).items() if value != getattr(default, name)]
        if not named or self.kind == "cpu":
            return {}
        return {f"PYTORCH_{self.kind.upper()}_ALLOC_CONF": ",".join(f"{name}:{value}" for name, value in named)}

    @property
    def micro_batches_reduce(self) -> bool:
        """Whether gradients are reduced more often than once a step."""
        strategy = self.strategy
        return strategy.accumulation_steps > 1 and strategy.mesh.shard > 1 and strategy.zero.reduces_each_micro_batch


@dataclass(frozen=True)
class Export:
    """A plan in another system's words.

    file_name: what such a file is usually called. notes: what could not be said, or only nearly.
    """

    system: str
    file_name: str
    text: str
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"file_name": self.file_name, "text": self.text, "notes": list(self.notes)}


class Draft:
    """Notes of an export in the making, and which settings of the strategy it has dealt with.

    Settings are named as in a recipe: "optimizer.states". A name covers what is below it.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._notes: list[str] = []
        self._covered: set[str] = set()

    def express(self, *settings: str) -> None:
        """These have a setting of the same meaning in what is written."""
        self._covered.update(settings)

    def note_compile(self, theirs: str) -> None:
        """theirs: how the other system compiles blocks, where it can."""
        if self.job.strategy.compile.blocks:
            self.note(f"compile: {theirs}, which is not written here", "compile")

    def batch(self, each: str, steps: str) -> dict[str, Any]:
        """Sizes of micro batches and how many make a step, under the names that a system has for them."""
        self.express("micro_batch_size", "accumulation_steps")
        return {each: self.job.strategy.micro_batch_size, steps: self.job.strategy.accumulation_steps}

    def note_environment(self) -> None:
        """For files that set no variables."""
        for name, value in self.job.environment.items():
            self.note(f"allocator: export {name}={value} before the launch", "allocator")

    def note(self, text: str, *settings: str) -> None:
        """These have none, or only a near one."""
        self._covered.update(settings)
        self._notes.append(text)

    def note_if(self, condition: bool, text: str, *settings: str) -> None:
        """As note where condition holds; nothing where it does not."""
        if condition:
            self.note(text, *settings)

    def notes(self, system: str) -> tuple[str, ...]:
        """All of them, with one for every setting that differs from trainfit's default and was not dealt with."""
        rest = [f"{name} {value}: {system} has no setting for it" for name, value in self.left_out()]
        takes, asked = self.job.strategy.sequences_per_step, self.job.sequences
        if self.job.tiers.offloads:
            rest.append(
                f"tiers {self.job.tiers.text}: saved tensors leave the device here and stay there in {system}, where "
                "blocks that recompute keep their inputs: it needs more memory than the plan"
            )
        full = [f"batch: {takes} sequences a step, not {asked}: every micro batch of a rank is full"]
        return (*(full if asked not in (None, takes) else ()), *self._notes, *rest)

    def left_out(self) -> Iterator[tuple[str, Any]]:
        for name, value in changed_settings(self.job.strategy):
            parts = name.split(".")
            if not any(".".join(parts[: depth + 1]) in self._covered for depth in range(len(parts))):
                yield name, value


def changed_settings(strategy: Strategy) -> Iterator[tuple[str, Any]]:
    """Each setting that is not trainfit's default, by its name in a recipe, and its value."""
    default = type(strategy)(micro_batch_size=1)
    for each in fields(strategy):
        yield from _changed(each.name, getattr(strategy, each.name), getattr(default, each.name))


def _changed(name: str, value: Any, default: Any) -> Iterator[tuple[str, Any]]:
    if name == "tiers":
        if set(value) - {"keep"}:
            yield name, Tiers(value).text
    elif name == "tier_table":
        if value:
            yield name, f"of {len(value)} rows, by the tokens of a micro batch"
    elif name == "kept_operators":
        for each in value:
            yield f"{name}.{each.tier}", f"keeps the outputs of {len(each.kept)} operators"
    elif is_dataclass(value):
        default = LossScale() if isinstance(value, LossScale) else default
        if not isinstance(default, type(value)):
            yield name, value
            return
        for each in fields(value):
            yield from _changed(f"{name}.{each.name}", getattr(value, each.name), getattr(default, each.name))
    elif value != default:
        yield name, value
