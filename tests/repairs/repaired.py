"""Runs re-export on an export with an injected fault."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import more_harm
import registry
from base_models import MERGED, Export
from registry import Fault

from kvdoctor.options import Options
from kvdoctor.repair import pipeline
from kvdoctor.repair.repairs.registry import load
from kvdoctor.repair.request import RepairRequest
from kvdoctor.report.document import exit_code

REPOSITORY = Path(__file__).parents[2]

NOT_REPAIRABLE = {
    "queries-rotated-anew": "the positions of the queries are wrong, and the cache is right",
    "window-too-small": "the mask of the steps differs from that of the prefill",
    "other-values-with-a-past": "the steps compute something else than the prefill",
    "norm-missing-with-a-past": "the steps compute something else than the prefill",
    "encoder-cut": "the mask of the steps hides encoder states",
    "place-in-the-batch": "the computation depends on the row of the batch",
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


@dataclass(frozen=True)
class RepairedExport:
    """What became of a broken export.

    Attributes:
        code: The exit code of the command.
        written: Whether OUT is there.
        document: The report.
    """

    code: int
    written: bool
    document: dict[str, Any]

    @property
    def proved(self) -> bool:
        """Whether a copy was written that is proved, and on which nothing is found that was called an error."""
        return self.written and self.document["repair"]["proved"]

    @property
    def repairs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(repair["name"] for repair in self.document["repair"]["repairs"]))

    @property
    def details(self) -> str:
        """For the reader of a failed test."""
        record = self.document["repair"]
        failed = [f"{entry['claim']}: {entry['detail']}" for entry in record["proof"] if not entry["holds"]]
        not_repaired = [f"{entry['repair']} {entry['finding']}: {entry['reason']}" for entry in record["not_repaired"]]
        findings = [f"{finding['severity']} {finding['name']}" for finding in self.document["findings"]]
        return "\n".join([f"exit code {self.code}", *self.repairs, *failed, *not_repaired, *findings])


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


def re_export(source: Path, out: Path, *more: str) -> RepairedExport:
    """Run the command."""
    command = [sys.executable, "-m", "kvdoctor", "re-export", source, "-o", out, "--format", "json", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY, env=dict(os.environ))
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout, done.stderr
    return RepairedExport(done.returncode, out.exists(), json.loads(done.stdout))
