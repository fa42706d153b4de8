"""A loss scale for each block: for models whose gradients, first block to last, span more than fp16 does.

NOTE [ Scales change at borders ]
Units are what comes before the blocks, each block, and what comes after them. Within unit i gradients are multiplied by
S_i; where they leave a unit for the one before, a hook multiplies by S_before / S_i. All scales are powers of two, so
that scaling loses nothing by itself, and fp32 gradients are to the bit those of plain training. A parameter that acts
both before and after the blocks (a tied head) gets two contributions, so these two units share one scale.
The hooks sit on what a block is given and on what the last one returns: outside of what a tier recomputes, inside of
what FSDP does around a block.

NOTE [ How scales are chosen ]
After each window, per unit and over all ranks: the largest gradient of its parameters, and of what left it. S_i puts
the larger of the two, or what it recently was, just below 2**10: six powers of two are left for gradients inside of a
block that nobody looks at. A unit that overflows all the same is the last one with a non-finite gradient, since infs
flow to all before it: it alone backs off, to a ceiling that grows again as a single scale would. With it go units
before it that have never been finite, of which nothing is known yet.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer

from trainfit.errors import ModelError, RecipeError
from trainfit.hardware.ranks import local_part
from trainfit.profile import LossScale
from trainfit.techniques.base import Build
from trainfit.workload.flow import BlockFlow, hidden_input, trace_flow

_TARGET = 2.0**10
_MEMORY = 0.95  # of a unit's largest gradient, from one step to the next


@dataclass
class ScaleBook:
    """Which scale each unit has and why; plain numbers. See NOTE [ How scales are chosen ].

    ceilings: above which a unit has overflowed. calm: finite steps since its ceiling last moved. largest: what its
    gradients lately were. tied: the first unit and the last have one scale.
    """

    scales: list[float]
    ceilings: list[float | None]
    calm: list[int]
    largest: list[float]
    tied: bool = False

    @classmethod
    def of(cls, num_units: int, init_scale: float, *, tied: bool) -> ScaleBook:
        scale = _power_below(init_scale)
        return cls([scale] * num_units, [None] * num_units, [0] * num_units, [0.0] * num_units, tied)

    def culprit(self, largest: Sequence[float]) -> int | None:
        """The first unit in the order of backward whose gradients are not finite."""
        return next((unit for unit in reversed(range(len(largest))) if not math.isfinite(largest[unit])), None)

    def learn(self, largest: Sequence[float], setting: LossScale) -> int | None:
        """The largest gradient of each unit, as it truly is, after a step. Returns the unit that overflowed."""
        culprit = self.culprit(largest)
        if culprit is not None:
            self._back_off(culprit, setting)
        for unit in range(0 if culprit is None else culprit + 1, len(largest)):
            self._grow(unit, setting)
            self.largest[unit] = max(largest[unit], _MEMORY * self.largest[unit])
            self.scales[unit] = self._wanted(unit)
        if self.tied:
            self.scales[0] = self.scales[-1] = min(self.scales[0], self.scales[-1])
        return culprit

    def _back_off(self, culprit: int, setting: LossScale) -> None:
        scale = self.scales[culprit] * setting.backoff_factor
        self.ceilings[culprit], self.calm[culprit] = scale, 0
        for unit in range(culprit + 1):
            if unit == culprit or self.largest[unit] == 0.0:
                self.scales[unit] = min(self.scales[unit], scale)

    def _grow(self, unit: int, setting: LossScale) -> None:
        ceiling = self.ceilings[unit]
        self.calm[unit] += 1
        if ceiling is not None and self.calm[unit] >= setting.growth_interval:
            self.ceilings[unit], self.calm[unit] = ceiling * setting.growth_factor, 0

    def _wanted(self, unit: int) -> float:
        if self.largest[unit] == 0.0:
            return self.scales[unit]
        wanted = _power_below(_TARGET / self.largest[unit])
        ceiling = self.ceilings[unit]
        return wanted if ceiling is None else min(wanted, ceiling)


class _Borders:
    """What the hooks know: the scales of a window, and what they saw. Holds no module."""

    def __init__(self, scales: list[float], device: torch.device) -> None:
        self.scales = scales
        self.largest = torch.zeros(len(scales), dtype=torch.float32, device=device)

    def cross(self, unit: int, gradient: Tensor) -> Tensor | None:
        """The gradient that leaves a unit, as the unit before wants it."""
        _keep_largest(self.largest[unit], local_part(gradient))
        ratio = self.scales[unit - 1] / self.scales[unit]
        return None if ratio == 1.0 else gradient * ratio


class BlockScaling:
    """Scales by block. See NOTE [ Scales change at borders ]."""

    kind: ClassVar[str] = "per_block"

    def __init__(self, setting: LossScale, build: Build) -> None:
        """Raises ModelError for a model whose blocks hand on more than hidden states, RecipeError for a pipeline and
        for factors that are no powers of two."""
        _refuse(setting, build)
        flow = _flow_of(build)
        self.setting = setting
        self.names = ["before the blocks", *build.anatomy.blocks, "after the blocks"]
        self._units, tied = _parameters_by_unit(build, flow)
        self.book = ScaleBook.of(len(self._units), setting.init_scale, tied=tied)
        self.skips_in_a_row = 0
        self.culprit: str | None = None
        self._ranks = build.ranks
        self._borders = _Borders(self.book.scales, build.accelerator.device)
        self._largest: list[float] | None = None
        _watch_borders(build.blocks, self._borders)

    @property
    def scale(self) -> float:
        """Of the loss."""
        return self.book.scales[-1]

    @property
    def tensors(self) -> list[Tensor]:
        return [self._borders.largest]

    def begin(self) -> float:
        self._borders.scales = list(self.book.scales)
        self._borders.largest.zero_()
        return self.scale

    @torch.no_grad()
    def unscale(self, optimizer: Optimizer) -> None:
        scales = self._borders.scales
        seen = self._borders.largest / torch.tensor(scales, device=self._borders.largest.device)
        for unit, parameters in enumerate(self._units):
            for device, _, gradients in local_gradients(parameters):
                found = torch.zeros((), dtype=torch.float32, device=device)
                inverse = torch.full((), 1.0 / scales[unit], dtype=torch.float32, device=device)
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
                largest = torch.stack(torch._foreach_norm(gradients, math.inf)).amax()
                largest = torch.where(found > 0, math.inf, largest)
                torch.maximum(seen[unit], largest.to(seen.device), out=seen[unit])
        seen = self._ranks.max(seen)
        self._largest = None if isinstance(seen, FakeTensor) else seen.tolist()

    def step(self, optimizer: Optimizer) -> bool:
        culprit = None if self._largest is None else self.book.learn(self._largest, self.setting)
        self.culprit = None if culprit is None else self.names[culprit]
        if culprit is None:
            optimizer.step()
        self.skips_in_a_row = 0 if culprit is None else self.skips_in_a_row + 1
        return culprit is not None

    def state(self) -> dict[str, Any]:
        return {"kind": self.kind, "skips_in_a_row": self.skips_in_a_row, **asdict(self.book)}

    def load(self, state: Mapping[str, Any]) -> None:
        numbers = {key: list(state[key]) for key in ("scales", "ceilings", "calm", "largest")}
        if any(len(values) != len(self._units) for values in numbers.values()):
            raise ValueError(f"scales of {len(numbers['scales'])} units for a model of {len(self._units)}")
        self.book = ScaleBook(**numbers, tied=self.book.tied)
        self.skips_in_a_row = int(state["skips_in_a_row"])

    @contextmanager
    def other_scales(self, scales: Sequence[float]) -> Iterator[None]:
        """For windows that nobody steps with."""
        own, self.book.scales = self.book.scales, list(scales)
        try:
            yield
        finally:
            self.book.scales = own


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[tuple[torch.device, torch.dtype, list[Tensor]]]:
    """What this rank has of the gradients, without empty shards, by device and dtype as foreach wants them."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None and (gradient := local_part(parameter.grad)).numel():
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return [(device, dtype, gradients) for (device, dtype), gradients in groups.items()]


