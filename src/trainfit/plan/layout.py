"""What a mesh and a ZeRO stage make of a model's bytes and of a step's time, for the fast model.

Close enough to order candidates; the rehearsal of a rank says what is true. With N shards and T x P ranks that split
the model itself, M = T * P:

| stage | parameters | more while micro batches run      | gradients that stay | optimizer |
|-------|------------|-----------------------------------|---------------------|-----------|
| 0     | 1 / M      |                                   | 1 / M               | 1 / M     |
| 1     | 1 / MN     | the whole 1 / M                   | 1 / M               | 1 / MN    |
| 2     | 1 / MN     | the whole 1 / M, one block's two  | 1 / MN              | 1 / MN    |
|       |            | gradient buffers                  |                     |           |
| 3     | 1 / MN     | what is outside of the blocks and | 1 / MN              | 1 / MN    |
|       |            | 1 + prefetch blocks; as in 2      |                     |           |
"""

from __future__ import annotations

from trainfit.hardware import Hardware
from trainfit.plan.cost import Resident, Shares
from trainfit.profile import Layout, Mesh, Zero
from trainfit.rehearsal.trace import ModelFacts

_SLOW_LINK = 1e9  # bytes a second where nothing is known of the link


def default_layouts(num_devices: int) -> tuple[Layout, ...]:
    """A copy on each device, or one copy's states over all of them, by stage."""
    if num_devices == 1:
        return (Layout(),)
    sharded = (Layout(Mesh(shard=num_devices), Zero(stage)) for stage in (1, 2, 3))
    return (Layout(Mesh(replicate=num_devices)), *sharded)


def shares_of(layout: Layout) -> Shares:
    mesh, zero = layout.mesh, layout.zero
    # A pipeline's first stage has its share of blocks, and as many micro batches under way.
    return Shares(mesh.tensor, mesh.shard if zero.reduces_each_micro_batch else 1, mesh.tensor * mesh.pipeline)


def resident_of(
    facts: ModelFacts,
    layout: Layout,
    hardware: Hardware,
    *,
    batch_bytes: int,
    shared_bytes: int,
    accumulates: bool,
    gathered: float = 1.0,
) -> Resident:
    """Bytes and seconds of one rank beside its activations.

    gathered: the size of gathered parameters over that of their shards, where they come in another dtype.
    """
    mesh = layout.mesh
    zero = layout.zero if mesh.data > 1 else Zero()  # a rank with nobody to share with gathers nothing
    split = mesh.tensor * mesh.pipeline
    parameters, gradients = facts.parameter_bytes // split, facts.gradient_bytes // split
    sharded = mesh.shard if zero.stage else 1
    block = facts.largest_block_bytes // mesh.tensor
    outside = max(0, facts.parameter_bytes - facts.block_bytes) // split
    working = 0
    if zero.stage in (1, 2):
        working = int(parameters * gathered)
    elif zero.stage == 3:
        working = int((outside + (1 + zero.prefetch) * block) * gathered)
    if zero.stage and zero.reduces_each_micro_batch:
        working += 2 * block
    left = gradients // sharded if zero.reduces_each_micro_batch else gradients
    return Resident(
        model_bytes=parameters // sharded + facts.optimizer_bytes // split // sharded,
        batch_bytes=batch_bytes,
        shared_bytes=shared_bytes,
        gradient_bytes=gradients // sharded,
        earlier_gradient_bytes=left if accumulates else 0,
        working_bytes=working,
        update_bytes=facts.update_peak_bytes // split // sharded,
        **_seconds(facts, layout, hardware, int(parameters * gathered), gradients),
    )


def _seconds(
    facts: ModelFacts, layout: Layout, hardware: Hardware, parameters: int, gradients: int
) -> dict[str, float]:
    """Rings send (n - 1) / n of the bytes; all-reduce does so twice. None of it hidden: an order, not a forecast."""
    mesh, zero = layout.mesh, layout.zero
    link = hardware.spec.link_bandwidth
    rate = link.value if link else _SLOW_LINK
    ring = (mesh.shard - 1) / mesh.shard / rate
    copies = 2 * (mesh.replicate - 1) / mesh.replicate / rate * gradients / (mesh.shard if zero.stage else 1)
    gather, reduce = ring * parameters, ring * gradients
    each = (2 * gather if zero.stage == 3 else 0.0) + (reduce if zero.reduces_each_micro_batch else 0.0)
    once = (gather if zero.stage in (1, 2) else 0.0) + (0.0 if zero.reduces_each_micro_batch else reduce) + copies
    split = mesh.tensor * mesh.pipeline * (mesh.shard if zero.stage else 1)
    return {"micro_batch_seconds": each, "step_seconds": once + facts.optimizer_seconds / split}
