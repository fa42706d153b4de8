"""One variant's process: builds it, then does a step whenever it is told to. python -m contest.worker CASE VARIANT

Reads lines from stdin and answers each with a line of JSON; libraries' own words go to stderr. "step" does one.
Bytes are those of the heap counter on a CPU, else those that the device's allocator has given out:
  held    live between steps beyond weights and AdamW's states: what a variant keeps for itself
  peak    the most in a step above what was live before it
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from contest.setting import Case, Step
from heap import Heap


class Meter(Protocol):
    def live(self) -> int: ...
    def peak(self) -> int: ...
    def reset(self) -> None: ...


class DeviceMeter:
    """What the device's allocator has given out."""

    def __init__(self, kind: str) -> None:
        self._device = torch.get_device_module(kind)

    def live(self) -> int:
        gc.collect()
        return int(self._device.memory_allocated())

    def peak(self) -> int:
        return int(self._device.max_memory_allocated())

    def reset(self) -> None:
        self._device.reset_peak_memory_stats()


def main(case_json: str, variant_json: str) -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not come between the answers
    torch.set_num_threads(1)
    case, variant = Case(**json.loads(case_json)), json.loads(variant_json)
    meter: Meter = Heap("python benchmarks/frontier.py") if case.device == "cpu" else DeviceMeter(case.device)
    synchronize = (lambda: None) if case.device == "cpu" else torch.get_device_module(case.device).synchronize
    before = meter.live()
    begin = time.perf_counter()
    step = builder(variant["builder"])(case, **variant["arguments"])
    loss = float(step())
    synchronize()
    first_seconds = time.perf_counter() - begin
    step()  # with states, and with pages that the first one has made
    held = meter.live() - before - resident_bytes(case)
    answer(replies, first_seconds=first_seconds, loss=loss, held=held, torch=torch.__version__)
    for line in sys.stdin:
        if line.strip() == "step":
            answer(replies, **one_step(step, meter, synchronize))
    os._exit(0)  # gloo's and DeepSpeed's threads may abort at a normal exit


def builder(name: str) -> Callable[..., Step]:
    module, function = name.split(":")
    made: Callable[..., Step] = getattr(importlib.import_module(f"contest.{module}"), function)
    return made


def resident_bytes(case: Case) -> int:
    """Weights, two moments and buffers, in fp32."""
    with torch.device("meta"):
        from reference_model import ReferenceModel

        model = ReferenceModel(case.config)
    parameters = sum(each.numel() for each in model.parameters())
    return 12 * parameters + sum(each.numel() * each.element_size() for each in model.buffers())


def one_step(step: Step, meter: Meter, synchronize: Callable[[], None]) -> dict[str, Any]:
    live = meter.live()
    meter.reset()
    synchronize()
    gc.disable()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    step()
    synchronize()
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    gc.enable()
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak": meter.peak() - live}


def answer(replies: Any, **values: Any) -> None:
    print(json.dumps(values), file=replies, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
