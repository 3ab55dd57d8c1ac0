"""The gate: many models, one policy, one verdict.

Jobs (a path and the options that hold for it) -> running -> reports -> judging -> verdict and exit code.
"""

from collections.abc import Sequence

from kvdoctor.gating.jobs import Job, exports_of
from kvdoctor.gating.judging import Judged, judged
from kvdoctor.gating.running import diagnosed
from kvdoctor.gating.static import inspected

__all__ = ("Job", "Judged", "exports_of", "gate")


def gate(jobs: Sequence[Job], *, static: bool = False) -> Judged:
    """Step-test every model, or only read it where that is asked for, and judge them together.

    Raises:
        UsageError: there is nothing at one of the paths.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    return judged(jobs, inspected(jobs) if static else diagnosed(jobs))
