"""The meter against sizes known beforehand, and out of memory at a cap."""

import gc

import pytest
import torch

from trainfit.hardware import Accelerator, find_device, this_machine

MIB = 2**20


@pytest.fixture(autouse=True)
def _nothing_left_over() -> None:
    gc.collect()


def test_peak_sees_what_was_freed_and_reset_forgets_it(target: Accelerator):
    num_bytes = 64 * MIB
    # The host's meter counts pages of the whole process: allow for what else it touches.
    slack = {"cpu": 4 * MIB, "npu": 0}[target.kind]
    torch.ones(num_bytes, dtype=torch.uint8, device=target.device)  # code that runs for the first time takes pages too
    before = target.memory.current_bytes()
    assert target.memory.reset_peak()
    tensor = torch.ones(num_bytes, dtype=torch.uint8, device=target.device)
    assert target.memory.current_bytes() - before == pytest.approx(num_bytes, abs=slack)
    del tensor
    assert target.memory.current_bytes() == pytest.approx(before, abs=slack)
    assert target.memory.peak_bytes() - before == pytest.approx(num_bytes, abs=slack)
    target.memory.reset_peak()
    assert target.memory.peak_bytes() == pytest.approx(before, abs=slack)


def test_what_is_reserved_is_no_less_than_what_was_in_use(npu: Accelerator):
    npu.memory.reset_peak()
    tensor = torch.ones(64 * MIB, dtype=torch.uint8, device=npu.device)
    del tensor
    assert npu.memory.peak_reserved_bytes() >= npu.memory.peak_bytes() >= 64 * MIB
    assert npu.memory.peak_reserved_bytes() >= npu.memory.reserved_bytes() >= npu.memory.current_bytes()


def test_allocations_are_rounded_up_as_the_catalogue_says(npu: Accelerator):
    granularity = find_device(npu.name).spec.allocation_granularity
    before = npu.memory.current_bytes()
    tensors = [torch.empty(num_bytes, dtype=torch.uint8, device=npu.device) for num_bytes in (1, 512, 513)]
    assert npu.memory.current_bytes() - before == granularity + granularity + 2 * granularity
    del tensors


def test_total_and_free_add_up(npu: Accelerator, set_limit):
    set_limit(100 * MIB)
    tensor = torch.empty(30 * MIB, dtype=torch.uint8, device=npu.device)
    assert npu.memory.total_bytes() == 100 * MIB
    assert npu.memory.free_bytes() == 100 * MIB - npu.memory.current_bytes()
    del tensor


def test_out_of_memory_is_recognised_and_recoverable(target: Accelerator, set_limit):
    set_limit(target.memory.current_bytes() + 8 * MIB if target.kind == "npu" else 0)
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8, device=target.device)
    assert target.is_out_of_memory(caught.value)
    assert torch.ones(MIB, dtype=torch.uint8, device=target.device).sum() == MIB


def test_other_errors_are_not_out_of_memory(target: Accelerator):
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2, 3, device=target.device) @ torch.ones(2, 3, device=target.device)
    assert not target.is_out_of_memory(caught.value)


def test_a_cache_that_holds_nothing_is_not_emptied(target: Accelerator):
    assert not target.memory.release_cache(threshold=0.0)


def test_this_machine_is_the_npu_with_the_memory_that_its_driver_reports(npu: Accelerator):
    here = this_machine()
    assert here.spec.name == "ascend-910b3"
    assert here.total_bytes == npu.memory.total_bytes()
    assert here.spec.tflops == find_device("ascend-910b3").spec.tflops
    assert this_machine("cpu").spec.kind == "cpu"
