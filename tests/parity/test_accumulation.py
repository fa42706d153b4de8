"""Accumulated gradients are those of one big batch, whatever the windows look like."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from plain import (
    build,
    gradients,
    largest_difference,
    make_model,
    plain_gradients,
    planned_gradients,
    random_batch,
    sequences,
    small_workload,
)
from torch import Tensor, nn

from trainfit.errors import DataError
from trainfit.workload import IGNORED_LABEL, MicroBatch

CLOSE = 1e-6


@pytest.fixture(scope="module")
def workload():
    return small_workload("llama", seq_len=64, max_position_embeddings=128)


def mean_of_means(model: nn.Module, batches: list[MicroBatch]) -> dict[str, Tensor]:
    """The mistake of GA-01: every micro batch's own mean, divided by the number of micro batches."""
    for batch in batches:
        logits = model(batch.inputs).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED_LABEL)
        (loss / len(batches)).backward()
    return gradients(model)


@pytest.mark.parametrize(
    ("lengths", "micro_batch_size"),
    [((10, 100), 1), ((64, 3, 40, 1, 17, 64, 9), 2), ((5, 5, 5, 60), 3)],
    ids=["10-and-100-tokens", "padded-rows-short-last", "one-row-last"],
)
def test_windows_of_unequal_token_counts_equal_the_big_batch(workload, lengths, micro_batch_size):
    """GA-01: sum of losses / all valid tokens. Mean of means is off, shown here."""
    rows = sequences(lengths, workload.vocab_size)
    big = MicroBatch.from_sequences(rows)
    assert big.num_tokens == sum(lengths)
    expected = plain_gradients(make_model(workload).train(), big)
    pieces = [
        MicroBatch.from_sequences(rows[begin : begin + micro_batch_size])
        for begin in range(0, len(rows), micro_batch_size)
    ]
    assert len({piece.num_tokens for piece in pieces}) > 1
    for activation, chunks in (("keep", 1), ("full", 1), ("pointwise", 3)):
        step = build(workload, activation, loss_chunks=chunks)
        assert largest_difference(planned_gradients(step, pieces), expected) < CLOSE
    assert largest_difference(mean_of_means(make_model(workload).train(), pieces), expected) > 0.05


def test_loss_of_a_window_is_the_mean_over_its_tokens(workload):
    rows = sequences((10, 100), workload.vocab_size)
    big = MicroBatch.from_sequences(rows)
    logits = make_model(workload)(big.inputs).logits
    expected = F.cross_entropy(logits.flatten(0, 1), big.labels.flatten(), ignore_index=IGNORED_LABEL)
    result = build(workload)([MicroBatch.from_sequences([row]) for row in rows])
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert result.num_tokens == 110


def test_a_window_shorter_than_accumulation_steps_is_one_update_over_what_is_there(workload):
    """GA-04: 3 batches with accumulation 4 are one update with the mean over 3; nothing leaks into the next window."""
    batches = list(random_batch(workload, rows=3).split(1))
    expected = plain_gradients(make_model(workload).train(), random_batch(workload, rows=3))
    step = build(workload, micro_batch_size=1, accumulation_steps=4)
    seen: list[dict[str, Tensor]] = []
    step.optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(step.model)))
    step(batches)
    assert len(seen) == 1
    assert largest_difference(seen[0], expected) < CLOSE
    assert all(p.grad is None for p in step.model.parameters())
    after_one = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    step(batches)
    fresh = make_model(workload).train()
    fresh.load_state_dict(after_one)
    assert largest_difference(seen[1], plain_gradients(fresh, random_batch(workload, rows=3))) < CLOSE


def test_ten_batches_in_windows_of_four_are_three_updates(workload):
    """GA-04, GA-05: what counts updates counts windows, not micro batches."""
    batches = list(random_batch(workload, rows=10).split(1))
    step = build(workload, micro_batch_size=1, accumulation_steps=4)
    schedule = torch.optim.lr_scheduler.LambdaLR(step.optimizer, lambda update: 1 / (1 + update))
    for begin in range(0, 10, 4):
        step(batches[begin : begin + 4])
        schedule.step()
    assert {int(state["step"]) for state in step.optimizer.state.values()} == {3}
    assert schedule.last_epoch == 3


def test_an_empty_window_is_refused(workload):
    nothing = MicroBatch(torch.zeros(1, 4, dtype=torch.long), torch.full((1, 4), IGNORED_LABEL), 0)
    step = build(workload)
    for window in ([], [nothing], [nothing, nothing]):
        with pytest.raises(DataError, match="valid label"):
            step(window)


@pytest.mark.parametrize("chunks", [1, 4])
def test_a_micro_batch_without_labels_adds_nothing(workload, chunks: int):
    batch = random_batch(workload)
    nothing = MicroBatch.of(batch.inputs, torch.full_like(batch.labels, IGNORED_LABEL))
    step = build(workload, "full", loss_chunks=chunks)
    alone = planned_gradients(step, [batch])
    step.model.zero_grad()
    loss, num_tokens = step.accumulate([nothing, batch, nothing])
    assert num_tokens == batch.num_tokens
    assert loss.isfinite()
    assert largest_difference(gradients(step.model), alone) == 0.0


def test_clipping_is_over_the_whole_window_and_reports_the_norm_before(workload):
    batches = list(random_batch(workload, rows=4).split(1))
    plain = plain_gradients(make_model(workload).train(), random_batch(workload, rows=4))
    norm = torch.stack([gradient.norm() for gradient in plain.values()]).norm()
    limit = norm.item() / 3
    step = build(workload, micro_batch_size=1, accumulation_steps=4, max_grad_norm=limit)
    seen: list[dict[str, Tensor]] = []
    step.optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(step.model)))
    result = step(batches)
    assert result.gradient_norm is not None
    assert result.gradient_norm.item() == pytest.approx(norm.item(), rel=1e-5)
    clipped = {name: gradient / 3 for name, gradient in plain.items()}
    assert largest_difference(seen[0], clipped) < 1e-5


def test_a_step_that_failed_leaves_nothing_for_the_next(workload):
    """After an error in the second micro batch (out of memory, say) the next window is that window alone."""
    batches = list(random_batch(workload, rows=2).split(1))
    step = build(workload, micro_batch_size=1, accumulation_steps=2)
    expected = planned_gradients(step, batches)
    step.model.zero_grad()
    out_of_range = MicroBatch.of(torch.full((1, 4), workload.vocab_size), torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(IndexError):
        step([batches[0], out_of_range])
    seen: list[dict[str, Tensor]] = []
    step.optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(step.model)))
    step(batches)
    assert largest_difference(seen[0], expected) == 0.0
