"""What holds for all tests: no report is taken from, or left in, the cache of whoever runs them."""

import os
import tempfile

os.environ["KVDOCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="kvdoctor-tests-cache-")
