"""Whether a repair of the graph would take, asked before anybody is sent to one.

The advice of a check says what mends its fault as a rule. Here the repairs that it leads to are tried on a copy in
memory, which nobody sees: where each of them declines, the advice is another export. Those that need runs to decide
(frozen axes, sessions) are believed.
"""

from dataclasses import replace

from kvdoctor.findings import Finding
from kvdoctor.patient import CannotRepair, Patient
from kvdoctor.repairs import Repair, Stage, load

WITHOUT_RUNS: tuple[Stage, ...] = ("ports", "slots", "values")
"""Stages whose repairs read the graph alone."""
FRESH = " --from CHECKPOINT"


def foreseen(patient: Patient) -> tuple[Finding, ...]:
    """The findings of a patient; the advice of those that no repair would take is another export."""
    return tuple(_elsewhere(finding) if _is_declined(finding, patient) else finding for finding in patient.findings)


def _is_declined(finding: Finding, patient: Patient) -> bool:
    if finding.repair.kind != "graph" or finding.severity == "note":
        return False
    leading = [repair for repair in load() if finding.name in repair.mends]
    return bool(leading) and all(_declines(repair, patient) for repair in leading)


def _declines(repair: Repair, patient: Patient) -> bool:
    if repair.stage not in WITHOUT_RUNS:
        return False
    saved = patient.copy.snapshot()
    try:
        repair.apply(patient)
    except CannotRepair:
        return True
    except Exception:  # `re-export` tells of it, and of what to do
        return False
    finally:
        patient.copy.restore(saved)
    return False


def _elsewhere(finding: Finding) -> Finding:
    command = (finding.repair.command or "").replace(" -o FIXED", f"{FRESH} -o FIXED", 1)
    return replace(finding, repair=replace(finding.repair, kind="re-export", command=command or None))
