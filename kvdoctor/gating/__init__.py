"""The gate: many models, one policy, one verdict.

Jobs (a path and the options that hold for it) -> running -> reports -> judging -> verdict and exit code.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvdoctor.baseline import Baseline, today
from kvdoctor.gating.jobs import How, Job, exports_of
from kvdoctor.gating.judging import Judged, judged
from kvdoctor.gating.knowing import compared
from kvdoctor.gating.running import diagnosed

__all__ = ("How", "Job", "Judged", "exports_of", "gate")


def gate(
    jobs: Sequence[Job], how: How | None = None, *, static: bool = False, baseline: Baseline | None = None
) -> Judged:
    """Step-test every model, or only read it where that is asked for, and judge them together.

    Without `how` they run side by side as the machine allows, and no report is kept. What the baseline holds is marked
    as known, and does not count until its day is over.

    Raises:
        UsageError: there is nothing at one of the paths.
        KvdoctorError: the worker cannot start ONNX Runtime, or the cluster that was asked for cannot be used.
    """
    if static:
        from kvdoctor.gating.static import inspected

        reports = inspected(jobs)
    else:
        reports = diagnosed(jobs, how or How())
    if baseline is None:
        return judged(jobs, reports)
    held = compared(baseline, reports, today())
    return replace(judged(jobs, held.reports), baseline=held.told)
