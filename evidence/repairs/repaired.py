"""Runs re-export on an export with an injected fault."""

from pathlib import Path

from support.repaired import RepairedExport

from evidence.faults import registry
from evidence.faults.base_models import MERGED, Export
from evidence.faults.registry import Fault
from evidence.repairs import more_harm
from kvdoctor.options import Options
from kvdoctor.repair import pipeline
from kvdoctor.repair.repairs.registry import load
from kvdoctor.repair.session import RepairRequest
from kvdoctor.report.document import exit_code

NOT_REPAIRABLE = {
    "queries-rotated-anew": "the positions of the queries are wrong, and the cache is right",
    "window-too-small": "the mask of the steps differs from that of the prefill",
    "other-values-with-a-past": "the steps compute something else than the prefill",
    "norm-missing-with-a-past": "the steps compute something else than the prefill",
    "encoder-cut": "the mask of the steps hides encoder states",
    **dict.fromkeys(
        ("mask-not-read", "positions-not-read", "encoder-mask-not-read", "encoder-mask-not-read-in-steps"),
        "the graph does not read the input that says where padding is",
    ),
    **dict.fromkeys(
        ("positions-restart", "positions-lag-by-one", "positions-run-ahead", "positions-stand-still"),
        "the steps compute wrong positions from right ones, and no node counts from 0",
    ),
    "distances-lost": "the steps look up one distance for all entries, and the right ones are not in the graph",
    "keys-rotated-anew": "keys are rotated by other positions than queries; those of the queries are right",
    **dict.fromkeys(("mask-off-by-one", "mask-of-the-trace"), "the mask hides entries by numbers that match no length"),
    **dict.fromkeys(
        ("chunk-sees-ahead", "chunk-sees-the-past-alone"), "the steps have no causal mask of their own, or a second one"
    ),
    "table-of-6": "rows beyond the end of the table are not in the file",
    "first-entry-read": "the value of a missing entry is unknown",
    **dict.fromkeys(
        ("logits-overflow", "overflow-when-long", "mask-infinite-when-long"),
        "the numbers become infinite during the computation",
    ),
    "weights-no-numbers": "the original numbers are not in the file",
    "unknown-operator": "no runtime has the operator",
    "types-mixed": "the intended types of the addition are unknown",
}
"""Faults that no repair of the graph removes, and why; nothing is written for them, and the report gives a reason."""

OUT_OF_REACH = {"one-output-missing": MERGED}
"""Exports in which a fault is not repaired: one branch of a merged decoder does not compute the missing output."""


def faults() -> dict[str, Fault]:
    """Every fault whose finding calls for a repair."""
    repairable = {name for repair in load() for name in repair.checks}
    found = {name: fault for name, fault in registry.load().items() if fault.check in repairable}
    return found | more_harm.load()


def repair_fault(fault: Fault, export: Export, folder: Path) -> RepairedExport:
    """Break the export, and let it be repaired into `folder`."""
    fault.harm(export)
    source = export.write(folder / "broken")
    before = {path: path.read_bytes() for path in source.iterdir()}
    out = folder / "fixed"
    options = Options(consumer=fault.consumer, thorough=fault.thorough)
    report = pipeline.re_export(RepairRequest(str(source), str(out)), options)
    repaired = RepairedExport(exit_code(report, "error"), out.exists(), report.to_dict())
    assert {path: path.read_bytes() for path in source.iterdir()} == before, "the source was changed"
    return repaired
