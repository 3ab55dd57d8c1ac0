"""Lets the tests of the health page import its modules, those of the zoo and those of the folder above."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "zoo", HERE.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
