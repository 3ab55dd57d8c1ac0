"""Whether a repair of the graph would take, asked before anybody is sent to one.

The advice of a check says what mends its fault as a rule. Here the repairs that it leads to are tried on a copy in
memory, which nobody sees: where each of them declines, the advice is another export, and where the order or names of
nodes are to be mended, it is that. Those that need runs to decide (frozen axes, sessions) are believed.
"""

import shlex
from dataclasses import replace
from typing import Literal

from kvdoctor.findings import Advice, Finding
from kvdoctor.patient import CannotRepair, Patient
from kvdoctor.repairs import Repair, Stage, load

WITHOUT_RUNS: tuple[Stage, ...] = ("ports", "slots", "values")
"""Stages whose repairs read the graph alone."""
FRESH = " --from CHECKPOINT"

Answer = Literal["changes", "nothing", "declines"]


def foreseen(patient: Patient) -> tuple[Finding, ...]:
    """The findings of a patient, with advice that fits what the repairs would do."""
    advised = tuple(_advised(finding, patient) for finding in patient.findings)
    if not any(map(_stays, advised)):
        return advised
    return tuple(_elsewhere(f) if f.repair.kind == "graph" and f.severity == "error" else f for f in advised)


def _stays(finding: Finding) -> bool:
    """Whether a loop stays wrong whatever is repaired beside: then no copy is proved."""
    loop = finding.code.startswith(("KV2", "KV3")) and finding.use is None
    return loop and finding.severity == "error" and finding.repair.kind == "re-export"


def _advised(finding: Finding, patient: Patient) -> Finding:
    if finding.severity == "note":
        return finding
    leading = [repair for repair in load() if finding.name in repair.mends]
    if finding.repair.kind == "graph" and leading:
        declined = all(r.stage in WITHOUT_RUNS and _answer(r, patient) == "declines" for r in leading)
        return _elsewhere(finding) if declined else finding
    file = any(repair.stage == "file" and _answer(repair, patient) == "changes" for repair in leading)
    return _here(finding, patient) if file else finding


def _answer(repair: Repair, patient: Patient) -> Answer:
    """What a repair would do; the copy is as it was afterwards."""
    saved = patient.copy.snapshot()
    try:
        return "changes" if repair.apply(patient) else "nothing"
    except CannotRepair:
        return "declines"
    except Exception:  # `re-export` tells of it, and of what to do
        return "nothing"
    finally:
        patient.copy.restore(saved)


def _here(finding: Finding, patient: Patient) -> Finding:
    command = f"kvdoctor re-export {shlex.quote(patient.copy.folder.shown)} -o FIXED"
    return replace(finding, repair=Advice("graph", f"or {finding.repair.text}", command))


def _elsewhere(finding: Finding) -> Finding:
    command = (finding.repair.command or "").replace(" -o FIXED", f"{FRESH} -o FIXED", 1)
    return replace(finding, repair=replace(finding.repair, kind="re-export", command=command or None))
