"""What holds for all tests: no report of whoever runs them is used, and no test fails because a machine is busy."""

import os
import signal
import sys
import tempfile
from pathlib import Path

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
