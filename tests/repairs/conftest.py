"""Lets the tests of the repairs import their own modules, the faults, the zoo and the folder above."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "faults", HERE.parent / "zoo", HERE.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
