"""find_overflow names the first module whose values or gradients fp16 cannot hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trainfit.hardware import accelerator
from trainfit.profile import LossScale
from trainfit.step import Strategy, TrainStep, build_step, find_overflow
from trainfit.workload import MicroBatch, workload_from_module

CPU = accelerator("cpu")
WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up_gain = self.gradient_gain = self.between = 1.0

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(self.norm(x)) * self.between * self.up_gain
        return x + self.down(_GradientTimes.apply(inner, self.gradient_gain))


class _GradientTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, gain: float) -> Tensor:
        ctx.gain = gain
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient * ctx.gain, None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 13)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(tier: str = "keep", **knobs) -> TrainStep:
    torch.manual_seed(0)
    workload = workload_from_module(Model, seq_len=6, vocab_size=13)
    scale = LossScale(init_scale=1.0, per_block=knobs.pop("per_block", False))
    return build_step(workload, Strategy(2, precision="fp16", tiers=(tier,) * 4, loss_scale=scale, **knobs), CPU)


def window() -> list[MicroBatch]:
    ids = torch.randint(13, (2, 6), generator=torch.Generator().manual_seed(0))
    return [MicroBatch.of(ids, ids)]


@pytest.mark.parametrize("tier", ["keep", "full"])
def test_a_module_whose_values_overflow_is_named(tier: str):
    step = build(tier)
    with torch.no_grad():
        step.model.blocks[2].up.weight.mul_(1e5)
    found = find_overflow(step, window())
    assert found is not None
    assert (found.place, found.phase) == ("blocks.2.up", "forward")
    assert 0 < found.non_finite <= found.elements == 2 * 6 * WIDTH
    assert "values of blocks.2.up are the first that are not finite, in forward" in str(found)


def test_an_operator_between_two_modules_is_placed_between_them():
    step = build()
    step.model.blocks[1].between = 1e6
    found = find_overflow(step, window())
    assert (found.place, found.phase) == ("blocks.1, before blocks.1.down,", "forward")


@pytest.mark.parametrize("tier", ["keep", "full"])
@pytest.mark.parametrize("per_block", [False, True])
def test_a_module_whose_gradients_overflow_is_named(tier: str, per_block: bool):
    """Blocks 1 and 0, to which the infs flow, are not."""
    step = build(tier, per_block=per_block)
    step.model.blocks[2].gradient_gain = 1e9
    found = find_overflow(step, window())
    assert found.phase == "backward"
    assert found.place == "what follows blocks.2.up"


def test_a_parameter_whose_gradient_alone_overflows_is_named():
    step = build()
    step.model.blocks[3].up.weight.register_hook(lambda gradient: gradient * torch.inf)
    found = find_overflow(step, window())
    assert (found.place, found.phase) == ("blocks.3.up.weight", "backward")


def test_a_finite_window_has_none_and_leaves_nothing():
    step = build()
    before = {name: value.clone() for name, value in step.model.state_dict().items()}
    assert find_overflow(step, window()) is None
    assert all(torch.equal(value, before[name]) for name, value in step.model.state_dict().items())
    assert all(parameter.grad is None for parameter in step.model.parameters())
    assert not any(module._forward_hooks for module in step.model.modules())
    assert not step(window()).skipped


class Counting(Model):
    """With dropout, running statistics and a count of its own: what a forward changes beside the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.statistics = nn.Dropout(0.5), nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        x = self.statistics(self.dropout(self.embedding(ids)).flatten(0, 1)).view(*ids.shape, WIDTH)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def looked_at(*, overflows: bool) -> tuple[TrainStep, dict[str, Tensor], Tensor]:
    """A step whose window was looked at, with its buffers and the generator's state from before."""
    torch.manual_seed(0)
    workload = workload_from_module(Counting, seq_len=6, vocab_size=13)
    step = build_step(workload, Strategy(2, precision="fp16", tiers=("full",) * 4, loss_scale=LossScale(1.0)), CPU)
    step(window())
    if overflows:
        with torch.no_grad():
            step.model.blocks[2].up.weight.mul_(1e5)
    buffers = {name: value.clone() for name, value in step.model.named_buffers()}
    assert int(buffers["calls"]) == 1
    state = torch.get_rng_state()
    assert (find_overflow(step, window()) is not None) == overflows
    return step, buffers, state


@pytest.mark.parametrize("overflows", [False, True])
def test_generators_are_left_alone(overflows: bool):
    """A run that was looked at goes on as one that was not."""
    _, _, state = looked_at(overflows=overflows)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("overflows", [False, True])
def test_buffers_are_left_alone(overflows: bool):
    """Statistics of a window that overflowed would be those of the run's next checkpoint."""
    step, buffers, _ = looked_at(overflows=overflows)
    assert not [name for name, value in step.model.named_buffers() if not torch.equal(value, buffers[name])]
