"""A user's own module and loss train as they would in a hand-written loop."""

from __future__ import annotations

import pytest
import torch
from plain import CPU
from torch import Tensor, nn

from trainfit.step import Strategy, build_step, parse_tiers
from trainfit.workload import AdamWSettings, MicroBatch, workload_from_module

WIDTH, ROWS = 12, 8


class Regressor(nn.Module):
    """Continuous inputs, no vocabulary, no head that anyone would recognise."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)[:, 0]


def summed_huber(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.huber_loss(output, labels, reduction="sum", delta=0.7)


def batches(count: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(9)
    return [
        MicroBatch.of(torch.randn(rows, 5, generator=generator), torch.randn(rows, generator=generator))
        for rows in (ROWS, ROWS, 3)[:count]
    ]


def hand_written(module: nn.Module, steps: int) -> list[float]:
    """One batch of all rows, the mean loss, clipping at 1, AdamW that decays matrices only."""
    settings = AdamWSettings()
    matrices = [p for p in module.parameters() if p.dim() >= 2]
    vectors = [p for p in module.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
    )
    inputs, labels = (torch.cat([getattr(batch, name) for batch in batches(3)]) for name in ("inputs", "labels"))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = summed_huber(module(inputs), labels) / len(labels)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("activation", ["keep", "full", "2*full,1*pointwise,1*keep"])
def test_three_steps_equal_a_hand_written_loop(activation: str):
    torch.manual_seed(0)
    module = Regressor()
    workload = workload_from_module(module, seq_len=1, vocab_size=1, loss=summed_huber)
    step = build_step(workload, Strategy(ROWS, 3, tiers=parse_tiers(activation, 4)), CPU)
    losses = [step(batches(3)).loss.item() for _ in range(3)]
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    expected = hand_written(module, 3)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[2] < losses[0]
    moved = {name: (p - before[name]).abs().max().item() for name, p in module.named_parameters()}
    trained = dict(step.model.named_parameters())
    for name, parameter in module.named_parameters():
        assert (trained[name] - parameter).abs().max().item() < 2e-2 * moved[name], name


def test_the_users_module_is_left_alone():
    module = Regressor()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    workload = workload_from_module(module, seq_len=1, vocab_size=1, loss=summed_huber)
    build_step(workload, Strategy(ROWS, 1, tiers=("full",) * 4), CPU)(batches(1))
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert all(p.grad is None for p in module.parameters())
    assert all("forward" not in vars(block) for block in module.blocks)


def test_evaluation_is_the_summed_loss_of_the_user():
    workload = workload_from_module(Regressor(), seq_len=1, vocab_size=1, loss=summed_huber)
    step = build_step(workload, Strategy(ROWS), CPU)
    (batch,) = batches(1)
    loss, num_tokens = step.evaluate(batch)
    assert num_tokens == ROWS
    with torch.no_grad():
        expected = summed_huber(step.model(batch.inputs), batch.labels)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
