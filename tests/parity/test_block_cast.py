"""cast "block" against autocast alone: the same bits, fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain import CPU, build, planned_gradients, random_batch, tiny_workload

from trainfit.hardware import this_machine
from trainfit.profile import Mesh, OptimizerVariant, Zero
from trainfit.rehearsal import measure, rehearse
from trainfit.step import Strategy, parse_tiers
from trainfit.techniques.block_cast import CastForward, cast_weights

MIXED = "1*full,1*attention,1*pointwise,1*keep"
FAMILIES = ["llama", "gpt2", "gemma2", "qwen3_moe"]


@pytest.mark.parametrize("activation", ["keep", "pointwise", "full", MIXED])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_autocast_to_the_bit(family: str, activation: str):
    workload = tiny_workload(family)
    batches = [random_batch(workload), random_batch(workload, seed=4)]
    expected = planned_gradients(build(workload, activation, precision="bf16"), batches)
    found = planned_gradients(build(workload, activation, precision="bf16", cast="block"), batches)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_blocks_hold_no_copies_of_their_weights(family: str):
    workload = tiny_workload(family, seq_len=64)
    with torch.device("meta"):
        model = workload.make_model()
    blocks = [model.get_submodule(name) for name in workload.anatomy().blocks]
    # A bias is cast too, but no backward needs it.
    copies = [2 * p.numel() for block in blocks for _, _, p in cast_weights(block) if p.dim() == 2]
    peaks = {}
    for cast in ("operator", "block"):
        strategy = Strategy(4, precision="bf16", cast=cast, tiers=parse_tiers("keep", 4))  # type: ignore[arg-type]
        predicted = rehearse(workload, strategy, this_machine("cpu"))
        measured = measure(workload, strategy, CPU, steps=0)
        assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.001)
        assert predicted.resident_bytes == pytest.approx(measured.resident_bytes, rel=0.001)
        peaks[cast] = predicted.phases["loss"]
    assert peaks["operator"] - peaks["block"] == sum(copies)


def test_evaluation_and_a_second_build_see_the_weights_as_they_are():
    workload = tiny_workload("llama")
    step = build(workload, "keep", precision="bf16", cast="block")
    batch = random_batch(workload)
    step([batch])
    loss, _ = step.evaluate(batch)
    assert all(isinstance(p, torch.nn.Parameter) and p.dtype == torch.float32 for p in step.model.parameters())
    again = build(workload, "full", precision="bf16", model=step.model)
    assert not any(isinstance(vars(part).get("forward"), CastForward) for part in again.model.modules())
    assert torch.equal(again.evaluate(batch)[0], loss)


def test_an_update_in_backward_sees_every_gradient():
    workload = tiny_workload("llama")
    knobs: dict[str, Any] = {"precision": "bf16", "optimizer": OptimizerVariant(update="backward")}
    steps = [build(workload, "keep", cast=cast, **knobs) for cast in ("operator", "block")]
    for seed in range(3):
        losses = [step([random_batch(workload, seed=seed)]).loss for step in steps]
        assert torch.equal(*losses)


def test_sharded_weights_are_gathered_in_the_compute_dtype():
    """Half the bytes on the links, as a rehearsal of a rank counts them."""
    workload = tiny_workload("llama", tie_word_embeddings=False)
    hardware = this_machine("cpu")
    gathered = {}
    for cast in ("operator", "block"):
        strategy = Strategy(
            2, precision="bf16", cast=cast, tiers=parse_tiers("keep", 4), mesh=Mesh(shard=2), zero=Zero(3)  # type: ignore[arg-type]
        )  # fmt: skip
        collectives = rehearse(workload, strategy, hardware).collectives
        gathered[cast] = next(c.bytes for kind, c in collectives.items() if kind in ("all_gather", "broadcast"))
    assert gathered["operator"] == 2 * gathered["block"]
