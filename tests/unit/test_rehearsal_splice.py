"""Splicing: a rehearsal of some blocks gives what one of all blocks gives, or says that it cannot."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfit.errors import RecipeError
from trainfit.hardware import find_device
from trainfit.profile import Mesh, OptimizerVariant, Pipeline, Profile, TensorParallel, TokenBucket, Zero
from trainfit.rehearsal import rehearse
from trainfit.rehearsal.events import Event, Work
from trainfit.rehearsal.record import StepRecord
from trainfit.rehearsal.splice import Cut, NotAlikeError, Repeat, cut_of, spliced
from trainfit.step import Strategy, parse_tiers
from trainfit.workload import MicroBatch, Workload, workload_from_config

module: Any = importlib.import_module("trainfit.rehearsal.rehearse")
BLOCKS = 12
NPU = find_device("ascend-910b3")
_SIZES = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 256, "max_position_embeddings": 64}
LLAMA = {"model_type": "llama", "num_key_value_heads": 2, "intermediate_size": 64, **_SIZES}
EXPERTS = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 2,
}
BUFFERS = {  # blocks have buffers of their own, the first two are dense
    **LLAMA,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
CAPPED = {**LLAMA, "model_type": "gemma2", "head_dim": 8, "sliding_window": 8}
SEQUENCES = TensorParallel(sequence=True)
BACKWARD = OptimizerVariant(update="backward")


def workload(config: dict[str, Any] = LLAMA, blocks: int = BLOCKS) -> Workload:
    return workload_from_config({**config, "num_hidden_layers": blocks}, seq_len=32, name="deep")


def strategy(tiers: str = "keep", steps: int = 1, **settings: Any) -> Strategy:
    return Strategy(1, steps, **{"precision": "bf16", **settings}, tiers=parse_tiers(tiers, BLOCKS))


TABLE = tuple(
    TokenBucket(tokens, parse_tiers(tiers, BLOCKS))
    for tokens, tiers in ((16, "keep"), (24, "6*full,6*keep"), (32, "11*full,1*pointwise"))
)
CASES: dict[str, tuple[dict[str, Any], Strategy, int]] = {
    "keep": (LLAMA, strategy(), 0),
    "two runs, accumulated": (LLAMA, strategy("6*full,6*pointwise", 4), 0),
    "every other one": (LLAMA, strategy("every:2", loss_chunks=2), 0),
    "foreach": (LLAMA, strategy(optimizer=OptimizerVariant(kernel="foreach")), 0),
    "adafactor": (LLAMA, strategy(optimizer=OptimizerVariant(kind="adafactor")), 0),
    "bits by chance": (LLAMA, strategy(optimizer=OptimizerVariant(weights="bf16_stochastic", states="int8")), 0),
    "on the host": (LLAMA, strategy(optimizer=OptimizerVariant(place="host")), 0),
    "update in backward": (LLAMA, strategy("full", optimizer=BACKWARD), 0),
    "fp16": (LLAMA, strategy(precision="fp16", optimizer=OptimizerVariant(kernel="foreach")), 0),
    "cast by block": (LLAMA, strategy("full", 2, cast="block"), 0),
    "recomputed ahead": (LLAMA, strategy("full", 2, recompute_ahead=1), 0),
    "ahead beside collectives": (LLAMA, strategy("pointwise", mesh=Mesh(tensor=2), recompute_ahead=1), 0),
    "ahead, then kept": (LLAMA, strategy("9*full,3*keep", 2, mesh=Mesh(replicate=2), recompute_ahead=1), 0),
    "dense and experts": (EXPERTS, strategy("pointwise", 2), 0),
    "compressed": (LLAMA, strategy("6*keep_int8,6*keep_fp8", 2, cast="block"), 0),
    "made again": (LLAMA, strategy("discard", 2), 0),
    "buffers": (BUFFERS, strategy("attention"), 0),
    "blockwise attention": (CAPPED, strategy("attention", 2, attention="blockwise"), 0),
    "replicas": (LLAMA, strategy("full", 2, mesh=Mesh(replicate=2)), 0),
    "ZeRO 1": (LLAMA, strategy(steps=4, mesh=Mesh(shard=4), zero=Zero(1)), 0),
    "ZeRO 2": (LLAMA, strategy("full", 3, mesh=Mesh(shard=4), zero=Zero(2)), 0),
    "tier table": (LLAMA, strategy("11*full,1*pointwise", 2, tier_table=TABLE, micro_batch_tokens=16), 0),
    "ZeRO 3": (LLAMA, strategy("pointwise", 4, mesh=Mesh(shard=4), zero=Zero(3)), 0),
    "tensor": (LLAMA, strategy(mesh=Mesh(tensor=2)), 0),
    "sequences": (LLAMA, strategy("full", 2, mesh=Mesh(shard=2, tensor=2), zero=Zero(3), tensor=SEQUENCES), 0),
    "first stage": (LLAMA, strategy("full", 6, mesh=Mesh(pipeline=2, shard=2), zero=Zero(2)), 0),
    "last stage": (LLAMA, strategy("pointwise", 4, mesh=Mesh(pipeline=2), pipeline=Pipeline("gpipe")), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_some_blocks_give_what_all_give(name: str, monkeypatch: pytest.MonkeyPatch):
    """Bytes to the byte. Seconds to 1e-4: the norm of so many fewer gradients' norms is read in less time."""
    config, chosen, rank = CASES[name]
    settings: dict[str, Any] = {"rank": rank, "max_grad_norm": None if chosen.optimizer == BACKWARD else 1.0}
    if chosen.tier_table:
        settings["micro_batches"] = [
            MicroBatch.of(*(torch.zeros(1, length, dtype=torch.long) for _ in range(2))) for length in (32, 24, 16)
        ]
    _assert_some_give_what_all_give(workload(config), chosen, settings, monkeypatch)


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("tensor", [SEQUENCES, TensorParallel()], ids=["sequences", "whole"])
def test_some_blocks_of_a_stage_give_what_all_give(rank: int, tensor: TensorParallel, monkeypatch: pytest.MonkeyPatch):
    """At the first try: an end of a stage that is like no block in its midst would cost a second rehearsal."""
    mesh = Mesh(pipeline=2, shard=4, tensor=2)
    chosen = Strategy(1, 4, "bf16", parse_tiers("full", 16), mesh=mesh, zero=Zero(3), tensor=tensor)
    _assert_some_give_what_all_give(workload(blocks=16), chosen, {"rank": rank}, monkeypatch)


