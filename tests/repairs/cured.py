"""What re-export makes of an export that was made sick."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import more_harm
import registry
from patients import MERGED, Export
from registry import Fault

from kvdoctor import re_exporting
from kvdoctor.doctor import Options
from kvdoctor.repairs import load
from kvdoctor.report.document import exit_code

REPOSITORY = Path(__file__).parents[2]

MENDED_ELSEWHERE = {
    "queries-rotated-anew": "the positions of the queries are wrong, and the cache is right",
    "window-too-small": "the mask of the steps is another one than that of the prefill",
    "other-values-with-a-past": "the mathematics of the steps is another one than that of the prefill",
    "norm-missing-with-a-past": "the mathematics of the steps is another one than that of the prefill",
    "encoder-cut": "the mask of the steps hides encoder states",
    "place-in-the-batch": "the mathematics depends on the place in the batch",
    **dict.fromkeys(
        ("positions-restart", "positions-lag-by-one", "positions-run-ahead", "positions-stand-still"),
        "the steps compute other positions than they are given: nothing counts from 0 that should not",
    ),
    "distances-lost": "the steps look up one distance for all entries: which they should look up is not in them",
    "keys-rotated-anew": "the keys are rotated by other positions than the queries, which are right",
    **dict.fromkeys(
        ("mask-off-by-one", "mask-of-the-trace"), "the mask hides entries by numbers that are those of no length"
    ),
    **dict.fromkeys(
        ("chunk-sees-ahead", "chunk-sees-the-past-alone"), "the steps have no causal mask of their own, or a second one"
    ),
    "table-of-6": "what stands behind the end of the table is not in the file",
    "first-entry-read": "what the model needs of an entry that is not there cannot be told",
    **dict.fromkeys(
        ("logits-overflow", "overflow-when-long", "mask-infinite-when-long"),
        "the numbers become infinite as they are computed",
    ),
    "weights-no-numbers": "which numbers they were is not in the file",
    "unknown-operator": "nobody has the operator",
    "types-mixed": "what was meant by the addition cannot be told",
}
"""Faults under the name of a check that repairs mend, which no repair can mend: nothing is written, and it is said."""

OUT_OF_REACH = {"one-output-missing": MERGED}
"""Exports in which a fault is not mended: both branches of a merged decoder would have to return what one lacks."""


@dataclass(frozen=True)
class Cured:
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
        unmended = [f"{entry['repair']} {entry['finding']}: {entry['reason']}" for entry in record["unmended"]]
        findings = [f"{finding['severity']} {finding['name']}" for finding in self.document["findings"]]
        return "\n".join([f"exit code {self.code}", *self.repairs, *failed, *unmended, *findings])


def faults() -> dict[str, Fault]:
    """Every fault that is called by the name of a check which a repair mends."""
    mended = {name for repair in load() for name in repair.mends}
    found = {name: fault for name, fault in registry.load().items() if fault.check in mended}
    return found | more_harm.load()


def cure(fault: Fault, export: Export, folder: Path) -> Cured:
    """Break the export, and let it be repaired into `folder`."""
    fault.harm(export)
    source = export.write(folder / "broken")
    before = {path: path.read_bytes() for path in source.iterdir()}
    out = folder / "fixed"
    options = Options(consumer=fault.consumer, thorough=fault.thorough)
    report = re_exporting.re_export(re_exporting.Request(str(source), str(out)), options)
    cured = Cured(exit_code(report, "error"), out.exists(), report.to_dict())
    assert {path: path.read_bytes() for path in source.iterdir()} == before, "the source was changed"
    return cured


def re_export(source: Path, out: Path, *more: str) -> Cured:
    """Run the command."""
    command = [sys.executable, "-m", "kvdoctor", "re-export", source, "-o", out, "--format", "json", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY, env=dict(os.environ))
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout, done.stderr
    return Cured(done.returncode, out.exists(), json.loads(done.stdout))
