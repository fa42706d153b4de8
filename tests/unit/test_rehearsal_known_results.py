"""Remembered results: what a fake kernel gives the second time is what it gave the first."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from trainfit.hardware import find_device
from trainfit.rehearsal import known_results, rehearse
from trainfit.rehearsal.operators import FakeKernels
from trainfit.step import Strategy
from trainfit.workload import workload_from_module

Run = Callable[[Tensor], Any]


def seen(output: Any, given: Tensor) -> Any:
    if not isinstance(output, Tensor):
        return [seen(each, given) for each in output]
    storage = output.untyped_storage()
    shares = storage._cdata == given.untyped_storage()._cdata
    shape = tuple(output.shape), output.stride(), output.storage_offset(), output.dtype, output.device.type
    flags = shares, output is given, output.is_conj(), output.is_neg(), output.requires_grad
    return shape, storage.nbytes(), flags, sorted(vars(output)), str(torch._C._dispatch_keys(output))


def under(mode: AbstractContextManager[Any], make: Callable[[], Tensor], run: Run) -> Any:
    with FakeTensorMode(), torch.device("cpu"):
        given = make()
        with mode:
            return seen(run(given), given)


def in_another_default(x: Tensor) -> Any:
    """What has no dtype of its own takes the default's, which a model may set."""
    before, numbers = torch.get_default_dtype(), torch.zeros(3, dtype=torch.int64)
    made = [torch.ones(2), numbers * 1.5, numbers / 2]
    torch.set_default_dtype(torch.bfloat16)
    try:
        return [*made, torch.ones(2), numbers * 1.5, numbers / 2]
    finally:
        torch.set_default_dtype(before)


def inferred(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.t()


CASES: dict[str, tuple[Callable[[], Tensor], Run]] = {
    "scalars": (lambda: torch.zeros(4, dtype=torch.int64), lambda x: [x * 1, x * True, x * 1.0, x**2, x**2.0]),
    "views of views": (lambda: torch.zeros(4, 6), lambda x: [x[1:].t()[2:], x[1:].t()[2:].unsqueeze(0)]),
    "in place on views": (lambda: torch.zeros(4, 6), lambda x: [x[1:].add_(1), x[1:].t().zero_(), x.add_(x)]),
    "no elements": (lambda: torch.zeros(3, 0), lambda x: [x.t(), x.sum(1), x * 2, x.reshape(-1).unbind()]),
    "made of nothing": (
        lambda: torch.zeros(2),
        lambda x: [torch.empty(2, 3), torch.zeros(3), torch.full((2,), 1.5), torch.arange(3), torch.tensor(1.0)],
    ),
    "the default dtype": (lambda: torch.zeros(2), in_another_default),
    "no dimensions": (lambda: torch.zeros(()), lambda x: [x * 2, x.expand(3), x.reshape(-1)]),
    "strides of 0": (lambda: torch.zeros(3, 1).expand(3, 4), lambda x: [x * 2, x.t(), x.clone(), x.split(3, 1)]),
    "conjugates": (
        lambda: torch.zeros(3, 4, dtype=torch.complex64),
        lambda x: [x.imag, x.conj().imag, x.conj() * x, x.conj().view(12), x.view(12)],
    ),
    "other devices": (lambda: torch.zeros(3), lambda x: [torch.empty_like(x, device="meta"), x.to("meta"), x * 2]),
    "inference": (lambda: torch.zeros(3, 4), lambda x: [x.t(), inferred(x)]),
    "gradients": (lambda: torch.zeros(3, 4, requires_grad=True), lambda x: [x.t(), x.detach().t(), x * 2]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_remembered_is_what_is_computed(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(known_results, "_results", {})
    make, run = CASES[name]
    plain = under(nullcontext(), make, run)
    assert under(FakeKernels(), make, run) == plain
    assert known_results._results, "nothing was remembered"
    assert under(FakeKernels(), make, run) == plain


def test_sparse_outputs_are_not_looked_into():
    with FakeTensorMode(), torch.device("cpu"), FakeKernels():
        assert torch.zeros(3, 4).to_sparse().layout == torch.sparse_coo


def test_sizes_that_a_model_reads_off_tensors_are_not_made_up():
    """Of another model the bytes would be another's."""

    def make() -> nn.Module:
        dim = int(torch.linspace(8, 16, 2, device="cpu")[1])
        return nn.Sequential(nn.Embedding(8, dim), nn.Linear(dim, 8))

    model = workload_from_module(make, seq_len=4, vocab_size=8)
    with pytest.raises(DataDependentOutputException):
        rehearse(model, Strategy(1), find_device("ascend-910b3"))
