"""What several checks of the evidence need."""

import os
from collections.abc import Iterator

import pytest

from evidence.zoo.making import Maker
from kvdoctor.options import Options
from kvdoctor.runtime.client import Runtime


@pytest.fixture(scope="session")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """Makes exports in a folder that the processes of one session share."""
    mine = tmp_path_factory.getbasetemp()
    return Maker((mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine) / "zoo")


@pytest.fixture(scope="session")
def runtime() -> Iterator[Runtime]:
    """One warm worker for all checks of a process."""
    with Runtime(Options().limits) as warm:
        yield warm
