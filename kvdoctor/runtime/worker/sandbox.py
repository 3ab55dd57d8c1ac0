"""The sandbox of the worker on Linux: Landlock for files, programs and TCP, seccomp for all sockets.

It holds for all code of the process: the runtime, an operator's library, and what a model makes of them. It needs no
privileges and cannot be left. By system calls, since a bare environment has no binding of either.

Sources: docs.kernel.org, userspace-api/landlock and userspace-api/seccomp_filter; linux/landlock.h, linux/filter.h.
"""

import contextlib
import ctypes
import errno
import glob
import os
import platform
import stat
import struct
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from kvdoctor.decode.messages import Sandbox

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 38, 22, 2
READ, READ_FOLDER = 1 << 2, 1 << 3
FILE_RIGHTS = 1 << 0 | 1 << 1 | READ | 1 << 14 | 1 << 15
"""Those of a file that is no folder: execute, write, read, truncate, ioctl of a device."""
RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""How many rights to files there are since each version of Landlock's interface; 4 has two for TCP, 6 two scopes."""
EXECUTE = 1 << 0

ENVIRONMENT = ("/usr", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/ssl/openssl.cnf")
SYSTEM = ("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system", "/sys/fs/cgroup", "/dev/urandom")
DRIVERS = ("/sys", "/proc/driver", "/etc/vulkan", "/etc/OpenCL")
"""What the drivers of a device read besides."""
DRIVER_VARIABLES = ("VK_ICD_FILENAMES", "VK_DRIVER_FILES", "VK_LAYER_PATH", "LD_LIBRARY_PATH")

MACHINES = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
"""The number of a machine for seccomp, and of its system call `socket`."""
LOAD, JUMP_IF_EQUAL, JUMP_IF_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EACCES
IO_URING_SETUP = 425
"""The system call by which sockets can be made without `socket`; its number is that of every machine."""
OTHER_CALLS = 0x40000000
"""The numbers from here on are those of another set of system calls of x86_64."""


def describe_sandbox() -> str:
    """What this kernel can keep from a worker; empty if nothing."""
    version, sockets = landlock_version(), platform.machine() in MACHINES
    if not version:
        return ""
    network = "no sockets" if sockets else "no TCP" if version >= 4 else "the network is open: Linux 6.7 closes it"
    return f"Landlock {version} (files; {network})"


@cache
def landlock_version() -> int:
    """The version of Landlock's interface; 0 where the kernel has none, or it is disabled."""
    if sys.platform != "linux":
        return 0
    with contextlib.suppress(OSError):
        return _call(CREATE_RULESET, None, 0, 1)
    return 0


def restrict(sandbox: Sandbox) -> None:
    """Take from this process all files but those of the sandbox and of its environment, programs, and the network.

    Threads that run already are not restricted: the worker calls it before it starts one.

    Raises:
        OSError: the kernel has Landlock and refuses.
    """
    version = landlock_version()
    if not version:
        return
    files = (1 << RIGHTS[max(one for one in RIGHTS if one <= version)]) - 1
    attributes = struct.pack("QQQ", files, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = _call(CREATE_RULESET, attributes, size, 0)
    for path in {*_environment(), *sandbox.reads}:
        _allow(rules, path, READ | READ_FOLDER)
    for path in (*sandbox.writes, "/dev/null", *_matching(sandbox.devices)):
        _allow(rules, path, files & ~EXECUTE)
    for path in (*DRIVERS, *_named_in(DRIVER_VARIABLES)) if sandbox.devices else ():
        _allow(rules, path, READ | READ_FOLDER)
    _library().prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call(RESTRICT_SELF, rules, 0)
    os.close(rules)
    if not sandbox.devices:  # a driver may talk to a service of the system
        _refuse_sockets()


def _allow(rules: int, path: str, rights: int) -> None:
    """Allow a file, or all that is below a folder; what is not there needs no rule."""
    with contextlib.suppress(OSError):
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)  # type: ignore[attr-defined,unused-ignore]
        try:
            rights &= -1 if stat.S_ISDIR(os.fstat(opened).st_mode) else FILE_RIGHTS
            _call(ADD_RULE, rules, 1, struct.pack("=Qi", rights, opened), 0)
        finally:
            os.close(opened)


def _environment() -> Iterator[str]:
    """What Python, its packages and the libraries of the system are read from, after the start as well."""
    yield from (*ENVIRONMENT, *SYSTEM, sys.prefix, sys.base_prefix, *filter(None, sys.path))
    yield from (*_named_in(("LD_LIBRARY_PATH",)), *_list_linked_packages())
    yield os.path.dirname(os.path.dirname(os.path.dirname(__file__)))  # noqa: PTH120
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:  # noqa: PTH123
        files = {line.split(maxsplit=5)[5].strip() for line in maps if "/" in line}
    yield from {os.path.dirname(file) for file in files if ".so" in file}  # noqa: PTH120


def _list_linked_packages() -> Iterator[str]:
    """The folders that hold the files of packages which an installer linked into the environment, one by one."""
    for folder in (one for one in filter(os.path.isdir, sys.path) if os.access(one, os.R_OK | os.X_OK)):
        for entry in os.scandir(folder):
            file = f"{entry.path}/__init__.py" if entry.is_dir() else entry.path
            if os.path.islink(file):  # noqa: PTH114
                inside = os.path.dirname(os.path.realpath(file))  # noqa: PTH120
                yield os.path.dirname(inside) if entry.is_dir() else inside  # noqa: PTH120


def _named_in(variables: Iterable[str]) -> list[str]:
    """The paths in variables of the environment that are lists of them."""
    return [path for name in variables for path in os.environ.get(name, "").split(os.pathsep) if path]


def _matching(patterns: Iterable[str]) -> list[str]:
    return [path for pattern in patterns for path in glob.glob(pattern)]  # noqa: PTH207


def _refuse_sockets() -> None:
    """Refuse all sockets: those of UDP and of services of this machine are open under Landlock."""
    machine, number = MACHINES.get(platform.machine(), (0, 0))
    if not machine:
        return
    program = [
        *((LOAD, 0, 0, 4), (JUMP_IF_EQUAL, 0, 5, machine)),
        *((LOAD, 0, 0, 0), (JUMP_IF_LEAST, 3, 0, OTHER_CALLS), (JUMP_IF_EQUAL, 2, 0, number)),
        (JUMP_IF_EQUAL, 1, 0, IO_URING_SETUP),
        *((RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    filter_ = struct.pack("HP", len(program), ctypes.addressof(code))
    _library().prctl(SET_SECCOMP, FILTER, filter_, 0, 0)


@cache
def _library() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: bytes | int | None) -> int:
    """A system call. Raises OSError: it fails."""
    passed = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result = int(_library().syscall(ctypes.c_long(number), *passed))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
