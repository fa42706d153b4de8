"""TrainStep: what it keeps, what it leaves, and when memory is taken."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from trainfit.hardware import accelerator
from trainfit.profile import Phase
from trainfit.rehearsal.tracker import StorageTracker
from trainfit.step import Strategy, TrainStep, build_step
from trainfit.workload import AdamWSettings, MicroBatch, workload_from_module

CPU = accelerator("cpu")
VOCAB, DIM, LENGTH = 23, 8, 10
STRATEGIES = [Strategy(2), Strategy(2, tiers=("pointwise", "full"), loss_chunks=3), Strategy(2, precision="bf16")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(strategy: Strategy = STRATEGIES[0], **knobs) -> TrainStep:
    torch.manual_seed(0)
    workload = workload_from_module(Model, seq_len=LENGTH, vocab_size=VOCAB)
    return build_step(workload, strategy, CPU, **knobs)


def batch(seed: int = 1, rows: int = 2) -> MicroBatch:
    tokens = torch.randint(VOCAB, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return MicroBatch.of(tokens[:, :-1], tokens[:, 1:])


def live_bytes() -> int:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    return sum({id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["plain", "planned", "bf16"])
def test_evaluation_takes_no_more_for_more_batches(strategy: Strategy):
    """ME-03: live bytes between batches are constant, and no result holds a graph."""
    step = build(strategy)
    losses, live = [], []
    for seed in range(6):
        losses.append(step.evaluate(batch(seed))[0])
        live.append(live_bytes())
    assert all(loss.grad_fn is None for loss in losses)
    scalar = losses[0].untyped_storage().nbytes()
    assert [later - earlier for earlier, later in pairwise(live[1:])] == [scalar] * 4


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["plain", "planned", "bf16"])
def test_no_graph_outlives_its_step(strategy: Strategy):
    """ME-06: five results in a list hold five scalars, not five graphs; without the collector's help."""
    step = build(strategy)
    alive: list[weakref.ref] = []
    handle = step.model.layers[0].register_forward_hook(
        lambda module, args, output: alive.append(weakref.ref(output.untyped_storage()))
    )
    gc.collect()
    gc.disable()
    try:
        results = [step([batch(seed), batch(seed + 9)]) for seed in range(5)]
        assert len(alive) == 10
        assert [reference() for reference in alive] == [None] * 10
    finally:
        gc.enable()
        handle.remove()
    for result in results:
        assert result.loss.shape == ()
        assert result.loss.grad_fn is None
        assert not result.loss.requires_grad


def test_live_bytes_do_not_grow_with_steps():
    step = build(STRATEGIES[1])
    live = []
    for seed in range(5):
        step([batch(seed)])
        live.append(live_bytes())
    assert len(set(live)) == 1


def test_optimizer_states_are_there_before_the_first_step():
    """ME-07: as AdamW itself would make them, all of them, and an update from them is AdamW's."""
    step = build()
    parameters = list(step.model.parameters())
    states = [step.optimizer.state[p] for p in parameters]
    assert [sorted(state) for state in states] == [["exp_avg", "exp_avg_sq", "step"]] * len(parameters)
    moments = sum(state[name].nbytes for state in states for name in ("exp_avg", "exp_avg_sq"))
    assert moments == 2 * sum(p.nbytes for p in parameters)

    reference = build(max_grad_norm=None).model
    settings = AdamWSettings()
    groups = [
        {"params": [p for p in reference.parameters() if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in reference.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=True)
    step = build(max_grad_norm=None)
    for seed in range(3):
        torch.manual_seed(seed)
        step([batch(seed)])
        torch.manual_seed(seed)
        data = batch(seed)
        optimizer.zero_grad()
        F.cross_entropy(reference(data.inputs).flatten(0, 1), data.labels.flatten()).backward()
        optimizer.step()
    for found, expected in zip(step.model.parameters(), reference.parameters()):
        assert torch.equal(found, expected)
    for found, expected in zip(step.model.parameters(), reference.parameters()):
        assert step.optimizer.state[found].keys() == optimizer.state[expected].keys()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["plain", "planned", "bf16"])
def test_the_first_step_peaks_where_the_second_does(strategy: Strategy):
    """ME-07: no memory is first taken in a later phase or step."""
    step = build(strategy)

    def peak() -> int:
        tracker = StorageTracker()
        tracker.register(step.model.parameters(), "parameters")
        states = (value for state in step.optimizer.state.values() for value in state.values())
        tracker.register(states, "optimizer")
        window = [batch(1), batch(2)]
        with tracker:
            step.observer = tracker.observe
            step(window)
        return tracker.profile().peak_bytes

    first, second, third = peak(), peak(), peak()
    assert first == second == third


def test_phases_come_in_order():
    phases: list[Phase] = []
    for strategy in (STRATEGIES[0], STRATEGIES[1]):
        step = build(strategy)
        step.observer = phases.append
        phases.clear()
        step([batch(1), batch(2)])
        assert phases == ["forward", "loss", "backward"] * 2 + ["optimizer"]


def test_a_part_in_eval_mode_is_still_so_after_evaluation():
    step = build()
    step.model.layers[0].eval()
    seen: list[bool] = []
    handle = step.model.layers[1].register_forward_hook(lambda module, *_: seen.append(module.training))
    step.evaluate(batch())
    handle.remove()
    assert seen == [False]
    assert not step.model.layers[0].training
    assert not step.model.layers[0].norm.training
    assert step.model.training
    assert step.model.layers[1].norm.training


def test_evaluation_that_fails_leaves_training_mode():
    step = build()
    wrong = MicroBatch.of(torch.full((1, 3), VOCAB), torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(IndexError):
        step.evaluate(wrong)
    assert all(module.training for module in step.model.modules())


def test_without_clipping_no_norm_is_computed():
    assert build(max_grad_norm=None)([batch()]).gradient_norm is None
    norm = build(max_grad_norm=1e9)([batch()]).gradient_norm
    assert norm is not None
    assert norm > 0


def test_parameters_that_no_one_uses_stay_as_they_are():
    class WithSpare(Model):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(3, 3)

    workload = workload_from_module(WithSpare, seq_len=LENGTH, vocab_size=VOCAB)
    step = build_step(workload, STRATEGIES[1], CPU)
    before = step.model.spare.weight.detach().clone()
    step([batch()])
    assert torch.equal(step.model.spare.weight, before)
