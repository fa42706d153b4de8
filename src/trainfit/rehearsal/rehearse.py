"""rehearse(): the very step that will run, on fake tensors."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fully_shard

from trainfit.errors import ModelError, RecipeError, TrainfitError
from trainfit.hardware import Hardware, Ranks, accelerator, ranks_of
from trainfit.hardware.ranks import fake_process_group
from trainfit.hardware.runtime import distributed_backend_of, rehearsed
from trainfit.profile import Category, Mesh, Phase, Profile
from trainfit.rehearsal.alike import runs_alike
from trainfit.rehearsal.events import SHELL
from trainfit.rehearsal.links import Links
from trainfit.rehearsal.operator_cost import OperatorCost
from trainfit.rehearsal.operators import FakeKernels
from trainfit.rehearsal.record import StepRecord
from trainfit.rehearsal.shorten import shortened
from trainfit.rehearsal.splice import Cut, NotAlikeError, cut_of
from trainfit.rehearsal.tracker import StorageTracker
from trainfit.rehearsal.watched import Watched
from trainfit.rehearsal.whereabouts import places_of
from trainfit.rehearsal.workspaces import library_bytes
from trainfit.step import Strategy, TrainStep, build_step
from trainfit.techniques.offload import OFFLOADED
from trainfit.techniques.optimizer import states_on_device
from trainfit.techniques.pipeline_cut import divide
from trainfit.workload import Workload
from trainfit.workload.batch import MicroBatch


def rehearse(
    workload: Workload,
    strategy: Strategy,
    hardware: Hardware,
    *,
    rank: int = 0,
    max_grad_norm: float | None = 1.0,
    micro_batches: Sequence[MicroBatch] | None = None,
    allowed_bytes: int | None = None,
) -> Profile:
    """Bytes and seconds of one optimizer step on one rank, from the step itself.

    By default every micro batch is full: (micro_batch_size, seq_len), under the row of a tier table that is for it. Of
    a full window not all run, see NOTE [ Micro batches that wait ]. micro_batches, of any shapes, all run. Optimizer
    states exist from the start, so the first step is like any other. allowed_bytes: see Watched.profile.
    Raises DeviceError for a precision that the device lacks and for several ranks in a process that is one already,
    RecipeError for tiers that are not as many as blocks and for a rank that is not there.
    """
    hardware.require(strategy.precision)
    if not 0 <= rank < strategy.mesh.size:
        raise RecipeError(
            f"rank {rank} of {strategy.mesh.size} is not there; give one from 0 to {strategy.mesh.size - 1}"
        )

    if micro_batches is None and strategy.tier_table:
        strategy = strategy.for_tokens(strategy.micro_batch_size * workload.seq_len)

    def rehearsed_of(model: Workload, shallow: Strategy, cut: Cut | None) -> Profile:
        with fake_ranks(strategy.mesh, rank, hardware) as ranks, fake_tensors():
            device = rehearsed(hardware.spec.kind)
            step = build_step(model, shallow, device, max_grad_norm=max_grad_norm, ranks=ranks)
            if workload.make_optimizer is not None:  # its states come with its first step
                with FakeKernels(), model_errors():
                    step(micro_batches or _full_window(model, strategy, strategy.accumulation_steps))
            if micro_batches is not None:
                watched = watch_step(step, micro_batches, hardware, cut=cut)
            else:
                watched = _watch_full_window(step, model, hardware, cut)
        late = workload.make_optimizer is not None
        return watched.profile(hardware, late_states=late, allowed_bytes=allowed_bytes)

    for cut in cuts_of(workload, strategy, rank):
        short = shortened(workload, cut.kept)
        assert short is not None
        try:
            return rehearsed_of(short, _of_blocks(strategy, cut.kept), cut)
        except NotAlikeError:
            pass  # more blocks then, at the price of time
        except TrainfitError:
            break  # to be said of the blocks that were asked for, with their numbers
    return rehearsed_of(workload, strategy, None)


def _of_blocks(strategy: Strategy, kept: Sequence[int]) -> Strategy:
    """The strategy for some blocks of the model."""
    table = tuple(replace(row, tiers=tuple(row.tiers[at] for at in kept)) for row in strategy.tier_table)
    return replace(strategy, tiers=tuple(strategy.tiers[at] for at in kept), tier_table=table)


def cuts_of(workload: Workload, strategy: Strategy, rank: int) -> Iterator[Cut]:
    """Which blocks may be enough, the fewest first; none where all have to run. See NOTE [ Splicing ].

    Whatever looks at all blocks together in ways that the tracker does not know is rehearsed whole: an optimizer of the
    workload's own, a loss scale for each block, several stages on a rank, a model that runs blocks by their number.
    """
    scales = strategy.loss_scale is not None and strategy.loss_scale.per_block
    anatomy, mesh = workload.anatomy(), strategy.mesh
    if workload.make_optimizer is not None or scales or strategy.pipeline.stages_per_rank > 1:
        return
    if anatomy.block_list is None or len(strategy.tiers) != len(anatomy.blocks):
        return  # the latter is an error, and said when the step is made
    stages = [part.blocks for part in divide(len(anatomy.blocks), mesh.pipeline)]
    own = rank // (mesh.size // mesh.pipeline)
    # Of a table blocks are alike that have the same tiers in each of its rows.
    kinds: list[Hashable] = list(zip(anatomy.structures, strategy.tiers, *(row.tiers for row in strategy.tier_table)))
    if strategy.tensor.sequence and stages[own]:
        # The first is given sequences that are split already and shifts what it hands on, the last is given a gradient
        # of whole ones.
        kinds[stages[own][0]], kinds[stages[own][-1]] = "first", "last"
    elif strategy.zero.stage == 3 and mesh.data > 1 and own < mesh.pipeline - 1:
        kinds[stages[own][-1]] = "last"  # nothing after it is gathered: it keeps its own parameters
    # A block that recomputes the one before it reads what the one before that returned.
    near = max(1, strategy.zero.prefetch if mesh.data > 1 else 1) + strategy.recompute_ahead
    # What comes back for a block is asked for before the next one's backward has begun.
    near += any(tier in OFFLOADED for tier in strategy.tiers)
    for reach in (near, near + 1):
        if (cut := cut_of(kinds, stages, own, reach)) is None:
            continue
        if runs_alike(workload, cut, stages[own]):
            yield cut


def block_passes(workload: Workload, strategy: Strategy) -> int:
    """What a rehearsal of the ranks that are judged takes, in runs of a micro batch through a block."""
    stages = strategy.mesh.pipeline
    cut = next(cuts_of(workload, strategy, 0), None)
    blocks = len(strategy.tiers if cut is None else cut.kept)
    return -(-blocks // stages) * sum(_running(strategy, stage) for stage in {0, stages - 1})


def _running(strategy: Strategy, stage: int) -> int:
    """How many micro batches of a full window run on a rank of this pipeline stage.

    See NOTE [ Micro batches that wait ].
    """
    mesh, steps = strategy.mesh, strategy.accumulation_steps
    if mesh.size == 1:
        return 1
    if mesh.pipeline > 1:
        under_way = mesh.pipeline - (stage if strategy.pipeline.stages_per_rank == 1 else 0)
        settled = _as_many_as_fit(strategy, under_way + 2)
        return min(steps, settled) if strategy.pipeline.schedule == "1f1b" else steps
    return min(steps, 2 if mesh.data == 1 else 3)


def _as_many_as_fit(strategy: Strategy, least: int) -> int:
    """Micro batches that a pipeline's schedule takes, so many or the next more."""
    return next(number for number in range(least, 10**9) if strategy.pipeline.fits(number, strategy.mesh.pipeline))


