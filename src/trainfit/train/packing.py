"""Packing: one array of tokens cut into sequences, and sequences into the windows that updates take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from trainfit.workload.batch import IGNORED_LABEL, MicroBatch

Tokens = NDArray[np.unsignedinteger[Any]]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Position:
    """Where in the data a run stands: the next sequence of an epoch's order. Independent of the micro batch size."""

    epoch: int = 0
    index: int = 0


class Sequences(Protocol):
    """What an epoch takes in some order: PackedTokens, all of one length, or DocumentTokens (variable.py)."""

    @property
    def tokens(self) -> Tokens: ...

    @property
    def num_sequences(self) -> int: ...

    def rows(self, indices: Sequence[int] | Indices) -> MicroBatch: ...

    def num_tokens_of(self, indices: Indices) -> int: ...

    def window_stop(self, order: Indices, index: int, sequences: int) -> int: ...

    def groups(self, indices: Indices, batch_size: int) -> list[Indices]: ...

    def updates(self, orders: Iterator[Indices], sequences: int) -> int: ...

    def spread(self, count: int) -> Indices: ...


@dataclass(frozen=True)
class PackedTokens:
    """Documents end to end, cut into sequences of seq_len.

    Sequence i reads tokens [i * seq_len, (i + 1) * seq_len) and predicts those one further, so every token but the
    first (and a rest shorter than a sequence at the end) is predicted exactly once.
    """

    tokens: Tokens
    seq_len: int

    @property
    def num_sequences(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_len)

    def rows(self, indices: Sequence[int] | Indices) -> MicroBatch:
        """The sequences at indices as one micro batch (len(indices), seq_len)."""
        starts = np.asarray(indices, dtype=np.int64)[:, None] * self.seq_len
        block = torch.from_numpy(self.tokens[starts + np.arange(self.seq_len + 1)].astype(np.int64))
        labels = block[:, 1:].contiguous()
        return MicroBatch(block[:, :-1].contiguous(), labels, labels.numel())

    def num_tokens_of(self, indices: Indices) -> int:
        """Labels of the sequences at indices."""
        return len(indices) * self.seq_len

    def window_stop(self, order: Indices, index: int, sequences: int) -> int:
        """Where in an epoch's order the update ends that begins at index."""
        return min(index + sequences, len(order))

    def groups(self, indices: Indices, batch_size: int) -> list[Indices]:
        """The sequences of each micro batch."""
        return [indices[start : start + batch_size] for start in range(0, len(indices), batch_size)]

    def updates(self, orders: Iterator[Indices], sequences: int) -> int:
        """Updates in passes over the text in these orders: each pass's last one may be short, and is still one."""
        return sum(updates_per_epoch(len(order), sequences) for order in orders)

    def spread(self, count: int) -> Indices:
        """Indices of count sequences (all, when there are fewer) spread evenly over the text."""
        count = min(count, self.num_sequences)
        return np.arange(count, dtype=np.int64) * self.num_sequences // max(count, 1)


def updates_per_epoch(num_sequences: int, sequences_per_update: int) -> int:
    """Optimizer updates in one pass: the last one may be short, and is still an update."""
    return ceil(num_sequences / sequences_per_update)


def epoch_order(data: Sequences, seed: int, epoch: int) -> Indices:
    """The order of an epoch's sequences, a function of seed and epoch."""
    return np.random.default_rng([seed, epoch]).permutation(data.num_sequences)


Share = tuple[int, int]
WHOLE: Share = (0, 1)


def shared_batches(data: Sequences, indices: Indices, batch_size: int, share: Share = WHOLE) -> Iterator[MicroBatch]:
    """The sequences at indices, batch_size at a time: what rank share[0] of share[1] gets of them.

    Each micro step takes a group of sequences for every rank, in the order of the ranks, and the last one what is left.
    All ranks get as many batches: one for which nothing is left gets a row without a valid label.
    """
    rank, count = share
    groups = data.groups(indices, batch_size)
    for start in range(0, len(groups), count):
        own = groups[start + rank] if start + rank < len(groups) else None
        yield _without_labels(data.rows(groups[-1][-1:])) if own is None else data.rows(own)


def _without_labels(batch: MicroBatch) -> MicroBatch:
    return MicroBatch(batch.inputs, torch.full_like(batch.labels, IGNORED_LABEL), 0)


def windows(
    data: Sequences,
    micro_batch_size: int,
    sequences_per_update: int,
    position: Position,
    seed: int,
    share: Share = WHOLE,
) -> Iterator[tuple[list[MicroBatch], Position]]:
    """Micro batches of one update after another, without end, each with the position after it.

    An update takes sequences_per_update (documents: as many as have its tokens), whatever the micro batch: its last
    micro batch may be short. The order of an
    epoch is a function of seed and epoch. The last window of an epoch has what is left; it never reaches into the next.
    share: see shared_batches; positions are those of all ranks together.
    """
    epoch, index = position.epoch, position.index
    while True:
        order = epoch_order(data, seed, epoch)
        while index < len(order):
            stop = data.window_stop(order, index, sequences_per_update)
            chosen, index = order[index:stop], stop
            after = Position(epoch, index) if index < len(order) else Position(epoch + 1, 0)
            yield list(shared_batches(data, chosen, micro_batch_size, share)), after
        epoch, index = epoch + 1, 0


def unigram_loss(train: Sequences, held_out: Sequences, indices: Indices, vocab_size: int) -> float:
    """Cross entropy (nats per token) of the held-out labels at indices under the token frequencies of train.

    Frequencies are smoothed by adding one to each count, so a token never seen in training costs a finite loss.
    """
    counts = np.ones(vocab_size, dtype=np.int64)
    for start in range(0, len(train.tokens), 2**22):  # bincount copies its input to int64: a piece at a time
        counts += np.bincount(train.tokens[start : start + 2**22], minlength=vocab_size)
    log_probabilities = np.log(counts / counts.sum())
    total, num_tokens = 0.0, 0
    for index in indices:
        labels = held_out.rows([int(index)]).labels.numpy()
        labels = labels[labels != IGNORED_LABEL]
        total += float(log_probabilities[labels].sum())
        num_tokens += labels.size
    return -total / num_tokens
