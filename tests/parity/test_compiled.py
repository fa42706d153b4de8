"""Compiled blocks: gradients as plain training's to rounding, bytes as rehearsed, and one clear line for the rest."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from plain import CPU, build, largest_difference, make_model, plain_gradients, planned_gradients, random_batch
from torch import Tensor, nn

from trainfit.errors import CompileError, DeviceError, ModelError, RecipeError
from trainfit.hardware import this_machine
from trainfit.plan import Target, choose
from trainfit.plan.search import Search
from trainfit.plan.variants import Tracers
from trainfit.profile import COMPILED_TIERS, GRAPH_TIERS, Compile, Mesh, Profile, Tier, Zero
from trainfit.rehearsal import measure, rehearse, verify
from trainfit.rehearsal.trace import Tracer
from trainfit.step import Strategy, TrainStep, build_step
from trainfit.techniques import compiled, inductor
from trainfit.workload import Workload, workload_from_module
from trainfit.workload.probe import run_fake

DIM, VOCAB_SIZE, SEQ_LEN = 64, 100, 64


class Gated(nn.Module):
    def __init__(self, breaks: bool, dropout: float) -> None:
        super().__init__()
        self.norm, self.heads, self.mix = nn.RMSNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, 4 * DIM)
        self.out, self.dropout = nn.Linear(2 * DIM, DIM), nn.Dropout(dropout)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(self.norm(x)).unflatten(-1, (3, 2, -1)).unbind(2)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        value, gate = self.mix(mixed.transpose(1, 2).flatten(2)).chunk(2, -1)
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.dropout(self.out(torch.sigmoid(gate) * torch.tanh(value)))


class Model(nn.Module):
    def __init__(
        self, num_blocks: int = 3, breaks: bool = False, dropout: float = 0.0, embedding_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(VOCAB_SIZE, DIM), nn.Dropout(embedding_dropout)
        self.layers = nn.ModuleList([Gated(breaks, dropout) for _ in range(num_blocks)])
        self.head = nn.Linear(DIM, VOCAB_SIZE, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.embedding(ids))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def workload(num_blocks: int = 3, *, breaks: bool = False, dropout: float = 0.0) -> Workload:
    return workload_from_module(lambda: Model(num_blocks, breaks, dropout), seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE)


def strategy(*tiers: Tier, budget: float = 1.0) -> Strategy:
    return Strategy(2, 2, tiers=tiers, loss_chunks=2, compile=Compile(1, budget))


def graphs_of(step: TrainStep) -> int:
    assert step.compiled is not None
    return step.compiled.graphs


def rehearsed(planned: Strategy) -> Profile:
    return rehearse(workload(len(planned.tiers)), planned, this_machine("cpu"))


def test_compiled_gradients_are_plain_trainings_to_rounding_and_its_bytes_are_as_rehearsed():
    """CK-13. Blocks that keep and one that recomputes, from one graph; and two whose graphs save less."""
    planned = strategy("keep", "full", "pointwise", "attention")
    step = build_step(workload(4), planned, CPU, max_grad_norm=None, model=make_model(workload(4)))
    batch = random_batch(workload(4), rows=4)
    found = planned_gradients(step, list(batch.split(2)))
    # Kernels fuse what eager rounds between operators, and sum in another order: some ulps of fp32, not to the bit.
    assert largest_difference(found, plain_gradients(make_model(workload(4)), batch)) < 1e-5
    assert graphs_of(step) == 3
    measured = measure(workload(4), planned, CPU, steps=0)  # compiles the same graph, from PyTorch's cache
    predicted = rehearsed(planned)
    assert predicted.peak_bytes == measured.peak_bytes
    assert predicted.compile_seconds > 0
    report = verify(workload(4), replace(planned, loss_chunks=1), CPU, steps=1)
    assert report.passed
    assert not report.bit_equal


def test_compiled_blocks_save_less_than_eager_and_less_still_under_a_tier_or_a_budget():
    """CK-13: saved bytes are not above eager's."""
    eager = rehearsed(replace(strategy("keep", "keep", "keep"), compile=Compile()))
    whole = rehearsed(strategy("keep", "keep", "keep"))
    budget = rehearsed(strategy("keep", "keep", "keep", budget=0.5))
    mixed = rehearsed(strategy("pointwise", "attention", "attention"))
    pointwise, attention, full = (rehearsed(strategy(*[tier] * 3)) for tier in ("pointwise", "attention", "full"))
    for row in ((eager, whole, budget, attention), (whole, pointwise, mixed, attention, full)):
        peaks = [profile.phases["loss"] for profile in row]
        assert peaks == sorted(set(peaks), reverse=True)


