"""What the fast model knows of a workload: traces at one micro batch, and what does not depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainfit.profile import BlockTrace, ShellTrace, Tier


@dataclass(frozen=True)
class ModelTrace:
    """What the fast model knows of a workload at one micro batch and precision.

    blocks: by structure and tier.
    shell: by number of loss chunks.
    shared_bytes: what all blocks are given besides hidden states (rotary tables, masks); it lives as long as any block.
    """

    blocks: Mapping[tuple[int, Tier], BlockTrace]
    shell: Mapping[int, ShellTrace]
    shared_bytes: int


@dataclass(frozen=True)
class ModelFacts:
    """What does not depend on the batch: sizes in bytes; structures has one entry per block.

    num_trained: parameters that train, tied ones once.
    gradient_bytes: of all of them before the update; 0 where each goes as soon as it is there.
    update_peak_bytes, optimizer_seconds: temporaries and time of the update.
    """

    structures: tuple[int, ...]
    num_trained: int
    parameter_bytes: int
    block_bytes: int  # of all blocks' parameters
    largest_block_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    update_peak_bytes: int
    optimizer_seconds: float
    dim: int
    vocab_size: int
    can_chunk: bool
    embedding_bytes: int = 0
    head_bytes: int = 0
