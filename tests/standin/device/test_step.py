"""build_step, rehearse and measure on the npu: what the cpu gives, from the npu's own allocator and generator."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from trainfit.errors import RecipeError
from trainfit.hardware import Accelerator, Hardware, accelerator, find_device
from trainfit.profile import LossScale, OptimizerVariant
from trainfit.rehearsal import measure, rehearse
from trainfit.step import Strategy, TrainStep, build_step, parse_tiers
from trainfit.workload import LoRASettings, MicroBatch, Workload, with_adapter, workload_from_config

LENGTH = 64
CONFIGS = {
    "llama": {
        "model_type": "llama",
        "vocab_size": 500,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 176,
        "max_position_embeddings": LENGTH,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 500,
        "n_embd": 64,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": LENGTH,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MIXED = "1*full,1*attention,1*pointwise,1*keep"


@pytest.fixture(autouse=True)
def _nothing_left_over() -> None:
    gc.collect()


def workload_of(family: str, **changes: Any) -> Workload:
    return workload_from_config({**CONFIGS[family], **changes}, seq_len=LENGTH, name=family)


def window(workload: Workload, rows: int = 2, count: int = 2, seed: int = 3) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(workload.vocab_size, (rows * count, LENGTH + 1), generator=generator)
    return list(MicroBatch.of(tokens[:, :-1], tokens[:, 1:]).split(rows))


def build(workload: Workload, device: Accelerator, activation: str = "keep", **knobs) -> TrainStep:
    """The same weights on every device: made on the host, then moved."""
    torch.manual_seed(0)
    model = workload.make_model().to(device.device)
    strategy = Strategy(knobs.pop("micro_batch_size", 2), tiers=parse_tiers(activation, 4), **knobs)
    return build_step(workload, strategy, device, model=model)


def gradients(step: TrainStep, batches: list[MicroBatch], seed: int = 7) -> dict[str, Tensor]:
    step.model.zero_grad()
    torch.manual_seed(seed)
    step.accumulate(batches)
    return {name: p.grad.cpu() for name, p in step.model.named_parameters()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", CONFIGS)
def test_three_planned_steps_give_the_losses_of_the_cpu(npu: Accelerator, family: str, precision: str):
    """Mixed tiers, a chunked loss and bf16 together; no dropout, since generators of two devices differ."""
    workload = workload_of(family, **(NO_DROPOUT if family == "gpt2" else {}))

    def losses(device: Accelerator, activation: str, chunks: int) -> list[float]:
        step = build(workload, device, activation, precision=precision, loss_chunks=chunks)
        return [step(window(workload)).loss.item() for _ in range(3)]

    on_npu = losses(npu, MIXED, 3)
    # Where the npu's attention takes another path, bf16 rounds in other places.
    assert on_npu == pytest.approx(losses(accelerator("cpu"), MIXED, 3), rel=1e-5 if precision == "fp32" else 1e-3)
    assert on_npu == pytest.approx(losses(npu, "keep", 1), rel=1e-6 if precision == "fp32" else 1e-3)
    assert on_npu[0] > on_npu[2]


@pytest.mark.parametrize("activation", ["pointwise", "attention", "full", MIXED])
def test_dropout_is_the_same_in_recompute(target: Accelerator, activation: str):
    """CK-04: the device's own generator is put back, so gradients are equal to the bit."""
    workload = workload_of("gpt2", resid_pdrop=0.2, embd_pdrop=0.1, attn_pdrop=0.1)
    kept = build(workload, target)
    expected = gradients(kept, window(workload))
    other = gradients(kept, window(workload), seed=8)
    assert any(not torch.equal(other[name], expected[name]) for name in expected), "dropout is off"
    found = gradients(build(workload, target, activation), window(workload))
    for name in expected:
        assert_close(found[name], expected[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("activation", ["pointwise", "full", MIXED])
def test_recompute_on_a_stream_of_its_own_gives_the_same_gradients(npu: Accelerator, activation: str):
    """The stand-in's streams are numbers of torch.npu.Stream that order nothing; tests/parity has late ones."""
    workload = workload_of("gpt2", resid_pdrop=0.2, embd_pdrop=0.1, attn_pdrop=0.1)
    expected = gradients(build(workload, npu, activation), window(workload))
    step = build(workload, npu, activation, recompute_ahead=1)
    assert not step.notes
    found = gradients(step, window(workload))
    for name in expected:
        assert_close(found[name], expected[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("activation", ["pointwise", "attention", "full", "3*full,1*keep"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_rehearsed_peak_of_early_recompute_is_the_allocators(npu: Accelerator, activation: str, accumulation: int):
    workload = workload_of("llama", attn_implementation="eager", hidden_act="gelu")
    late = Strategy(4, accumulation, "fp32", parse_tiers(activation, 4), 4)
    early = replace(late, recompute_ahead=1)
    predicted = rehearse(workload, early, on_this_npu(npu)).peak_bytes
    assert predicted == pytest.approx(measure(workload, early, npu, steps=0).peak_bytes, rel=0.002)
    assert predicted > rehearse(workload, late, on_this_npu(npu)).peak_bytes


def on_this_npu(npu: Accelerator) -> Hardware:
    return find_device(npu.name)


@pytest.mark.parametrize("activation", ["keep", "pointwise", "full", "2*full,2*pointwise"])
@pytest.mark.parametrize(("precision", "chunks", "accumulation"), [("fp32", 1, 1), ("bf16", 4, 3)])
@pytest.mark.parametrize("family", CONFIGS)
def test_rehearsed_peak_is_the_allocators(
    npu: Accelerator, family: str, activation: str, precision: str, chunks: int, accumulation: int
):
    """The allocator rounds every tensor up to 512 bytes, and so does the rehearsal.

    The stand-in has no kernel for attention, for dropout and for silu's gradient: it runs what they are composed of,
    which no NPU would. So: attention written out, gelu, no dropout.
    """
    changes = NO_DROPOUT if family == "gpt2" else {"hidden_act": "gelu"}
    workload = workload_of(family, attn_implementation="eager", **changes)
    strategy = Strategy(4, accumulation, precision, parse_tiers(activation, 4), chunks)
    hardware = on_this_npu(npu)
    assert hardware.spec.allocation_granularity == 512
    predicted = rehearse(workload, strategy, hardware)
    measured = measure(workload, strategy, npu, steps=0)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)
    unrounded = replace(hardware, spec=replace(hardware.spec, allocation_granularity=1))
    assert rehearse(workload, strategy, unrounded).peak_bytes < predicted.peak_bytes


def test_a_smaller_step_runs_after_out_of_memory(npu: Accelerator, set_limit):
    """At a cap just above the small step's peak the large one runs out and, once deleted whole, the small one fits."""
    workload = workload_of("llama", attn_implementation="eager", hidden_act="gelu")
    large, small = (8, "pointwise"), (2, "full")

    def run(size: tuple[int, str]) -> float:
        step = build(workload, npu, size[1], micro_batch_size=size[0])
        return step(window(workload, rows=size[0], count=1)).loss.item()

    expected = run(small)
    peaks = [
        rehearse(workload, Strategy(rows, tiers=(tier,) * 4), on_this_npu(npu)).peak_bytes
        for rows, tier in (large, small)
    ]
    assert peaks[0] > 1.5 * peaks[1]
    gc.disable()  # what keeps memory after `del` would be found by the collector, but nobody calls it in time
    try:
        set_limit(npu.memory.current_bytes() + peaks[1] * 11 // 10)
        step = build(workload, npu, "pointwise", micro_batch_size=8)
        with pytest.raises(RuntimeError) as caught:
            step(window(workload, rows=8, count=1))
        assert npu.is_out_of_memory(caught.value)
        assert all(p.grad is None for p in step.model.parameters())
        # The traceback holds the failed step's frames, and they hold its tensors.
        del caught, step
        assert run(small) == expected
    finally:
        gc.enable()


def test_nothing_stays_on_the_device_after_a_step(npu: Accelerator):
    step = build(workload_of("llama"), npu, MIXED, loss_chunks=3)
    batches = window(workload_of("llama"))
    step(batches)
    resident = npu.memory.current_bytes()
    for _ in range(3):
        step(batches)
        assert npu.memory.current_bytes() == resident
    step.evaluate(batches[0])
    assert npu.memory.current_bytes() == resident


FOREACH = OptimizerVariant(kernel="foreach")


@pytest.mark.parametrize("per_block", [False, True])
def test_fp16_trains_with_foreach_and_skips_what_overflows(npu: Accelerator, per_block: bool):
    workload = workload_of("gpt2", **NO_DROPOUT)
    scale = LossScale(init_scale=2.0**40, per_block=per_block)

    def run(device: Accelerator) -> list[tuple[float, bool, float | None]]:
        step = build(workload, device, MIXED, precision="fp16", loss_chunks=3, loss_scale=scale, optimizer=FOREACH)
        before = [p.detach().cpu().clone() for p in step.model.parameters()]
        found = []
        for _ in range(40):
            result = step(window(workload))
            found.append((result.loss.item(), result.skipped, result.loss_scale))
            is_same = all(torch.equal(p.detach().cpu(), old) for p, old in zip(step.model.parameters(), before))
            assert is_same == all(skipped for _, skipped, _ in found)
        return found

    on_npu, on_cpu = run(npu), run(accelerator("cpu"))
    skipped = [each[1] for each in on_npu]
    assert skipped[0]
    assert not skipped[-1]
    assert [each[1:] for each in on_npu] == [each[1:] for each in on_cpu]
    assert [each[0] for each in on_npu] == pytest.approx([each[0] for each in on_cpu], rel=2e-3)
    assert on_npu[-1][0] < on_npu[0][0]


def test_fp16_with_fused_adamw_is_refused_where_that_ignores_the_scaler(npu: Accelerator):
    workload = workload_of("llama")
    with pytest.raises(
        RecipeError, match=r"fused AdamW on npu neither unscales nor skips .* optimizer\.kernel: foreach"
    ):
        build(workload, npu, precision="fp16")
    build(workload, accelerator("cpu"), precision="fp16")  # the host's own fused AdamW skips


@pytest.mark.parametrize("storage", ["half", "int8", "nf4"])
def test_frozen_weights_are_made_small_on_the_host_and_train_on_the_device(storage: str):
    """The whole fp32 model never lies on the device; codes, scales and tables do."""
    workload = with_adapter(workload_of("llama"), LoRASettings(rank=4))
    strategy = Strategy(2, 2, "bf16", parse_tiers(MIXED, 4), 4, frozen_weights=storage)  # type: ignore[arg-type]
    losses = []
    for device in (accelerator("cpu"), accelerator("npu")):
        torch.manual_seed(0)
        device.memory.reset_peak()
        before = device.memory.current_bytes()
        step = build_step(workload, strategy, device)
        if device.kind == "npu":
            whole = sum(p.numel() * 4 for p in workload.meta_model().parameters())
            assert device.memory.peak_bytes() - before < 0.75 * whole
            assert {p.device.type for p in step.model.parameters()} == {"npu"}
        losses.append([float(step(window(workload)).loss) for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
