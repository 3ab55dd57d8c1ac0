"""What a step-test says of a decoder, and whether that is right."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FROZEN = {"batch-axis-frozen", "sequence-axis-frozen"}
"""Findings that are right for a decoder of one row or one token at a time."""
MEMORY = 3000
"""MiB: these decoders need a tenth of it."""


@dataclass(frozen=True)
class Expected:
    """The right findings, none for a right decoder, and the uses that go wrong; `unclear`: exit code 3 is right too."""

    fault: str = ""
    names: tuple[str, ...] = ()
    harm: tuple[str, ...] = ()
    unclear: bool = False
    frozen: bool = False

    @classmethod
    def loaded(cls, value: dict[str, Any]) -> "Expected":
        """What was written as JSON."""
        fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in value.items()}
        return cls(**fields)


@dataclass(frozen=True)
class Said:
    """Exit code, and the errors and warnings: severity and name, the leading one first."""

    code: int
    findings: tuple[tuple[str, str], ...]

    def judged(self, expected: Expected) -> str:
        """A right decoder is clean, open (exit code 3), false-error, false-warning, or unknown (an error that says so);
        a faulty one is named, found (by another name), unknown, or silent; broken without a report.
        """
        severe = [each for each in self.findings if not (expected.frozen and each[1] in FROZEN)]
        if self.code not in (0, 1, 3):
            return "broken"
        names = {name for _, name in severe}
        if expected.names:
            if names & set(expected.names):
                return "named"
            unknown = self.code == 3 or "contract-unknown" in names
            return "found" if names - {"contract-unknown"} else "unknown" if unknown else "silent"
        if not severe:
            return "open" if self.code == 3 else "clean"
        if names == {"contract-unknown"}:
            return "unknown"
        return "false-error" if any(level == "error" for level, _ in severe) else "false-warning"

    def well(self, expected: Expected) -> bool:
        """Whether an expert would agree."""
        word = self.judged(expected)
        return word in ("clean", "named") or (word == "open" and expected.unclear)


def step_test(executable: str, folder: Path) -> Said:
    """Run kvdoctor on a folder, in a process of its own."""
    command = [executable, "step-test", str(folder), "--format", "json", "--max-memory", str(MEMORY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    (folder / "report.json").write_text(done.stdout or done.stderr, encoding="utf-8")
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return Said(-1, ())
    severe = [(each["severity"], each["name"]) for each in report["findings"] if each["severity"] != "note"]
    return Said(done.returncode, tuple(severe))
