"""Predicted against measured step time: benchmarks/fair.sh python benchmarks/step_time.py FILE.json [--rounds N]

Three small models, thirty strategies of each, one thread; the prediction reads what `trainfit devices --calibrate` has
stored. Every strategy of a model runs two steps in turn, N rounds, of which the second counts: in training a step
follows one of its own, while the first finds the caches full of others' models. Its time is the least of all rounds, in
the processor's seconds of this thread: what other processes take of the core is not in them. Seconds are kept in the
file, to which more rounds are added by running it again, so that a noisy hour does not decide. --rounds 0 only reports.
The error of two strategies of a model is how far the ratio of predicted times is from that of measured ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from trainfit.hardware import Hardware, accelerator, this_machine
from trainfit.profile import OptimizerVariant, Profile
from trainfit.rehearsal import rehearse
from trainfit.rehearsal.measure import random_window
from trainfit.step import Strategy, build_step
from trainfit.step.strategy_text import describe_strategy, parse_tiers
from trainfit.workload import Workload
from trainfit.workload.resolve import workload_from_config

MAX_MEDIAN, MAX_ERROR = 0.03, 0.08
SEQ_LEN, SEQUENCES = 256, 4
_VOCAB = 4096
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "vocab_size": _VOCAB,
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 688,
        "max_position_embeddings": 512,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": _VOCAB,
        "n_embd": 256,
        "n_layer": 6,
        "n_head": 4,
        "n_positions": 512,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "vocab_size": _VOCAB,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
        "max_position_embeddings": 512,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
}


def strategies(num_blocks: int) -> list[Strategy]:
    """The same tokens in every one: tiers alike and mixed, micro batches, loss in pieces, precisions, optimizers."""
    half, rest = num_blocks // 2, num_blocks - num_blocks // 2
    mixed = (f"{half}*full,{rest}*keep", f"{half}*attention,{rest}*pointwise", "every:2")

    def tiers(text: str) -> tuple[Any, ...]:
        return parse_tiers(text, num_blocks)

    made = [
        Strategy(size, SEQUENCES // size, "fp32", tiers(tier))
        for size in (4, 2, 1)
        for tier in ("keep", "pointwise", "full")
    ]
    made += [Strategy(4, 1, "fp32", tiers(tier)) for tier in ("attention", *mixed)]
    made += [Strategy(2, 2, "fp32", tiers(mixed[0])), Strategy(1, 4, "fp32", tiers("attention"))]
    made += [Strategy(4, 1, "fp32", tiers("keep"), chunks) for chunks in (2, 8)]
    made += [Strategy(2, 2, "fp32", tiers("pointwise"), 4), Strategy(4, 1, "fp32", tiers("full"), 4)]
    made += [Strategy(size, 4 // size, "bf16", tiers(tier)) for size in (4, 1) for tier in ("keep", "full")]
    made += [Strategy(4, 1, "bf16", tiers("pointwise"), 4), Strategy(4, 1, "bf16", tiers(mixed[0]))]
    made += [Strategy(2, 2, "bf16", tiers("keep")), Strategy(2, 2, "bf16", tiers("attention"), 2)]
    variants = (OptimizerVariant(kernel="foreach"), OptimizerVariant(kind="adafactor"), OptimizerVariant(states="int8"))
    return made + [Strategy(4, 1, "fp32", tiers("keep"), 1, variant) for variant in variants]


@dataclass
class Case:
    strategy: Strategy
    predicted: Profile
    measured: float

    @property
    def error(self) -> float:
        return self.predicted.step_seconds / self.measured - 1


def workload_of(name: str) -> Workload:
    return workload_from_config(MODELS[name], seq_len=SEQ_LEN, name=name)


def measure(workload: Workload, rounds: int) -> list[float]:
    """The least seconds of a step of each strategy."""
    steps = []
    for strategy in strategies(len(workload.anatomy().blocks)):
        torch.manual_seed(0)
        step = build_step(workload, strategy, accelerator("cpu"))
        window = random_window(workload, strategy, seed=0)
        step(window)
        steps.append((step, window))
    least = [math.inf] * len(steps)
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for position, (step, window) in enumerate(steps):
            step(window)
            begin = time.thread_time()
            step(window)
            least[position] = min(least[position], time.thread_time() - begin)
    gc.enable()
    return least


def predict(workload: Workload, hardware: Hardware, seconds: Sequence[float]) -> list[Case]:
    found = strategies(len(workload.anatomy().blocks))
    return [Case(each, rehearse(workload, each, hardware), least) for each, least in zip(found, seconds, strict=True)]


def pair_errors(cases: Sequence[Case]) -> list[float]:
    """Of the ratio of every two strategies."""
    return [
        abs((a.predicted.step_seconds / b.predicted.step_seconds) / (a.measured / b.measured) - 1)
        for a, b in combinations(cases, 2)
    ]


def table_of(name: str, cases: Sequence[Case]) -> Table:
    made = Table("strategy", "predicted", "range", "measured", "error", title=f"{name}: ms of a step")
    for case in cases:
        low, high = case.predicted.step_seconds_low, case.predicted.step_seconds_high
        made.add_row(
            describe_strategy(case.strategy),
            f"{1e3 * case.predicted.step_seconds:.1f}",
            f"{1e3 * low:.0f} to {1e3 * high:.0f}",
            f"{1e3 * case.measured:.1f}",
            f"{case.error:+.1%}",
            style="" if low <= case.measured <= high else "yellow",
        )
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kept: dict[str, list[float]] = json.loads(arguments.file.read_text()) if arguments.file.exists() else {}
    if arguments.rounds:
        for name in arguments.models:
            found = measure(workload_of(name), arguments.rounds)
            kept[name] = [min(pair) for pair in zip(found, kept.get(name, found), strict=True)]
            arguments.file.write_text(json.dumps(kept))
        return 0
    return report({name: seconds for name, seconds in kept.items() if name in arguments.models})


def report(kept: Mapping[str, Sequence[float]]) -> int:
    hardware = this_machine("cpu")
    if hardware.spec.calibration is None:
        sys.exit("calibrate first, in the same environment: benchmarks/fair.sh python -m trainfit devices --calibrate")
    print(f"Prediction {hardware.spec.calibration.source}")
    console, errors = Console(width=120), []
    for name, seconds in kept.items():
        cases = predict(workload_of(name), hardware, seconds)
        errors += (found := pair_errors(cases))
        console.print(table_of(name, cases))
        print(_summary(name, found))
    print(_summary("all", errors))
    return int(statistics.median(errors) > MAX_MEDIAN or max(errors) > MAX_ERROR)


def _summary(name: str, errors: Sequence[float]) -> str:
    within = sum(error <= MAX_ERROR for error in errors) / len(errors)
    return (
        f"{name}: {len(errors)} pairs, median error {statistics.median(errors):.2%} (at most {MAX_MEDIAN:.0%}), "
        f"{within:.1%} within {MAX_ERROR:.0%}, largest {max(errors):.1%}"
    )


if __name__ == "__main__":
    sys.exit(main())
