"""The tiers of all blocks as other systems see them: none, all, every k-th, the first n."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise


@dataclass(frozen=True)
class Tiers:
    """Tiers of the blocks, first to last; no block at all counts as keeping everything."""

    names: Sequence[str]

    @property
    def text(self) -> str:
        """As a recipe has it: "6*full,2*keep"."""
        runs = [(tier, len(list(group))) for tier, group in groupby(self.names)]
        if len(runs) <= 1:
            return runs[0][0] if runs else "keep"
        return ",".join(f"{count}*{tier}" for tier, count in runs)

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(self.names) or frozenset({"keep"})

    @property
    def recomputed(self) -> int:
        """Blocks that do not keep everything."""
        return sum(tier != "keep" for tier in self.names)

    @property
    def offloads(self) -> bool:
        """Whether some block's saved tensors leave the device."""
        return any(tier.startswith("offload") for tier in self.names)

    @property
    def keeps_all(self) -> bool:
        return self.recomputed == 0

    def all_are(self, *tiers: str) -> bool:
        return self.kinds <= set(tiers)

    @property
    def every(self) -> int | None:
        """K where blocks 0, K, 2K, ... are recomputed in full and all others kept."""
        if not self.all_are("full", "keep") or self.keeps_all:
            return None
        full = [block for block, tier in enumerate(self.names) if tier == "full"]
        step = full[1] - full[0] if len(full) > 1 else len(self.names)
        return step if full == list(range(0, len(self.names), step)) else None

    @property
    def step(self) -> int:
        """The largest K for which recomputing every K-th block holds no more than the plan.

        One block in full holds less than one in any other tier that recomputes, so as many blocks will do.
        """
        return max(1, len(self.names) // self.recomputed)

    def most_in_a_stage(self, stages: int) -> int:
        """Recomputed blocks of the stage that has most of them, with blocks cut evenly."""
        cuts = [len(self.names) * stage // stages for stage in range(stages + 1)]
        return max(Tiers(self.names[start:end]).recomputed for start, end in pairwise(cuts))

    def full_first(self, stages: int) -> bool:
        """Whether all is recomputed in full, or by each stage its first blocks, equally many, and others are kept."""
        if self.all_are("full"):
            return True
        most = self.most_in_a_stage(stages)
        cuts = [len(self.names) * stage // stages for stage in range(stages + 1)]
        return all(
            tuple(self.names[start:end]) == ("full",) * most + ("keep",) * (end - start - most)
            for start, end in pairwise(cuts)
        )
