"""Whose fault an exception is: one out of a collective is another rank's."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from trainfit.errors import RecipeError
from trainfit.hardware.together import is_of_collective


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (dist.DistBackendError("anything"), True),
        (dist.DistNetworkError("anything"), True),
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (RuntimeError("Connection reset by peer"), True),
        (RuntimeError("NCCL communicator was aborted on rank 0"), True),
        (RuntimeError("HCCL function error: hcclAllReduce"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("gloo"), False),
        (OSError(104, "Connection reset by peer"), False),
        (RecipeError("no such backend: gloo"), False),
    ],
)
def test_a_collectives_error_is_told_from_ones_own(error: Exception, expected: bool):
    assert is_of_collective(error) == expected
