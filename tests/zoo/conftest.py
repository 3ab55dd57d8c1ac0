"""Lets the zoo import its own modules and those of the folder above, from wherever pytest starts."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from making import Maker

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture(scope="session")
def maker(tmp_path_factory: pytest.TempPathFactory) -> "Maker":
    """Makes exports in a folder that the processes of one test session share."""
    from making import Maker

    mine = tmp_path_factory.getbasetemp()
    return Maker((mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine) / "zoo")
