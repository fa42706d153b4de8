"""Memory of this machine and of this process as Linux tells it, limits of the container included. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from trainfit.errors import DeviceError

_ROOT = Path("/")


def total_bytes(root: Path = _ROOT) -> int:
    """The smaller of physical memory and the tightest cgroup (v1 or v2) limit around this process."""
    return min([_meminfo(root, "MemTotal"), *(limit for limit, _ in _limits(root))])


def free_bytes(root: Path = _ROOT) -> int:
    """What this process can still take: MemAvailable, or what is left below the tightest cgroup limit.

    Page cache that the kernel can drop (inactive_file) counts as free.
    """
    left = (limit - _cgroup_used(folder) for limit, folder in _limits(root))
    return max(0, min([_meminfo(root, "MemAvailable"), *left]))


def resident_bytes(root: Path = _ROOT) -> int:
    """Resident memory of this process now (VmRSS)."""
    return _table(root / "proc/self/status", "VmRSS")


def peak_resident_bytes(root: Path = _ROOT) -> int:
    """Highest resident memory (VmHWM) since reset_peak_resident, or since the process began."""
    return _table(root / "proc/self/status", "VmHWM")


def reset_peak_resident(root: Path = _ROOT) -> bool:
    """Makes VmHWM start again from VmRSS by writing 5 to /proc/self/clear_refs; False where that is not allowed."""
    try:
        (root / "proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _meminfo(root: Path, key: str) -> int:
    return _table(root / "proc/meminfo", key)


def _table(path: Path, key: str) -> int:
    """The line `key:   123 kB` of a /proc file, in bytes."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise DeviceError(f"cannot read {path}: memory on the cpu is metered through Linux's /proc") from error
    for line in lines:
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise DeviceError(f"{path} has no {key}: memory on the cpu is metered through Linux's /proc")


def _limits(root: Path) -> list[tuple[int, Path]]:
    """(limit in bytes, cgroup folder) of every cgroup from this process's own up to the root that has a limit."""
    found = []
    for folder in _cgroup_folders(root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _number(folder / name)
            # No limit is "max" in v2, which is no number, and near 2**63 in v1, which physical memory undercuts.
            if limit is not None:
                found.append((limit, folder))
    return found


def _cgroup_folders(root: Path) -> list[Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            mount = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        # Inside a container the path may be the host's and absent here: the mount itself is then the container's own.
        own = mount / path.lstrip("/")
        folders += [own, *(parent for parent in own.parents if parent.is_relative_to(mount))]
    return folders


def _cgroup_used(folder: Path) -> int:
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return used
    return max(0, used - int(stat.get("total_inactive_file", stat.get("inactive_file", 0))))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
