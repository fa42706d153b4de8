"""MicroBatch: what one forward and backward gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED_LABEL = -100
PADDED_TO = 16  # tokens: matmuls and attention are slow at odd lengths, and allocators like few sizes


def padded(length: int) -> int:
    """The length to which sequences of a micro batch are padded whose longest has so many tokens."""
    return -(-length // PADDED_TO) * PADDED_TO


@dataclass(frozen=True)
class MicroBatch:
    """Inputs and labels of one forward and backward.

    inputs: token ids (batch, sequence), or whatever a user's own module takes as its one argument.
    labels: (batch, sequence), already shifted: labels[:, t] is what position t should predict; IGNORED_LABEL is not
        counted. Padding on the right needs no mask in a causal model: give it IGNORED_LABEL.
    num_tokens: valid labels, counted once on the host so that no step waits for the device.
    """

    inputs: Tensor
    labels: Tensor
    num_tokens: int

    @classmethod
    def of(cls, inputs: Tensor, labels: Tensor) -> MicroBatch:
        """Counts the valid labels: entries that are not IGNORED_LABEL for integer labels, else rows."""
        integer = not labels.is_floating_point()
        return cls(inputs, labels, int((labels != IGNORED_LABEL).sum()) if integer else labels.shape[0])

    @classmethod
    def from_sequences(cls, sequences: Sequence[Tensor], padding_id: int = 0) -> MicroBatch:
        """One row per token sequence (length,), padded on the right; a row of length n predicts its last n - 1."""
        length = max(len(sequence) for sequence in sequences) - 1
        inputs = torch.full((len(sequences), length), padding_id, dtype=torch.long)
        labels = torch.full((len(sequences), length), IGNORED_LABEL, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            inputs[row, : len(sequence) - 1] = sequence[:-1]
            labels[row, : len(sequence) - 1] = sequence[1:]
        return cls.of(inputs, labels)

    def split(self, micro_batch_size: int) -> Iterator[MicroBatch]:
        """Pieces of at most micro_batch_size rows, in order."""
        for inputs, labels in zip(self.inputs.split(micro_batch_size), self.labels.split(micro_batch_size)):
            yield MicroBatch.of(inputs, labels)

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(
            self.inputs.to(device, non_blocking=True), self.labels.to(device, non_blocking=True), self.num_tokens
        )
