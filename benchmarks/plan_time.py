"""How long plans and a rehearsal take: python benchmarks/plan_time.py [NAME]

Plans are timed as commands, imports included; the rehearsal of Llama-2-13B as a call, the median of three. Wall time,
and processor time of the command, which a busy machine lengthens less. Exits 1 above a limit. NAME: one plan only.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time

from trainfit.hardware import find_device
from trainfit.rehearsal import rehearse
from trainfit.step import Strategy, parse_tiers
from trainfit.workload import resolve_workload

# name: (command, seconds at most, exit code)
PLANS = {
    "13b": ("plan llama-2-13b --device ascend-910b3 --seq-len 4096 --tokens-per-step 1M --json", 15.0, 2),
    "13b-on-8": (
        "plan llama-2-13b --device ascend-910b3 --devices 8 --seq-len 4096 --tokens-per-step 1M --json",
        20.0,
        0,
    ),
    "70b-on-64": (
        "plan llama-3.1-70b --device ascend-910b3 --devices 64 --seq-len 4096 --tokens-per-step 4M --json",
        60.0,
        0,
    ),
}
MAX_REHEARSAL_SECONDS = 5.0


def main(names: list[str]) -> int:
    slow = sum(not plan_in_time(*PLANS[name]) for name in names or PLANS)
    return int(slow + (0 if names else not rehearse_in_time()) > 0)


def plan_in_time(command: str, limit: float, expected: int) -> bool:
    begin, before = time.perf_counter(), _children_seconds()
    arguments = [sys.executable, "-m", "trainfit", *command.split()]
    done = subprocess.run(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    seconds, processor = time.perf_counter() - begin, _children_seconds() - before
    print(f"trainfit {command}: {seconds:.1f} s, {processor:.1f} s of processor time, at most {limit:g}", flush=True)
    if done.returncode != expected:
        print(f"  exit code {done.returncode} instead of {expected}", flush=True)
    return seconds <= limit and done.returncode == expected


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rehearse_in_time() -> bool:
    workload, hardware = resolve_workload("llama-2-13b", 4096), find_device("ascend-910b3")
    worst = 0.0
    for activation in ("keep", "pointwise", "full"):
        strategy = Strategy(1, 2, "bf16", parse_tiers(activation, 40), 4)
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            rehearse(workload, strategy, hardware)
            seconds.append(time.perf_counter() - begin)
        print(f"rehearse, {activation}: {statistics.median(seconds):.1f} s", flush=True)
        worst = max(worst, statistics.median(seconds))
    return worst <= MAX_REHEARSAL_SECONDS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
