"""What a mesh and a ZeRO stage make of a model's bytes and of a step's time, for the fast model.

Close enough to order candidates; the rehearsal of a rank says what is true. A rank has 1 / T of the parameters of its
stage's blocks and all of those outside of blocks (embedding, head). Of that, with N shards:

| stage | parameters | more while micro batches run      | gradients that stay | optimizer |
|-------|------------|-----------------------------------|---------------------|-----------|
| 0     | 1          |                                   | 1                   | 1         |
| 1     | 1 / N      | the whole                         | 1                   | 1 / N     |
| 2     | 1 / N      | the whole, and what gradients are | 1 / N               | 1 / N     |
|       |            | reduced in                        |                     |           |
| 3     | 1 / N      | what is outside of the blocks and | 1 / N               | 1 / N     |
|       |            | 1 + prefetch blocks; as in 2      |                     |           |

Gradients are reduced in two buffers of a block. A device's allocator keeps them with the stream that communicates,
where no other takes them, and as large as the largest that was reduced there, which may be all that is outside of the
blocks: a 70B model's embedding and head.

Tensor ranks with split sequences have 1 / T of what blocks save, others 1 / T of all but the hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainfit.hardware import Hardware
from trainfit.plan.cost import BlockTable, Resident, Shares
from trainfit.profile import ALL_TIERS, TIER_ACCURACY, Layout, Mesh, ShellTrace, Zero
from trainfit.rehearsal.links import Links
from trainfit.rehearsal.model_trace import ModelFacts
from trainfit.rehearsal.rehearse import operator_cost
from trainfit.techniques import TECHNIQUES
from trainfit.techniques.base import Asked
from trainfit.techniques.pipeline_cut import divide

_LAYOUT_FIELDS = ("zero", "tensor", "pipeline")


def default_layouts(num_devices: int) -> tuple[Layout, ...]:
    """A copy on each device, or one copy's states over all of them, by stage."""
    if num_devices == 1:
        return (Layout(),)
    sharded = (Layout(Mesh(shard=num_devices), Zero(stage)) for stage in (1, 2, 3))
    return (Layout(Mesh(replicate=num_devices)), *sharded)


def every_layout(asked: Asked, num_devices: int) -> tuple[Layout, ...]:
    """All ways to arrange the devices that the techniques of a layout take."""
    techniques = {each.setting: each for each in TECHNIQUES if each.setting in _LAYOUT_FIELDS}
    found: list[Layout] = []
    for mesh in meshes(num_devices):
        drafts: list[Mapping[str, object]] = [{"mesh": mesh}]
        for name in _LAYOUT_FIELDS:
            drafts = [
                {**draft, name: setting} for draft in drafts for setting in techniques[name].choices(draft, asked)
            ]
        found += [Layout(**draft) for draft in drafts]  # type: ignore[arg-type]
    return tuple(found)


