"""Attention tile by tile: the arithmetic of blockwise attention, and in what order its tiles come.

NOTE [ Tiles ]
Scores are made for a tile of queries and keys at a time, for as many (sequence, key head) pairs as a tile has room for,
and never all together. Forward keeps a running maximum and sum of each row; what it hands to backward beside the output
is one logarithm of a sum a row. Backward makes each tile again from that.
Temporaries, in tiles of at most `tile` scores each: forward holds one, and one more of half inputs or with dropout;
backward holds two, and one more each of half inputs, with a soft cap and with dropout; two rows of queries, keys and
values beside them.
Sums over tiles, maxima and logarithms are fp32 where inputs are half. Tiles that `causal` or `window` masks out are
never made; `mask` and `bias` are read tile by tile.

NOTE [ Tiles that stand for others ]
All tiles of one size do the same to memory, and take as long. A rehearsal gives `repeated`: of each kind of tile one
runs, inside repeated(times), which multiplies what an enclosing one says. The order of kinds within a row does not
matter for bytes, since a tile's temporaries die with it; it is a function, so that none of its variables outlive it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Repeated = Callable[[float], AbstractContextManager[None]]
_SMALLEST, _LARGEST = 64, 1024  # rows of a tile
_NO = float("-inf")


@dataclass(frozen=True)
class Scores:
    """How scores come about: scale * queries @ keys, capped, plus bias, without what is masked.

    causal: query i sees keys up to i, as F.scaled_dot_product_attention has it. window: of those, the last so many; 0
    for all. softcap: c in c * tanh(score / c); 0 for none. dropout: probability. tile: scores made at a time, at most,
    unless a single head's smallest tile has more. upcast: half inputs are multiplied in fp32, not only summed.
    """

    scale: float
    causal: bool = False
    window: int = 0
    softcap: float = 0.0
    dropout: float = 0.0
    tile: int = 2**18
    upcast: bool = True

    @property
    def factor(self) -> float:
        """What queries @ keys are multiplied by before anything else."""
        return self.scale / self.softcap if self.softcap else self.scale


class Tensors(NamedTuple):
    """query (batch, heads, q, dim), key (batch, key heads, k, dim), value (batch, key heads, k, value dim).

    mask: True where a key is seen; bias: added to scores. Both broadcast to (batch, heads, q, k). sinks (heads,): the
    score of one more key for each head, which has no value. seed: of dropout.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None
    seed: int


class Span(NamedTuple):
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


class Part(NamedTuple):
    """Sequences and key heads that are computed on together."""

    batch: Span
    heads: Span

    @property
    def pairs(self) -> int:
        return self.batch.size * self.heads.size


class Columns(NamedTuple):
    """Keys of a tile. edge: whether causal or window masks out some of its scores. times: tiles that it stands for."""

    keys: Span
    edge: bool
    times: int = 1


class Rows(NamedTuple):
    """Queries of tiles, with the keys that they see. times: rows that they stand for."""

    queries: Span
    columns: tuple[Columns, ...]
    times: int = 1


def spans(total: int, size: int) -> list[Span]:
    return [Span(start, min(start + size, total)) for start in range(0, total, size)]


def is_seen(scores: Scores, queries: Span, keys: Span) -> tuple[bool, bool]:
    """Whether a tile has scores that causal and window leave, and some that they mask out."""
    if not scores.causal:
        return True, False
    window = scores.window or queries.stop + 1
    some = keys.start <= queries.stop - 1 and keys.stop - 1 > queries.start - window
    every = keys.stop - 1 <= queries.start and keys.start > queries.stop - 1 - window
    return some, not every


def plan_rows(scores: Scores, num_queries: int, num_keys: int, size: int) -> list[Rows]:
    """All tiles of a part, row by row."""
    rows = []
    for queries in spans(num_queries, size):
        found = [(keys, *is_seen(scores, queries, keys)) for keys in spans(num_keys, size)]
        rows.append(Rows(queries, tuple(Columns(keys, edge) for keys, some, edge in found if some)))
    return rows


