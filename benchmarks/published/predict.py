"""What a run needs, in the words in which it was measured, and whether that fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context

from published.records import Metric, Record, Run
from published.rehearsing import Rehearsed, rehearse_run
from trainfit.hardware import Hardware, find_device
from trainfit.rehearsal.workspaces import library_bytes

_MIB = 2**20

# What a process has on the device beside its caching allocator: (bytes, how it was got).
CONTEXT: Mapping[str, tuple[int, str]] = {
    "context": (600 * _MIB, "catalogue: CUDA context and loaded kernels of torch 2, 0.4 to 0.6 GiB"),
    "communicator": (1536 * _MIB, "NCCL's buffers and kernels; see docs/design/published-runs.md"),
}
# By words in a record's device; the first that fits. Figures of memory come from the record, workspaces from here.
_DEVICES = (
    ("h200", "h200"),
    ("h100", "h100"),
    ("h800", "h100"),
    ("a100-sxm4-40", "a100-40gb"),
    ("a100 40", "a100-40gb"),
    ("a100", "a100-80gb"),
    ("4090", "rtx-4090"),
    ("3090", "rtx-3090"),
    ("l40", "l40s"),
)
_OTHER = "rtx-3090"  # any card before Hopper: the same workspaces


@dataclass(frozen=True)
class Prediction:
    """peak_bytes: in the record's metric. error: why there is no prediction."""

    peak_bytes: int = 0
    fits: bool | None = None
    rehearsed: Rehearsed | None = None
    error: str = ""

    @property
    def modelled(self) -> bool:
        return self.rehearsed is not None


Configuration = tuple[Run, str, int]  # with a device by name, and its bytes


def predictions(records: Sequence[Record], *, jobs: int = 1) -> Iterator[Prediction]:
    """One for each record, in order; each configuration is rehearsed once. jobs: processes."""
    keys = list(dict.fromkeys(map(_configuration, records)))
    outcomes: dict[Configuration, Rehearsed | str] = {}
    with ExitStack() as stack:
        results: Iterator[Rehearsed | str] = map(_tried, keys)
        if jobs > 1:
            results = stack.enter_context(get_context("fork").Pool(jobs)).imap(_tried, keys)
        for record in records:
            key = _configuration(record)
            while key not in outcomes:
                outcomes[keys[len(outcomes)]] = next(results)
            yield _prediction(record, outcomes[key])


def _configuration(record: Record) -> Configuration:
    hardware = hardware_of(record.device)
    return record.run, hardware.spec.name, record.device_bytes or hardware.total_bytes


def _prediction(record: Record, outcome: Rehearsed | str) -> Prediction:
    if isinstance(outcome, str):
        return Prediction(error=outcome)
    workspaces = sum(library_bytes(hardware_of(record.device).spec))
    return Prediction(in_metric(outcome, record.metric, workspaces, outside_bytes(record.run)), outcome.fits, outcome)


def _tried(key: Configuration) -> Rehearsed | str:
    run, device, memory = key
    hardware = find_device(device)
    limit_bytes = memory - outside_bytes(run) - sum(library_bytes(hardware.spec))
    try:
        return rehearse_run(run, hardware, limit_bytes)
    except Exception as error:  # a record that cannot be modelled is a miss, and the others go on
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def in_metric(outcome: Rehearsed, metric: Metric, workspaces: int, outside: int) -> int:
    """Bytes as the record counts them."""
    if metric in ("allocated", "active"):
        return outcome.peak_bytes + workspaces
    return outcome.reserved_bytes + workspaces + (outside if metric == "nvidia-smi" else 0)


def outside_bytes(run: Run) -> int:
    """Of a process on a device, outside of its caching allocator."""
    ranks = run.shard * run.replicate * run.tensor * run.pipeline
    return CONTEXT["context"][0] + (CONTEXT["communicator"][0] if ranks > 1 else 0)


def hardware_of(device: str) -> Hardware:
    """The catalogue's row whose kernels a record's device has."""
    words = device.lower()
    return find_device(next((name for word, name in _DEVICES if word in words), _OTHER))
