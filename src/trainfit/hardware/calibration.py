"""Calibration: what one machine takes for each class of operator, by dtype and size. Plain data; imports no torch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise, product
from typing import Any

from trainfit.errors import DeviceError
from trainfit.hardware.device import Kind

FORMAT = 4


@dataclass(frozen=True)
class Table:
    """Seconds of one call over one to three sizes, each axis in growing order; row-major.

    Between points the logarithm of the seconds is linear in the logarithms of the sizes. Below the smallest size a call
    takes as long as there, beyond the largest it grows in proportion to the size.
    """

    axes: tuple[tuple[float, ...], ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.seconds) != math.prod(map(len, self.axes)) or not self.axes or not all(self.axes):
            raise ValueError(f"{len(self.seconds)} figures for axes of {[len(axis) for axis in self.axes]}")
        if any(left >= right for axis in self.axes for left, right in pairwise(axis)):
            raise ValueError("sizes are not in growing order")
        if min(self.seconds) <= 0 or not all(map(math.isfinite, self.seconds)) or min(a[0] for a in self.axes) <= 0:
            raise ValueError("sizes and seconds have to be above zero")

    @classmethod
    def grown(cls, axes: tuple[tuple[float, ...], ...], measured: Mapping[tuple[int, ...], float]) -> Table:
        """From seconds by position on each axis: whoever is larger takes no less.

        A position that nobody measured, since it takes long, takes in proportion to one before it, whichever makes it
        fastest: rates grow with sizes. What noise made faster than something smaller is raised to it.
        """
        filled: dict[tuple[int, ...], float] = {}
        for position in product(*(range(len(axis)) for axis in axes)):
            before = [
                ((*position[:a], position[a] - 1, *position[a + 1 :]), axes[a][position[a]] / axes[a][position[a] - 1])
                for a in range(len(axes))
                if position[a]
            ]
            value = measured.get(position) or min(filled[each] * factor for each, factor in before)
            filled[position] = max([value, *(filled[each] for each, _ in before)])
        return cls(axes, tuple(filled.values()))

    @property
    def smallest(self) -> float:
        """Seconds at the smallest sizes: hardly more than calling the operator."""
        return self.seconds[0]

    def at(self, *sizes: float) -> float:
        """Seconds of a call of these sizes, one for each axis."""
        corners, scale = [(0, 1.0)], 1.0
        for axis, size in zip(self.axes, sizes, strict=True):
            scale *= max(1.0, size / axis[-1])
            low, high, share = _between(axis, size)
            corners = [
                (index * len(axis) + at, weight * part)
                for index, weight in corners
                for at, part in ((low, 1 - share), (high, share))
                if part
            ]
        return scale * math.exp(sum(weight * self._logarithms[index] for index, weight in corners))

    @cached_property
    def _logarithms(self) -> tuple[float, ...]:
        return tuple(map(math.log, self.seconds))


def _between(axis: tuple[float, ...], size: float) -> tuple[int, int, float]:
    """The points around a size, and how far it is from the first to the second in logarithms."""
    if size <= axis[0]:
        return 0, 0, 0.0
    if size >= axis[-1]:
        return len(axis) - 1, len(axis) - 1, 0.0
    high = bisect_right(axis, size)
    return high - 1, high, math.log(size / axis[high - 1]) / math.log(axis[high] / axis[high - 1])


@dataclass(frozen=True)
class Calibration:
    """Everything that was measured on one machine, for one number of threads and one version of torch.

    tables: by what was measured, such as "matmul.nt.bf16" (m, n, k) or "silu.fp32" (elements); see microbenchmarks.py.
    per_operator: seconds of the host for each operator around its kernel, by part of the step, over the bytes that
        operators touch in the mean; see overheads.py. "forward", "backward" and "no_grad" are always there.
    spread: how far apart rounds of the same measurement were, relative to the fastest; the median of all.
    date: of the measurement, YYYY-MM-DD.
    """

    device: str
    kind: Kind
    num_threads: int
    torch_version: str
    date: str
    spread: float
    per_operator: Mapping[str, Table] = field(hash=False)
    tables: Mapping[str, Table] = field(hash=False)

    def around(self, part: str, touched: float) -> float:
        """Seconds of an operator around its kernel, where operators touch so many bytes. A part that was not measured,
        such as one of a technique, is like forward. Beyond the largest size there is no more: caches are empty then."""
        table = self.per_operator.get(part, self.per_operator["forward"])
        return table.at(min(max(1.0, touched), table.axes[0][-1]))

    def table(self, name: str) -> Table | None:
        return self.tables.get(name)

    @property
    def source(self) -> str:
        """What a figure that was read off it says of itself."""
        threads = f", {self.num_threads} thread(s)" if self.kind == "cpu" else ""
        return f"measured here on {self.date}{threads}, torch {self.torch_version}"

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> Calibration:
        """The inverse of to_json. Raises DeviceError that says what is wrong with the content."""
        try:
            if data.get("format") != FORMAT:
                raise ValueError(f"its format is {data.get('format')}, not {FORMAT}")
            tables, per_operator = _tables(data["tables"]), _tables(data["per_operator"])
            rest = {name: kind(data[name]) for name, kind in _PLAIN.items()}
            if missing := {"forward", "backward", "no_grad"} - per_operator.keys():
                raise ValueError(f"per_operator has no {min(missing)}")
            if not 0 <= rest["spread"] < math.inf:
                raise ValueError("a figure is out of range")
            return cls(**rest, per_operator=per_operator, tables=tables)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DeviceError(f"no calibration: {' '.join(str(error).split()) or type(error).__name__}") from error


def _tables(data: Mapping[str, Any]) -> dict[str, Table]:
    return {
        str(name): Table(tuple(tuple(map(float, axis)) for axis in table["axes"]), tuple(table["seconds"]))
        for name, table in data.items()
    }


_PLAIN: Mapping[str, Any] = {
    "device": str,
    "kind": str,
    "num_threads": int,
    "torch_version": str,
    "date": str,
    "spread": float,
}
