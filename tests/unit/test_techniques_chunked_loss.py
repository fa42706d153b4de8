"""chunked_loss alone: numbers on the edge, and the memory it takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainfit.hardware import accelerator
from trainfit.rehearsal.tracker import StorageTracker
from trainfit.step import Strategy, build_step
from trainfit.techniques.chunked_loss import auto_chunks, chunked_loss
from trainfit.workload import IGNORED_LABEL, HeadSplit, workload_from_module

DIM, VOCAB = 8, 50


class Head(HeadSplit):
    """A head alone. capped takes the general way, through the model's own code."""

    def __init__(self, capped: bool, bias: bool, vocab_size: int = VOCAB) -> None:
        torch.manual_seed(0)
        self.layer = nn.Linear(DIM, vocab_size, bias=bias)
        self.capped = capped
        self.linear = None if capped else self.layer

    def hidden(self, inputs: Tensor) -> Tensor:
        return inputs

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.layer(hidden)
        return 2.0 * torch.tanh(logits / 2.0) if self.capped else logits

    def parameters(self) -> list[nn.Parameter]:
        return list(self.layer.parameters())


HEADS = [(capped, bias) for capped in (False, True) for bias in (False, True)]


def both(
    head: Head, hidden: Tensor, labels: Tensor, chunks: int
) -> tuple[tuple[Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]:
    """(loss, gradients of hidden and head) in chunks, and as plain PyTorch has them."""
    results = []
    for chunked in (True, False):
        leaf = hidden.clone().requires_grad_()
        if chunked:
            loss = chunked_loss(head, leaf, labels, chunks, 0.1)
        else:
            logits = head.logits(leaf).flatten(0, 1)
            loss = 0.1 * F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL)
        results.append((loss.detach(), list(torch.autograd.grad(loss, [leaf, *head.parameters()]))))
    return results[0], results[1]


