"""rehearse(): the very step that will run, on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from trainfit.hardware import Hardware, accelerator
from trainfit.profile import Profile
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

    micro_batches may hold fake or meta-free CPU tensors of other shapes than the strategy's; by default every micro batch is
    full: (micro_batch_size, seq_len). Optimizer states exist from the start, so the first step is like any other.
    """
    with fake_tensors():
        step = build_step(workload, strategy, accelerator("cpu"), max_grad_norm=max_grad_norm)
        batches = micro_batches or full_window(workload, strategy)
        return watch_step(step, batches, hardware)


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Tensors without memory. Fake `cpu` and not `meta`, which would take attention's slow path."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.device("cpu"):
        yield mode


def full_window(workload: Workload, strategy: Strategy) -> list[MicroBatch]:
    """accumulation_steps micro batches without padding, zeros for tokens."""
    shape = (strategy.micro_batch_size, workload.seq_len)
    return [
        MicroBatch(torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long), shape[0] * shape[1])
        for _ in range(strategy.accumulation_steps)
    ]


def watch_step(step: TrainStep, batches: Sequence[MicroBatch], hardware: Hardware) -> Profile:
    """Run one step under a tracker."""
    tracker = StorageTracker(
        rounding=hardware.spec.allocation_granularity,
        cost=operator_cost(hardware),
        inside_operators=hardware.spec.kind == "cpu",
    )
    tracker.register(resident_parameters(step), "parameters")
    tracker.register(optimizer_states(step), "optimizer")
    tracker.register((tensor for batch in batches for tensor in (batch.inputs, batch.labels)), "activations")
    name_gradients(step, tracker)
    with tracker:
        step.observer = tracker.observe
        step(batches)
    return tracker.profile()


def name_gradients(step: TrainStep, tracker: StorageTracker) -> None:
    """Tell the tracker, once gradients are complete, which storages they are."""
    outer = tracker.observe

    def observe(phase: str) -> None:
        if phase in ("optimizer", "forward"):
            gradients = (p.grad for p in step.model.parameters() if p.grad is not None)
            tracker.register(gradients, "gradients")
        outer(phase)  # type: ignore[arg-type]

    tracker.observe = observe  # type: ignore[method-assign,assignment]


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
