"""Which operators are collectives, and what they carry: read off the calls themselves, in rehearsals and real runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group as resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainfit.profile import Collective
from trainfit.rehearsal.links import Links
from trainfit.rehearsal.operators import leaves_to_its_handler

_OUTPUT = -1
_SETTLE_SECONDS = 0.5
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# By name: the kind, and which argument is the payload. DTensor's are functional and make their output themselves.
_C10D: Mapping[str, tuple[str, int]] = {
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 0),
    "scatter_": ("scatter", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
}
_FUNCTIONAL: Mapping[str, tuple[str, int]] = {
    "all_gather_into_tensor": ("all_gather", _OUTPUT),
    "all_gather_into_tensor_out": ("all_gather", _OUTPUT),
    "all_gather_into_tensor_coalesced": ("all_gather", _OUTPUT),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "all_reduce_coalesced_": ("all_reduce", 0),
    "all_to_all_single": ("all_to_all", 0),
    "broadcast": ("broadcast", 0),
    "broadcast_": ("broadcast", 0),
    "isend": ("send", 0),
    "irecv": ("recv", 0),
}
_KINDS: Mapping[str, tuple[str, int]] = {
    **{f"c10d::{name}": row for name, row in _C10D.items()},
    **{f"_c10d_functional::{name}": row for name, row in _FUNCTIONAL.items()},
}


@dataclass(frozen=True)
class Call:
    """One collective. tensors: all that it reads or writes. ranks: of the group, in the whole launch's numbers."""

    kind: str
    num_bytes: int
    group_size: int
    tensors: tuple[Tensor, ...] = field(repr=False, compare=False, default=())
    ranks: tuple[int, ...] = field(repr=False, compare=False, default=())

    def seconds(self, links: Links) -> float:
        """What it takes over them, see Links.seconds."""
        return links.seconds(self.kind, self.num_bytes, self.group_size, self.ranks)


def call_of(func: Any, args: tuple[Any, ...], output: Any) -> Call | None:
    """What an operator that has run did as a collective; None for all other operators."""
    if (row := _KINDS.get(func._schema.name)) is None:
        return None
    kind, position = row
    payload = _tensors(output if position == _OUTPUT else args[position])
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in payload)
    ranks = _group_ranks(func, args)
    return Call(kind, num_bytes, len(ranks), tuple(_tensors((args, output))), ranks)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _group_ranks(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    for argument, value in zip(func._schema.arguments, args):
        if argument.name == "process_group":
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
        if argument.name == "group_name":
            group = value if isinstance(value, dist.ProcessGroup) else resolve_process_group(value)
            return tuple(dist.get_process_group_ranks(group))
    raise AssertionError(f"{func} names no process group")


def tally(calls: Iterable[Call], links: Links | None = None) -> dict[str, Collective]:
    """Sums by kind, in the order of their first call."""
    totals: dict[str, Collective] = {}
    for call in calls:
        before = totals.get(call.kind, Collective(0, 0, ()))
        totals[call.kind] = Collective(
            before.count + 1,
            before.bytes + call.num_bytes,
            tuple(sorted({*before.group_sizes, call.group_size})),
            before.seconds + (call.seconds(links) if links else 0.0),
        )
    return totals


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives of a real run: enter it around a step.

    settles: do not go on before gloo's threads have let go of a collective.

    NOTE [ Frees that no profiler sees ]
    A gloo thread may be the last to drop a collective and its buffers. The profiler hears of allocations and frees from
    the thread that it was started on, and from gloo's while they carry out a collective, but not of what they drop
    after it: such buffers would look live for ever. So this thread holds the collective's Work until it is done and
    those threads rest: the last reference is here. A thread that waits for another rank rests too, hence the order.
    What DTensor calls is functional and keeps its Work from Python, but issues an operator of c10d that gives it. Their
    reduce-scatter needs this most: gloo's copies its input, and nobody but the Work holds the copy.
    """

    def __init__(self, *, settles: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self._settles = settles

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(leaves_to_its_handler, types)):
            return NotImplemented  # DTensor first: what it does is seen in its local operators
        if self._settles and func.namespace == "_c10d_functional":
            with _Settled():  # type: ignore[no-untyped-call]
                # Its kernel, since the operator would come to the mode by itself and leave it before the kernel.
                output = func.redispatch(_CPU, *args, **(kwargs or {}))
        else:
            output = func(*args, **(kwargs or {}))
        if (call := call_of(func, args, output)) is not None:
            self.calls.append(replace(call, tensors=()))
            if self._settles:
                _settle(call.kind, output)
        return output


class _Settled(TorchDispatchMode):
    """Around a functional collective: settles what it issues."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if (row := _KINDS.get(func._schema.name)) is not None:
            _settle(row[0], output)
        return output


def _settle(kind: str, output: Any) -> None:
    last = output[-1] if isinstance(output, list | tuple) and output else output
    # Point to point: the other rank may wait for something else of this one first.
    if kind not in ("send", "recv") and isinstance(last, torch.ScriptObject):
        dist.Work.unbox(last).wait()
        _let_threads_rest()


def _let_threads_rest() -> None:
    """Returns when no other thread of this process has anything to do."""
    own = str(threading.get_native_id())
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        time.sleep(_SETTLE_SECONDS)
        return
    deadline = time.monotonic() + _SETTLE_SECONDS
    resting = 0
    while resting < 2 and time.monotonic() < deadline:
        resting = resting + 1 if all(_rests(task) for task in tasks.iterdir() if task.name != own) else 0
        time.sleep(1e-4)


def _rests(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] != "R"
    except OSError:
        return True  # it has ended
