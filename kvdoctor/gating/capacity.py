"""How much of the machine may be used: cores and memory, also within the limits of a container.

Sources: cgroup v2 (docs.kernel.org/admin-guide/cgroup-v2: `cpu.max`, `memory.max`, `memory.current`, `memory.stat`) and
v1 (`cpu.cfs_quota_us`, `cpu.cfs_period_us`, `memory.limit_in_bytes`, `memory.usage_in_bytes`, `memory.stat`). A limit
of any group above holds as well. What is in use holds the cache of files that were read; the part of it that nobody has
touched for a while (`inactive_file`) is given up before a process is killed, and counts as free, as for `docker stats`.
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
"""Files that say how much a group may use and how much it uses, and the line of `memory.stat` that is taken back."""
SHARE = 0.8
"""Of the memory that is free: the rest is for what else the machine does in the meantime."""
RESTING_BYTES = 200 * MIB
"""What a slot and its worker hold without a model."""
TIMES_FILES = 4
"""A model in the runtime, against its files: read, optimised, packed, and opened a second time at another level."""


def cores() -> int:
    """The cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    quotas = [quota for group in _groups("cpu") if (quota := _quota(group)) is not None]
    return max(1, math.floor(min([count, *quotas])))


def memory() -> int:
    """Bytes of memory that may be taken now."""
    import psutil

    left = [psutil.virtual_memory().available]
    for group in _groups("memory"):
        for most, now, idle in USES:
            limit, used = _number(group / most), _number(group / now)
            if limit is not None and used is not None:
                left.append(max(limit - max(used - _told(group / "memory.stat", idle), 0), 0))
    return int(min(left) * SHARE)


def side_by_side(asked: int | None, models: int, most_memory: int | None) -> int:
    """How many models to run at once; `most_memory` in MiB is what each may take, where that was given."""
    count = asked or cores()
    each = RESTING_BYTES + (most_memory or 0) * MIB
    return max(1, min(count, models, memory() // each))


def needed(place: Path, most_memory: int | None) -> int:
    """Bytes that running the model at a place may take: by the size of its files, and never more than is allowed."""
    size = 0
    with contextlib.suppress(OSError):
        if place.is_file():
            files = [file for file in place.parent.iterdir() if file.name.startswith(place.stem)]
        else:
            files = [file for folder in (place, place / "onnx") if folder.is_dir() for file in folder.iterdir()]
        size = sum(file.stat().st_size for file in files if file.is_file())
    most = math.inf if most_memory is None else most_memory * MIB
    return RESTING_BYTES + int(min(size * TIMES_FILES, most))


def _groups(controller: str) -> Iterator[Path]:
    """The folders of the control groups that this process is in, from its own to the root."""
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
    quota_us, period_us = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _told(file: Path, name: str) -> int:
    """What a file with one name and number a line says under a name; 0 where it says nothing."""
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name} "):
                return int(line[len(name) :])
    return 0


def _number(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text(encoding="ascii"))
    return None
