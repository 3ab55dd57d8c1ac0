"""What holds for all tests: no report of whoever runs them is used, and no test fails because a machine is busy."""

import os
import tempfile

from hypothesis import settings

os.environ["KVDOCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="kvdoctor-tests-cache-")

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
