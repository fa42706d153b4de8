"""Early recompute learns the same to the bit, on streams that come late, and races with nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from late_streams import LateStreams, RaceError
from plain import build, make_model, random_batch, tiny_workload
from torch import Tensor

from trainfit.errors import RecipeError
from trainfit.hardware import Accelerator
from trainfit.profile import Mesh, OptimizerVariant, Zero
from trainfit.step import Strategy, TrainStep, build_step, parse_tiers
from trainfit.techniques import recompute_ahead
from trainfit.workload import Workload

DROPOUT = {"attn_pdrop": 0.1, "resid_pdrop": 0.2, "embd_pdrop": 0.1}
MIXED = "1*full,1*attention,1*pointwise,1*keep"
BY_BLOCK = {"precision": "bf16", "cast": "block"}
PARTS = "1*recompute_mlp,1*recompute_attention,1*selective,1*recompute_core"


def ahead(workload: Workload, device: Accelerator, activation: str, **knobs: Any) -> TrainStep:
    strategy = Strategy(2, tiers=parse_tiers(activation, 4), recompute_ahead=1, **knobs)
    return build_step(workload, strategy, device, max_grad_norm=None, model=make_model(workload))


def after(step: TrainStep, workload: Workload, steps: int) -> list[Tensor]:
    """Losses, then the weights."""
    torch.manual_seed(1)
    window = [random_batch(workload)]
    losses = [step(window).loss for _ in range(steps)]
    return [*losses, *(parameter.detach() for parameter in step.model.parameters())]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [torch.equal(*pair) for pair in zip(found, expected, strict=True)] == [True] * len(expected)


def test_fifty_steps_with_dropout_and_late_streams_are_the_same_to_the_bit():
    workload, device = tiny_workload("gpt2", **DROPOUT), LateStreams()
    step = ahead(workload, device, "full")
    with device.races:
        found = after(step, workload, 50)
    assert device.races.num_beside > 50 * 3 * 10  # three of four blocks, at least ten operators each
    assert_same(found, after(build(workload, "full"), workload, 50))


@pytest.mark.parametrize(
    ("family", "activation", "knobs"),
    [
        ("gpt2", "pointwise", {}),
        ("llama", "attention", BY_BLOCK),
        ("qwen3_moe", MIXED, BY_BLOCK),
        ("llama", PARTS, {}),
        ("llama", "full", {"optimizer": OptimizerVariant(update="backward")}),
    ],
)
def test_every_tier_races_with_nothing(family: str, activation: str, knobs: dict[str, Any]):
    workload, device = tiny_workload(family, **(DROPOUT if family == "gpt2" else {})), LateStreams()
    step = ahead(workload, device, activation, loss_chunks=2, **knobs)
    with device.races:
        found = after(step, workload, 2)
    assert device.races.num_beside
    assert_same(found, after(build(workload, activation, loss_chunks=2, **knobs), workload, 2))


class Hasty(recompute_ahead._Started):
    def __call__(self) -> None:
        self._held = None


class Careless(recompute_ahead._Started):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._held = ()


def test_who_does_not_wait_is_found_out(monkeypatch: pytest.MonkeyPatch):
    workload, device = tiny_workload("llama"), LateStreams(early=0.0)
    monkeypatch.setattr(recompute_ahead, "_Started", Hasty)
    device.races.raises = False
    with device.races:
        found = after(ahead(workload, device, "full"), workload, 2)
    assert found[1].isnan()  # since the first step's gradients were
    device.races.raises = True
    with device.races, pytest.raises(RaceError, match="reads"):
        after(ahead(workload, device, "full"), workload, 1)


def test_memory_that_is_given_away_too_soon_is_found_out(monkeypatch: pytest.MonkeyPatch):
    workload = tiny_workload("llama")
    device = LateStreams()
    monkeypatch.setattr(recompute_ahead, "_Started", Careless)
    with device.races, pytest.raises(RaceError, match="is given memory on stream 0"):
        after(ahead(workload, device, "pointwise"), workload, 2)
    monkeypatch.undo()
    device = LateStreams()
    monkeypatch.setattr(device, "stream_waits", lambda stream: None)
    with device.races, pytest.raises(RaceError, match="on stream 1 before stream 0"):
        after(ahead(workload, device, "pointwise"), workload, 2)


def test_what_has_no_effect_is_said():
    workload = tiny_workload("llama")
    notes = build(workload, "full", recompute_ahead=1).notes
    assert "recompute_ahead 1 has no effect: a CPU has no streams" in notes
    notes = ahead(workload, LateStreams(), "2*full,2*offload").notes
    assert any(note.startswith("recompute_ahead 1 has no effect beside tiers that offload") for note in notes)
    notes = ahead(workload, LateStreams(), "1*full,1*keep,1*full,1*keep").notes
    assert "recompute_ahead 1 has no effect: no two blocks in a row are recomputed" in notes


def test_gathered_weights_that_are_dropped_are_refused():
    with pytest.raises(RecipeError, match=r"zero\.stage 3 over mesh\.shard 2 has dropped them"):
        Strategy(1, recompute_ahead=1, mesh=Mesh(shard=2), zero=Zero(3))
    with pytest.raises(RecipeError, match="recompute_ahead is 2; it is 0 or 1 blocks"):
        Strategy(1, recompute_ahead=2)
