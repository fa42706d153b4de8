"""This machine's figures: from the OS and a short measurement."""

import time

import pytest
import torch

from trainfit import hardware
from trainfit.errors import DeviceError
from trainfit.hardware import accelerator, find_device, local, this_machine


def test_cpu_figures_are_measured_once_and_plausible():
    spec = this_machine("cpu").spec
    assert this_machine("cpu").spec == spec
    assert this_machine("cpu").spec.tflops is spec.tflops
    assert spec.kind == "cpu"
    assert spec.memory_bytes.value == accelerator("cpu").memory.total_bytes()
    assert set(spec.tflops) == {"fp32", "bf16", "fp16"}
    for figure in (*spec.tflops.values(), spec.memory_bandwidth, spec.launch_seconds):
        assert figure.source.startswith("measured here")
    assert f"{torch.get_num_threads()} threads" in spec.tflops["fp32"].source
    assert spec.allocation_granularity == 1


def test_the_measured_rate_is_that_of_a_matmul_timed_by_hand():
    size = 768
    left, right = torch.ones(size, size), torch.ones(size, size)

    def seconds() -> float:
        start = time.perf_counter()
        torch.mm(left, right)
        return time.perf_counter() - start

    by_hand = 2 * size**3 / min(seconds() for _ in range(5)) / 1e12
    # Other work on the machine moves either timing; a wrong unit or operation count moves it by far more.
    assert this_machine("cpu").spec.tflops["fp32"].value == pytest.approx(by_hand, rel=0.7)


def test_cpu_and_this_are_devices_by_name():
    assert find_device("cpu", count=2) == hardware.Hardware(this_machine("cpu").spec, 2)
    assert find_device("This") == this_machine()


def test_a_kind_that_is_not_here_is_refused():
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(DeviceError, match="no cuda device"):
        this_machine("cuda")


def test_measuring_takes_no_longer_than_it_promises(monkeypatch):
    """By counted work, not by the clock: the matmul doubles in size only while the next one fits its budget."""
    sizes: list[int] = []
    monkeypatch.setattr(
        local, "_seconds", lambda device, work, repeats: sizes.append(1) or 1e-3 * 8 ** (len(sizes) - 1)
    )
    local._matmul_tflops(accelerator("cpu"), "fp32")
    assert sum(2 * 1e-3 * 8**index for index in range(len(sizes))) <= local._MATMUL_SECONDS * 8 / 7


def test_names_that_need_torch_are_functions_and_unknown_ones_are_errors():
    assert callable(hardware.this_machine)
    assert callable(hardware.accelerator)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        hardware.nonsense  # noqa: B018
