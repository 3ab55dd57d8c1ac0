"""The cores and the memory that may be used, within the limits of the machine and of its container.

Sources: cgroup v2 (docs.kernel.org/admin-guide/cgroup-v2: `cpu.max`, `memory.max`, `memory.current`, `memory.stat`) and
v1 (`cpu.cfs_quota_us`, `cpu.cfs_period_us`, `memory.limit_in_bytes`, `memory.usage_in_bytes`, `memory.stat`). The
limits of all parent groups apply as well. Memory in use includes the page cache; its inactive part (`inactive_file`)
is reclaimed before a process is killed, and counts as free, as in `docker stats`.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

MIB = 1 << 20
CGROUPS = Path("/sys/fs/cgroup")
USES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""The files with the limit and the usage of a group, and the line of `memory.stat` with its reclaimable part."""
SHARE = 0.8
"""The share of free memory to use: the rest is for other programs."""
IDLE_BYTES = 200 * MIB
"""The memory of a process of the pool and its worker without a model."""
MEMORY_FACTOR = 4
"""Memory of a model in the runtime per byte of its files: read, optimized, packed, and opened a second time."""


def count_cores() -> int:
    """The cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    quotas = [quota for group in _groups("cpu") if (quota := _quota(group)) is not None]
    return max(1, math.floor(min([count, *quotas])))


def free_memory() -> int:
    """Bytes of memory that may be used now."""
    import psutil

    left = [psutil.virtual_memory().available]
    for group in _groups("memory"):
        for limit_file, usage_file, idle in USES:
            limit, used = _read_number(group / limit_file), _read_number(group / usage_file)
            if limit is not None and used is not None:
                left.append(max(limit - max(used - _read_entry(group / "memory.stat", idle), 0), 0))
    return int(min(left) * SHARE)


def parallel_models(jobs: int | None, models: int, max_memory: int | None) -> int:
    """The number of models to run at once. `jobs` is the request or None, `max_memory` the limit per model in MiB."""
    count = jobs or count_cores()
    each = IDLE_BYTES + (max_memory or 0) * MIB
    return max(1, min(count, models, free_memory() // each))


def memory_needed(path: Path, max_memory: int | None) -> int:
    """Bytes that a model may need, estimated from the size of its files; at most its limit, `max_memory` in MiB."""
    size = 0
    with contextlib.suppress(OSError):
        if path.is_file():
            files = [file for file in path.parent.iterdir() if file.name.startswith(path.stem)]
        else:
            files = [file for folder in (path, path / "onnx") if folder.is_dir() for file in folder.iterdir()]
        size = sum(file.stat().st_size for file in files if file.is_file())
    limit = math.inf if max_memory is None else max_memory * MIB
    return IDLE_BYTES + int(min(size * MEMORY_FACTOR, limit))


def _groups(controller: str) -> Iterator[Path]:
    """The folders of the control groups of this process, from its own up to the root."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        root = CGROUPS / controller if names else CGROUPS
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_dir():
                yield folder
            if folder == root:
                break


def _quota(group: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError, IndexError, ZeroDivisionError):
        quota, period = (group / "cpu.max").read_text(encoding="ascii").split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    quota_us, period_us = _read_number(group / "cpu.cfs_quota_us"), _read_number(group / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _read_entry(file: Path, name: str) -> int:
    """The number under a name in a file of `name number` lines; 0 if there is none."""
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name} "):
                return int(line[len(name) :])
    return 0


def _read_number(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text(encoding="ascii"))
    return None