def meshes(num_devices: int) -> Iterator[Mesh]:
    """Every factorisation, the least split first."""
    for tensor in _divisors(num_devices):
        for pipeline in _divisors(num_devices // tensor):
            data = num_devices // tensor // pipeline
            for shard in _divisors(data):
                yield Mesh(pipeline, data // shard, shard, tensor)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


@dataclass(frozen=True)
class StagePart:
    """What the ranks of one pipeline stage have, or of several that have as much.

    ranks: their indices along mesh.pipeline. blocks: first to last, of the first rank; those of the others in same.
    waiting: other micro batches under way, at most.
    """

    ranks: tuple[int, ...]
    blocks: tuple[int, ...]
    same: tuple[tuple[int, ...], ...]
    has_embedding: bool
    has_head: bool
    waiting: int

    def same_place(self, offset: int) -> Iterator[int]:
        """The blocks of all ranks at one place."""
        yield self.blocks[offset]
        yield from (blocks[offset] for blocks in self.same)

    def shell(self, whole: ShellTrace, hidden_bytes: int) -> ShellTrace:
        """As much of the model around the blocks as this stage has."""
        if self.has_embedding and self.has_head:
            return whole
        before = whole.before_blocks_peak_bytes if self.has_head else hidden_bytes
        after = whole.after_blocks_peak_bytes if self.has_embedding else 0
        gradient = whole.gradient_bytes if self.has_head else 0
        return ShellTrace(before, gradient, after, whole.seconds if self.has_head else 0.0)


def stage_parts(structures: tuple[int, ...], layout: Layout, accumulation_steps: int) -> list[StagePart]:
    """Stages that differ in what they have; of those alike the one with the most micro batches under way stands."""
    ranks, each = layout.mesh.pipeline, layout.pipeline.stages_per_rank
    if ranks == 1:
        return [StagePart((0,), tuple(range(len(structures))), (), True, True, 0)]
    parts = divide(len(structures), ranks * each)
    found: dict[object, StagePart] = {}
    for rank in range(ranks):
        mine = parts[rank::ranks]
        blocks = tuple(block for part in mine for block in part.blocks)
        if layout.pipeline.schedule == "gpipe":
            under_way = float(accumulation_steps)
        else:
            under_way = ((ranks - rank - 1) * (2 if each > 1 else 1) + (each - 1) * ranks + 1) / each
        waiting = max(0, min(accumulation_steps, int(np.ceil(under_way))) - 1)
        part = StagePart((rank,), blocks, (), mine[0].is_first, mine[-1].is_last, waiting)
        key = (tuple(structures[block] for block in blocks), part.has_embedding, part.has_head)
        same = found.get(key)
        found[key] = part if same is None else replace(same, ranks=(*same.ranks, rank), same=(*same.same, blocks))
    return list(found.values())


def shares_of(layout: Layout) -> Shares:
    mesh, zero = layout.mesh, layout.zero
    split = mesh.shard if zero.reduces_each_micro_batch and zero.stage else 1
    return Shares(mesh.tensor, split * mesh.tensor, mesh.tensor)


def split_table(
    table: BlockTable, whole: BlockTable, layout: Layout, hidden_bytes: int, hardware: Hardware
) -> BlockTable:
    """table: split by shares_of, of blocks that are whole in the other one. Adds what tensor ranks do not split."""
    ranks = layout.mesh.tensor
    if ranks == 1:
        return table
    # Two all-reduces in forward, two in backward, one again in a recompute: see tensor_parallel.py.
    whole_forward = {"keep", "discard", "offload", *TIER_ACCURACY}
    calls = np.array([[4.0 if tier in whole_forward else 5.0] for tier in ALL_TIERS])
    seconds = table.seconds + calls * transfer(hardware, "all_reduce", hidden_bytes, range(ranks))
    if layout.tensor.sequence:
        return replace(table, seconds=seconds)
    stays = np.minimum(whole.saved, hidden_bytes)
    return replace(
        table,
        saved=stays + (whole.saved - stays) // ranks,
        forward_peak=stays + (whole.forward_peak - stays) // ranks,
        seconds=seconds,
    )


def transfer(hardware: Hardware, kind: str, num_bytes: int, ranks: Sequence[int]) -> float:
    """Seconds of one collective of these ranks."""
    return Links.of(hardware.spec).seconds(kind, num_bytes, len(ranks), ranks) if len(ranks) > 1 else 0.0


def resident_of(
    facts: ModelFacts,
    layout: Layout,
    hardware: Hardware,
    part: StagePart,
    *,
    batch_bytes: int,
    shared_bytes: int,
    accumulates: bool,
    gathered: float = 1.0,
    compute_seconds: float = 0.0,
) -> Resident:
    """Bytes and seconds of one rank beside its activations.

    gathered: the size of gathered parameters over that of their shards, where they come in another dtype.
    compute_seconds: of a micro batch's blocks, behind which a device hides communication.
    """
    mesh = layout.mesh
    zero = layout.zero if mesh.data > 1 else Zero()  # a rank with nobody to share with gathers nothing
    outside = _outside(facts, part)
    parameters = _of_blocks(facts, part) // mesh.tensor + outside
    share = parameters / max(1, facts.parameter_bytes)  # of what trains, roughly
    gradients = int(facts.gradient_bytes * share)
    sharded = mesh.shard if zero.stage else 1
    block = facts.largest_block_bytes // mesh.tensor
    working = 0
    if zero.stage in (1, 2):
        working = int(parameters * gathered)
    elif zero.stage == 3:
        working = int((outside + min(1 + zero.prefetch, len(part.blocks)) * block) * gathered)
    if zero.stage and zero.reduces_each_micro_batch:
        working += 2 * block if hardware.is_host else max(2 * block, outside)
    left = gradients // sharded if zero.reduces_each_micro_batch else gradients
    return Resident(
        model_bytes=parameters // sharded + int(facts.optimizer_bytes * share) // sharded,
        batch_bytes=batch_bytes,
        shared_bytes=shared_bytes,
        gradient_bytes=gradients // sharded,
        earlier_gradient_bytes=left if accumulates else 0,
        working_bytes=working,
        update_bytes=int(facts.update_peak_bytes * share) // sharded,
        **_seconds(
            facts,
            replace(layout, zero=zero),
            hardware,
            int(parameters * gathered),
            gradients,
            share,
            compute_seconds,
            accumulates=accumulates,
        ),
    )


def _of_blocks(facts: ModelFacts, part: StagePart) -> int:
    return facts.block_bytes * len(part.blocks) // max(1, len(facts.structures))


def _outside(facts: ModelFacts, part: StagePart) -> int:
    """Parameters outside of the blocks that a stage has: embedding, last norm and head."""
    outside = max(0, facts.parameter_bytes - facts.block_bytes)
    if part.has_embedding and part.has_head:
        return outside
    if part.has_embedding:
        return min(outside, facts.embedding_bytes)
    return max(outside - facts.embedding_bytes, min(outside, facts.head_bytes)) if part.has_head else 0


def _seconds(
    facts: ModelFacts,
    layout: Layout,
    hardware: Hardware,
    parameters: int,
    gradients: int,
    share: float,
    compute_seconds: float,
    *,
    accumulates: bool,
) -> dict[str, float]:
    """A device hides what its blocks' computation covers, all but the first block's gather and the last one's
    reduction; a CPU nothing. Where tensor ranks talk over the same links nothing is hidden either: a block begins with
    one of their collectives, for which computation waits, and which waits for the gather. What shards are copied into
    and out of buffers of collectives nothing hides."""
    mesh, zero = layout.mesh, layout.zero
    shards = range(0, mesh.shard * mesh.tensor, mesh.tensor)
    stride = mesh.shard * mesh.tensor
    of_copies = gradients // (mesh.shard if zero.stage else 1)
    copies = transfer(hardware, "all_reduce", of_copies, range(0, mesh.replicate * stride, stride))
    gather = transfer(hardware, "all_gather", parameters, shards)
    reduce = transfer(hardware, "reduce_scatter", gradients, shards)
    reduces = bool(zero.stage) and zero.reduces_each_micro_batch
    each = (2 * gather if zero.stage == 3 else 0.0) + (reduce if reduces else 0.0)
    links = Links.of(hardware.spec)
    if mesh.tensor > 1 and links.bound(mesh.shard, shards) == links.bound(mesh.tensor, range(mesh.tensor)):
        compute_seconds = 0.0
    if not hardware.is_host:
        seen = each / max(1, len(facts.structures))  # the first gather and the last reduction
        each = max(seen, each - compute_seconds)
    once = (gather if zero.stage in (1, 2) else 0.0) + (0.0 if zero.reduces_each_micro_batch else reduce) + copies
    if zero.stage:
        rate, rest = operator_cost(hardware).memory_rate, 1 - 1 / mesh.shard
        moved_in_and_out, moved_in = 2 * parameters * (2 - rest) / rate, 2 * gradients / rate
        each += 2 * moved_in_and_out if zero.stage == 3 else 0.0
        once += moved_in_and_out if zero.stage < 3 else 0.0
        if not reduces:
            once += moved_in
        else:  # and added up as shards, where the trace of a block has added up whole gradients
            each += moved_in - (3 * gradients * rest / rate if accumulates else 0.0)
    update = facts.optimizer_seconds * share / (mesh.shard if zero.stage else 1)
    return {"micro_batch_seconds": each, "step_seconds": once + update}
