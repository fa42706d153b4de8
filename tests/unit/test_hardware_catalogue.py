"""The catalogue as data: every figure sourced, names found, bad names and counts refused in one line."""

import subprocess
import sys
from dataclasses import fields

import pytest

from trainfit.errors import DeviceError
from trainfit.hardware import DeviceSpec, Figure, Hardware, catalogue, find_device
from trainfit.hardware.catalogue import find_reported

GIB = 2**30
SPECS = {spec.name: spec for spec in catalogue()}


def figures(spec: DeviceSpec) -> list[Figure]:
    values = [getattr(spec, field.name) for field in fields(spec)]
    return [value for value in values if isinstance(value, Figure)] + list(spec.tflops.values())


def test_every_device_of_the_issue_is_there():
    assert set(SPECS) >= {
        *("ascend-910a", "ascend-910b1", "ascend-910b2", "ascend-910b3", "ascend-910b4", "ascend-910c"),
        *("a100-40gb", "a100-80gb", "h100", "h200", "l40s", "rtx-3090", "rtx-4090"),
    }
    assert len(SPECS) == len(catalogue())


@pytest.mark.parametrize("spec", catalogue(), ids=lambda spec: spec.name)
def test_figures_are_sourced_and_within_what_physics_allows(spec: DeviceSpec):
    for figure in figures(spec):
        assert figure.value > 0
        assert figure.source.strip()
        assert figure.confidence in ("high", "medium", "low")
        assert ("assumed" in figure.source) <= (figure.confidence == "low"), figure
    assert spec.tflops["fp32"].value < spec.tflops["fp16"].value
    assert 0 < spec.efficiency.value <= 1
    # A size in bytes, a rate in TFLOP/s and a bandwidth in bytes a second cannot be mistaken for each other.
    assert 16 * GIB < spec.memory_bytes.value < 256 * GIB
    assert 1 < spec.tflops["fp16"].value < 5000
    assert 1e11 < spec.memory_bandwidth.value < 1e13
    assert Hardware(spec).usable_bytes == spec.memory_bytes.value - spec.overhead_bytes.value > 0.9 * 16 * GIB
    assert spec.allocation_granularity == 512


def test_a_card_never_reports_more_than_the_box_says():
    boxes = {"64": ["ascend-910b1", "ascend-910b2", "ascend-910b3", "ascend-910b4-64gb", "ascend-910c"]}
    boxes |= {"32": ["ascend-910a", "ascend-910b4"], "24": ["rtx-3090", "rtx-4090"], "48": ["l40s"]}
    boxes |= {"40": ["a100-40gb"], "80": ["a100-80gb", "h100"], "141": ["h200"]}
    for size, names in boxes.items():
        for name in names:
            assert 0.9 * int(size) * GIB < SPECS[name].memory_bytes.value < int(size) * GIB


def test_a_64_gb_ascend_budgets_from_what_it_reports():
    assert find_device("ascend-910b3").total_bytes == int(60.96 * GIB)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("ascend-910b3", "ascend-910b3"),
        ("Ascend 910B3", "ascend-910b3"),
        ("Ascend910B3", "ascend-910b3"),
        ("Ascend910B4-1", "ascend-910b4-64gb"),
        ("Ascend910_9392", "ascend-910c"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("RTX_4090", "rtx-4090"),
    ],
)
def test_devices_are_found_by_catalogue_and_driver_names(name: str, found: str):
    assert find_device(name).spec.name == found


def test_no_driver_name_means_two_devices():
    names = [name for spec in catalogue() for name in spec.reported_names]
    assert len(names) == len(set(names))
    assert all(find_reported(name) is not None for name in names)
    assert find_reported("NVIDIA GeForce GTX 1080") is None


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ascend-910x3", "the nearest is ascend-910b3"),
        ("a100", "a100-40gb, a100-80gb"),
        ("ascend-910b", "ascend-910b1"),
        ("rtx4090", "the nearest is rtx-4090"),
        ("", "unknown device ''"),
        ("toaster-oven", "unknown device 'toaster-oven'; `trainfit devices`"),
    ],
)
def test_an_unknown_name_is_refused_in_one_line_with_the_next_move(name: str, hint: str):
    with pytest.raises(DeviceError) as caught:
        find_device(name)
    assert hint in str(caught.value)
    assert "trainfit devices" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [0, -1, 10**9])
def test_counts_that_no_run_can_have_are_refused(count: int):
    with pytest.raises(DeviceError, match=str(count)):
        find_device("h100", count)


def test_bf16_is_refused_on_910a_and_nowhere_else():
    with pytest.raises(DeviceError, match="ascend-910a has no bf16 arithmetic; use --precision fp32 or fp16"):
        find_device("ascend-910a").require("bf16")
    assert [name for name, spec in SPECS.items() if not Hardware(spec).supports("bf16")] == ["ascend-910a"]
    for spec in catalogue():
        Hardware(spec).require("fp16")


def test_the_catalogue_loads_without_torch():
    script = (
        "import sys; from trainfit.hardware import catalogue, find_device;"
        "catalogue(); find_device('h100'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
