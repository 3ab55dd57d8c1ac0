"""The report of a model that was not diagnosed: never healthy, and never a reason to stop the others."""

from kvdoctor.facts import environment
from kvdoctor.findings import Advice, Fault, NotChecked, Verdicts, fault_found, find_check
from kvdoctor.gating.jobs import Job
from kvdoctor.report.document import ModelFacts, Report, decide

DIED = "worker-died"


def not_diagnosed(job: Job, reason: str) -> Report:
    """The report that says why nothing was checked."""
    return _report(job, Verdicts(not_checked=[NotChecked(None, "*", reason, essential=True)]))


def died(job: Job, how: str, times: int) -> Report:
    """The report of a model whose diagnosis ended with the process that it ran in, each of so many times."""
    fault = Fault(
        severity="error",
        subject=(job.path,),
        where="the diagnosis as a whole",
        promised="a report",
        observed=f"the process of the diagnosis was lost {times} times; the last time, {how}",
        cause="reading or running this model takes down the process that does it, or its memory does not suffice",
        advice=Advice("caller", "run it alone where more memory is free; if it ends again, please report it"),
    )
    selection, check = job.options.selection, find_check(DIED)
    if check is not None and not selection.takes(check.code, check.name):
        return not_diagnosed(job, fault.observed)
    return _report(job, Verdicts(findings=[fault_found(DIED, fault)]))


def _report(job: Job, verdicts: Verdicts) -> Report:
    findings, not_checked = tuple(verdicts.findings), tuple(verdicts.not_checked)
    return Report(
        command="gate",
        arguments=job.options.as_arguments(),
        seed=job.options.seed,
        verdict=decide("gate", findings, not_checked, job.options.fail_on),
        environment=environment(),
        model=ModelFacts(job.path, ()),
        findings=findings,
        not_checked=not_checked,
    )
