"""rehearse(): the very step that will run, on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from trainfit.errors import ModelError, TrainfitError
from trainfit.hardware import Hardware, accelerator
from trainfit.profile import Phase, Profile
from trainfit.rehearsal.operators import OperatorCost
from trainfit.rehearsal.tracker import StorageTracker
from trainfit.step import Strategy, TrainStep, build_step
from trainfit.workload import Workload
from trainfit.workload.batch import MicroBatch


def rehearse(
    workload: Workload,
    strategy: Strategy,
    hardware: Hardware,
    *,
    max_grad_norm: float | None = 1.0,
    micro_batches: Sequence[MicroBatch] | None = None,
) -> Profile:
    """Bytes and seconds of one optimizer step, from the step itself.

    By default every micro batch is full: (micro_batch_size, seq_len). Of a full window only the last micro batch runs,
    on gradients that the others have left: no earlier one needs as much, and each takes as long. micro_batches, of any
    shapes, all run. Optimizer states exist from the start, so the first step is like any other. Raises DeviceError for
    a precision that the device lacks, RecipeError for tiers that are not as many as blocks.
    """
    hardware.require(strategy.precision)
    with fake_tensors():
        step = build_step(workload, strategy, accelerator("cpu"), max_grad_norm=max_grad_norm)
        if micro_batches is not None:
            return watch_step(step, micro_batches, hardware)
        if strategy.accumulation_steps > 1:
            for parameter in step.model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        return watch_step(
            step, [full_micro_batch(workload, strategy)], hardware, waiting=strategy.accumulation_steps - 1
        )


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Tensors without memory. Fake `cpu` and not `meta`, which would take attention's slow path."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.device("cpu"):
        yield mode


def full_micro_batch(workload: Workload, strategy: Strategy) -> MicroBatch:
    """A micro batch without padding, zeros for tokens."""
    ids = torch.zeros(strategy.micro_batch_size, workload.seq_len, dtype=torch.long)
    return MicroBatch(ids, torch.zeros_like(ids), ids.numel())


def watch_step(step: TrainStep, batches: Sequence[MicroBatch], hardware: Hardware, *, waiting: int = 0) -> Profile:
    """Run one step under a tracker. waiting: micro batches like the first that do not run, but take memory and time."""
    tracker = new_tracker(hardware)
    tracker.register(resident_parameters(step), "parameters")
    tracker.register(optimizer_states(step), "optimizer")
    tracker.register((p.grad for p in step.model.parameters() if p.grad is not None), "gradients")
    # On a CPU the whole window is there; a device is sent one micro batch at a time.
    on_host = hardware.spec.kind == "cpu"
    sent = [tensor for batch in (batches if on_host else batches[:1]) for tensor in (batch.inputs, batch.labels)]
    if on_host and waiting:
        sent.append(torch.empty(waiting * (batches[0].inputs.nbytes + batches[0].labels.nbytes), dtype=torch.uint8))
    tracker.register(sent, "activations")

    def observe(phase: Phase) -> None:
        # Gradients are complete before the optimizer runs, and known to be gradients only then.
        if phase in ("optimizer", "forward"):
            tracker.register((p.grad for p in step.model.parameters() if p.grad is not None), "gradients")
        tracker.observe(phase)

    step.observer = observe
    with tracker, model_errors():
        step(batches)
    return tracker.profile(repeats=1 + waiting)


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


def new_tracker(hardware: Hardware) -> StorageTracker:
    """A tracker that rounds, costs and looks into operators as the device does."""
    return StorageTracker(
        rounding=hardware.spec.allocation_granularity,
        cost=operator_cost(hardware),
        inside_operators=hardware.spec.kind == "cpu",
    )


def resident_parameters(step: TrainStep) -> list[Tensor]:
    return [*step.model.parameters(), *step.model.buffers()]


def optimizer_states(step: TrainStep) -> list[Tensor]:
    states = (value for state in step.optimizer.state.values() for value in state.values())
    return [value for value in states if isinstance(value, Tensor)]


def operator_cost(hardware: Hardware) -> OperatorCost:
    """The device's roofline, with the share of its peak that large matmuls reach."""
    spec = hardware.spec
    return OperatorCost(
        flops_per_second={
            precision: figure.value * 1e12 * spec.efficiency.value for precision, figure in spec.tflops.items()
        },
        bytes_per_second=spec.memory_bandwidth.value,
        launch_seconds=spec.launch_seconds.value,
    )