def test_a_graph_that_keeps_attention_saves_that_and_its_input_and_no_weights_in_half_precision():
    """In bf16: hidden states in fp32; of attention the output in bf16, and a number for each row of a head."""
    hardware, tokens = this_machine("cpu"), 2 * SEQ_LEN
    tracer = Tracer(workload(), hardware, precision="bf16", tiers=COMPILED_TIERS, compiled=Compile(1))
    blocks = tracer.trace(2, "bf16", (1,), accumulates=False).blocks
    assert blocks[0, "attention"].saved_bytes == tokens * (4 * DIM + 2 * DIM + 4 * 2)
    weights = sum(p.numel() for p in Model(1).layers[0].parameters() if p.dim() == 2)
    assert blocks[0, "keep"].saved_bytes - blocks[0, "pointwise"].saved_bytes >= 2 * weights


def test_what_a_graph_draws_is_not_drawn_again():
    """Gradients with dropout under each tier are those of the graph that saves all, from the same seed."""
    made = workload(dropout=0.5)
    batch = random_batch(made)

    def gradients(tier: Tier, budget: float = 1.0) -> dict[str, Tensor]:
        planned = replace(strategy(*[tier] * 3, budget=budget), loss_chunks=1)
        step = build_step(made, planned, CPU, max_grad_norm=None, model=make_model(made))
        torch.manual_seed(3)
        return planned_gradients(step, [batch])

    expected = gradients("keep")
    assert largest_difference(gradients("pointwise"), expected) < 1e-5
    assert largest_difference(gradients("attention"), expected) < 1e-5
    for budget in (0.3, 0.0):
        assert largest_difference(gradients("keep", budget), expected) < 1e-5


def test_verify_refuses_what_draws_in_compiled_blocks():
    with pytest.raises(RecipeError, match=r"layers.0.dropout has dropout 0.5, and compiled blocks draw other numbers"):
        verify(workload(dropout=0.5), strategy("keep", "keep", "keep"), CPU, steps=1)


def test_verify_sees_a_dropout_that_blocks_share_with_what_is_outside():
    """named_modules of the whole model tells a shared module once, by its first name."""

    def sharing() -> Model:
        model = Model(embedding_dropout=0.25)
        for layer in model.layers:
            layer.dropout = model.dropout
        return model

    made = workload_from_module(sharing, seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE)
    with pytest.raises(RecipeError, match=r"layers.0.dropout has dropout 0.25,"):
        verify(made, strategy("keep", "keep", "keep"), CPU, steps=1)


def test_verify_compares_a_model_with_dropout_outside_of_compiled_blocks():
    made = workload_from_module(lambda: Model(embedding_dropout=0.5), seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE)
    planned = replace(strategy("keep", "keep", "keep"), loss_chunks=1)
    assert verify(made, planned, CPU, steps=1).passed


def test_leave_to_compile_on_several_devices_is_said_to_have_no_effect():
    target = Target(2**30, 4 * SEQ_LEN, SEQ_LEN, may_change=frozenset({"compile"}))
    plan = choose(workload(), replace(this_machine("cpu"), count=2), target)
    assert plan.strategy.compile == Compile()
    assert "compiling is left aside: compiled blocks run on one device" in plan.notes


def test_a_graph_that_saves_more_than_eager_is_warned_of(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "eager_bytes", lambda graph: 1000)
    with pytest.warns(UserWarning, match=r"layers.0 compiled saves .* for backward, as it is written 1000 B"):
        rehearsed(strategy("keep", "keep"))


def test_compiled_blocks_that_are_left_out_of_a_rehearsal_count_as_if_they_ran(monkeypatch: pytest.MonkeyPatch):
    planned = strategy(*["full"] * 12, *["keep"] * 12)
    spliced = rehearsed(planned)
    monkeypatch.setattr(sys.modules["trainfit.rehearsal.rehearse"], "cuts_of", lambda *_: iter(()))
    assert spliced.phases == rehearsed(planned).phases


