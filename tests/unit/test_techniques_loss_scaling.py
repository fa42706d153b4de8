"""Loss scaling: torch's GradScaler step by step, one unscale a window, and nothing but true gradients behind it."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainfit.errors import ModelError, RecipeError
from trainfit.hardware import accelerator
from trainfit.profile import LossScale, OptimizerVariant
from trainfit.step import Strategy, TrainStep, build_step
from trainfit.step.strategy_text import describe_strategy
from trainfit.techniques.block_scales import ScaleBook
from trainfit.workload import MicroBatch, workload_from_config, workload_from_module

CPU = accelerator("cpu")


class Products(nn.Module):
    """Inputs times one weight: the gradient of the summed output is the sum of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def summed(output: Tensor, labels: Tensor) -> Tensor:
    return output.sum()


def build(
    module: nn.Module | None = None, *, accumulation: int = 1, norm: float | None = 1.0, **scale: Any
) -> TrainStep:
    workload = workload_from_module(module or Products(), seq_len=1, vocab_size=1, loss=summed)
    strategy = Strategy(1, accumulation, "fp16", loss_scale=LossScale(**scale))
    return build_step(workload, strategy, CPU, max_grad_norm=norm)


def batch(value: float) -> MicroBatch:
    return MicroBatch.of(torch.tensor([value]), torch.zeros(1))


def watched(step: TrainStep) -> list[float]:
    """The gradients that the optimizer will have been given."""
    used: list[float] = []
    step.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: used.extend(p.grad.item() for p in step.model.parameters())
    )
    return used


def test_gradients_are_clipped_by_their_true_norm():
    """MP-04: gradient 0.5 at scale 65536 and a norm of 1 stay 0.5; clipped before unscaling they would be 1.5e-5."""
    step = build(norm=1.0)
    used = watched(step)
    result = step([batch(0.5)])
    assert (result.gradient_norm.item(), used, result.loss.item()) == (0.5, [0.5], 0.5)
    assert (result.skipped, result.loss_scale) == (False, 65536.0)


def test_a_window_is_unscaled_once_and_has_one_scale():
    """MP-03: k = 2, an interval of one step. The scale moves after the window, and gradients are divided once."""
    step = build(accumulation=2, growth_interval=1, init_scale=4.0, norm=None)
    factors: list[float] = []
    compute = step._compute_loss
    step._compute_loss = lambda batch, factor, observe: factors.append(factor) or compute(batch, factor, observe)
    used = watched(step)
    for _ in range(2):
        step([batch(0.25), batch(0.75)])
    assert factors == [2.0, 2.0, 4.0, 4.0]  # scale / 2 tokens
    assert used == [0.5, 0.5]
    step.accumulate([batch(0.25), batch(0.75)])
    assert step.model.weight.grad.item() == 0.5
    step.accumulate([batch(0.0), batch(0.0)])  # no RuntimeError of a scaler that was not told of a new window


def test_what_overflows_in_any_micro_batch_skips_the_step_and_backs_off():
    step = build(accumulation=2)
    before = step.model.weight.item()
    result = step([batch(torch.inf), batch(1.0)])
    assert result.skipped
    assert step.model.weight.item() == before
    assert step.model.weight.grad is None
    assert step.optimizer.state[step.model.weight]["step"] == 0
    assert (result.loss_scale, step.scaling.scale, step.scaling.skips_in_a_row) == (65536.0, 32768.0, 1)
    assert not step([batch(1.0), batch(1.0)]).skipped
    assert step.scaling.skips_in_a_row == 0
    assert step.model.weight.item() != before


def test_a_failed_window_leaves_nothing_to_the_next():
    step = build()
    compute = step._compute_loss
    step._compute_loss = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        step([batch(1.0)])
    step._compute_loss = compute
    assert step([batch(0.5)]).gradient_norm.item() == 0.5


@pytest.mark.parametrize("seed", [0, 1])
def test_the_scale_is_that_of_gradscaler_over_5000_steps(seed: int):
    """Growth, overflows, and MP-05: in the middle another step takes over from JSON."""
    numbers: dict[str, Any] = {"init_scale": 1024.0, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 5}
    ours = build(norm=None, **numbers)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    theirs = torch.amp.GradScaler("cpu", **numbers)
    generator = torch.Generator().manual_seed(seed)
    # Overflows become rarer, so that growth is seen as well.
    overflows = torch.rand(5000, generator=generator) < torch.linspace(0.3, 0.05, 5000)
    skips, scales = 0, set()
    for index, overflow in enumerate(overflows.tolist()):
        value = torch.inf if overflow else 1.0
        theirs.scale((weight * value).sum()).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        scaling = ours.scaling
        scaling.begin()
        ours.model.weight.grad = torch.full((1,), value) * scaling.scale
        scaling.unscale(ours.optimizer)
        skips += scaling.step(ours.optimizer)
        assert scaling.scale == theirs.get_scale()
        scales.add(scaling.scale)
        if index == 2500:
            state = json.loads(json.dumps(scaling.state()))
            ours = build(norm=None, **numbers)
            ours.scaling.load(state)
    assert skips == int(overflows.sum())
    assert len(scales) > 20


def test_scale_and_growth_tracker_come_back():
    """MP-05: scale 256 and growth tracker 1; three steps later it grows, and not one step later."""
    step = build(init_scale=512.0, growth_interval=4)
    step([batch(torch.inf)])
    step([batch(1.0)])
    state = json.loads(json.dumps(step.scaling.state()))
    assert (state["scale"], state["growth_tracker"], state["skips_in_a_row"]) == (256.0, 1, 0)
    other = build(growth_interval=4)
    other.scaling.load(state)
    scales = []
    for _ in range(4):
        other([batch(1.0)])
        scales.append(other.scaling.scale)
    assert scales == [256.0, 256.0, 512.0, 512.0]


