"""Settings for every test."""

import os
import tempfile
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# No calibration that this machine's user has stored: what tests say of it would depend on that.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="trainfit-tests-")

# On a busy machine an example may take any time; what a test claims does not depend on the clock.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A kernel's peak depends on how its threads meet."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
