"""Training whose all-gathers come late, each rank's at other moments, and are poison until they are waited for."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from zero_ranks import Case, build, window, workload_of


@dataclass(frozen=True)
class Delay:
    """Seconds that a gather takes longer, drawn between least and most."""

    least: float
    most: float


class Late(dist.Work):
    """A gather that has come when it is due; what it gathers is not there before wait()."""

    def __init__(self, work: dist.Work, gathered: Tensor, output: Tensor, due: float) -> None:
        super().__init__()
        self._work, self._gathered, self._output, self._due = work, gathered, output, due

    def wait(self, timeout: object = None) -> bool:
        self._work.wait()
        time.sleep(max(0.0, self._due - time.monotonic()))
        self._output.copy_(self._gathered)
        return True


class LateAllGather:
    """All-gather for set_custom_all_gather(). Those that block are late where they are called."""

    def __init__(self, delay: Delay) -> None:
        self._delay, self._random = delay, random.Random(dist.get_rank())

    def allocate(self, size: Sequence[int], *, dtype: object, device: object) -> Tensor:
        return Tensor.new_empty(Tensor(), size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        seconds = self._random.uniform(self._delay.least, self._delay.most)
        if not async_op:
            time.sleep(seconds)
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
        gathered = output_tensor.new_empty(output_tensor.shape)
        work = dist.all_gather_into_tensor(gathered, input_tensor.clone(), group=group, async_op=True)
        output_tensor.fill_(float("nan"))
        return Late(work, gathered, output_tensor, time.monotonic() + seconds)


def losses(case: Case, num_steps: int, delay: Delay | None, *, waits_late: bool) -> tuple[list[float], float]:
    """Losses and gradient norms of num_steps steps, and their seconds.

    waits_late: gathers begin when they are asked for and are waited for when parameters are used, as on a device with
    streams; else they block, as gloo's do.
    """
    step = build(case)
    root = step._sync.root
    for module in root.modules():
        if isinstance(module, FSDPModule) and delay is not None:
            module.set_custom_all_gather(LateAllGather(delay))
    root._set_unshard_async_op(waits_late)
    vocab_size, found = workload_of(case.model).vocab_size, []
    begin = time.monotonic()
    for number in range(num_steps):
        result = step(window(case, number, vocab_size))
        assert result.gradient_norm is not None
        found += [float(result.loss), float(result.gradient_norm)]
    return found, time.monotonic() - begin


def run_all(work: Sequence[tuple[Case, int, Delay | None, bool]]) -> list[tuple[list[float], float]]:
    return [losses(case, steps, delay, waits_late=late) for case, steps, delay, late in work]
