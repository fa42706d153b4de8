"""What gloo, the host's process-group backend, lacks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class ExchangedReduceScatter:
    """Reduce-scatter for FSDPModule.set_custom_reduce_scatter: every rank is sent its share of each, and adds them.

    PyTorch's gloo backend has none of its own: it clones the input, all-reduces the clone and drops all but a share,
    which moves twice the bytes (ProcessGroupGloo.cpp). Here (n - 1) / n of the input is sent, as in a ring. Shares are
    added in the order of ranks, in fp32 whatever they are sent in.
    """

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

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
