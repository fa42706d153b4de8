"""Fixtures for tests that run on cpu and on the stand-in npu through the facade."""

from collections.abc import Callable, Iterator

import npu_standin
import pytest
import torch

from trainfit.hardware import Accelerator, accelerator


@pytest.fixture(params=["cpu", "npu"])
def device(request: pytest.FixtureRequest) -> str:
    """Each kind of device in turn."""
    return str(request.param)


@pytest.fixture
def target(device: str) -> Accelerator:
    """The facade of `device`."""
    return accelerator(device)


@pytest.fixture
def npu() -> Accelerator:
    """The facade of the stand-in alone."""
    return accelerator("npu")


@pytest.fixture
def set_limit() -> Iterator[Callable[[int], None]]:
    """set_limit(bytes) caps the npu until the test ends; it does nothing to the cpu."""
    yield npu_standin.set_limit
    npu_standin.set_limit()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
