"""Cutting, rules and rehearsals of pipelines, in one process."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.errors import DataError, ModelError, RecipeError
from trainfit.hardware import accelerator
from trainfit.hardware.ranks import fake_process_group, ranks_of
from trainfit.profile import Mesh, Pipeline, Zero
from trainfit.rehearsal.rehearse import fake_tensors
from trainfit.step import Strategy, TrainStep, build_step
from trainfit.step.strategy_text import describe_strategy
from trainfit.techniques.pipeline_cut import divide
from trainfit.techniques.pipeline_window import even_window
from trainfit.workload import IGNORED_LABEL, MicroBatch, Workload, dissect, workload_from_config, workload_from_module
from trainfit.workload.flow import trace_flow

CPU = accelerator("cpu")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}
LLAMA = workload_from_config({"model_type": "llama", **SIZES}, seq_len=16, name="llama")
TIED = workload_from_config({"model_type": "llama", **SIZES, "tie_word_embeddings": True}, seq_len=16, name="tied")
INTERLEAVED = Pipeline("interleaved", 2)


# ---- rules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_blocks", "num_stages", "sizes"),
    [(8, 4, [2, 2, 2, 2]), (9, 4, [2, 2, 3, 2]), (10, 4, [2, 3, 3, 2]), (11, 4, [3, 3, 3, 2]), (3, 2, [2, 1])],
)
def test_left_over_blocks_go_to_the_middle_first(num_blocks: int, num_stages: int, sizes: list[int]):
    parts = divide(num_blocks, num_stages)
    assert [len(part.blocks) for part in parts] == sizes
    assert [number for part in parts for number in part.blocks] == list(range(num_blocks))


def test_fewer_blocks_than_stages():
    with pytest.raises(RecipeError, match="8 pipeline stages for a model of 3 blocks"):
        divide(3, 8)


def strategy(accumulation: int, pipeline: Pipeline = Pipeline(), **more: Any) -> Strategy:
    return Strategy(1, accumulation, mesh=more.pop("mesh", Mesh(pipeline=4)), pipeline=pipeline, **more)


def test_fewer_micro_batches_than_stages():
    with pytest.raises(RecipeError, match=r"accumulation_steps is 3.*mesh.pipeline 4; use accumulation_steps=4"):
        strategy(3)
    with pytest.raises(RecipeError, match=r"accumulation_steps is 9.*use accumulation_steps=10"):
        strategy(9, INTERLEAVED)
    strategy(4)
    strategy(10, INTERLEAVED)
    strategy(1, Pipeline("gpipe"))


@pytest.mark.parametrize("pipeline", [Pipeline("1f1b", 2), Pipeline("interleaved", 1), Pipeline("gpipe", 0)])
def test_stages_per_rank_belong_to_interleaved(pipeline: Pipeline):
    with pytest.raises(RecipeError, match=r"pipeline\.stages_per_rank"):
        strategy(8, pipeline)


def test_unknown_schedules_and_keys():
    with pytest.raises(RecipeError, match=r"unknown pipeline.schedule 'zigzag'; one of 1f1b"):
        strategy(8, Pipeline("zigzag"))  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="unknown key"):
        Strategy.from_json({"micro_batch_size": 1, "pipeline": {"stages": 3}})


def test_a_strategy_with_a_pipeline_survives_json():
    full = strategy(8, INTERLEAVED)
    assert Strategy.from_json(full.to_json()) == full
    assert "pipeline 4" in describe_strategy(full)
    assert "interleaved with 2 stages a rank" in describe_strategy(full)


# ---- windows -------------------------------------------------------------------------------------------------------


def rows(number: int, tokens: int) -> MicroBatch:
    return MicroBatch.of(torch.ones(number, tokens, dtype=torch.long), torch.ones(number, tokens, dtype=torch.long))


def test_uneven_windows_are_padded_with_ignored_labels():
    window = even_window([rows(2, 5), rows(1, 7)], lambda number: number % 4 == 0)
    assert [batch.inputs.shape for batch in window] == [(2, 7)] * 4
    assert [int((batch.labels != IGNORED_LABEL).sum()) for batch in window] == [10, 7, 0, 0]
    assert [batch.num_tokens for batch in window] == [10, 7, 0, 0]


def test_even_windows_are_left_alone():
    window = [rows(2, 5), rows(2, 5)]
    assert all(a is b for a, b in zip(even_window(window, lambda number: True), window, strict=True))


def test_what_cannot_be_padded():
    images = MicroBatch(torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.long), 2)
    with pytest.raises(DataError, match=r"window of 1 micro batches .* cannot be padded .* give 2 micro batches"):
        even_window([images], lambda number: number == 2)


# ---- cutting -------------------------------------------------------------------------------------------------------


@contextmanager
def rehearsed(workload: Workload, chosen: Strategy, rank: int) -> Iterator[TrainStep]:
    with fake_process_group(chosen.mesh.size, rank):
        ranks = ranks_of(chosen.mesh, CPU, backend="hccl")
        with fake_tensors():
            yield build_step(workload, chosen, CPU, ranks=ranks)


def full_window(number: int) -> list[MicroBatch]:
    ids = torch.zeros(1, 16, dtype=torch.long)
    return [MicroBatch(ids, torch.zeros_like(ids), 16) for _ in range(number)]


@pytest.mark.parametrize("workload", [LLAMA, TIED])
@pytest.mark.parametrize("pipeline", [Pipeline(), INTERLEAVED])
def test_every_parameter_is_on_one_stage_under_its_own_name(workload: Workload, pipeline: Pipeline):
    whole = dict(workload.make_model().named_parameters())
    found: Counter[str] = Counter()
    for rank in range(4):
        with rehearsed(workload, strategy(4, pipeline), rank) as step:
            mine = dict(step.model.named_parameters())
            assert all(parameter.shape == whole[name].shape for name, parameter in mine.items())
            assert {name for name in mine if name.startswith("model.layers.")} == {
                name for name in whole if any(name.startswith(f"{block}.") for block in step.anatomy.blocks)
            }
            assert step.anatomy.num_parameters == sum(parameter.numel() for parameter in mine.values())
            found.update(list(mine))
    twice = {"model.embed_tokens.weight"} if workload is TIED else set()
    assert found == Counter(list(whole) + list(twice))


def test_parameters_of_other_stages_are_gone_from_memory():
    with fake_process_group(4, 1):
        model = LLAMA.make_model()
        refs = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
        step = build_step(LLAMA, strategy(4), CPU, model=model)
        alive = {name for name, parameter in refs.items() if parameter() is not None}
        assert alive == {name for name, _ in step.model.named_parameters()}
        kept = sum(p.untyped_storage().nbytes() for p in step.model.parameters())
        leaves = [value for part in model.modules() for value in vars(part).values() if isinstance(value, Tensor)]
        assert leaves, "dropped parameters are read as zeros"
        assert sum(zeros.untyped_storage().nbytes() for zeros in leaves) < kept / 100


def test_tiers_are_those_of_the_stages_own_blocks():
    tiers = ("keep",) * 5 + ("full",) * 3
    for rank, expected in enumerate([0, 0, 1, 2]):
        with rehearsed(LLAMA, strategy(4, tiers=tiers), rank) as step:
            blocks = [step.model.get_submodule(name) for name in step.anatomy.blocks]
            assert sum("forward" in vars(block) for block in blocks) == expected
    with (
        pytest.raises(RecipeError, match="2 activation tiers for a model of 8 blocks"),
        rehearsed(LLAMA, strategy(4, tiers=("full",) * 2), 0),
    ):
        pass


def test_a_stage_that_has_nothing_to_train():
    def frozen() -> nn.Module:
        model = LLAMA.make_model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(f"layers.{number}." in name for number in (2, 3)))
        return model

    workload = workload_from_module(frozen, seq_len=16, vocab_size=64)
    with pytest.raises(RecipeError, match="nothing trains in blocks 2 to 3"), rehearsed(workload, strategy(4), 1):
        pass


def test_a_stage_cannot_be_called_past_the_pipeline():
    with rehearsed(LLAMA, strategy(4), 1) as step, pytest.raises(ModelError, match="cannot be called by itself"):
        step.model(torch.zeros(1, 16, dtype=torch.long))


# ---- models that hand on more than hidden states -------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, hidden: Tensor, more: Tensor | None = None) -> Tensor:
        return hidden + self.linear(self.norm(hidden if more is None else hidden + more))


class Odd(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.bias = nn.Parameter(torch.zeros(16))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        if kind == "tied blocks":
            self.blocks[2].linear.weight = self.blocks[0].linear.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = start = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            if self.kind == "between" and number == 1:
                hidden = hidden * 2
            hidden = block(hidden, self.bias) if self.kind == "trained" else block(hidden)
            if self.kind == "twice":
                hidden = block(hidden)
        if self.kind == "skip":
            hidden = hidden + start
        return self.head(hidden)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("between", "block 1 is not given what block 0 returns"),
        ("trained", "block 0 is given a trained tensor beside its hidden states"),
        ("twice", "block 0 is not called once and in its turn"),
        ("skip", "its output depends on more than what the last block returns"),
    ],
)
def test_models_that_cannot_be_cut(kind: str, reason: str):
    model = Odd(kind)
    with pytest.raises(ModelError, match=f"cannot be cut into pipeline stages: {reason}; use mesh.pipeline 1"):
        trace_flow(model, dissect(model, 64), seq_len=4, device=CPU.device, autocast=CPU.autocast("bf16"))


def test_blocks_that_share_weights_cannot_be_cut():
    workload = workload_from_module(lambda: Odd("tied blocks"), seq_len=4, vocab_size=64)
    with pytest.raises(ModelError, match="are one tensor"), rehearsed(workload, strategy(2, mesh=Mesh(pipeline=2)), 0):
        pass


def test_flow_sees_frozen_parameters_and_leaves_no_trace():
    model = Odd("plain").requires_grad_(False)
    state = {name: (id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()}
    flow = trace_flow(model, dissect(model, 64), seq_len=4, device=CPU.device, autocast=CPU.autocast("bf16"))
    assert flow.before == {"embed.weight"}
    assert flow.after == {"head.weight", "head.bias"}
    assert state == {name: (id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()}
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.blocks)


# ---- rehearsals ----------------------------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Counts what is sent to other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.count[func.__name__.split(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("rank", "zero_stage", "pipeline"),
    [
        *((rank, zero_stage, Pipeline()) for rank in (0, 9, 31) for zero_stage in (1, 2, 3)),
        *((rank, 2, INTERLEAVED) for rank in (0, 9, 31)),
        (31, 3, INTERLEAVED),
    ],
)
def test_32_ranks_of_which_one_exists(rank: int, zero_stage: int, pipeline: Pipeline):
    """pipeline 4 x replicate 2 x shard 4: counts are those of the formula, for first, middle and last stage."""
    micro_batches = 4
    mesh, zero = Mesh(pipeline=4, replicate=2, shard=4), Zero(zero_stage)
    chosen = strategy(micro_batches, pipeline, mesh=mesh, zero=zero, tiers=("full", *["keep"] * 7), loss_chunks=2)
    with rehearsed(LLAMA, chosen, rank) as step:
        with Collectives() as seen:
            result = step(full_window(micro_batches))
        assert isinstance(result.loss, FakeTensor)
        loss, _ = step.evaluate(full_window(1)[0])
        assert isinstance(loss, FakeTensor)
    at_an_end = rank != 9
    groups = 2 + at_an_end  # two blocks, and what is outside of blocks at either end
    stages = pipeline.stages_per_rank
    # Stages met their neighbours when they were made: NCCL wants all ranks in a group's first call.
    assert seen.count["send"] == seen.count["recv"] == micro_batches * (2 * stages - at_an_end)
    assert seen.count["reduce_scatter_base"] == groups * (1 if zero_stage == 1 else micro_batches)
    gathers = groups if zero_stage < 3 else 2 * 2 * micro_batches
    assert seen.count["allgather_base"] >= gathers
    if zero_stage < 3:
        assert seen.count["allgather_base"] == gathers


def test_buffers_live_only_while_they_hold_something():
    """PyTorch's stages would keep what they receive of all micro batches from the start to the end of training."""
    with rehearsed(LLAMA, strategy(4), 1) as step:
        step(full_window(4))
        run: Any = step._run_window
        (stage,) = run.__self__.stages
        infos = [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]
        assert len(infos) == 8
        assert all(info.buffer is None for part in infos for info in part)


def test_an_error_in_a_block_comes_out_as_it_is_and_leaves_nothing_behind():
    with rehearsed(LLAMA, strategy(4), 1) as step:
        block: Any = step.model.get_submodule(step.anatomy.blocks[-1])
        forward, calls = block.forward, iter(range(9))

        def fail_later(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == 2:
                raise ArithmeticError("a block failed")
            return forward(*args, **kwargs)

        block.forward = fail_later
        with pytest.raises(ArithmeticError, match="a block failed"):
            step(full_window(4))
        run: Any = step._run_window
        (stage,) = run.__self__.stages
        assert not stage.fwd_cache
        assert not stage.args_recv_info
        block.forward = forward
        assert isinstance(step(full_window(4)).loss, FakeTensor)