def _watch_full_window(step: TrainStep, workload: Workload, hardware: Hardware, cut: Cut | None) -> Watched:
    """NOTE [ Micro batches that wait ]

    A single process runs the last micro batch, on gradients that the others have left: no earlier one needs as much,
    and each takes as long. Ranks talk at other times in the first, the middle ones and the last, so these three run,
    and the middle one counts for all like it; without data ranks, who sum losses after the last and gather anew before
    each, the last is like the middle ones. Stages of a pipeline have several micro batches under way, the last one only
    one: as many run as are under way, and two more. The second stretch from a forward to the next one that follows a
    backward, which in the first stage is the first with all under way, counts for the rest. How long stages wait for
    each other shows on no single rank: see `_with_turns`.
    """
    strategy = step.strategy
    steps = strategy.accumulation_steps
    if strategy.mesh.size == 1:
        if steps > 1:
            for parameter in step.model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        return watch_step(step, _full_window(workload, strategy, 1), hardware, waiting=steps - 1, cut=cut)
    running = _running(strategy, step.ranks.rank // (strategy.mesh.size // strategy.mesh.pipeline))
    batches = _full_window(workload, strategy, running)
    with FakeKernels(), model_errors():
        _set_up(step)
    return watch_step(step, batches, hardware, waiting=steps - running, like=min(1, running - 1), cut=cut)


def _set_up(step: TrainStep) -> None:
    """What the first step makes and later ones find there.

    FSDP's buffers for gathered parameters, and on fake tensors its shards' padding once more.
    """
    for module in step.root.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()


@contextmanager
def fake_ranks(mesh: Mesh, rank: int, hardware: Hardware) -> Iterator[Ranks]:
    """One rank of a mesh whose others are not there. Enter it before fake_tensors()."""
    if mesh.size == 1:
        yield Ranks()
        return
    numbers = random.getstate()  # PyTorch's stand-ins for collectives draw from it
    try:
        with fake_process_group(mesh.size, rank), _real_meshes():
            yield ranks_of(mesh, accelerator("cpu"), backend=distributed_backend_of(hardware.spec.kind))
    finally:
        random.setstate(numbers)


@contextmanager
def _real_meshes() -> Iterator[None]:
    """The mesh over which FSDP keeps parameters after forward is made in fully_shard, and cannot be fake."""
    name = "_get_post_forward_mesh_info"
    original = getattr(_fully_shard, name)

    def make(*args: Any) -> Any:
        with unset_fake_temporarily():
            return original(*args)

    setattr(_fully_shard, name, make)
    try:
        yield
    finally:
        setattr(_fully_shard, name, original)


@contextmanager
def fake_tensors(mode: FakeTensorMode | None = None) -> Iterator[FakeTensorMode]:
    """Tensors without memory, of a new mode or an earlier one. Fake `cpu` and not `meta`, which would take attention's
    slow path. See NOTE [ Known results ]."""
    with mode or FakeTensorMode(allow_non_fake_inputs=True) as entered, torch.device("cpu"), FakeKernels(reads=False):
        yield entered


def _full_window(workload: Workload, strategy: Strategy, count: int) -> list[MicroBatch]:
    return [full_micro_batch(workload, strategy) for _ in range(count)]


def full_micro_batch(workload: Workload, strategy: Strategy) -> MicroBatch:
    """A micro batch without padding, zeros for tokens."""
    ids = torch.zeros(strategy.micro_batch_size, workload.seq_len, dtype=torch.long)
    return MicroBatch(ids, torch.zeros_like(ids), ids.numel())


def watch_step(
    step: TrainStep,
    batches: Sequence[MicroBatch],
    hardware: Hardware,
    *,
    waiting: int = 0,
    like: int = 0,
    cut: Cut | None = None,
) -> Watched:
    """Run one step under a tracker. cut: where the step's model is only some blocks of another."""
    tracker = new_tracker(hardware, cut)
    places = places_of(step.model, step.anatomy)
    owners = {id(t): place for place, block in places.items() for t in (*block.parameters(), *block.buffers())}

    def register(tensors: Iterable[tuple[Tensor, object]], category: Category) -> None:
        """Each with the parameter or buffer that it belongs to."""
        for tensor, owner in tensors:
            tracker.register([tensor], category, owners.get(id(owner), SHELL))

    def register_gradients() -> None:
        register(((p.grad, p) for p in step.model.parameters() if p.grad is not None), "gradients")

    register(((tensor, tensor) for tensor in resident_parameters(step)), "parameters")
    register(_owned_states(step), "optimizer")
    for size in library_bytes(hardware.spec, side_streams=step.strategy.recompute_ahead):
        tracker.hold(size, "temporary")
    register_gradients()
    # On a CPU the whole window is there; a device is sent one micro batch at a time.
    on_host = hardware.is_host
    sent = [tensor for batch in (batches if on_host else batches[:1]) for tensor in (batch.inputs, batch.labels)]
    if on_host and waiting:
        sent.append(torch.empty(waiting * (batches[0].inputs.nbytes + batches[0].labels.nbytes), dtype=torch.uint8))
    tracker.register(sent, "activations")

    def observe(phase: Phase) -> None:
        # Gradients are complete before the optimizer runs, and known to be gradients only then.
        if phase in ("optimizer", "forward"):
            register_gradients()
        tracker.observe(phase)

    step.observer = observe
    with tracker, tracker.whereabouts.watching(places), model_errors():
        step(batches)
    ids = sum(batch.inputs.numel() for batch in batches) + waiting * batches[0].inputs.numel()
    # What dies from here on does so outside of the step, and the tracker would still hear of it.
    record = StepRecord(list(tracker.log), dict(tracker.record.names))
    seconds = 0.0 if step.compiled is None else step.compiled.seconds_with_kernels
    return Watched(record, step.strategy, step.ranks.rank, ids, waiting, like, cut, seconds)


def _owned_states(step: TrainStep) -> Iterator[tuple[Tensor, object]]:
    """What the optimizer and loss scaling keep on the device, with the parameter that it belongs to."""
    owners = {id(value): parameter for parameter, state in step.optimizer.state.items() for value in state.values()}
    return ((tensor, owners.get(id(tensor))) for tensor in optimizer_states(step))


@contextmanager
def model_errors() -> Iterator[None]:
    """What a model cannot do on fake token ids becomes one line; our own errors stay what they are."""
    try:
        yield
    except (TrainfitError, AssertionError):
        raise  # said already, or our own bug
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ModelError(
            f"the model cannot be rehearsed on token ids ({type(error).__name__}: {reason}); check its config, or give "
            "rehearse() micro_batches of its own inputs"
        ) from error


def new_tracker(hardware: Hardware, cut: Cut | None = None) -> StorageTracker:
    """A tracker that rounds, costs and looks into operators as the device does."""
    spec = hardware.spec
    return StorageTracker(
        rounding=spec.allocation_granularity,
        cost=operator_cost(hardware),
        links=Links.of(spec),
        kind=spec.kind,
        times={} if cut is None else cut.times,
    )


def resident_parameters(step: TrainStep) -> list[Tensor]:
    return [*step.model.parameters(), *step.model.buffers()]


def optimizer_states(step: TrainStep) -> list[Tensor]:
    """What stays on the device between steps beside the model: the optimizer's, and those of loss scaling."""
    return states_on_device(step.optimizer) + ([] if step.scaling is None else step.scaling.tensors)


def operator_cost(hardware: Hardware) -> OperatorCost:
    """What is known of the device's speed: its calibration, or else its data sheet and what is reached of it."""
    spec = hardware.spec
    return OperatorCost(
        flops_per_second={
            precision: figure.value * 1e12 * spec.efficiency.value for precision, figure in spec.tflops.items()
        },
        bytes_per_second=spec.memory_bandwidth.value * spec.memory_efficiency.value,
        launch_seconds=spec.launch_seconds.value,
        attention=(spec.attention_forward.value, spec.attention_backward.value),
        host_bytes_per_second=spec.host_bandwidth.value,
        transfer_bytes_per_second={"host": spec.host_link.value, "disk": spec.disk.value},
        calibration=spec.calibration,
        runs_ahead=not hardware.is_host,
    )