def _keep_largest(kept: Tensor, gradient: Tensor) -> None:
    """kept, 0-dim, becomes the largest |gradient| seen, inf for anything that is not finite."""
    largest = torch.linalg.vector_norm(gradient.detach(), math.inf).to(kept)
    kept.copy_(torch.maximum(kept, torch.where(largest.isfinite(), largest, math.inf)))


def _power_below(value: float) -> float:
    return math.ldexp(1.0, max(-100, min(100, math.frexp(value)[1] - 1)))


def _refuse(setting: LossScale, build: Build) -> None:
    if build.ranks.mesh.pipeline > 1 or build.ranks.mesh.tensor > 1:
        raise RecipeError(
            "loss_scale.per_block does not work with mesh.pipeline and mesh.tensor; use mesh.shard, or leave it out"
        )
    factors = {"growth_factor": setting.growth_factor, "backoff_factor": setting.backoff_factor}
    if bad := [name for name, value in factors.items() if math.frexp(value)[0] != 0.5]:
        raise RecipeError(
            f"loss_scale.{bad[0]} {factors[bad[0]]} is no power of two, which scales by block must be; use 2 and 0.5"
        )


def _flow_of(build: Build) -> BlockFlow:
    """Of a fake model, since this one may be sharded by now."""
    device = build.accelerator.device
    if not build.anatomy.blocks:
        raise ModelError("the model has no repeated blocks, so loss_scale.per_block has nothing to scale; leave it out")
    some = next(build.model.parameters())
    with ExitStack() as stack:
        if not isinstance(local_part(some.detach()), FakeTensor):
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.device(device))
        model = build.workload.make_model().train()
    try:
        return trace_flow(
            model,
            build.anatomy,
            seq_len=build.workload.seq_len,
            device=device,
            autocast=build.accelerator.autocast("fp32"),
        )
    except ModelError as error:
        reason = str(error).partition(": ")[2].rpartition(";")[0]
        raise ModelError(f"loss_scale.per_block cannot scale between blocks: {reason}; leave it out") from error


