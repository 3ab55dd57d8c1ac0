"""What holds for all tests: no report of whoever runs them is used, and no test fails because a machine is busy."""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))  # the makers of the generated pages

# Hundreds of tests run the command: its modules are compiled once, also where the tree is to stay without bytecode.
os.environ.setdefault("PYTHONPYCACHEPREFIX", tempfile.mkdtemp(prefix="kvdoctor-tests-bytecode-"))
os.environ["PYTHONDONTWRITEBYTECODE"] = ""

# A shell starts what runs in the background with interrupts ignored: commands that tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["LC_ALL"] = "C.UTF-8"  # in a locale without it, text is printed in ASCII
if os.environ.pop("CI", None) == "true":  # there a long command prints its progress, which no test expects
    os.environ["KVDOCTOR_TESTS_IN_CI"] = "true"
os.environ["KVDOCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="kvdoctor-tests-cache-")

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

UNTIL = "KVDOCTOR_TESTS_UNTIL"
"""The time, in seconds since 1970, after which no slow test is begun: .ci/run ends in time on a slow machine too."""
DAY = 86_400
STRIDE = 13
"""By how many files the order of a day is shifted: what a slow machine leaves out one day it begins with on another."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with another file every day where the time is limited."""
    until = os.environ.get(UNTIL)
    if until is None or not items:
        return
    files = list(dict.fromkeys(item.path for item in items))
    begin = int(until) // DAY * STRIDE % len(files)
    place = {path: at for at, path in enumerate([*files[begin:], *files[:begin]])}
    items.sort(key=lambda item: place[item.path])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a slow test, with the reason, once the time for them is over."""
    until = os.environ.get(UNTIL)
    if until is not None and item.get_closest_marker("slow") is not None and time.time() > int(until):
        pytest.skip(f"the time for slow tests is over ({UNTIL})")
