"""cast "block" against autocast alone: the same bits, fewer bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from plain import CPU, assert_equal_to_the_bit, build, planned_gradients, random_batch, tiny_workload
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.hardware import this_machine
from trainfit.profile import Mesh, Offload, OptimizerVariant, Zero
from trainfit.rehearsal import measure, rehearse
from trainfit.step import Strategy, parse_tiers
from trainfit.techniques import offload
from trainfit.techniques.block_cast import CastForward, cast_weights
from trainfit.workload import LoRASettings, Workload, with_adapter, with_trained_only

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


@pytest.mark.parametrize("activation", ["keep_bf16", "keep_int8", "discard", "offload"])
@pytest.mark.parametrize("way", ["gpt2", "adapter"])
def test_tiers_that_pack_what_is_saved_leave_the_casts_alone(
    way: str, activation: str, monkeypatch: pytest.MonkeyPatch
):
    """The casts are emptied when forward has ended: whoever packed one would pack nothing, or codes of a weight."""
    monkeypatch.setattr(offload, "SMALLEST", 256)
    workload = FROZEN["adapter"]() if way == "adapter" else tiny_workload(way)
    batches = [random_batch(workload), random_batch(workload, seed=4)]
    knobs: dict[str, Any] = {"precision": "bf16"} | ({"offload": Offload("disk")} if "offload" in activation else {})
    expected = planned_gradients(build(workload, activation, **knobs), batches)
    found = planned_gradients(build(workload, activation, cast="block", **knobs), batches)
    assert_equal_to_the_bit(found, expected)


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


class LowCopies(TorchDispatchMode):
    """Bytes of live bf16 casts of some parameters: most_bytes, after any operator."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._sources = {p.data_ptr() for p in parameters}
        self._storages: list[weakref.ref[Any]] = []
        self.most_bytes = self.num_casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16
        if is_cast and args[0].data_ptr() in self._sources:
            self._storages.append(weakref.ref(result.untyped_storage()))
            self.num_casts += 1
        alive = [storage for each in self._storages if (storage := each()) is not None]
        self.most_bytes = max(self.most_bytes, sum(storage.nbytes() for storage in alive))
        return result


def one_linear_a_block() -> Workload:
    return with_trained_only(tiny_workload("llama"), ["*.mlp.up_proj.weight"])


FROZEN: dict[str, Callable[[], Workload]] = {
    "adapter": lambda: with_adapter(tiny_workload("llama"), LoRASettings(rank=4)),
    "adapter of all": lambda: with_adapter(tiny_workload("llama"), LoRASettings(rank=4, targets="all-linear")),
    "one linear a block": one_linear_a_block,
    "nothing frozen": lambda: tiny_workload("llama"),
}


@pytest.mark.parametrize("activation", ["keep", "pointwise", "full", MIXED])
@pytest.mark.parametrize("way", FROZEN)
def test_no_more_than_a_block_of_copies_lives_at_once(way: str, activation: str):
    """A weight that does not train has no gradient whose arrival would end its copy."""
    workload = FROZEN[way]()
    step = build(workload, activation, precision="bf16", cast="block")
    blocks = [step.model.get_submodule(name) for name in step.anatomy.blocks]
    of_a_block = max(2 * sum(p.numel() for _, _, p in cast_weights(block)) for block in blocks)
    copies = LowCopies(p for block in blocks for _, _, p in cast_weights(block))
    batch = random_batch(workload)
    with copies:
        step.accumulate([batch])
    assert copies.num_casts >= len(blocks) * len(cast_weights(blocks[0]))
    assert copies.most_bytes <= of_a_block


@pytest.mark.parametrize("way", FROZEN)
def test_frozen_weights_take_what_was_predicted(way: str):
    workload = FROZEN[way]()
    strategy = Strategy(2, precision="bf16", cast="block", tiers=parse_tiers("keep", 4))
    predicted = rehearse(workload, strategy, this_machine("cpu"))
    measured = measure(workload, strategy, CPU, steps=0)
    assert predicted.phases["backward"] == pytest.approx(measured.phases["backward"], rel=0.01)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


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
