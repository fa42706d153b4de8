"""Documents as sequences of their own lengths, put together into micro batches by their tokens.

NOTE [ Micro batches by tokens ]
An update takes documents in the order of its epoch until they have the tokens that were asked for; which ones depends
on the data and the seed alone, not on a plan. They are sorted, longest first, and cut into micro batches: as many as
fit the tokens of a micro batch when each is padded to the longest of them (up to a multiple of PADDED_TO), or one that
is longer alone. Rows are padded on the right, where no causal model looks back from, and labels there are not counted,
so the padding takes part in nothing: every gradient is that of the documents one by one. Ranks take micro batches in
turn, so those of one micro step are about as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainfit.workload.batch import IGNORED_LABEL, MicroBatch, padded

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class DocumentTokens:
    """Documents end to end, each a sequence of its own; those with more than seq_len tokens to predict are cut.

    starts, lengths: of each sequence, which reads tokens [start, start + length) and predicts those one further.
    update_tokens: that an update takes. batch_tokens: of a micro batch, padding included; 0 takes the size that groups
    is given, in sequences of seq_len.
    """

    tokens: NDArray[np.unsignedinteger[Any]]
    starts: Integers
    lengths: Integers
    seq_len: int
    update_tokens: int
    batch_tokens: int = 0

    @classmethod
    def of(
        cls, tokens: NDArray[np.unsignedinteger[Any]], ends: Integers, seq_len: int, update_tokens: int
    ) -> DocumentTokens:
        """ends: where in tokens each document has ended."""
        begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        predicted = np.maximum(ends - begins - 1, 0)
        pieces = -(-predicted // seq_len)
        number = np.arange(pieces.sum()) - np.repeat(pieces.cumsum() - pieces, pieces)  # within its document
        starts = np.repeat(begins, pieces) + number * seq_len
        lengths = np.minimum(np.repeat(predicted, pieces) - number * seq_len, seq_len)
        return cls(tokens, starts, lengths, seq_len, update_tokens)

    def in_batches_of(self, batch_tokens: int) -> DocumentTokens:
        return replace(self, batch_tokens=batch_tokens)

    @property
    def num_sequences(self) -> int:
        return len(self.starts)

    def rows(self, indices: Sequence[int] | Integers) -> MicroBatch:
        """The sequences at indices as one micro batch, padded on the right. See NOTE [ Micro batches by tokens ]."""
        indices = np.asarray(indices, dtype=np.int64)
        lengths = self.lengths[indices]
        width = self._width(int(lengths.max()))
        inputs = torch.zeros((len(indices), width), dtype=torch.long)
        labels = torch.full((len(indices), width), IGNORED_LABEL, dtype=torch.long)
        for row, (start, length) in enumerate(zip(self.starts[indices].tolist(), lengths.tolist())):
            own = torch.from_numpy(self.tokens[start : start + length + 1].astype(np.int64))
            inputs[row, :length], labels[row, :length] = own[:-1], own[1:]
        return MicroBatch(inputs, labels, int(lengths.sum()))

    def _width(self, longest: int) -> int:
        return max(longest, min(padded(longest), self.seq_len))

    def num_tokens_of(self, indices: Integers) -> int:
        """Labels of the sequences at indices."""
        return int(self.lengths[indices].sum())

    def spread(self, count: int) -> Integers:
        """Indices of count sequences (all, when there are fewer) spread evenly over the text."""
        count = min(count, self.num_sequences)
        return np.arange(count, dtype=np.int64) * self.num_sequences // max(count, 1)

    def window_stop(self, order: Integers, index: int, sequences: int) -> int:
        """Where in an epoch's order the update ends that begins at index: when it has the tokens asked for."""
        reached = self.lengths[order[index:]].cumsum().searchsorted(self.update_tokens)
        return min(index + int(reached) + 1, len(order))

    def groups(self, indices: Integers, batch_size: int) -> list[Integers]:
        """The sequences of each micro batch, longest first. Every index is in exactly one."""
        budget = self.batch_tokens or batch_size * self.seq_len
        order = indices[np.argsort(-self.lengths[indices], kind="stable")]
        groups, at = [], 0
        while at < len(order):
            count = max(1, budget // self._width(int(self.lengths[order[at]])))
            groups.append(order[at : at + count])
            at += count
        return groups

    def updates(self, orders: Iterator[Integers], sequences: int) -> int:
        """Updates in passes over the text in these orders."""
        count = 0
        for order in orders:
            index = 0
            while index < len(order):
                index, count = self.window_stop(order, index, sequences), count + 1
        return count
