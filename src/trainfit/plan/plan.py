"""Plan: a strategy, what it will need, and what lost to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainfit.errors import RecipeError
from trainfit.plan.target import Target
from trainfit.profile import Profile
from trainfit.step.strategy import Strategy


@dataclass(frozen=True)
class Alternative:
    """A strategy that was not chosen. rehearsed: its figures are exact, not the fast model's."""

    strategy: Strategy
    peak_bytes: int
    step_seconds: float
    rehearsed: bool
    why: str

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "strategy": self.strategy.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Alternative:
        return cls(**{**data, "strategy": Strategy.from_json(data["strategy"])})


@dataclass(frozen=True)
class MoreMemory:
    """What a device with so many bytes more would make of it, by the fast model: seconds of a step, and how."""

    bytes: int
    step_seconds: float
    how: str


@dataclass(frozen=True)
class Bucket:
    """A row of a strategy's tier table: what its largest micro batches need, and their seconds for each token."""

    max_tokens: int
    peak_bytes: int
    token_seconds: float


@dataclass(frozen=True)
class Plan:
    """What was chosen and why.

    allowed_bytes: the budget less its margin.
    plain: what training without any technique needs, the whole step as one micro batch.
    binds: the event of the step that has the peak: "the loss spike", "backward of block 31", "the optimizer step".
    more_memory: what a little more would buy; None where nothing fits.
    buckets: of a strategy with a tier table, one for each row.
    """

    allowed_bytes: int
    target: Target
    device: str
    workload: str
    strategy: Strategy
    predicted: Profile
    plain: Alternative
    alternatives: tuple[Alternative, ...]
    reason: str
    notes: tuple[str, ...] = ()
    binds: str = ""
    more_memory: MoreMemory | None = None
    buckets: tuple[Bucket, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the prediction stays within what is allowed."""
        return self.predicted.needed_bytes <= self.allowed_bytes

    @property
    def budget_bytes(self) -> int:
        return self.target.budget_bytes

    @property
    def devices(self) -> str:
        """In words, such as "8 x ascend-910b3"."""
        size = self.strategy.mesh.size
        return self.device if size == 1 else f"{size} x {self.device}"

    @property
    def hash(self) -> str:
        """Twelve hex digits of model, device, target, strategy and peak; every run and report cites them."""
        sizes = [self.allowed_bytes, self.predicted.peak_bytes]
        cited = [self.workload, self.device, sizes, self.target.to_json(), self.strategy.to_json()]
        return hashlib.sha256(json.dumps(cited, sort_keys=True).encode()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:
        """The documented keys of `plan --json`; also what plan.json in a run folder holds."""
        return {
            "fits": self.fits,
            "budget_bytes": self.budget_bytes,
            "allowed_bytes": self.allowed_bytes,
            "model": self.workload,
            "device": self.device,
            "target": self.target.to_json(),
            "chosen": {"strategy": self.strategy.to_json(), "predicted": self.predicted.to_json()},
            "plain": self.plain.to_json(),
            "alternatives": [alternative.to_json() for alternative in self.alternatives],
            "reason": self.reason,
            "notes": list(self.notes),
            "binds": self.binds,
            "more_memory": None if self.more_memory is None else asdict(self.more_memory),
            "buckets": [asdict(bucket) for bucket in self.buckets],
            "hash": self.hash,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """The inverse of to_json. Raises RecipeError if a key is missing or the hash is not that of the content."""
        try:
            plan = cls(
                allowed_bytes=data["allowed_bytes"],
                target=Target.from_json(data["target"]),
                device=data["device"],
                workload=data["model"],
                strategy=Strategy.from_json(data["chosen"]["strategy"]),
                predicted=Profile.from_json(data["chosen"]["predicted"]),
                plain=Alternative.from_json(data["plain"]),
                alternatives=tuple(Alternative.from_json(each) for each in data["alternatives"]),
                reason=data["reason"],
                notes=tuple(data["notes"]),
                binds=data.get("binds", ""),
                more_memory=MoreMemory(**data["more_memory"]) if data.get("more_memory") else None,
                buckets=tuple(Bucket(**each) for each in data.get("buckets", ())),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RecipeError(
                f"the plan is not one that `trainfit plan --json` wrote: {error}; make it again"
            ) from error
        sizes = (plan.allowed_bytes, plan.predicted.peak_bytes, plan.plain.peak_bytes)
        if not all(isinstance(size, int) for size in sizes):
            raise RecipeError(f"the plan's sizes are {sizes}, not whole bytes; make it again")
        if plan.hash != data.get("hash"):
            raise RecipeError(f"the plan says hash {data.get('hash')}, its content {plan.hash}; make it again")
        return plan
