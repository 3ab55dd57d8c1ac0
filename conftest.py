"""What holds for tests and evidence: no report of whoever runs them is used, and no busy machine fails one."""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvdoctor.runtime.client import Runtime

# Modules are compiled once for all processes and runs; where the tree is to stay without bytecode, into pytest's cache.
if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(__file__).parent / ".pytest_cache" / "bytecode")
    os.environ.update(PYTHONPYCACHEPREFIX=sys.pycache_prefix, PYTHONDONTWRITEBYTECODE="")

# A shell starts what runs in the background with interrupts ignored: commands that tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["LC_ALL"] = "C.UTF-8"  # in a locale without it, text is printed in ASCII
if os.environ.pop("CI", None) == "true":  # there a long command prints its progress, which no test expects
    os.environ["KVDOCTOR_TESTS_IN_CI"] = "true"
CACHE = tempfile.TemporaryDirectory(prefix="kvdoctor-tests-cache-")
os.environ["KVDOCTOR_CACHE_DIR"] = CACHE.name

UNTIL = "KVDOCTOR_TESTS_UNTIL"
"""The time, in seconds since 1970, after which no slow test is begun: .ci/run ends in time on a slow machine too."""
DAY = 86_400
GOLDEN = 0.618_034
"""The share of the tests by which the order of a day is shifted: a few days begin with parts far from each other."""


# Slow modules are imported below this line: by now it is settled where their bytecode is kept.
def pytest_configure() -> None:
    """Give no example of hypothesis a limit of time."""
    from hypothesis import settings

    settings.register_profile("any machine", deadline=None)
    settings.load_profile("any machine")


@pytest.fixture(scope="session")
def runtime() -> "Iterator[Runtime]":
    """The runtime of this environment, with a worker that stays."""
    from kvdoctor.runtime.client import Runtime
    from kvdoctor.runtime.process import Limits

    with Runtime(Limits()) as warm:
        yield warm


@pytest.fixture(scope="session", autouse=True)
def one_worker() -> Iterator[None]:
    """Start ONNX Runtime once for what runs in this process."""
    from support.warm_workers import lent_workers

    with lent_workers():
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a file in one process: they share what is diagnosed, exported and built once for a file.

    Where the time is limited, they are run in the order of the day.
    """
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log) if UNTIL not in os.environ else None


@pytest.hookimpl(trylast=True)  # after -m has left out the others
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with another part every day where the time is limited."""
    until = os.environ.get(UNTIL)
    if until is not None:
        begin = int(int(until) // DAY * GOLDEN % 1 * len(items))
        items[:] = [*items[begin:], *items[:begin]]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a slow test, with the reason, once the time for them is over."""
    until = os.environ.get(UNTIL)
    if until is not None and item.get_closest_marker("slow") is not None and time.time() > int(until):
        pytest.skip(f"the time for slow tests is over ({UNTIL})")
