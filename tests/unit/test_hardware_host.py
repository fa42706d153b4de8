"""Memory of the host from made-up /proc and cgroup trees, and from the real ones."""

from pathlib import Path

import pytest
import torch

from trainfit.errors import DeviceError
from trainfit.hardware import accelerator, host

GIB, MIB = 2**30, 2**20


def tree(root: Path, files: dict[str, str]) -> Path:
    meminfo = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_cgroups_physical_memory_counts(tmp_path: Path):
    root = tree(tmp_path, {})
    assert host.total_bytes(root) == 16 * GIB
    assert host.free_bytes(root) == 8 * GIB


def test_a_cgroup_v2_limit_counts_and_droppable_cache_is_free(tmp_path: Path):
    group = "sys/fs/cgroup/slice/job"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slice/job\n",
            f"{group}/memory.max": f"{4 * GIB}\n",
            f"{group}/memory.current": f"{3 * GIB}\n",
            f"{group}/memory.stat": f"anon 1\nfile 2\ninactive_file {GIB}\n",
            "sys/fs/cgroup/slice/memory.max": "max\n",
        },
    )
    assert host.total_bytes(root) == 4 * GIB
    assert host.free_bytes(root) == 2 * GIB


def test_the_tightest_limit_on_the_way_up_counts(tmp_path: Path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slice/job\n",
            "sys/fs/cgroup/slice/job/memory.max": f"{6 * GIB}\n",
            "sys/fs/cgroup/slice/memory.max": f"{2 * GIB}\n",
        },
    )
    assert host.total_bytes(root) == 2 * GIB


def test_a_cgroup_v1_limit_counts_where_the_path_is_the_hosts(tmp_path: Path):
    group = "sys/fs/cgroup/memory"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n",
            f"{group}/memory.limit_in_bytes": f"{3 * GIB}\n",
            f"{group}/memory.usage_in_bytes": f"{GIB}\n",
            f"{group}/memory.stat": f"inactive_file 1\ntotal_inactive_file {512 * MIB}\n",
        },
    )
    assert host.total_bytes(root) == 3 * GIB
    assert host.free_bytes(root) == 2 * GIB + 512 * MIB


def test_v1s_number_for_no_limit_is_no_limit(tmp_path: Path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert host.total_bytes(root) == 16 * GIB


def test_a_full_cgroup_leaves_nothing_rather_than_less(tmp_path: Path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
        },
    )
    assert host.free_bytes(root) == 0


def test_without_proc_the_error_says_what_is_needed(tmp_path: Path):
    with pytest.raises(DeviceError, match=r"Linux's /proc"):
        host.total_bytes(tmp_path)


def test_where_the_peak_cannot_be_reset_it_says_so(tmp_path: Path):
    assert not host.reset_peak_resident(tmp_path)


def test_the_meter_sees_a_tensor_come_and_go():
    memory = accelerator("cpu").memory
    before = memory.current_bytes()
    can_reset = memory.reset_peak()
    tensor = torch.ones(128 * MIB, dtype=torch.uint8)
    assert memory.current_bytes() - before == pytest.approx(128 * MIB, rel=0.05)
    del tensor
    assert memory.current_bytes() - before < 8 * MIB
    assert memory.peak_bytes() >= before + 120 * MIB
    if can_reset:
        memory.reset_peak()
        assert memory.peak_bytes() - before < 8 * MIB


def test_real_sizes_are_in_order():
    memory = accelerator("cpu").memory
    assert 0 < memory.current_bytes() <= memory.peak_bytes() < memory.total_bytes()
    assert 0 < memory.free_bytes() <= memory.total_bytes()
    assert not memory.release_cache(threshold=0.0)
