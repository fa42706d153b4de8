"""What only a device with streams and memory of its own can show. python benchmarks/device_check.py [cpu|cuda|npu]

1. Each optimizer variant: predicted and measured peak, and seconds of a step beside plain AdamW's, round-robin.
2. States on the host, in many small pieces through two buffers, against states on the device: weights of 20 steps.
   Fused AdamW of host and device are different kernels, so a rounding apart is right and more is a race.
3. cast "block" against "operator": gradients to the bit.
4. fp16 with one scale: loss falls, steps that overflow are skipped.
5. The allocator's model against the device's (allocator_check.py): random traces, to the byte.

Takes about three minutes on one GPU. Exits 1 when a peak is 1 % off or one of 2 to 5 does not hold.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, replace

import torch

import allocator_check
from trainfit.hardware import Accelerator, accelerator, find_device, this_machine
from trainfit.hardware.runtime import best_kind
from trainfit.profile import LossScale, OptimizerVariant, Precision
from trainfit.rehearsal import measure, rehearse
from trainfit.rehearsal.measure import random_window
from trainfit.step import Strategy, TrainStep, build_step
from trainfit.techniques import stored_adamw
from trainfit.techniques.optimizer import bytes_per_parameter
from trainfit.workload import Workload, workload_from_config

RESIDUAL = OptimizerVariant(weights="bf16_residual")
VARIANTS = [
    OptimizerVariant(),
    OptimizerVariant(kernel="foreach"),
    OptimizerVariant(states="int8"),
    OptimizerVariant(states="fp8"),
    OptimizerVariant(weights="bf16_master"),
    RESIDUAL,
    replace(RESIDUAL, states="int8", gradients="half"),
    replace(RESIDUAL, states="int8", gradients="half", update="backward"),
    OptimizerVariant(weights="bf16_stochastic", states="int8", gradients="half"),
    OptimizerVariant(place="host"),
    OptimizerVariant(weights="bf16_master", gradients="half", place="host"),
]


def main() -> int:
    device = accelerator(sys.argv[1] if len(sys.argv) > 1 else best_kind())
    dim, blocks = (256, 4) if device.kind == "cpu" else (2048, 8)
    config = {
        "model_type": "llama", "vocab_size": 4096, "hidden_size": dim, "intermediate_size": 4 * dim,
        "num_hidden_layers": blocks, "num_attention_heads": dim // 64, "num_key_value_heads": dim // 64,
        "max_position_embeddings": 512,
    }  # fmt: skip
    workload = workload_from_config(config, seq_len=256, name="llama")
    print(f"{device.name}, {workload.anatomy().num_parameters / 1e6:.0f}M parameters, torch {torch.__version__}")
    good = [peaks(workload, device), host_equals_device(workload, device), casts_equal(workload, device)]
    good.append(fp16_trains(workload, device))
    if device.kind != "cpu":
        good.append(allocator_check.check_all(device.kind, num_traces=20))
    return int(not all(good))


def strategy_of(workload: Workload, variant: OptimizerVariant, precision: Precision = "bf16") -> Strategy:
    tiers = ("full",) * len(workload.anatomy().blocks)
    return Strategy(2, precision=precision, tiers=tiers, loss_chunks=2, optimizer=variant)


def peaks(workload: Workload, device: Accelerator) -> bool:
    hardware = this_machine("cpu") if device.kind == "cpu" else find_device(device.name)
    good, first = True, 0.0
    print(f"{'variant':52} {'bytes/param':>11} {'predicted MB':>12} {'measured MB':>11} {'error':>8} {'x plain':>7}")
    for variant in VARIANTS:
        strategy = strategy_of(workload, variant)
        norm = None if variant.update == "backward" else 1.0
        predicted = rehearse(workload, strategy, hardware, max_grad_norm=norm)
        measured = measure(workload, strategy, device, steps=3, max_grad_norm=norm)
        first = first or measured.step_seconds
        error = predicted.peak_bytes / measured.peak_bytes - 1
        good = good and abs(error) < 0.01
        words = ", ".join(str(value) for value in list(asdict(variant).values())[1:])
        print(
            f"{words:52} {bytes_per_parameter(variant).total:11.2f} {predicted.peak_bytes / 1e6:12.1f} "
            f"{measured.peak_bytes / 1e6:11.1f} {error:+8.3%} {measured.step_seconds / first:7.2f}",
            flush=True,
        )
    return good


def new_step(workload: Workload, device: Accelerator, strategy: Strategy) -> TrainStep:
    torch.manual_seed(0)
    model = workload.make_model().to(device.device)
    return build_step(workload, strategy, device, model=model)


def host_equals_device(workload: Workload, device: Accelerator) -> bool:
    before, stored_adamw.MIN_PIECE = stored_adamw.MIN_PIECE, 2**12
    try:
        variants = [OptimizerVariant(weights="bf16_master", place=place) for place in ("host", "device")]  # type: ignore[arg-type]
        steps = [new_step(workload, device, strategy_of(workload, variant)) for variant in variants]
        for seed in range(20):
            for step in steps:
                step(random_window(workload, step.strategy, seed=seed))
    finally:
        stored_adamw.MIN_PIECE = before
    masters = [
        torch.cat([state["master"].flatten().cpu() for state in step.optimizer.state.values()]) for step in steps
    ]
    difference = ((masters[0] - masters[1]).abs().max() / masters[1].abs().max()).item()
    print(f"states on the host against the device, 20 steps: masters differ by {difference:.1e} of the largest")
    return difference < 1e-2


def casts_equal(workload: Workload, device: Accelerator) -> bool:
    keep = replace(strategy_of(workload, OptimizerVariant()), tiers=("keep",) * len(workload.anatomy().blocks))
    found = []
    for cast in ("operator", "block"):
        step = new_step(workload, device, replace(keep, cast=cast))  # type: ignore[arg-type]
        step.accumulate(random_window(workload, keep, seed=0))
        found.append({name: p.grad for name, p in step.model.named_parameters()})
    equal = all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    print(f"gradients under cast block are autocast's to the bit: {equal}")
    return equal


def fp16_trains(workload: Workload, device: Accelerator) -> bool:
    variant = OptimizerVariant(kernel="foreach" if device.fused_adamw_ignores_grad_scaler else "fused")
    strategy = replace(strategy_of(workload, variant, "fp16"), loss_scale=LossScale(init_scale=2.0**40))
    step = new_step(workload, device, strategy)
    window = random_window(workload, strategy, seed=0)
    began = time.perf_counter()
    results = [step(window) for _ in range(60)]
    losses = [float(result.loss) for result in results]
    skipped = sum(result.skipped for result in results)
    print(f"fp16: loss {losses[0]:.3f} to {losses[-1]:.3f}, {skipped} of 60 steps skipped from a scale of 2^40, "
          f"{(time.perf_counter() - began) / 60:.3f} s a step")  # fmt: skip
    return 0 < skipped < 60 and losses[-1] < losses[0]


if __name__ == "__main__":
    raise SystemExit(main())