def test_a_model_that_was_compiled_can_be_built_again_without():
    model = make_model(workload())
    before = [vars(block).get("forward") for block in model.layers]
    build_step(workload(), strategy("keep", "full", "keep"), CPU, max_grad_norm=None, model=model)
    again = build(workload(), "3*full", model=model)
    batch = random_batch(workload())
    assert largest_difference(planned_gradients(again, [batch]), plain_gradients(make_model(workload()), batch)) < 1e-5
    assert again.compiled is None
    assert not any("ompiled" in str(vars(block)["forward"].forward) for block in model.layers)
    build(workload(), model=model)
    assert [vars(block).get("forward") for block in model.layers] == before


def test_no_graph_leaves_sizes_open_when_another_model_was_compiled_before(monkeypatch: pytest.MonkeyPatch):
    sizes: list[list[object]] = []
    whole = compiled.lower_without_kernels

    def lower(graph, inputs, *rest):
        sizes.append([each for each in inputs if not isinstance(each, Tensor)])
        return whole(graph, inputs, *rest)

    monkeypatch.setattr(compiled, "lower_without_kernels", lower)
    for rows in (1, 2, 3):
        rehearsed(replace(strategy("full"), micro_batch_size=rows))
    assert sizes == [[], [], []]


def test_a_graph_is_compiled_once_for_all_rehearsals_of_a_process(monkeypatch: pytest.MonkeyPatch):
    """With the same bytes and seconds as the first time, and again where what it depends on is another."""
    monkeypatch.setattr(inductor, "_KNOWN", OrderedDict())
    monkeypatch.setattr(inductor, "KERNEL_SECONDS", 0.0)
    calls: list[int] = []
    whole = inductor._lower_without_kernels
    monkeypatch.setattr(inductor, "_lower_without_kernels", lambda *given: calls.append(1) or whole(*given))
    planned = strategy("keep", "attention", "full")
    first = rehearsed(planned)
    assert len(calls) == 2
    again = rehearsed(planned)
    assert len(calls) == 2
    assert again.phases == first.phases
    assert again.compile_seconds == pytest.approx(first.compile_seconds, rel=0.3)  # some of it is measured anew
    for other in (replace(planned, micro_batch_size=1, accumulation_steps=4), replace(planned, precision="bf16")):
        rehearsed(other)
    assert len(calls) == 6
    rehearsed(replace(planned, compile=Compile(1, 0.5)))
    assert len(calls) == 7  # attention has no budget


