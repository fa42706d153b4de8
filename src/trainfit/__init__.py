"""trainfit: a PyTorch training run that fits the memory it has, at the least cost in speed, learning the same.

    workload = resolve_workload("llama-2-7b", seq_len=4096)
    plan = choose(workload, find_device("h100"), Target(budget_bytes=..., tokens_per_step=2**18, seq_len=4096))
    step = build_step(workload, plan.strategy, accelerator("cuda"))

Names are looked up on first use, so that importing the package does not import torch.
"""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "Hardware": "trainfit.hardware",
    "MicroBatch": "trainfit.workload",
    "Plan": "trainfit.plan",
    "Profile": "trainfit.profile",
    "Strategy": "trainfit.step",
    "Target": "trainfit.plan",
    "Workload": "trainfit.workload",
    "accelerator": "trainfit.hardware",
    "build_step": "trainfit.step",
    "choose": "trainfit.plan",
    "find_device": "trainfit.hardware",
    "measure": "trainfit.rehearsal",
    "rehearse": "trainfit.rehearsal",
    "resolve_workload": "trainfit.workload",
    "workload_from_module": "trainfit.workload",
}
__all__ = sorted(_EXPORTS)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'trainfit' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
