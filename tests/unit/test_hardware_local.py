"""This machine's figures: from the OS and a short measurement."""

import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trainfit import hardware
from trainfit.errors import DeviceError
from trainfit.hardware import accelerator, calibration_store, find_device, local, this_machine


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


def test_the_next_start_has_the_same_figures(monkeypatch, tmp_path):
    """As another process would, with a neighbour on the machine meanwhile: what it measured would make another plan."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(local, "_growing_matmuls", lambda device, precision: rate)

    def started() -> hardware.Hardware:
        local._measured_spec.cache_clear()
        return this_machine("cpu")

    rate = 2.0
    first = started()
    assert first.spec.tflops["fp32"].value == rate
    rate = 3.0
    assert started() == first
    (kept,) = (tmp_path / "trainfit" / "measured").iterdir()
    assert f"cpu-{torch.get_num_threads()}-torch-" in kept.name
    with monkeypatch.context() as context:
        context.setattr(calibration_store, "processor", lambda: "another machine with the same home")
        assert started().spec.tflops["fp32"].value == rate
    assert started() == first
    for broken in ("", "[]", "{}", kept.read_text().replace("2.0", "NaN"), kept.read_text().replace("2.0", '"2"')):
        kept.write_text(broken)
        rate += 1
        assert started().spec.tflops["fp32"].value == rate
    local._measured_spec.cache_clear()


def test_a_home_that_cannot_be_written_is_none(monkeypatch, tmp_path):
    (tmp_path / "trainfit").mkdir()
    (tmp_path / "trainfit" / "measured").write_text("")  # no folder
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    local._measured_spec.cache_clear()
    assert this_machine("cpu").spec.tflops["fp32"].source.startswith("measured here")
    local._measured_spec.cache_clear()


def test_the_rate_is_that_of_the_operations_torch_counts(monkeypatch):
    """On a machine that is pretended to make 3 TFLOP/s, whatever the size of the matmul."""

    def seconds_at_3_tflops(device, work, repeats):
        with FlopCounterMode(display=False) as counter:
            work()
        return counter.get_total_flops() / 3e12

    monkeypatch.setattr(local, "_seconds", seconds_at_3_tflops)
    assert local._growing_matmuls(accelerator("cpu"), "fp32") == pytest.approx(3)
    assert local._matmul_tflops(accelerator("cpu"), "fp32") == 3


def test_seconds_are_those_of_one_call():
    seconds = local._seconds(accelerator("cpu"), lambda: time.sleep(0.02), repeats=3, tries=3)
    assert 0.02 <= seconds < 0.03  # the shortest try: a neighbour only lengthens the others


def test_cpu_and_this_are_devices_by_name():
    assert find_device("cpu", count=2) == hardware.Hardware(this_machine("cpu").spec, 2)
    assert find_device("This") == this_machine()


def test_a_kind_that_is_not_here_is_refused():
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(DeviceError, match="no cuda device"):
        this_machine("cuda")
    with pytest.raises(DeviceError, match="no cuda device"):
        find_device("cuda")


@pytest.mark.parametrize("first", [1e-4, 2e-4, 5e-4, 1e-3])
def test_measuring_takes_no_longer_than_it_promises(monkeypatch, first):
    """By counted work, not by the clock: the matmul doubles in size only while the next one fits its budget."""
    seconds: list[float] = []
    monkeypatch.setattr(
        local, "_seconds", lambda device, work, repeats: seconds.append(first * 8 ** len(seconds)) or seconds[-1]
    )
    local._growing_matmuls(accelerator("cpu"), "fp32")
    runs = 6  # of each size: a warm-up and five tries
    assert runs * seconds[-1] <= local._MATMUL_SECONDS < runs * 8 * seconds[-1]
    assert runs * sum(seconds) <= local._MATMUL_SECONDS * 8 / 7


def test_names_that_need_torch_are_functions_and_unknown_ones_are_errors():
    assert callable(hardware.this_machine)
    assert callable(hardware.accelerator)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        hardware.nonsense  # noqa: B018