def random_hidden(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden = scale * torch.randn(3, 7, DIM, generator=generator)
    return hidden, torch.randint(VOCAB, (3, 7), generator=generator)


@pytest.mark.parametrize(("capped", "bias"), HEADS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_logits_of_any_size_give_finite_and_right_gradients(capped: bool, bias: bool, scale: float):
    """exp() of logits of several hundred overflows unless the highest is taken off first."""
    hidden, labels = random_hidden(scale)
    head = Head(capped, bias)
    (loss, found), (plain_loss, expected) = both(head, hidden, labels, 4)
    assert loss.item() == pytest.approx(plain_loss.item(), rel=1e-5)
    # A logit is known to its last bit at best, and exp() turns that absolute error into a relative one.
    tolerance = 2e-6 + torch.finfo(torch.float32).eps * head.layer(hidden).abs().max()
    for one, other in zip(found, expected):
        assert one.isfinite().all()
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize(("capped", "bias"), HEADS)
def test_gradients_are_added_to_those_of_earlier_micro_batches_in_place(capped: bool, bias: bool):
    head = Head(capped, bias)
    hidden, labels = random_hidden()
    (_, alone), _ = both(head, hidden, labels, 4)
    earlier = [torch.ones_like(parameter) for parameter in head.parameters()]
    for parameter, gradient in zip(head.parameters(), earlier):
        parameter.grad = gradient
    leaf = hidden.clone().requires_grad_()
    chunked_loss(head, leaf, labels, 4, 0.1, is_last_word=True).backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, alone[0])
    for parameter, gradient, expected in zip(head.parameters(), earlier, alone[1:]):
        assert parameter.grad is gradient
        # One is added to sums of size 1: each of the four pieces rounds to 2^-24 of that.
        assert (gradient - 1 - expected).abs().max() <= 4 * 2**-24 * 2


@pytest.mark.parametrize(("capped", "bias"), HEADS)
def test_loss_is_multiplied_by_what_comes_after_it(capped: bool, bias: bool):
    """Unless it is told that nothing does."""
    head = Head(capped, bias)
    hidden, labels = random_hidden()
    found = []
    for factor in (1.0, 2.5):
        leaf = hidden.clone().requires_grad_()
        head.layer.zero_grad()
        (factor * chunked_loss(head, leaf, labels, 4, 0.1)).backward()
        found.append([leaf.grad, *(parameter.grad for parameter in head.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(2.5 * one, other, rtol=1e-6, atol=0)


def test_hooks_of_a_head_see_the_gradient_of_each_micro_batch():
    """A hook that reduces or scales is to have this micro batch's gradient, not the sum."""
    weight, losses = three_losses()
    calls: list[int] = []
    weight.register_hook(lambda gradient: calls.append(1))
    for loss in losses:
        before = None if weight.grad is None else weight.grad.clone()
        found = loss()
        # Nothing has been added behind the hook's back.
        assert before is None or (weight.grad is not None and torch.equal(weight.grad, before))
        found.backward()
    assert len(calls) == 3


def test_hooks_after_accumulation_see_the_sum():
    """They are called for every micro batch, whoever has added it."""
    expected, losses = three_losses()
    for loss in losses:
        loss().backward()
    weight, losses = three_losses()
    seen: list[Tensor] = []
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    for loss in losses:
        loss().backward()
    assert len(seen) == 3
    assert not torch.equal(seen[1], seen[2])
    assert torch.equal(seen[2], expected.grad)


def three_losses() -> tuple[nn.Parameter, list[Callable[[], Tensor]]]:
    """A head's weight, and what gives it the gradients of three micro batches."""
    torch.manual_seed(0)
    head = Head(capped=False, bias=False)
    hidden, labels = random_hidden()

    def loss() -> Tensor:
        return chunked_loss(head, hidden.clone().requires_grad_(), labels, 4, 0.1, is_last_word=True)

    return head.layer.weight, [loss] * 3


@pytest.mark.parametrize(("capped", "bias"), HEADS)
def test_without_a_valid_label_loss_and_gradients_are_zero(capped: bool, bias: bool):
    hidden, labels = random_hidden()
    (loss, found), _ = both(Head(capped, bias), hidden, torch.full_like(labels, IGNORED_LABEL), 4)
    assert loss == 0
    assert all((gradient == 0).all() for gradient in found)


@pytest.mark.parametrize(("capped", "bias"), HEADS)
def test_rows_without_a_label_get_no_gradient(capped: bool, bias: bool):
    hidden, labels = random_hidden()
    labels[1] = IGNORED_LABEL
    (_, found), (_, expected) = both(Head(capped, bias), hidden, labels, 5)
    assert (found[0][1] == 0).all()
    assert (found[0][0] != 0).any()
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6 * other.abs().max().item())


@pytest.mark.parametrize("capped", [False, True])
def test_only_what_wants_a_gradient_gets_one(capped: bool):
    head = Head(capped, True)
    hidden, labels = random_hidden()
    head.layer.bias.requires_grad_(False)
    loss = chunked_loss(head, hidden, labels, 3, 1.0)  # hidden states of a frozen backbone
    loss.backward()
    assert head.layer.weight.grad is not None
    assert head.layer.bias.grad is None
    head.layer.weight.requires_grad_(False)
    assert not chunked_loss(head, hidden, labels, 3, 1.0).requires_grad


def test_peak_is_one_piece_of_logits_and_the_gradients():
    """tokens * vocab / chunks * 4 bytes, one gradient of the head, one of hidden: what the docstring promises."""
    vocab_size, tokens, chunks = 20000, 256, 8
    head = Head(False, False, vocab_size)
    hidden = torch.randn(1, tokens, DIM, requires_grad=True)
    labels = torch.zeros(1, tokens, dtype=torch.long)

    def peak(run) -> int:
        tracker = StorageTracker()
        tracker.register([hidden, labels, head.layer.weight], "parameters")
        start = tracker.live_bytes()
        with tracker:
            run().backward()
        hidden.grad = head.layer.weight.grad = None
        return tracker.profile().peak_bytes - start

    logits, head_bytes = 4 * vocab_size * tokens, 4 * vocab_size * DIM
    in_chunks = peak(lambda: chunked_loss(head, hidden, labels, chunks, 1.0))
    whole = peak(lambda: F.cross_entropy(head.logits(hidden).flatten(0, 1), labels.flatten()))
    assert in_chunks == pytest.approx(logits / chunks + head_bytes, rel=0.02)
    assert whole == pytest.approx(3 * logits, rel=0.05)  # log-softmax, its gradient, the logits' gradient


@pytest.mark.parametrize(
    ("tokens", "vocab_size", "dim", "rows"),
    [
        (65536, 32000, 4096, 8389),  # as many logits as hidden states: 65536 * 4096 / 32000
        (4096, 32000, 4096, 1024),  # a quarter of the head's gradient: 4096 / 4
        (8192, 50257, 64, 128),  # no smaller matmuls than this
        (4, 32000, 64, 128),
    ],
)
def test_auto_chunks_stops_where_a_smaller_piece_would_save_nothing(tokens, vocab_size, dim, rows):
    assert auto_chunks(tokens, vocab_size, dim) == -(-tokens // rows)


class NoPlainHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCAB, DIM), nn.ModuleList([nn.Linear(DIM, DIM)])

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers[0](self.embedding(ids)) @ self.embedding.weight.T


@pytest.mark.parametrize("own_loss", [False, True])
def test_a_head_that_cannot_be_split_leaves_a_note_and_one_piece(own_loss: bool):
    loss = (lambda output, labels: output.square().sum()) if own_loss else None
    workload = workload_from_module(NoPlainHead(), seq_len=4, vocab_size=VOCAB, loss=loss)
    step = build_step(workload, Strategy(1, loss_chunks=4), accelerator("cpu"))
    (note,) = step.notes
    assert "one piece instead of 4" in note
    assert ("loss of its own" in note) == own_loss
    assert not build_step(workload, Strategy(1), accelerator("cpu")).notes
