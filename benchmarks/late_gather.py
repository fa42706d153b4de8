"""All-gathers that come late, as over a slow network, for FSDPModule.set_custom_all_gather()."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Delay:
    """Seconds that a gather takes longer, drawn between least and most."""

    least: float
    most: float


class _Late(dist.Work):
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
    """Each rank's gathers are late by other numbers.

    With async_op the output is nan until wait(), so that whoever does not wait is found out; without, the caller is
    held up.
    """

    def __init__(self, delay: Delay) -> None:
        self._delay, self._random = delay, random.Random(dist.get_rank())

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        seconds = self._random.uniform(self._delay.least, self._delay.most)
        if not async_op:
            time.sleep(seconds)
            return dist.all_gather_single(output_tensor, input_tensor, group=group)
        gathered = torch.empty_like(output_tensor)
        # A copy: the input is a part of the output.
        work = dist.all_gather_single(gathered, input_tensor.clone(), group=group, async_op=True)
        output_tensor.fill_(float("nan"))
        return _Late(work, gathered, output_tensor, time.monotonic() + seconds)
