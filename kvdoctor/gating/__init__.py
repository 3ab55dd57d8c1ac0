"""The gate: many models, one policy, one verdict.

Jobs (a path and the options that hold for it) -> running -> reports -> judging -> verdict and exit code.
"""

from collections.abc import Sequence

from kvdoctor.gating.jobs import How, Job
from kvdoctor.gating.judging import Judged, judged
from kvdoctor.gating.running import diagnosed

__all__ = ("How", "Job", "Judged", "gate")


def gate(jobs: Sequence[Job], how: How | None = None) -> Judged:
    """Step-test every model, and judge them together. Without `how`: side by side as the machine allows, no cache.

    Raises:
        UsageError: there is nothing at one of the paths.
        KvdoctorError: the worker cannot start ONNX Runtime, or the cluster that was asked for cannot be used.
    """
    return judged(jobs, diagnosed(jobs, how or How()))