def _assert_some_give_what_all_give(
    model: Workload, chosen: Strategy, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    watched = importlib.import_module("trainfit.rehearsal.watched")

    def seen(record: StepRecord, cut: Cut) -> StepRecord:
        results.append(spliced(record, cut))
        return results[-1]

    monkeypatch.setattr(watched, "spliced", seen)
    cuts = next(module.cuts_of(model, chosen, settings["rank"]))
    monkeypatch.setattr(module, "cuts_of", lambda *_: iter([cuts]))
    some = rehearse(model, chosen, NPU, **settings)
    assert results, "nothing was spliced"
    monkeypatch.setattr(module, "cuts_of", lambda *_: iter(()))
    every = rehearse(model, chosen, NPU, **settings)
    assert len(results) == 1
    assert _without_seconds(some) == _without_seconds(every)
    assert some.phase_seconds == pytest.approx(every.phase_seconds, rel=1e-4)
    assert some.step_seconds == pytest.approx(every.step_seconds, rel=1e-4)
    assert some.communication_seconds == pytest.approx(every.communication_seconds, rel=1e-9)
    assert some.exposed_communication_seconds == pytest.approx(every.exposed_communication_seconds, rel=1e-4)
    for one, other in zip(some.timeline, every.timeline, strict=True):
        assert replace(one, seconds=0) == replace(other, seconds=0)


def _without_seconds(profile: Profile) -> dict[str, Any]:
    return {
        name: {kind: (each.count, each.bytes, each.group_sizes) for kind, each in value.items()}
        if name == "collectives"
        else value
        for name, value in vars(profile).items()
        if "seconds" not in name and name != "timeline"
    }


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("zero", [Zero(), Zero(3)], ids=["ZeRO 0", "ZeRO 3"])
def test_micro_batches_that_wait_count_as_if_they_ran(zero: Zero, stage: int, monkeypatch: pytest.MonkeyPatch):
    mesh = Mesh(pipeline=4, shard=2) if zero.stage else Mesh(pipeline=4)
    chosen = Strategy(1, 9, "bf16", parse_tiers("full", 4), mesh=mesh, zero=zero)
    model, rank = workload(blocks=4), stage * mesh.size // 4
    some = rehearse(model, chosen, NPU, rank=rank)
    left_out = chosen.accumulation_steps - module._running(chosen, stage)
    monkeypatch.setattr(module, "_running", lambda strategy, stage: strategy.accumulation_steps)
    every = rehearse(model, chosen, NPU, rank=rank)
    assert left_out == (3 if stage == 0 else 5)
    # Fake micro batches are all there from their first use on, where real ones are sent and forgotten: ids, labels and
    # the loss of each take 512 bytes here.
    assert 0 <= every.peak_bytes - some.peak_bytes <= 3 * 512 * (left_out + 1)
    assert some.reserved_bytes == every.reserved_bytes
    assert some.step_seconds == pytest.approx(every.step_seconds, rel=1e-8)
    assert some.tokens == every.tokens


def test_what_fails_is_said_of_the_blocks_that_were_asked_for():
    with pytest.raises(RecipeError, match=r"model\.layers\.6 never calls"):
        rehearse(workload(), strategy("6*full,6*recompute_core"), NPU)


def test_few_blocks_all_run():
    assert list(module.cuts_of(workload(blocks=4), Strategy(1, tiers=("keep",) * 4), 0)) == []


# ---- which blocks run --------------------------------------------------------------------------------------------


def test_a_cut_keeps_both_ends_and_two_in_the_middle():
    cut = cut_of(["a"] * 20, [range(20)], 0, reach=1)
    assert cut is not None
    assert cut.kept == (0, 1, 18, 19)
    assert cut.repeats == (Repeat(0, 4, 1, 1, 16, 1),)
    assert cut.times == {"block 1": 17}


def test_a_unit_of_several_blocks_repeats():
    cut = cut_of(["s", "s", "f"] * 8, [range(24)], 0, reach=1)
    assert cut is not None
    assert cut.kept == (*range(6), *range(18, 24))
    assert cut.times == dict.fromkeys(("block 3", "block 4", "block 5"), 5)


def test_of_other_stages_as_many_blocks_run():
    cut = cut_of(["a"] * 10 + ["b"] * 10, [range(10), range(10, 20)], 1, reach=1)
    assert cut is not None
    assert cut.kept == (0, 1, 2, 3, 10, 11, 18, 19)
    assert cut.times == {"block 5": 7}


@given(st.lists(st.sampled_from("ab"), max_size=40), st.integers(1, 3))
def test_kept_and_repeated_blocks_are_those_of_the_model(kinds: list[str], reach: int):
    cut = cut_of(kinds, [range(len(kinds))], 0, reach)
    if cut is None:
        return
    assert len(cut.kept) <= 0.75 * len(kinds)
    written: list[str] = []
    block = 0
    while block < len(cut.kept):
        repeat = next((each for each in cut.repeats if each.at == block), None)
        unit = [kinds[cut.kept[block + at]] for at in range(repeat.size if repeat else 1)]
        written += unit * (repeat.copies + 1 if repeat else 1)
        block += len(unit)
    assert written == kinds


# ---- what is checked -----------------------------------------------------------------------------------------------


def log(sizes: list[int], *, leaves: int | None = None, reads: int | None = None) -> Iterator[Event | Work]:
    """Each block makes a storage, and frees it in backward. leaves: the block that does not. reads: the block whose
    operator touches the storage of the first one."""
    for number, size in enumerate(sizes):
        yield Event(number, size, "forward", "mm", requested=size, place=f"block {number}")
        touched = (0,) if reads == number else (number,)
        yield Work("forward", "mm", 1.0, "memory", touched=touched, place=f"block {number}")
    for number, size in reversed(list(enumerate(sizes))):
        if number != leaves:
            yield Event(number, -size, "backward", "mm", place=f"block {number}")


CUT = Cut((0, 1, 8, 9), (Repeat(0, 4, 1, 1, 6, 1),))


def test_a_block_is_written_once_more_for_each_that_did_not_run():
    whole = spliced(StepRecord(list(log([8] * 4)), {1: "activations"}), CUT)
    events = whole.events
    assert [event.place for event in events] == [
        *(f"block {number}" for number in range(10)),
        *(f"block {number}" for number in reversed(range(10))),
    ]
    assert len(whole.names) == 7  # those of the block that stands for seven
    live: set[int] = set()
    for event in events:
        live.symmetric_difference_update({event.storage})
    assert not live
    assert sum(isinstance(entry, Work) for entry in whole.log) == 10


@pytest.mark.parametrize("entries", [log([8, 8, 9, 8]), log([8] * 4, leaves=2), log([8] * 4, reads=2)])
def test_blocks_that_do_not_do_the_same_are_refused(entries: Iterator[Event | Work]):
    with pytest.raises(NotAlikeError):
        spliced(StepRecord(list(entries), {}), CUT)


def test_what_outlives_the_step_in_one_block_only_is_refused():
    """Both in the middle free what the one before made: nobody frees that of the last but one."""
    entries: list[Event | Work] = [
        Event(number, 8, "forward", "mm", requested=8, place=f"block {number}") for number in range(4)
    ]
    entries += [Event(number, -8, "backward", "mm", place="block 3") for number in (3, 2, 1, 0)]
    whole = spliced(StepRecord(list(entries), {}), CUT)  # a far block frees those of all it stands for
    assert sum(event.num_bytes for event in whole.events) == 0
    double: list[Event | Work] = [*entries, Event(0, -8, "backward", "mm", place="block 3")]
    with pytest.raises(NotAlikeError, match="frees what is not there"):
        spliced(StepRecord(double, {}), CUT)
