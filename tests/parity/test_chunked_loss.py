"""A loss in chunks gives the gradients of a loss in one piece, for every kind of head."""

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
from torch import Tensor

from trainfit.workload import IGNORED_LABEL, MicroBatch, Workload

CLOSE = 1e-6
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
HEADS = {
    "linear": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "tied-gpt2": ("gpt2", GPT),
    "biased-phi": ("phi", {}),
    "biased-gptj": ("gptj", {**GPT, "rotary_dim": 4}),
    "capped": ("gemma2", {"head_dim": 8, "final_logit_softcapping": 0.3}),
    "scaled-cohere": ("cohere", {"logit_scale": 0.3, "pad_token_id": 0}),
    "scaled-granite": ("granite", {"logits_scaling": 7.0}),
}


def workload_of(head: str) -> Workload:
    model_type, changes = HEADS[head]
    return small_workload(model_type, **changes)


def ragged_batch(workload: Workload) -> MicroBatch:
    """Rows of 24, 7 and 15 tokens and one hole: ignored labels inside and at the end."""
    batch = MicroBatch.from_sequences(sequences((24, 7, 15), workload.vocab_size))
    batch.labels[0, 3:6] = IGNORED_LABEL
    return MicroBatch.of(batch.inputs, batch.labels)


@pytest.mark.parametrize("head", HEADS)
def test_chunks_of_any_size_give_the_gradients_of_plain_training(head: str):
    """2 and 8 divide the 72 tokens, 7 and 50 do not, 1000 is more than there are."""
    workload = workload_of(head)
    batch = ragged_batch(workload)
    expected = plain_gradients(make_model(workload).train(), batch)
    for chunks in (2, 7, 8, 50, 1000):
        step = build(workload, loss_chunks=chunks)
        assert not step.notes
        assert largest_difference(planned_gradients(step, [batch]), expected) < CLOSE, chunks


@pytest.mark.parametrize("head", ["linear", "tied", "biased-phi", "capped"])
def test_accumulated_chunks_give_the_gradients_of_the_big_batch(head: str):
    workload = workload_of(head)
    rows = sequences((24, 2, 15, 9), workload.vocab_size)
    expected = plain_gradients(make_model(workload).train(), MicroBatch.from_sequences(rows))
    window = [MicroBatch.from_sequences([row]) for row in rows]
    assert largest_difference(planned_gradients(build(workload, loss_chunks=3), window), expected) < CLOSE


@pytest.mark.parametrize("head", ["linear", "biased-phi", "capped"])
@pytest.mark.parametrize("frozen", ["head", "backbone"])
def test_frozen_parts_get_no_gradient_and_the_rest_is_right(head: str, frozen: str):
    workload = workload_of(head)
    batch = ragged_batch(workload)

    def model() -> torch.nn.Module:
        made = make_model(workload).train()
        if frozen == "head":
            made.get_output_embeddings().requires_grad_(False)
        else:
            made.base_model.requires_grad_(False)
            made.get_output_embeddings().requires_grad_(True)
        return made

    expected = plain_gradients(model(), batch)
    assert len(expected) < len(list(model().parameters()))
    step = build(workload, model=model(), loss_chunks=4)
    assert largest_difference(planned_gradients(step, [batch]), expected) < CLOSE


@pytest.mark.parametrize("head", ["linear", "biased-phi", "capped", "scaled-granite"])
def test_in_bf16_chunks_are_as_near_to_fp32_as_one_piece_is(head: str):
    workload = workload_of(head)
    batch = ragged_batch(workload)
    exact = plain_gradients(make_model(workload).train(), batch)
    whole = planned_gradients(build(workload, precision="bf16"), [batch])
    chunked = planned_gradients(build(workload, precision="bf16", loss_chunks=5), [batch])
    assert 1e-4 < largest_difference(whole, exact) < 0.1
    assert largest_difference(chunked, exact) < 1.5 * largest_difference(whole, exact)
    assert all(gradient.dtype == torch.float32 for gradient in chunked.values())


@pytest.mark.parametrize("head", ["linear", "capped"])
@pytest.mark.parametrize("chunks", [1, 5])
def test_evaluation_is_the_plain_summed_loss_without_a_graph(head: str, chunks: int):
    workload = workload_of(head)
    batch = ragged_batch(workload)
    model = make_model(workload).eval()
    with torch.no_grad():
        logits = model(batch.inputs).logits
        expected = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    step = build(workload, "full", loss_chunks=chunks)
    loss, num_tokens = step.evaluate(batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (num_tokens, loss.requires_grad, loss.grad_fn) == (batch.num_tokens, False, None)
    assert not gradients(step.model)
    assert step.model.training


def test_evaluation_in_chunks_makes_no_gradient_of_the_head():
    """ME-03: what evaluation needs is one piece of logits, not a second head."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        num_bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            if isinstance(output, Tensor) and func.namespace == "aten" and not func.is_view:
                self.num_bytes = max(self.num_bytes, output.untyped_storage().nbytes())
            return output

    for head in ("linear", "capped"):
        workload = small_workload(HEADS[head][0], **HEADS[head][1], vocab_size=4000)
        step = build(workload, loss_chunks=24)
        with Largest() as largest:
            step.evaluate(random_batch(workload, rows=1))
        piece_bytes = 4 * 4000
        head_bytes = 4 * 4000 * 32
        # The embedding lookup and blocks have outputs of their own, all far smaller than the head.
        assert piece_bytes <= largest.num_bytes < head_bytes / 2


@pytest.mark.parametrize("head", ["linear", "capped"])
def test_a_second_backward_is_refused(head: str):
    """Gradients are made in forward and handed out once; a second backward would get what is no longer there."""
    workload = workload_of(head)
    batch = ragged_batch(workload)
    step = build(workload, loss_chunks=4)
    loss = step._compute_loss(batch, 1.0, lambda _: None)
    loss.backward(retain_graph=True)
    with pytest.raises(Exception, match="once"):
        loss.backward()
