"""Collectives for FSDP2 that gloo, the host's process-group backend, does by copying more than it must.

Their classes are what FSDPModule.set_custom_all_gather() and set_custom_reduce_scatter() take.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class _Collective:
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class BroadcastAllGather(_Collective):
    """All-gather in place: every rank broadcasts its share of the output, all at once.

    gloo's own gathers into a buffer of the output's size and copies that (ProcessGroupGloo.cpp).
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        shares = output_tensor.view(group.size(), -1)
        # FSDP has put this rank's share where it belongs.
        assert input_tensor.untyped_storage()._cdata == output_tensor.untyped_storage()._cdata
        works = [dist.broadcast(share, group=group, group_src=rank, async_op=True) for rank, share in enumerate(shares)]
        for work in works:
            work.wait()


class ExchangedReduceScatter(_Collective):
    """Reduce-scatter: every rank is sent its share of each, and adds them.

    gloo has none of its own: PyTorch clones the input, all-reduces the clone and drops all but a share, which moves
    twice the bytes. Here (n - 1) / n of the input is sent, as in a ring. Shares are added in the order of ranks, in
    fp32 whatever they are sent in.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM, op
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), 0, out=output_tensor.view(-1))
