"""Windows come to the device in the order and with the contents of the host."""

from __future__ import annotations

import torch

from trainfit.train.prefetch import Prefetch
from trainfit.workload.batch import MicroBatch


def test_prefetched_windows_are_on_the_device_and_equal(target):
    ids = torch.arange(60).view(5, 3, 4)
    source = iter(
        [([MicroBatch.of(window, window + 1), MicroBatch.of(window, window)], n) for n, window in enumerate(ids)]
    )
    with Prefetch(source, target) as windows:
        taken = list(windows)
    assert [position for _, position in taken] == list(range(5))
    for (first, second), host in zip((window for window, _ in taken), ids):
        for tensor, expected in ((first.inputs, host), (first.labels, host + 1), (second.labels, host)):
            assert tensor.device == target.device
            assert torch.equal(tensor.cpu(), expected)
