"""The model of the caching allocator against a real one. python benchmarks/allocator_check.py [cuda|npu] [traces]

Random traces of allocations and frees on one stream, each in a fresh process for each of four settings: after every
allocation and free, bytes allocated and reserved of the device and of the model are compared, and so are the peaks.
Settings are read by PyTorch when a process starts, so each has its own. Exits 1 when one trace differs, 2 with one line
where there is no such device.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import dataclass

import torch

from trainfit.errors import DeviceError
from trainfit.hardware import Accelerator, accelerator
from trainfit.hardware.allocator import conf_of
from trainfit.hardware.memory import DeviceMemory
from trainfit.hardware.runtime import allocation_padding_of, best_kind
from trainfit.profile import AllocatorSettings
from trainfit.rehearsal.allocator import CachingAllocator

SETTINGS = (
    AllocatorSettings(),
    AllocatorSettings(expandable_segments=True),
    AllocatorSettings(max_split_size_mb=64),
    AllocatorSettings(roundup_power2_divisions=4),
)
LIVE_BYTES = 4 * 2**30  # at most, of one trace
ACTIONS = 600


@dataclass(frozen=True)
class Action:
    """Allocate num_bytes under a number, or free what has it (num_bytes 0)."""

    number: int
    num_bytes: int


def random_trace(seed: int) -> list[Action]:
    """Sizes over six orders of magnitude, some of them again and again, as a step's are."""
    numbers, live, actions = random.Random(seed), {}, []
    usual = [int(2 ** numbers.uniform(8, 28)) for _ in range(12)]
    for number in range(ACTIONS):
        size = numbers.choice(usual) if numbers.random() < 0.7 else int(2 ** numbers.uniform(4, 28.5))
        if live and (numbers.random() < 0.45 or sum(live.values()) + size > LIVE_BYTES):
            freed = numbers.choice(list(live))
            live.pop(freed)
            actions.append(Action(freed, 0))
        else:
            live[number] = size
            actions.append(Action(number, size))
    return actions


def first_difference(device: Accelerator, settings: AllocatorSettings, trace: list[Action]) -> str | None:
    """Where device and model part, in words; None where they never do."""
    memory, model = device.memory, CachingAllocator(settings, padding=allocation_padding_of(device.kind))
    assert isinstance(memory, DeviceMemory)
    module = getattr(torch, device.kind)
    module.empty_cache()
    if memory.reserved_bytes():
        return f"{memory.reserved_bytes()} bytes are held before the trace begins"
    memory.reset_peak()
    live: dict[int, torch.Tensor] = {}
    for step, action in enumerate(trace):
        if action.num_bytes:
            live[action.number] = torch.empty(action.num_bytes, dtype=torch.uint8, device=device.device)
            model.malloc(action.number, action.num_bytes)
        else:
            del live[action.number]
            model.free(action.number)
        real = memory.current_bytes(), memory.reserved_bytes()
        if real != (model.allocated_bytes, model.reserved_bytes):
            words = f"device {real}, model {(model.allocated_bytes, model.reserved_bytes)} (allocated, reserved)"
            return f"action {step} of {len(trace)}, {action}: {words}"
    peaks = memory.peak_bytes(), int(module.max_memory_reserved(device.device))
    if peaks != (model.peak_allocated_bytes, model.peak_reserved_bytes):
        return f"peaks: device {peaks}, model {(model.peak_allocated_bytes, model.peak_reserved_bytes)}"
    live.clear()
    module.empty_cache()
    return None if memory.reserved_bytes() == 0 else f"{memory.reserved_bytes()} bytes are held after all was freed"


def check_one(kind: str, index: int, num_traces: int) -> int:
    """All traces under one setting, in this process."""
    device, settings = accelerator(kind), SETTINGS[index]
    differences = [(seed, first_difference(device, settings, random_trace(seed))) for seed in range(num_traces)]
    bad = [f"trace {seed}: {difference}" for seed, difference in differences if difference is not None]
    print(
        f"{conf_of(settings) or 'defaults':32} {num_traces - len(bad)} of {num_traces} traces equal",
        *bad[:3],
        sep="\n  ",
    )
    return int(bool(bad))


def check_all(kind: str, num_traces: int = 50) -> bool:
    """Every setting in a process of its own. Whether all traces agree."""
    codes = []
    for index, settings in enumerate(SETTINGS):
        environment = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
        if conf := conf_of(settings):
            environment[f"PYTORCH_{kind.upper()}_ALLOC_CONF"] = conf
        command = [sys.executable, __file__, kind, str(num_traces), str(index)]
        codes.append(subprocess.run(command, env=environment, check=False).returncode)
    return not any(codes)


def main() -> int:
    arguments = sys.argv[1:]
    kind = arguments[0] if arguments else best_kind()
    num_traces = int(arguments[1]) if len(arguments) > 1 else 50
    if len(arguments) > 2:
        return check_one(kind, int(arguments[2]), num_traces)
    try:
        device = accelerator(kind)
    except DeviceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if device.kind == "cpu":
        print("error: a CPU has no caching allocator; run this where there is a GPU or an NPU", file=sys.stderr)
        return 2
    print(f"{device.name}, torch {torch.__version__}, {ACTIONS} actions a trace")
    return int(not check_all(device.kind, num_traces))


if __name__ == "__main__":
    raise SystemExit(main())
