"""Tables between and beyond what was measured, and the file they lie in."""

import json
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.errors import DeviceError
from trainfit.hardware import accelerator, microbenchmarks
from trainfit.hardware.calibration import Calibration, Table
from trainfit.hardware.calibration_store import calibration_path, load_calibration, save_calibration
from trainfit.hardware.microbenchmarks import Grids, Stopwatch

AXES = ((16.0, 256.0, 4096.0), (16.0, 64.0), (8.0, 32.0, 128.0))
POSITIONS = [(i, j, k) for i in range(3) for j in range(2) for k in range(3)]
SECONDS = st.floats(1e-7, 1e-1)
SIZE = st.floats(1.0, 1e5)


def made(**changes) -> Calibration:
    table = Table(((1.0, 1024.0),), (1e-6, 1e-4))
    facts = {
        "device": "cpu",
        "kind": "cpu",
        "num_threads": 3,
        "torch_version": "2.13.0+cpu",
        "date": "2026-01-31",
        "spread": 0.02,
        "per_operator": {
            "forward": Table(((1.0, 2**20),), (5e-6, 2e-5)),
            "backward": Table(((1.0,),), (4e-6,)),
            "no_grad": Table(((1.0,),), (3e-6,)),
        },
        "tables": {"copy.fp32": table},
    }
    return Calibration(**{**facts, **changes})


@given(st.lists(SECONDS, min_size=18, max_size=18), st.tuples(SIZE, SIZE, SIZE), st.integers(0, 2), st.floats(1, 50))
def test_larger_never_takes_less(seconds, sizes, axis, factor):
    """However noisy the measurements are, also between points and beyond them."""
    table = Table.grown(AXES, dict(zip(POSITIONS, seconds)))
    larger = [size * (factor if at == axis else 1) for at, size in enumerate(sizes)]
    assert table.at(*larger) >= table.at(*sizes) * (1 - 1e-9)


@given(st.lists(SECONDS, min_size=18, max_size=18))
def test_what_was_measured_is_what_is_read_unless_something_smaller_took_longer(seconds):
    measured = dict(zip(POSITIONS, seconds))
    table = Table.grown(AXES, measured)
    for position in POSITIONS:
        smaller = [measured[each] for each in POSITIONS if all(a <= b for a, b in zip(each, position))]
        sizes = (axis[at] for axis, at in zip(AXES, position))
        assert table.at(*sizes) == pytest.approx(max(smaller))


@given(st.floats(1e-9, 1e-3), st.floats(0.2, 3), SIZE)
def test_a_power_of_the_size_is_met_between_points(factor, exponent, size):
    axis = (1.0, 10.0, 1e3, 1e5)
    table = Table((axis,), tuple(factor * x**exponent for x in axis))
    assert table.at(size) == pytest.approx(factor * size**exponent)


def test_beyond_the_largest_it_grows_in_proportion_and_below_the_smallest_not_at_all():
    table = Table(((10.0, 100.0), (1.0, 2.0)), (1.0, 1.5, 3.0, 4.0))
    assert table.at(1000, 2) == pytest.approx(40)
    assert table.at(1000, 6) == pytest.approx(120)
    assert table.at(1, 0.5) == table.smallest == 1.0


def test_what_was_too_long_to_measure_takes_in_proportion_to_the_fastest_before_it():
    """Rates grow with sizes: of two that are smaller, the one at the higher rate tells more."""
    table = Table.grown(((1.0, 4.0), (1.0, 4.0)), {(0, 0): 1.0, (0, 1): 2.0, (1, 0): 4.0})
    assert table.at(4, 4) == pytest.approx(min(2.0 * 4, 4.0 * 4))


@pytest.mark.parametrize(
    ("axes", "seconds"),
    [
        (((1.0, 2.0),), (1.0,)),
        (((2.0, 1.0),), (1.0, 1.0)),
        (((1.0, 2.0),), (1.0, 0.0)),
        (((1.0, 2.0),), (1.0, math.nan)),
        (((0.0, 2.0),), (1.0, 1.0)),
        ((), ()),
    ],
)
def test_a_table_that_is_none_is_refused(axes, seconds):
    with pytest.raises(ValueError, match=r"figures|order|above zero"):
        Table(axes, seconds)


def test_it_comes_back_from_its_file_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_calibration("cpu", 3, "2.13.0+cpu") is None
    path = save_calibration(made())
    assert path.is_relative_to(tmp_path / "trainfit")
    assert load_calibration("cpu", 3, "2.13.0+cpu") == made()
    assert load_calibration("cpu", 2, "2.13.0+cpu") is None  # other threads, another file
    assert load_calibration("cpu", 3, "2.14.0") is None
    assert not list(path.parent.glob("*.tmp"))


def test_a_relative_cache_folder_is_ignored(monkeypatch):
    """As the XDG base directory specification says."""
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    assert calibration_path("cpu", 1, "2").is_absolute()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "no calibration"),
        ('{"format": 0}', "format is 0, not 4"),
        ({"tables": {"copy.fp32": {"axes": [[1.0, 2.0]], "seconds": [1.0]}}}, "1 figures for axes of"),
        ({"tables": {"copy.fp32": {"axes": [[1.0]], "seconds": ["fast"]}}}, "no calibration"),
        ({"per_operator": {"forward": {"axes": [[1.0]], "seconds": [1.0]}}}, "per_operator has no backward"),
        ({"per_operator": {"forward": 1.0}}, "no calibration"),
        ({"spread": -1.0}, "out of range"),
        ({"device": "gpu"}, "is of gpu"),
    ],
)
def test_a_broken_or_foreign_file_is_one_line_with_the_next_move(tmp_path, monkeypatch, content, words):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = save_calibration(made())
    data = {**json.loads(path.read_text()), **content} if isinstance(content, dict) else content
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(DeviceError, match=words) as error:
        load_calibration("cpu", 3, "2.13.0+cpu")
    assert "trainfit devices --calibrate" in str(error.value)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "trainfit").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DeviceError, match=r"cannot write .*set XDG_CACHE_HOME"):
        save_calibration(made())


def test_matmuls_that_should_take_long_are_not_made(monkeypatch):
    made: list[tuple[int, int, int]] = []

    def matrices(layout: str, m: int, n: int, k: int, *rest: object) -> tuple[int, int, int]:
        made.append((m, n, k))
        return m, n, k

    sizes = (1, 4, 16, 64)
    watch = SimpleNamespace(device=accelerator("cpu"), seconds=lambda calls, *rest: 1e-3 * math.prod(calls[0].args))
    monkeypatch.setattr(microbenchmarks, "matrices", matrices)
    measured = microbenchmarks._matmuls(watch, "nn", "bf16", Grids(matmul=(sizes,) * 3))
    assert {math.prod(each) for each in made} == {1, 4, 16}  # 64 should take 0.064 s
    table = Table.grown((sizes,) * 3, measured)
    assert table.at(64, 64, 64) == pytest.approx(1e-3 * 64**3)
    assert table.at(1, 1, 64) == pytest.approx(0.064)


@pytest.mark.parametrize(("is_device", "expected"), [(True, 1e-3), (False, 2.0)])
def test_a_devices_first_call_which_loads_the_kernel_is_not_timed(is_device, expected):
    """A host's long call is timed once."""
    made = [0.0]

    def call() -> None:
        made.append(made[-1] + (2.0 if len(made) == 1 else 1e-3))

    device = SimpleNamespace(kind="cuda", is_beside_host=is_device, synchronize=lambda: None)
    watch = Stopwatch(device)
    watch.now = lambda: made[-1]
    assert watch.seconds([call]) == pytest.approx(expected)
