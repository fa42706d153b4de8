"""Traces of any micro batch from those of one and two sequences, to order what is worth tracing itself.

NOTE [ Straight lines ]
Bytes of a block are a constant and a part that grows with the tokens, and so, but for kernels that turn from bound by
memory to bound by arithmetic, are its seconds. The shell's bytes grow with the tokens and with those of one chunk of
the loss, its seconds with the tokens and with the number of chunks. Two traces draw the line of the blocks, three of
the shell its plane. Of T tensor ranks each has a constant part of a block and 1 / T of the rest, and its collectives
take as long as (T - 1) / T of what they carry, so one more trace, of the most ranks, gives any number of them. What is
chosen is traced at its own size before it is solved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, TypeVar

from trainfit.hardware import Hardware
from trainfit.profile import BlockTrace, OptimizerVariant, Precision, ShellTrace, TensorParallel, Tier
from trainfit.rehearsal.model_trace import ModelTrace
from trainfit.rehearsal.trace import Tracer
from trainfit.second_process import SecondProcess
from trainfit.workload import Workload

T = TypeVar("T", BlockTrace, ShellTrace)
_Blocks = Mapping[tuple[int, Tier], BlockTrace]
_Split = tuple[int, TensorParallel]  # how many tensor ranks, and how they work together
_FEW, _MORE = 2, 4  # chunks of the loss


def begin_tracer(
    beside: SecondProcess,
    workload: Workload,
    hardware: Hardware,
    variant: OptimizerVariant,
    settings: Mapping[str, Any],
) -> None:
    """Have the other process make the tracer that a Sketch will ask it for, while this one makes its own."""
    workload.anatomy()  # is sent along once it is known: the workload without it would be another one there
    beside.submit(_make_tracer, workload, hardware, variant, settings)


class Sketch:
    """Of one tracer and precision, with gradients of earlier micro batches in place."""

    def __init__(
        self,
        tracer: Tracer,
        precision: Precision,
        max_size: int,
        tokens: int,
        *,
        splits: Iterable[_Split] = (),
        beside: SecondProcess | None = None,
    ) -> None:
        """max_size: of a micro batch. tokens: of a sequence. splits: what split_blocks() will be asked for.

        beside: a process that traces some of it.
        """
        chunks = (1, _FEW, _MORE) if tracer.facts.can_chunk and tokens >= _MORE else (1,)
        self._tracer, self._precision = tracer, precision
        self._wholes: dict[object, Mapping[tuple[int, Tier], list[float]]] = {}
        self._lines: dict[object, _Blocks] = {}  # by micro batch, and by tensor ranks
        setting = tracer.workload, tracer.hardware, tracer.variant, tracer.settings
        self._begun: dict[_Split | None, Callable[[], ModelTrace | None]] = {}
        if beside is not None and not tracer.compiled.blocks:
            if max_size > 1:
                self._begun[None] = beside.submit(_trace, *setting, None, 2, precision, (1, *chunks[2:]))
            for split in splits:
                self._begun[split] = beside.submit(_trace, *setting, split, 1, precision, (1,))
        self._one = tracer.trace(1, precision, chunks, accumulates=True)
        if None in self._begun:
            two = self._begun[None]()
            assert two is not None
            tracer.learn(two, 2, precision, accumulates=True)
        else:
            two = self._one
            if max_size > 1:
                two = tracer.trace(2, precision, (1, *chunks[2:]), accumulates=True)
        self._two = two

    @cached_property
    def shared_bytes(self) -> int:
        return self._one.shared_bytes

    def blocks(self, size: int) -> _Blocks:
        if size not in self._lines:
            one, two = self._one.blocks, self._two.blocks
            self._lines[size] = {key: _line(one[key], two[key], size) for key in one}
        return self._lines[size]

    def split_blocks(self, size: int, ranks: int, setting: TensorParallel, most_ranks: int) -> _Blocks | None:
        """blocks() of one of several tensor ranks, most_ranks at most; None where that cannot be traced."""
        if (line := (size, ranks, setting, most_ranks)) in self._lines:
            return self._lines[line]
        key = most_ranks, setting
        if key not in self._wholes:
            if key in self._begun:
                split = self._begun[key]()
            else:
                split = self._tracer.split_trace(*key, 1, self._precision, (1,), accumulates=True)
            if split is None:
                return None
            self._wholes[key] = {
                each: _constant_parts(self._one.blocks[each], split.blocks[each], most_ranks) for each in split.blocks
            }
        found = {}
        for each, block in self.blocks(size).items():
            constant = self._wholes[key][each]
            values = [type(value)(value * (part + (1 - part) / ranks)) for value, part in zip(_fields(block), constant)]
            found[each] = BlockTrace(*values)
        self._lines[line] = found
        return found

    def shell(self, size: int, chunks: int) -> ShellTrace:
        if chunks == 1 or _FEW not in self._one.shell:
            return _line(self._one.shell[1], self._two.shell[1], size)
        few, more, longer = self._one.shell[_FEW], self._one.shell[_MORE], self._two.shell.get(_MORE)
        if longer is None:
            longer = more
        values = []
        for name in ("before_blocks_peak_bytes", "gradient_bytes", "after_blocks_peak_bytes"):
            at_few, at_more, at_longer = (getattr(each, name) for each in (few, more, longer))
            piece = (at_few - at_more) / (1 / _FEW - 1 / _MORE)  # of all tokens of one sequence in one piece
            # Two sequences in four chunks have the pieces of one in two.
            grows = at_longer - at_few if longer is not more else 0
            constant = at_few - grows - piece / _FEW
            values.append(max(0, int(constant + grows * size + piece * size / chunks)))
        call = (more.seconds - few.seconds) / (_MORE - _FEW)
        grows = longer.seconds - more.seconds
        seconds = few.seconds - grows - call * _FEW + grows * size + call * chunks
        return ShellTrace(values[0], values[1], values[2], max(0.0, seconds))

    def trace(self, size: int, chunks: int, blocks: _Blocks | None = None) -> ModelTrace:
        return ModelTrace(blocks or self.blocks(size), {chunks: self.shell(size, chunks)}, self.shared_bytes)


def _trace(
    workload: Workload,
    hardware: Hardware,
    variant: OptimizerVariant,
    settings: Mapping[str, Any],
    split: _Split | None,
    *args: Any,
) -> ModelTrace | None:
    """In another process: what a tracer like that gives there."""
    tracer = _tracer(workload, hardware, variant, settings)
    if split is None:
        return tracer.trace(*args, accumulates=True)
    return tracer.split_trace(*split, *args, accumulates=True)


def _tracer(workload: Workload, hardware: Hardware, variant: OptimizerVariant, settings: Mapping[str, Any]) -> Tracer:
    """Made once."""
    key = "tracer", repr((variant, sorted(settings.items())))
    tracer: Tracer | None = workload.memo.get(key)
    # A copy's memo begins with that of the workload it was copied from.
    if tracer is None or tracer.workload is not workload or tracer.hardware != hardware:
        tracer = workload.memo[key] = Tracer(workload, hardware, variant, **settings)
    return tracer


def _make_tracer(*args: Any) -> None:
    """For later: a tracer cannot be sent."""
    _tracer(*args)


def _constant_parts(whole: BlockTrace, split: BlockTrace, ranks: int) -> list[float]:
    """Of each field what every tensor rank has, over the whole; the rest is shared by them."""
    pairs = zip(_fields(whole), _fields(split))
    return [(part / value - 1 / ranks) / (1 - 1 / ranks) if value else 0.0 for value, part in pairs]


def _fields(trace: BlockTrace | ShellTrace) -> tuple[Any, ...]:
    """As dataclasses.astuple, which copies each number."""
    return tuple(getattr(trace, name) for name in trace.__dataclass_fields__)


def _line(one: T, two: T, size: int) -> T:
    """Each field at another size; whole numbers stay whole."""
    return type(one)(*(max(0, a + (b - a) * (size - 1)) for a, b in zip(_fields(one), _fields(two))))
