"""What of a model no batch changes: its sizes, and its optimizer's update on fake tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from trainfit.rehearsal.model_trace import ModelFacts
from trainfit.rehearsal.tracker import StorageTracker, storage_bytes
from trainfit.techniques.base import Build
from trainfit.techniques.optimizer import states_on_device


def model_facts(build: Build, hidden: Tensor | None, memory_rate: float, tracker: StorageTracker) -> ModelFacts:
    """Of a whole model with its optimizer; call it under fake tensors.

    hidden: what its first block is given, (sequences, tokens, dim). memory_rate: bytes per second. tracker: a new one
    that knows the model's parameters.
    """
    gradients, update_peak, update_seconds = _update(build, tracker)
    optimizer = build.optimizer
    assert optimizer is not None
    blocks = [storage_bytes(block.parameters()) for block in build.blocks]
    return ModelFacts(
        structures=build.anatomy.structures,
        num_trained=sum(p.numel() for p in build.model.parameters() if p.requires_grad),
        parameter_bytes=storage_bytes([*build.model.parameters(), *build.model.buffers()]),
        block_bytes=sum(blocks),
        largest_block_bytes=max(blocks, default=0),
        optimizer_bytes=storage_bytes(states_on_device(optimizer)),
        gradient_bytes=gradients,
        update_peak_bytes=update_peak,
        # Clipping reads the gradients twice and writes them.
        optimizer_seconds=3 * gradients / memory_rate + update_seconds,
        dim=1 if hidden is None else hidden.shape[-1],
        vocab_size=build.workload.vocab_size,
        can_chunk=not isinstance(build.split, str),
        embedding_bytes=_bytes_of(build, build.anatomy.embedding),
        head_bytes=_bytes_of(build, build.anatomy.head),
    )


def _bytes_of(build: Build, name: str | None) -> int:
    """Of the parameters of one part of the model."""
    return storage_bytes(build.model.get_submodule(name).parameters()) if name else 0


def _update(build: Build, tracker: StorageTracker) -> tuple[int, int, float]:
    """Bytes of all gradients, and temporaries and seconds of an update by them."""
    if build.updates_in_backward:
        return 0, 0, 0.0  # part of each block's backward
    optimizer = build.optimizer
    assert optimizer is not None
    trained = [p for p in build.model.parameters() if p.requires_grad]

    def set_gradients() -> None:
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)

    set_gradients()
    if build.workload.make_optimizer is not None:
        optimizer.step()  # its states come with its first step
        set_gradients()
    gradients = [p.grad for p in trained if p.grad is not None]
    tracker.register(gradients, "gradients")
    tracker.register(states_on_device(optimizer), "optimizer")
    tracker.phase = "optimizer"
    start = tracker.live_bytes()
    with tracker:
        optimizer.step()
    num_bytes = storage_bytes(gradients)
    del gradients
    for parameter in trained:
        parameter.grad = None
    return num_bytes, max(0, tracker.peak_bytes() - start), tracker.seconds_of()["optimizer"]
