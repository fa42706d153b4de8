"""The chosen plan against random strategies that fit too, all run for real:

    benchmarks/fair.sh python benchmarks/planner_beats_random.py FILE.json [--rounds N] [--memory-mb N ...]

A tiny model, budgets that bind, this machine with what `trainfit devices --calibrate` has stored. Random micro
batches, loss chunks and tiers of each block, kept where their rehearsal stays within the same budget. Each runs a step
in turn, round after round, so that a noisy neighbour hits all alike; its time is the least of all rounds, in the
processor's seconds of this thread. From the fourth round on only those near the fastest run. Strategies and seconds
are kept in the file, to which more rounds are added by running it again; --rounds 0 only reports. Exits 1 if one is
more than 3 % faster than the plan: where its prediction is slower than the plan's, by the cost model's fault, else by
the search's.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tiny_models import TINY_CONFIGS
from trainfit.hardware import accelerator, this_machine
from trainfit.plan import Plan, Target, choose
from trainfit.profile import TIER_ACCURACY, TIERS
from trainfit.rehearsal import rehearse
from trainfit.step import Strategy, build_step
from trainfit.step.strategy_text import describe_strategy
from trainfit.techniques.offload import OFFLOADED
from trainfit.units import format_bytes
from trainfit.workload import MicroBatch, workload_from_config

SEQUENCES, SEQ_LEN = 8, 128
MAX_LEAD = 0.03
# What equals plain training. On a CPU nothing is elsewhere.
EXACT_TIERS = [tier for tier in TIERS if tier not in {*OFFLOADED, *TIER_ACCURACY}]
ALL_RUN = 3  # rounds, after which those run on that are near
STILL_IN = 1.15  # times the fastest; above what the least of so many rounds is off by
WORKLOAD = workload_from_config(TINY_CONFIGS["llama"], seq_len=SEQ_LEN, name="tiny-llama")
HARDWARE = this_machine("cpu")


@dataclass
class Run:
    """A strategy and the seconds of its steps."""

    strategy: Strategy
    seconds: list[float] = field(default_factory=list)

    @property
    def least(self) -> float:
        return min(self.seconds, default=float("inf"))


def random_strategy(generator: random.Random) -> Strategy:
    size = generator.choice([1, 2, 4, 8])
    # Half of them runs of tiers, as people set them; half any tier anywhere.
    blocks = len(WORKLOAD.anatomy().blocks)
    tiers = [generator.choice(EXACT_TIERS) for _ in range(blocks)]
    if generator.random() < 0.5:
        tiers = sorted(tiers, key=TIERS.index, reverse=True)
    return Strategy(size, SEQUENCES // size, tiers=tuple(tiers), loss_chunks=generator.choice([1, 2, 4, 8]))


def feasible(count: int, allowed: int, seed: int) -> list[Strategy]:
    """So many different ones that stay within what is allowed; an error where they are too rare."""
    generator = random.Random(seed)
    seen: set[Strategy] = set()
    found: list[Strategy] = []
    while len(found) < count:
        if len(seen) == 100 * count:
            sys.exit(f"of {len(seen)} random strategies {len(found)} fit, {count} are wanted; give more memory")
        strategy = random_strategy(generator)
        if strategy not in seen:
            seen.add(strategy)
            if rehearse(WORKLOAD, strategy, HARDWARE, max_grad_norm=None).needed_bytes <= allowed:
                found.append(strategy)
    return found


def measure(runs: list[Run], chosen: Strategy, rounds: int) -> None:
    """Adds a step's seconds to those near the fastest, the plan among them, in each round."""
    ids = torch.randint(WORKLOAD.vocab_size, (SEQUENCES, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    batch = MicroBatch.of(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    steps = {}
    for run in _near(runs, chosen):
        torch.manual_seed(0)
        step = build_step(WORKLOAD, run.strategy, accelerator("cpu"), max_grad_norm=None)
        window = list(batch.split(run.strategy.micro_batch_size))
        step(window)  # the first is slower
        steps[run.strategy] = step, window
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for run in _near(runs, chosen):
            step, window = steps[run.strategy]
            begin = time.thread_time()
            step(window)
            run.seconds.append(time.thread_time() - begin)
    gc.enable()


def _near(runs: list[Run], chosen: Strategy) -> list[Run]:
    """Those that have not run often enough to tell, and those that may be the fastest. The plan always."""
    limit = STILL_IN * min(run.least for run in runs)
    return [run for run in runs if len(run.seconds) < ALL_RUN or run.least <= limit or run.strategy == chosen]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--strategies", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--memory-mb", type=int, nargs="+", default=[20, 24, 32])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if HARDWARE.spec.calibration is None:
        sys.exit("calibrate first, in the same environment: benchmarks/fair.sh python -m trainfit devices --calibrate")
    torch.set_num_threads(1)
    print(f"prediction {HARDWARE.spec.calibration.source}")
    kept = json.loads(arguments.file.read_text()) if arguments.file.exists() else {}
    return max(compare(megabytes, arguments, kept) for megabytes in arguments.memory_mb)


def compare(megabytes: int, arguments: argparse.Namespace, kept: dict[str, Any]) -> int:
    """One budget: the plan, its rivals, more rounds of those that are near. 1 where the plan is beaten."""
    plan = choose(WORKLOAD, HARDWARE, Target(megabytes * 2**20, SEQUENCES * SEQ_LEN, SEQ_LEN), max_grad_norm=None)
    if not plan.fits:
        sys.exit(plan.reason)
    key = f"{arguments.strategies} within {megabytes} MiB, seed {arguments.seed}"
    if key in kept:
        runs = [Run(Strategy.from_json(each["strategy"]), each["seconds"]) for each in kept[key]]
    else:
        runs = [Run(each) for each in feasible(arguments.strategies, plan.allowed_bytes, arguments.seed)]
    if all(run.strategy != plan.strategy for run in runs):
        runs.append(Run(plan.strategy))
    if arguments.rounds:
        measure(runs, plan.strategy, arguments.rounds)
        kept[key] = [{"strategy": run.strategy.to_json(), "seconds": run.seconds} for run in runs]
        arguments.file.write_text(json.dumps(kept))
    print(key)
    return report(runs, plan)


def report(runs: list[Run], plan: Plan) -> int:
    ranked = sorted(runs, key=lambda run: run.least)
    chosen = next(run for run in runs if run.strategy == plan.strategy)
    print(f"the plan: {describe_strategy(plan.strategy)}; what binds: {plan.binds}")
    print("  least ms (rounds), predicted ms, predicted bytes")
    for run in sorted({id(run): run for run in (*ranked[:5], chosen)}.values(), key=lambda run: run.least):
        predicted = rehearse(WORKLOAD, run.strategy, HARDWARE, max_grad_norm=None)
        print(
            f"  {run.least * 1e3:.1f} ({len(run.seconds)}), {predicted.step_seconds * 1e3:.1f}, "
            f"{format_bytes(predicted.needed_bytes)}: {describe_strategy(run.strategy)}"
        )
    lead = chosen.least / ranked[0].least - 1
    place = ranked.index(chosen) + 1
    print(
        f"within {format_bytes(plan.allowed_bytes)} the plan takes {chosen.least * 1e3:.1f} ms, place {place} of "
        f"{len(runs)}; the best is {lead:.1%} ahead, at most {MAX_LEAD:.0%}"
    )
    return int(lead > MAX_LEAD)


if __name__ == "__main__":
    sys.exit(main())
