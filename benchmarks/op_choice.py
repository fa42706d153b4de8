"""How near the least recompute a block comes: python benchmarks/op_choice.py [FAMILY ...] [--device NAME] [--measure]

For one block of each family, at 8 budgets from all that it saves to what `full` keeps: seconds of recompute

    fixed    where blocks mix the fixed tiers (keep, pointwise, attention, full), as a search does
    chosen   where they may also have the two chosen tiers of that budget, traced as the planner traces them
    best     of the mixed-integer program: one choice of operators for every block, proven the least

Seconds are the device's by its calibration or data sheet: of backward, less those of `keep`. What a tier copies in
forward is no recompute: a router's choices, which every tier but `keep` stores alike; it is shown. Exits 1 where
chosen is more than 3 % above best at any budget. --measure also runs a block on this machine, in turns, under each
fixed tier and under chosen ones of three budgets: ms of forward and backward, medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from reference_model import ReferenceConfig, ReferenceModel
from tiny_models import TINY_CONFIGS
from trainfit.hardware import Hardware, accelerator, find_device
from trainfit.operators import KeptOperators
from trainfit.plan.op_choice import best_choice, mixed_seconds, neighbours
from trainfit.profile import SEARCH_TIERS, Tier
from trainfit.rehearsal.model_trace import ModelTrace
from trainfit.rehearsal.trace import Tracer
from trainfit.step import Strategy, build_step
from trainfit.workload import MicroBatch, Workload, workload_from_config, workload_from_module

FAMILIES = ("reference", "llama", "gpt2", "qwen3_moe")
SHARES = (1.0, 0.9, 0.75, 0.6, 0.45, 0.3, 0.15, 0.0)
ALLOWED = 1.03
_NOTHING = 1e-9  # seconds
_ROUNDS = 9


def workload_of(family: str) -> tuple[Workload, int]:
    """The workload and its micro batch."""
    if family == "reference":
        config = ReferenceConfig()
        made = workload_from_module(
            lambda: ReferenceModel(config), vocab_size=config.vocab_size, seq_len=config.seq_len
        )
        return made, config.batch_size
    wide = {"hidden_size": 256, "intermediate_size": 704, "moe_intermediate_size": 256, "n_embd": 256}
    config = {name: wide.get(name, value) for name, value in TINY_CONFIGS[family].items()}
    return workload_from_config(config, seq_len=256, name=family), 8


def compare(family: str, hardware: Hardware) -> float:
    """The largest of chosen / best over the budgets."""
    workload, size = workload_of(family)
    tracer = Tracer(workload, hardware)
    graph = tracer.graph(0, size, "fp32")
    trace = tracer.trace(size, "fp32", (1,), accumulates=True)
    full = trace.blocks[0, "full"].saved_bytes
    fixed = [(_bytes(trace, tier, full), _again(trace, tier)) for tier in SEARCH_TIERS]
    most = _bytes(trace, "keep", full)
    print(f"{family}: {len(graph.operators)} operators, micro batch {size}, {hardware.spec.name}")
    copies = trace.blocks[0, "full"].forward_seconds - trace.blocks[0, "keep"].forward_seconds
    print(f"  copies of a router's choices, in forward: {1e6 * max(0.0, copies):.1f} us")
    print("  budget         fixed      chosen        best   chosen/best   operators kept")
    worst = 0.0
    for share in SHARES:
        room = int(most * share)
        tiers: list[Tier] = ["chosen_1", "chosen_2"]
        rules = [graph.rules(tier, each.kept) for tier, each in zip(tiers, neighbours(graph, room))]
        traced = tracer.trace_chosen({(0, each.tier): each for each in rules}, size, "fp32", accumulates=True)
        whole = ModelTrace({**trace.blocks, **traced}, trace.shell, trace.shared_bytes)
        more = [(_bytes(whole, tier, full), _again(whole, tier)) for tier in tiers]
        chosen = mixed_seconds([*fixed, *more], room)
        best = 0.0 if room >= most else best_choice(graph, room).seconds
        ratio = 1.0 if chosen <= _NOTHING else chosen / best if best > _NOTHING else float("inf")
        worst = max(worst, ratio)
        kept = " and ".join(str(len(each.kept)) for each in rules)
        figures = "".join(f"{1e6 * each:9.1f} us" for each in (mixed_seconds(fixed, room), chosen, best))
        print(f"  {room / 2**20:7.2f} MiB{figures} {ratio:12.3f}   {kept}", flush=True)
    print(f"  chosen is at most {worst:.3f} of the best\n")
    return worst


def _bytes(trace: ModelTrace, tier: Tier, full: int) -> int:
    return trace.blocks[0, tier].saved_bytes - full


def _again(trace: ModelTrace, tier: Tier) -> float:
    return trace.blocks[0, tier].backward_seconds - trace.blocks[0, "keep"].backward_seconds


def measure(family: str, hardware: Hardware) -> None:
    """Medians of forward and backward of the whole model, in turns."""
    workload, size = workload_of(family)
    tracer = Tracer(workload, hardware)
    graph = tracer.graph(0, size, "fp32")
    trace = tracer.trace(size, "fp32", (1,), accumulates=True)
    full, blocks = trace.blocks[0, "full"].saved_bytes, len(tracer.facts.structures)
    runs: dict[str, Callable[[], object]] = {}
    saved: dict[str, int] = {}
    for tier in SEARCH_TIERS:
        runs[tier], saved[tier] = _step(workload, size, (tier,) * blocks), _bytes(trace, tier, full)
    for share in (0.6, 0.4, 0.15):
        rules = graph.rules("chosen_1", neighbours(graph, int(_bytes(trace, "keep", full) * share))[0].kept)
        name = f"chosen at {share:.0%}"
        runs[name] = _step(workload, size, ("chosen_1",) * blocks, rules)
        traced = tracer.trace_chosen({(0, "chosen_1"): rules}, size, "fp32", accumulates=True)
        saved[name] = traced[0, "chosen_1"].saved_bytes - full
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(_ROUNDS + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    print(f"{family}, measured: forward and backward, median of {_ROUNDS} turns; MiB a block saves beside its input")
    least = statistics.median(seconds["keep"])
    for name, each in seconds.items():
        middle = statistics.median(each)
        print(f"  {name:14} {1e3 * middle:8.1f} ms  {middle / least:5.3f} x keep  {saved[name] / 2**20:6.2f} MiB")
    print(flush=True)


def _step(
    workload: Workload, size: int, tiers: tuple[Tier, ...], rules: KeptOperators | None = None
) -> Callable[[], object]:
    torch.manual_seed(0)
    strategy = Strategy(size, tiers=tiers, kept_operators=() if rules is None else (rules,))
    step = build_step(workload, strategy, accelerator("cpu"), max_grad_norm=None)
    tokens = torch.randint(workload.vocab_size, (size, workload.seq_len + 1))
    batch = MicroBatch.of(tokens[:, :-1], tokens[:, 1:])
    return lambda: step.accumulate([batch])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*")
    parser.add_argument("--device", default="this")
    parser.add_argument("--measure", action="store_true")
    asked = parser.parse_args()
    hardware = find_device(asked.device)
    families = asked.families or list(FAMILIES)
    worst = max(compare(family, hardware) for family in families)
    for family in families if asked.measure else ():
        measure(family, hardware)
    print(f"chosen is at most {worst:.3f} of the best at every budget; {ALLOWED} allowed")
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
