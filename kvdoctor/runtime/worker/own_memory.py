"""The resident memory of this process, in bytes, as each system tells it.

Linux is read without psutil, which other systems need: kvdoctor depends on it.
"""

import sys
from pathlib import Path


def resident_bytes() -> int:
    """What is resident now."""
    if sys.platform == "linux":
        return _read_status("VmRSS")
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """The most that was resident until now."""
    if sys.platform == "linux":
        return _read_status("VmHWM")
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _read_status(name: str) -> int:
    """A figure that Linux tells of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
