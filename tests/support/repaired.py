"""Runs re-export, and reads what became of a broken export."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.command_line import run

REPOSITORY = Path(__file__).parents[2]


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


def re_export(source: Path, out: Path, *more: str) -> RepairedExport:
    """Run the command."""
    done = run("re-export", source, "-o", out, "--format", "json", *more, cwd=REPOSITORY)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout, done.stderr
    return RepairedExport(done.returncode, out.exists(), json.loads(done.stdout))
