"""The gate: many models, one policy, one verdict.

Jobs (a path and the options that hold for it) -> running -> reports -> judging -> verdict and exit code.
"""

from collections.abc import Sequence

from kvdoctor.gating.jobs import Job
from kvdoctor.gating.judging import Judged, judged
from kvdoctor.gating.running import diagnosed

__all__ = ("Job", "Judged", "gate")


def gate(jobs: Sequence[Job]) -> Judged:
    """Step-test every model, and judge them together.

    Raises:
        UsageError: there is nothing at one of the paths.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    return judged(jobs, diagnosed(jobs))