def test_fp16_parameters_are_refused_with_their_names():
    """MP-01, before anything has run."""
    module = nn.Sequential(nn.Linear(3, 3).half(), nn.Linear(3, 3), nn.Linear(3, 3).half())
    with pytest.raises(
        ModelError, match=r"4 of 6 parameters .*fp16 themselves \(0\.weight, 0\.bias, 2\.weight, \.\.\."
    ) as it:
        build(module)
    assert "module.float()" in str(it.value)
    for part in (module[0], module[2]):
        part.requires_grad_(False)
    build(module)  # what does not train has no gradient


@pytest.mark.parametrize("loss_chunks", [1, 3])
@pytest.mark.parametrize("per_block", [False, True])
def test_fp16_weights_with_fp32_masters_and_gradients_train_as_fp32_weights_do(loss_chunks: int, per_block: bool):
    """What MP-01 asks for: half weights in the model, nothing half in the optimizer."""
    workload = workload_from_config(
        {"model_type": "llama", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 24},
        seq_len=24,
        name="llama",
    )  # fmt: skip
    tokens = torch.randint(97, (2, 25), generator=torch.Generator().manual_seed(0))

    def losses(weights: Any) -> list[float]:
        torch.manual_seed(0)
        scale = LossScale(per_block=per_block)
        variant = OptimizerVariant(weights=weights)
        strategy = Strategy(2, precision="fp16", loss_chunks=loss_chunks, loss_scale=scale, optimizer=variant)
        step = build_step(workload, strategy, CPU)
        results = [step([MicroBatch.of(tokens[:, :-1], tokens[:, 1:])]) for _ in range(5)]
        assert {p.dtype for p in step.model.parameters()} == {torch.float32 if weights == "fp32" else torch.float16}
        assert not any(result.skipped for result in results)
        return [result.loss.item() for result in results]

    assert losses("fp16_master") == pytest.approx(losses("fp32"), rel=1e-3)


def test_fp32_and_bf16_have_no_scaling():
    workload = workload_from_module(Products(), seq_len=1, vocab_size=1, loss=summed)
    for precision in ("fp32", "bf16"):
        step = build_step(workload, Strategy(1, precision=precision), CPU)
        assert step.scaling is None
        assert step([batch(0.5)]).loss_scale is None


def test_a_loss_that_a_user_leaves_in_fp16_does_not_overflow_under_its_scale():
    step = build(norm=None)
    step._autocast = nullcontext
    step.model.half()
    assert step([MicroBatch.of(torch.tensor([2.0]).half(), torch.zeros(1))]).loss.item() == 2.0


# ---- scales by block -------------------------------------------------------------------------------------------------


def test_the_culprit_is_the_first_in_backward_and_alone_backs_off():
    book = ScaleBook.of(4, 2.0**16, tied=False)
    setting = LossScale(growth_interval=3)
    assert book.learn([torch.inf, torch.inf, 2.0, 1.0], setting) == 1
    # What lies behind it is known to be finite, and unit 0 has never been.
    assert book.scales == [2.0**15, 2.0**15, 2.0**9, 2.0**10]
    assert book.ceilings == [None, 2.0**15, None, None]
    assert book.learn([1.0, 2.0**-30, 100.0, 1.0], setting) is None
    # Just below 2**10 when multiplied; unit 1 stays under the scale at which it overflowed.
    assert book.scales == [2.0**10, 2.0**15, 2.0**3, 2.0**10]
    for _ in range(2):
        book.learn([1.0, 2.0**-30, 100.0, 1.0], setting)
    assert book.scales[1] == 2.0**16
    assert book.learn([torch.nan, torch.nan, torch.inf, 1.0], setting) == 2
    assert book.scales == [2.0**10, 2.0**16, 2.0**2, 2.0**10]


def test_a_large_gradient_is_remembered_for_a_while():
    book = ScaleBook.of(3, 1.0, tied=False)
    book.learn([1.0, 64.0, 1.0], LossScale())
    steps = 0
    while book.scales[1] < 2.0**9:
        book.learn([1.0, 1.0, 1.0], LossScale())
        steps += 1
    assert 30 < steps < 100


def test_tied_ends_have_one_scale():
    book = ScaleBook.of(3, 1.0, tied=True)
    book.learn([1.0, 1.0, 8.0], LossScale())
    assert book.scales == [2.0**7, 2.0**10, 2.0**7]
    book.learn([torch.inf, 1.0, 8.0], LossScale())
    assert book.scales == [2.0**6, 2.0**10, 2.0**6]


class Odd(nn.Module):
    """Blocks whose outputs pass each other by."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(4, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_blocks_that_hand_on_more_than_hidden_states_are_refused():
    workload = workload_from_module(Odd, seq_len=4, vocab_size=11)
    with pytest.raises(
        ModelError, match=r"per_block cannot scale between blocks: block 1 is not given what.*; leave it"
    ):
        build_step(workload, Strategy(1, precision="fp16", loss_scale=LossScale(per_block=True)), CPU)


def test_a_strategy_says_that_it_scales_by_block():
    assert "fp16 scaled by block" in describe_strategy(
        Strategy(1, precision="fp16", loss_scale=LossScale(per_block=True))
    )
    assert "scaled" not in describe_strategy(Strategy(1, precision="fp16"))


def test_factors_that_are_no_powers_of_two_are_refused():
    workload = workload_from_module(Odd, seq_len=4, vocab_size=11)
    scale = LossScale(per_block=True, growth_factor=1.5)
    with pytest.raises(RecipeError, match=r"growth_factor 1\.5 is no power of two"):
        build_step(workload, Strategy(1, precision="fp16", loss_scale=scale), CPU)
