"""What each rank of test_late_gathers.py runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.fsdp import FSDPModule
from zero_ranks import Case, build, window, workload_of

from late_gather import Delay, LateAllGather


def numbers(case: Case, num_steps: int, delay: Delay | None, *, waits_late: bool) -> list[float]:
    """Losses and gradient norms of num_steps steps.

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
    for number in range(num_steps):
        result = step(window(case, number, vocab_size))
        assert result.gradient_norm is not None
        found += [float(result.loss), float(result.gradient_norm)]
    return found


def run_all(work: Sequence[tuple[Case, int, Delay | None, bool]]) -> list[list[float]]:
    return [numbers(case, steps, delay, waits_late=late) for case, steps, delay, late in work]
