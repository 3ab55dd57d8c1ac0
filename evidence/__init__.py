"""What was measured: programs that measure, the pages that they write, and the checks of these pages.

A program is run from the root of the repository, as `python -m evidence.zoo.make_page`.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "docs") if str(ROOT / folder) not in sys.path]
