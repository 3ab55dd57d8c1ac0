"""Checks whether a repair of the graph would work before the advice of a finding names it.

The advice of a check says what usually repairs its fault. Here the repairs that it leads to are tried on a copy in
memory: if none of them would change the graph, the advice becomes another export; if the order or names of nodes are
the fault, it becomes a repair. A repair that cannot be tried here (an inspection has no runtime) stays advised.
"""

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from kvdoctor.analysis.model_folder import ModelFolder
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.errors import as_argument
from kvdoctor.findings import Advice, Finding
from kvdoctor.options import Options
from kvdoctor.repair.repairs.registry import Repair, load_for_check
from kvdoctor.repair.workspace import CannotRepair, NoRuntime, RepairContext, WorkingCopy

if TYPE_CHECKING:
    from kvdoctor.runtime.client import Runtime

REPEATABLE = ("optimum", "onnxruntime-genai")
"""Producers of exports from a checkpoint. A file of transformers names PyTorch, and has a config.json with it."""

MOST_SECONDS = 60.0
"""Processor time for the trials of one stack; what is left then stays advised as it is."""

Answer = Literal["changes", "declines", "not tried"]


def check_advice(
    context: ContractContext, findings: tuple[Finding, ...], options: Options, runtime: "Runtime | None"
) -> tuple[Finding, ...]:
    """The findings of a stack, with advice that names a repair only if it would not decline."""
    copy = WorkingCopy(context.folder)
    trial = RepairContext(context.stack, context.contract, findings, context.runs, copy, runtime, options)
    end = time.process_time() + MOST_SECONDS
    advised = tuple(_check_finding(one, trial) if time.process_time() < end else one for one in trial.findings)
    errors = [finding for finding in advised if finding.severity == "error"]
    frozen = {f.name for f in errors if f.repair.kind == "re-export"} & {"past-axis-frozen"}
    if frozen and not context.runs:  # no copy can be run, and so none proved
        return tuple(_advise_export(f, context.folder) if f.repair.kind == "graph" else f for f in advised)
    loops = (f for f in errors if f.code.startswith(("KV2", "KV3")) and f.use is None)
    if not any(finding.repair.kind == "re-export" for finding in loops):
        return advised
    # A loop stays wrong after all repairs of the graph: then no copy can be proved.
    return tuple(_advise_export(f, context.folder) if f in errors and f.repair.kind == "graph" else f for f in advised)


def _check_finding(finding: Finding, trial: RepairContext) -> Finding:
    if finding.severity == "note":
        return finding
    leading, folder = load_for_check(finding.name), trial.copy.folder
    if finding.repair.kind == "graph" and leading:
        declined = all(_try_repair(repair, trial) == "declines" for repair in leading)
        return _advise_export(finding, folder) if declined else finding
    if not any(repair.stage == "file" and _try_repair(repair, trial) == "changes" for repair in leading):
        return finding
    command = f"kvdoctor re-export {as_argument(folder.shown)} -o {folder.out}"
    return replace(finding, repair=Advice("graph", f"or {finding.repair.text}", command))


def _try_repair(repair: Repair, trial: RepairContext) -> Answer:
    saved = trial.copy.snapshot()
    try:
        return "changes" if repair.apply(trial) else "declines"
    except NoRuntime:
        return "not tried"
    except CannotRepair:
        return "declines"
    except Exception:  # `re-export` reports it
        return "not tried"
    finally:
        trial.copy.restore(saved)


def _advise_export(finding: Finding, folder: ModelFolder) -> Finding:
    before, out, rest = (finding.repair.command or "").rpartition(" -o ")
    return advise_export(finding, folder, f"{before} --from CHECKPOINT{out}{rest}" if out else finding.repair.command)


def advise_export(finding: Finding, folder: ModelFolder, command: str | None) -> Finding:
    """A finding that leads to another export: by `--from` where an exporter can repeat it, else by its own text."""
    makers = " ".join(file.view.producer.lower() for file in folder.files if file.view is not None)
    if isinstance(folder.side_cars.config.get("model_type"), str) or any(name in makers for name in REPEATABLE):
        return replace(finding, repair=replace(finding.repair, kind="re-export", command=command))
    return replace(finding, repair=Advice("re-export", f"{finding.repair.instead}; docs/own-decoder.md shows how"))