def _parameters_by_unit(build: Build, flow: BlockFlow) -> tuple[list[list[nn.Parameter]], bool]:
    """Parameters that train, and whether some act both before the blocks and after them."""
    found: dict[int, int] = {}
    units: list[list[nn.Parameter]] = [[] for _ in range(len(build.blocks) + 2)]
    tied = False
    for unit, block in enumerate(build.blocks, start=1):
        for parameter in block.parameters():
            if parameter.requires_grad and found.setdefault(id(parameter), unit) == unit:
                units[unit].append(parameter)
            elif parameter.requires_grad:
                raise ModelError("loss_scale.per_block: two blocks share a parameter; leave it out")
    for name, parameter in build.model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad or found.get(id(parameter)) in range(1, len(units) - 1):
            continue
        is_before, is_after = name in flow.before, name in flow.after
        tied = tied or (is_before and is_after)
        if id(parameter) not in found:
            found[id(parameter)] = unit = 0 if is_before else len(units) - 1
            units[unit].append(parameter)
    return units, tied


def _watch_borders(blocks: Sequence[nn.Module], borders: _Borders) -> None:
    """Hooks hold the borders weakly: a step that is gone scales nothing any more."""
    reference = weakref.ref(borders)
    for unit, block in enumerate(blocks, start=1):
        block.register_forward_pre_hook(partial(_enter, reference, unit), with_kwargs=True)
    blocks[-1].register_forward_hook(partial(_leave_last, reference, len(blocks) + 1))


def _enter(borders: weakref.ref[_Borders], unit: int, module: nn.Module, args: Any, kwargs: Any) -> None:
    _watch(borders, unit, hidden_input(args, kwargs))


def _leave_last(borders: weakref.ref[_Borders], unit: int, module: nn.Module, args: Any, output: Any) -> None:
    _watch(borders, unit, output[0] if isinstance(output, tuple) else output)


def _watch(borders: weakref.ref[_Borders], unit: int, hidden: Tensor) -> None:
    if torch.is_grad_enabled() and hidden.requires_grad and borders() is not None:
        hidden.register_hook(partial(_cross, borders, unit))


def _cross(borders: weakref.ref[_Borders], unit: int, gradient: Tensor) -> Tensor | None:
    alive = borders()
    return None if alive is None else alive.cross(unit, gradient)