def folded(rows: list[Rows]) -> list[Rows]:
    """One row of each size with one tile of each kind. See NOTE [ Tiles that stand for others ]."""
    kept: list[Rows] = []
    for size in dict.fromkeys(row.queries.size for row in rows):
        alike = [row for row in rows if row.queries.size == size]
        each = [columns for row in alike for columns in row.columns]
        times = Counter((columns.keys.size, columns.edge) for columns in each)
        first = {(columns.keys.size, columns.edge): columns for columns in reversed(each)}
        columns = tuple(first[kind]._replace(times=count) for kind, count in times.items())
        kept.append(Rows(alike[0].queries, columns, len(alike)))
    return kept


def tile_shape(scores: Scores, batch: int, key_heads: int, groups: int, longest: int) -> tuple[int, int, int]:
    """Rows of a tile, and how many sequences and key heads are computed on together.

    An eighth of the sequence: what a causal mask hides of the tiles on its edge is computed for nothing.
    """
    size = _SMALLEST
    while size < min(_LARGEST, longest // 8) and groups * 4 * size * size <= scores.tile:
        size *= 2
    size = min(size, longest)
    pairs = max(1, scores.tile // (groups * size * size))
    heads = min(key_heads, pairs)
    return size, min(batch, pairs // heads) if heads == key_heads else 1, heads


class Walk:
    """The parts and rows of one call, all of them or, in a rehearsal, those that stand for others."""

    def __init__(self, tensors: Tensors, scores: Scores, repeated: Repeated | None) -> None:
        batch, heads, num_queries, _ = tensors.query.shape
        key_heads, num_keys = tensors.key.shape[1:3]
        self.groups = heads // key_heads
        self.size, at_once, heads_at_once = tile_shape(
            scores, batch, key_heads, self.groups, max(num_queries, num_keys)
        )
        self.rows = plan_rows(scores, num_queries, num_keys, self.size)
        self.parts = [Part(b, h) for b in spans(batch, at_once) for h in spans(key_heads, heads_at_once)]
        self._repeated = repeated

    def each_part(self) -> Iterator[Part]:
        if self._repeated is None:
            yield from self.parts
            return
        self.rows = folded(self.rows)
        sizes = [(part.batch.size, part.heads.size) for part in self.parts]
        for size in dict.fromkeys(sizes):
            with self._repeated(sizes.count(size)):
                yield self.parts[sizes.index(size)]

    def row(self, rows: Rows) -> AbstractContextManager[None]:
        """What runs inside counts for so many rows."""
        return nullcontext() if self._repeated is None else self._repeated(rows.times)

    def tile(self, columns: Columns, rows: Rows) -> AbstractContextManager[None]:
        """Inside of row()."""
        return nullcontext() if self._repeated is None else self._repeated(columns.times / rows.times)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Tile:
    """What the tiles of one part have in common, and how one of them is made."""

    def __init__(self, tensors: Tensors, scores: Scores, groups: int, part: Part) -> None:
        self.tensors, self.scores, self.groups, self.part = tensors, scores, groups, part
        self.sum_dtype = accumulation_dtype(tensors.query.dtype)
        self.dtype = self.sum_dtype if scores.upcast else tensors.query.dtype
        # Half queries are not scaled before they are multiplied, which would round them.
        self.held = scores.factor if self.dtype == self.sum_dtype else 1.0

    @property
    def query_heads(self) -> slice:
        return slice(self.part.heads.start * self.groups, self.part.heads.stop * self.groups)

    def of_queries(self, tensor: Tensor, span: Span, dtype: torch.dtype) -> Tensor:
        """(pairs, groups * queries, dim) of a tensor (batch, heads, queries, dim)."""
        found = tensor[self.part.batch.slice, self.query_heads, span.slice].to(dtype)
        return found.reshape(self.part.pairs, self.groups * span.size, tensor.shape[-1])

    def of_keys(self, tensor: Tensor, span: Span) -> Tensor:
        """(pairs, keys, dim) of a tensor (batch, key heads, keys, dim)."""
        found = tensor[self.part.batch.slice, self.part.heads.slice, span.slice].to(self.dtype)
        return found.reshape(self.part.pairs, span.size, tensor.shape[-1])

    def into_queries(self, target: Tensor, span: Span, rows: Tensor) -> None:
        """The inverse of of_queries."""
        place = target[self.part.batch.slice, self.query_heads, span.slice]
        place.copy_(rows.view(place.shape))

    def queries(self, span: Span) -> Tensor:
        found = self.of_queries(self.tensors.query, span, self.dtype)
        return found if self.held == 1.0 else found * self.held

    def multiply(self, first: Tensor, second: Tensor) -> Tensor:
        """A batched product, as a tile of sums."""
        product = torch.bmm(first, second)
        return product if product.dtype == self.sum_dtype else product.to(self.sum_dtype)

    def raw(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Scores before cap, bias and mask; under a cap, its tanh."""
        made = self.multiply(queries, keys.transpose(1, 2))
        if self.held != self.scores.factor:
            made.mul_(self.scores.factor)
        return made.tanh_() if self.scores.softcap else made

    def finish(self, made: Tensor, queries: Span, columns: Columns) -> Tensor:
        """Scores from raw ones, in place."""
        if self.scores.softcap:
            made.mul_(self.scores.softcap)
        by_head = self.by_head(made, queries)
        if self.tensors.bias is not None:
            by_head.add_(self.piece(self.tensors.bias, queries, columns.keys))
        if self.tensors.mask is not None:
            by_head.masked_fill_(self.piece(self.tensors.mask, queries, columns.keys).logical_not(), _NO)
        if columns.edge:
            by_head.masked_fill_(self.hidden(queries, columns.keys), _NO)
        return made

    def by_head(self, made: Tensor, queries: Span) -> Tensor:
        """(batch, key heads, groups, queries, keys), a view."""
        return made.view(self.part.batch.size, self.part.heads.size, self.groups, queries.size, -1)

    def sinks(self, queries: Span) -> Tensor:
        """(pairs, groups * queries, 1): the score of each row's sink."""
        assert self.tensors.sinks is not None
        rows = self.tensors.sinks.new_empty(self.part.pairs, self.groups * queries.size, 1, dtype=self.sum_dtype)
        own = self.tensors.sinks[self.query_heads].view(self.part.heads.size, self.groups, 1, 1)
        self.by_head(rows, queries).copy_(own)
        return rows

    def piece(self, tensor: Tensor, queries: Span, keys: Span) -> Tensor:
        """A tile's part of what broadcasts to (batch, heads, queries, keys), as by_head has it; a view."""
        part, groups = self.part, self.groups
        batch, heads, rows, columns = tensor.shape
        found = tensor[
            part.batch.slice if batch > 1 else slice(None),
            self.query_heads if heads > 1 else slice(None),
            queries.slice if rows > 1 else slice(None),
            keys.slice if columns > 1 else slice(None),
        ]
        by_head: Tensor = found.unflatten(1, (part.heads.size, groups) if heads > 1 else (1, 1))
        return by_head

    def hidden(self, queries: Span, keys: Span) -> Tensor:
        """(queries, keys): True where causal or window masks a score out."""
        device = self.tensors.query.device
        behind = torch.arange(queries.start, queries.stop, device=device)[:, None] - torch.arange(
            keys.start, keys.stop, device=device
        )
        return (behind < 0) | (behind >= self.scores.window) if self.scores.window else behind < 0

    def dropped(self, like: Tensor, queries: Span, keys: Span) -> Tensor:
        """What dropout multiplies probabilities by; the same for the same seed and tile."""
        generator = None
        if self.tensors.seed >= 0:  # a rehearsal draws no numbers
            tile = (self.part.batch.start, self.part.heads.start, queries.start, keys.start)
            generator = torch.Generator(device=like.device).manual_seed(hash((self.tensors.seed, *tile)) & (2**63 - 1))
        keep = 1.0 - self.scores.dropout
        return torch.empty_like(like).bernoulli_(keep, generator=generator).mul_(1.0 / keep)


# ---- forward ---------------------------------------------------------------------------------------------------------


class _Running(NamedTuple):
    """Of each row so far: its maximum, the sum of its exponentials and of what they weigh."""

    maximum: Tensor
    total: Tensor
    weighed: Tensor


def forward(tensors: Tensors, scores: Scores, repeated: Repeated | None = None) -> tuple[Tensor, Tensor]:
    """Output (batch, heads, q, value dim), and the logarithm of each row's sum (batch, heads, q), infinite where a row
    has nothing to see and its output is zero."""
    query, value = tensors.query, tensors.value
    batch, heads, num_queries, _ = query.shape
    # Heads behind queries, as models want it next.
    output = query.new_empty(batch, num_queries, heads, value.shape[-1]).transpose(1, 2)
    logsum = query.new_empty(batch, heads, num_queries, dtype=accumulation_dtype(query.dtype))
    walk = Walk(tensors, scores, repeated)
    for part in walk.each_part():
        tile = Tile(tensors, scores, walk.groups, part)
        for rows in walk.rows:
            with walk.row(rows):
                _forward_rows(tile, rows, walk, output, logsum)
    return output, logsum


def _forward_rows(tile: Tile, rows: Rows, walk: Walk, output: Tensor, logsum: Tensor) -> None:
    queries = tile.queries(rows.queries)
    shape = queries.shape[:2]
    sinks = tile.tensors.sinks is not None
    running = _Running(
        tile.sinks(rows.queries) if sinks else queries.new_full((*shape, 1), _NO, dtype=tile.sum_dtype),
        queries.new_full((*shape, 1), float(sinks), dtype=tile.sum_dtype),
        queries.new_zeros((*shape, tile.tensors.value.shape[-1]), dtype=tile.sum_dtype),
    )
    for columns in rows.columns:
        with walk.tile(columns, rows):
            _forward_tile(tile, rows.queries, columns, queries, running)
    nothing = running.total == 0
    total = running.total.masked_fill_(nothing, 1.0)
    tile.into_queries(output, rows.queries, running.weighed.div_(total))
    total.log_().add_(running.maximum).masked_fill_(nothing, math.inf)
    tile.into_queries(logsum.unsqueeze(-1), rows.queries, total)


def _forward_tile(tile: Tile, span: Span, columns: Columns, queries: Tensor, running: _Running) -> None:
    made = tile.finish(tile.raw(queries, tile.of_keys(tile.tensors.key, columns.keys)), span, columns)
    maximum = torch.maximum(running.maximum, made.amax(-1, keepdim=True))
    shift = maximum.masked_fill(maximum == _NO, 0.0)  # where nothing was seen yet, exp(-inf - 0) is 0
    made.sub_(shift).exp_()
    shrink = running.maximum.sub_(shift).exp_()
    running.total.mul_(shrink).add_(made.sum(-1, keepdim=True))
    if tile.scores.dropout:
        made.mul_(tile.dropped(made, span, columns.keys))
    values = tile.of_keys(tile.tensors.value, columns.keys)
    running.weighed.mul_(shrink).add_(tile.multiply(made.to(tile.dtype), values))
    running.maximum.copy_(maximum)


# ---- backward --------------------------------------------------------------------------------------------------------


class _Result(NamedTuple):
    """What a part's tiles add up to; key and value: (pairs, keys, dim). bias, sinks: of all parts."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    sinks: Tensor | None


class _RowData(NamedTuple):
    """queries, gradient (pairs, rows, dim); logsum, mean (pairs, rows, 1): mean of the gradients of probabilities."""

    queries: Tensor
    gradient: Tensor
    logsum: Tensor
    mean: Tensor
    query_sum: Tensor


def backward(
    gradient: Tensor,
    tensors: Tensors,
    output: Tensor,
    logsum: Tensor,
    scores: Scores,
    bias_gradient: bool,
    repeated: Repeated | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, bias (no elements unless bias_gradient) and sinks (none where there are none)."""
    query, key, value = tensors.query, tensors.key, tensors.value
    sum_dtype = accumulation_dtype(query.dtype)
    of_query, of_key, of_value = (torch.empty_like(each) for each in (query, key, value))
    of_bias = None
    if bias_gradient:
        assert tensors.bias is not None
        of_bias = torch.zeros_like(tensors.bias, dtype=sum_dtype, memory_format=torch.contiguous_format)
    of_sinks = None if tensors.sinks is None else torch.zeros_like(tensors.sinks, dtype=sum_dtype)
    walk = Walk(tensors, scores, repeated)
    for part in walk.each_part():
        tile = Tile(tensors, scores, walk.groups, part)
        result = _Result(
            of_query,
            key.new_zeros(part.pairs, *key.shape[2:], dtype=sum_dtype),
            value.new_zeros(part.pairs, *value.shape[2:], dtype=sum_dtype),
            of_bias,
            of_sinks,
        )
        for rows in walk.rows:
            with walk.row(rows):
                _backward_rows(tile, rows, walk, result, gradient, output, logsum)
        if (rest := scores.scale / tile.held) != 1.0:
            result.key.mul_(rest)
        for whole, own in ((of_key, result.key), (of_value, result.value)):
            place = whole[part.batch.slice, part.heads.slice]
            place.copy_(own.view(place.shape))
        del result, own
    return of_query, of_key, of_value, _as(of_bias, tensors.bias, query), _as(of_sinks, tensors.sinks, query)


def _as(gradient: Tensor | None, of: Tensor | None, query: Tensor) -> Tensor:
    """In the dtype of what it is the gradient of; nothing for none."""
    return query.new_empty(0) if gradient is None or of is None else gradient.to(of.dtype)


def _backward_rows(
    tile: Tile, rows: Rows, walk: Walk, result: _Result, gradient: Tensor, output: Tensor, logsum: Tensor
) -> None:
    span = rows.queries
    queries = tile.queries(span)
    mean = (tile.of_queries(gradient, span, tile.sum_dtype) * tile.of_queries(output, span, tile.sum_dtype)).sum(
        -1, keepdim=True
    )
    logsums = tile.of_queries(logsum.unsqueeze(-1), span, tile.sum_dtype)
    if result.sinks is not None:
        errors = tile.sinks(span).sub_(logsums).exp_().mul_(mean)
        result.sinks[tile.query_heads].sub_(tile.by_head(errors, span).sum((0, 3, 4)).flatten())
        del errors
    data = _RowData(
        queries,
        tile.of_queries(gradient, span, tile.dtype),
        logsums,
        mean,
        queries.new_zeros(queries.shape, dtype=tile.sum_dtype),
    )
    for columns in rows.columns:
        with walk.tile(columns, rows):
            _backward_tile(tile, span, columns, data, result)
    tile.into_queries(result.query, span, data.query_sum.mul_(tile.scores.scale))


def _backward_tile(tile: Tile, span: Span, columns: Columns, data: _RowData, result: _Result) -> None:
    keys = tile.of_keys(tile.tensors.key, columns.keys)
    made = tile.raw(data.queries, keys)
    slope = made.square().neg_().add_(1.0) if tile.scores.softcap else None
    weights = tile.finish(made, span, columns).sub_(data.logsum).exp_()
    values = tile.of_keys(tile.tensors.value, columns.keys)
    errors = tile.multiply(data.gradient, values.transpose(1, 2))
    dropped = None
    if tile.scores.dropout:
        dropped = tile.dropped(made, span, columns.keys)
        errors.mul_(dropped)
    errors.sub_(data.mean).mul_(weights)
    if dropped is not None:
        weights.mul_(dropped)
        del dropped
    result.value[:, columns.keys.slice].add_(tile.multiply(weights.to(tile.dtype).transpose(1, 2), data.gradient))
    del made, weights
    if result.bias is not None:
        place = tile.piece(result.bias, span, columns.keys)
        by_head = tile.by_head(errors, span)
        spread = [dim for dim in range(5) if place.shape[dim] < by_head.shape[dim]]
        place.add_(by_head.sum(spread, keepdim=True) if spread else by_head)
    if slope is not None:
        errors.mul_(slope)
        del slope
    low = errors.to(tile.dtype)
    data.query_sum.add_(tile.multiply(low, keys))
    result.key[:, columns.keys.slice].add_(tile.multiply(low.transpose(1, 2), data.queries))
