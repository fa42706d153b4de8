"""How long a plan and a rehearsal of Llama-2-13B take: python benchmarks/plan_time.py

The plan is timed as a command, imports included; the rehearsal as a call, the median of three. Exits 1 above 15 s
or 5 s.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from trainfit.hardware import find_device
from trainfit.rehearsal import rehearse
from trainfit.step import Strategy, parse_tiers
from trainfit.workload import resolve_workload

PLAN = "plan llama-2-13b --device ascend-910b3 --seq-len 4096 --tokens-per-step 1M --json"
MAX_PLAN_SECONDS, MAX_REHEARSAL_SECONDS = 15.0, 5.0


def main() -> int:
    begin = time.perf_counter()
    command = [sys.executable, "-m", "trainfit", *PLAN.split()]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    plan_seconds = time.perf_counter() - begin
    print(f"trainfit {PLAN}: {plan_seconds:.1f} s (exit code {done.returncode}: it does not fit)")
    workload, hardware = resolve_workload("llama-2-13b", 4096), find_device("ascend-910b3")
    worst = 0.0
    for activation in ("keep", "pointwise", "full"):
        strategy = Strategy(1, 2, "bf16", parse_tiers(activation, 40), 4)
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            rehearse(workload, strategy, hardware)
            seconds.append(time.perf_counter() - begin)
        print(f"rehearse, {activation}: {statistics.median(seconds):.1f} s")
        worst = max(worst, statistics.median(seconds))
    return int(plan_seconds > MAX_PLAN_SECONDS or worst > MAX_REHEARSAL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
