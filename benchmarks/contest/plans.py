"""trainfit's plans: what `choose` takes for a share of plain training's peak."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from contest.setting import BETAS, LEARNING_RATE, Case, Step, make_model
from trainfit.hardware import accelerator, this_machine
from trainfit.plan import Target, choose
from trainfit.plan.target import MAY_CHANGE
from trainfit.rehearsal import rehearse
from trainfit.step import Strategy, build_step, parse_tiers
from trainfit.step.strategy_text import describe_strategy
from trainfit.workload import MicroBatch, Workload, workload_from_module
from trainfit.workload.workload import AdamWSettings

# What rounds alone: no other precision, no other optimizer, no lossy copy.
_MAY_CHANGE = frozenset({"compile"} & set(MAY_CHANGE))


def workload_of(case: Case) -> Workload:
    config = case.config
    made = workload_from_module(partial(make_model, config), seq_len=config.seq_len, vocab_size=config.vocab_size)
    return made.copy(name=case.model, optimizer=AdamWSettings(LEARNING_RATE, BETAS, weight_decay=0.0))


def plan_all(case: Case, shares: Sequence[float], deadline: float = math.inf) -> list[dict[str, Any]]:
    """For each different plan: shares of plain's peak that lead to it, its strategy, words, and what was predicted.

    deadline: on time.monotonic's clock; after it no more plans are made.
    """
    workload, hardware, config = workload_of(case), this_machine(case.device), case.config
    plain = Strategy(config.batch_size, precision=case.precision, tiers=parse_tiers("keep", config.num_blocks))
    profile = rehearse(workload, plain, hardware, max_grad_norm=None)
    above = profile.peak_bytes - profile.resident_bytes
    found: dict[str, dict[str, Any]] = {}
    for share in shares:
        if time.monotonic() > deadline:
            break
        target = Target(
            profile.resident_bytes + int(share * above),
            config.batch_size * config.seq_len,
            config.seq_len,
            case.precision,
            may_change=_MAY_CHANGE,
        )
        plan = choose(workload, hardware, target, max_grad_norm=None)
        made = found.setdefault(
            plan.strategy.hash,
            {
                "shares": [],
                "strategy": plan.strategy.to_json(),
                "words": describe_strategy(plan.strategy) + ("" if plan.fits else ", the smallest there is"),
                "predicted_ratio": plan.predicted.step_seconds / profile.step_seconds,
                "predicted_peak": plan.predicted.peak_bytes - plan.predicted.resident_bytes,
            },
        )
        made["shares"].append(share)
    return list(found.values())


def run(case: Case, *, strategy: Mapping[str, Any]) -> Step:
    chosen = Strategy.from_json(strategy)
    device = accelerator(case.device)
    step = build_step(workload_of(case), chosen, device, max_grad_norm=None, model=case.new_model())
    window = list(MicroBatch.of(*case.tokens()).split(chosen.micro_batch_size))

    def once() -> Tensor:
        return step(window).loss

    return once