def test_a_search_mixes_tiers_of_graphs():
    hardware = this_machine("cpu")
    target = Target(2**30, 4 * SEQ_LEN, SEQ_LEN, may_change=frozenset({"compile"}))
    search = Search(Tracers(workload(6), hardware, target), hardware, target, 2**30)
    point = next(
        bounded.point
        for bounded in search.points
        if bounded.point.strategy.compile.blocks and bounded.point.strategy.micro_batch_size == 2
    )
    drawn, traced = (
        [case.uniform(tier) for tier in COMPILED_TIERS] for case in (search.sketched(point), search.traced(point))
    )
    for (there,), (here,) in zip(drawn, traced):
        # A graph of another size reuses its buffers in other ways: by one tensor of hidden states, in one block.
        assert there.peak_bytes == pytest.approx(here.peak_bytes, abs=2 * SEQ_LEN * DIM * 4 + 1024)
        assert there.seconds / drawn[0][0].seconds == pytest.approx(here.seconds / traced[0][0].seconds, rel=0.05)
    highest, lowest = (search.traced(point).peak(traced[index]) for index in (0, -1))
    found = search.solve(point, (highest + lowest) // 2)
    assert set(found.strategy.tiers) & set(GRAPH_TIERS)
    predicted = rehearse(workload(6), found.strategy, hardware)
    assert found.peak_bytes == pytest.approx(predicted.peak_bytes, rel=0.01)


@pytest.mark.parametrize("tier", ["discard", "selective", "recompute_mlp", "offload"])
def test_tiers_that_look_at_operators_are_refused(tier: Tier):
    with pytest.raises(RecipeError, match=f"activation tier '{tier}' looks at operators as they run"):
        strategy("keep", tier)


@pytest.mark.parametrize(
    ("setting", "words"),
    [(Compile(2), "compile.blocks is 2"), (Compile(1, 1.5), "compile.budget is 1.5"), (Compile(1, -1), "budget is -1")],
)
def test_settings_out_of_range_are_refused(setting: Compile, words: str):
    with pytest.raises(RecipeError, match=words):
        Strategy(1, compile=setting)


@pytest.mark.parametrize("dim", ["pipeline", "replicate", "shard", "tensor"])
def test_several_devices_are_refused(dim: str):
    with pytest.raises(RecipeError, match=f"compile runs on one device, mesh.{dim} is 2"):
        Strategy(1, 2, compile=Compile(1), mesh=Mesh(**{dim: 2}), zero=Zero(int(dim == "shard")))


def test_a_block_that_is_no_single_graph_is_one_line():
    with pytest.raises(ModelError, match=r"layers.0 cannot be compiled as one graph .*--compile none") as error:
        rehearse(workload(breaks=True), strategy("keep", "keep", "keep"), this_machine("cpu"))
    assert "\n" not in str(error.value)


def test_leave_to_compile_what_cannot_be_compiled_is_a_plan_without_and_a_note():
    target = Target(2**30, 4 * SEQ_LEN, SEQ_LEN, may_change=frozenset({"compile"}))
    plan = choose(workload(breaks=True), this_machine("cpu"), target)
    assert (plan.fits, plan.strategy.compile, plan.target) == (True, Compile(), target)
    assert any("no block is compiled: block cannot be compiled as one graph" in note for note in plan.notes)
    with pytest.raises(CompileError, match="--compile none"):
        choose(workload(breaks=True), this_machine("cpu"), replace(target, compile=Compile(1)))


def test_functions_of_one_name_make_two_graphs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inductor, "_KNOWN", OrderedDict())

    def made(activation: Callable[[Tensor], Tensor]) -> Workload:
        @torch._dynamo.allow_in_graph
        def named(x: Tensor) -> Tensor:
            return activation(x)

        def model() -> Model:
            built = Model()
            for layer in built.layers:
                layer.dropout.forward = named
            return built

        return workload_from_module(model, seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE)

    def profile(activation: Callable[[Tensor], Tensor]) -> Profile:
        return rehearse(made(activation), strategy("keep", "keep", "keep"), this_machine("cpu"))

    profile(torch.relu)
    after = profile(lambda x: x.exp() @ torch.ones(DIM, DIM))
    monkeypatch.setattr(inductor, "_KNOWN", OrderedDict())
    assert after.phases == profile(lambda x: x.exp() @ torch.ones(DIM, DIM)).phases


def test_a_block_that_is_called_in_too_many_ways_is_one_line():
    double = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True, dynamic=False)

    def run(*sizes: int) -> None:
        for rows in sizes:
            with compiled.compile_errors("layers.0"):
                double(torch.ones(rows))

    words = r"layers.0 cannot be compiled as one graph \(\w+: .*recompile.*--compile none"
    with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(ModelError, match=words) as error:
        run(2, 3, 4)
    assert "\n" not in str(error.value)


def test_without_a_compiler_there_is_one_line(monkeypatch: pytest.MonkeyPatch):
    def missing() -> str:
        raise OSError("no g++")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", missing)
    with pytest.raises(DeviceError, match=r"compile needs a C\+\+ compiler, and none was found; install g\+\+"):
        build_step(workload(), strategy("keep", "keep", "keep"), CPU)


def test_evaluation_runs_blocks_as_they_are_written():
    step = build_step(workload(), strategy("keep", "keep", "keep"), CPU, model=make_model(workload()))
    step.evaluate(random_batch(workload()))
    assert graphs_of(step) == 0


def test_a_model_that_is_tried_on_fake_tensors_runs_as_it_is_written():
    """Kernels would read where no memory is; nor is anything compiled for it."""
    step = build_step(workload(), strategy("keep", "full", "keep"), CPU, model=make_model(workload()))
    assert run_fake(step.model, SEQ_LEN).shape == (1, SEQ_LEN, VOCAB_SIZE)
    assert graphs_of(step) == 0
