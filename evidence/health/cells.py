"""One cell of the health page: what the real command line says of an export in one runtime, condensed."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvdoctor.findings import means_incomplete

MOST_SECONDS = 900
LONGEST = 400
"""Characters that are kept of a reason."""


def measure(path: Path, release: str | None) -> dict[str, Any]:
    """Runs `step-test`, and `re-export` where the export is not healthy.

    Args:
        path: Folder or file of the export.
        release: The onnxruntime that it must run in as well; None for the installed one alone.

    Returns:
        The exit code and verdict of the step-test, and each stack with its state: healthy, repaired, refused (no
        repair), or not checked. The warnings of a repaired stack are those of the copy.
    """
    # A target may need the network once: its environment is made where it does not exist yet.
    target = ["--offline"] if release is None else ["--target", f"onnxruntime=={release}"]
    code, diagnosed = _run(path, "step-test", path.name, "--no-config", *target)
    cell: dict[str, Any] = {"exit": code, "verdict": diagnosed["verdict"]}
    repaired = None
    if diagnosed["verdict"] != "healthy":
        with tempfile.TemporaryDirectory(prefix="health-") as scratch:
            _, repaired = _run(path, "re-export", path.name, "--out", str(Path(scratch, "out")), *target)
    cell["stacks"] = {name: _stack(name, diagnosed, repaired) for name in _names(diagnosed)}
    _check(cell)
    return cell


def _run(path: Path, command: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the report of one command, run beside the export."""
    line = [sys.executable, "-m", "kvdoctor", command, *arguments, "--format", "json"]
    done = subprocess.run(
        line, cwd=path.parent, check=False, capture_output=True, encoding="utf-8", timeout=MOST_SECONDS
    )
    try:
        document: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        raise RuntimeError(f"{command} {path}: exit code {done.returncode}: {done.stderr[-400:]}") from None
    return done.returncode, document


def _names(document: dict[str, Any]) -> list[str]:
    return [stack["name"] for stack in document["stacks"]] or [""]


def _stack(name: str, diagnosed: dict[str, Any], repaired: dict[str, Any] | None) -> dict[str, Any]:
    verdict = verdict_of(name, diagnosed)
    told = {severity: _told(name, diagnosed, severity) for severity in ("error", "warning")}
    layout = next((stack["layout"] for stack in diagnosed["stacks"] if stack["name"] == name), "")
    facts = {"layout": layout, "errors": told["error"], "warnings": told["warning"], "repairs": [], "why": ""}
    if verdict == "healthy":
        return {"state": "healthy", **facts}
    record = (repaired or {}).get("repair") or {}
    if record.get("proved") and repaired is not None and verdict_of(name, repaired) == "healthy":
        applied = [each for each in record["repairs"] if each["stack"] == name]
        # A stack that could not be run may be repaired for a warning.
        errors = told["error"] or sorted({check for each in applied for check in each["checks"]})
        names = list(dict.fromkeys(each["name"] for each in applied))
        left = {"errors": errors, "warnings": _told(name, repaired, "warning"), "repairs": names}
        return {"state": "repaired", **facts, **left}
    if verdict == "incomplete":
        return {"state": "not checked", **facts, "why": _open(name, diagnosed)}
    return {"state": "refused", **facts, "why": _why(name, record, told["error"])}


def verdict_of(name: str, document: dict[str, Any]) -> str:
    """The verdict of one stack, by the rule that kvdoctor has for a report; of all stacks it is the report's."""
    findings = [each for each in document["findings"] if each["stack"] in (name, None)]
    if any(each["severity"] == "error" and not means_incomplete(each["code"]) for each in findings):
        return "unhealthy"
    opened = [each for each in document["not_checked"] if each["stack"] in (name, None) and each["essential"]]
    return "incomplete" if opened or any(means_incomplete(each["code"]) for each in findings) else "healthy"


def _told(name: str, document: dict[str, Any], severity: str) -> list[str]:
    """The names of the findings of a severity that concern a stack."""
    found = [each for each in document["findings"] if each["stack"] in (name, None)]
    return sorted({each["name"] for each in found if each["severity"] == severity})


def _why(name: str, record: dict[str, Any], errors: list[str]) -> str:
    """Why no repair of the graph is offered."""
    entries = [each for each in record.get("not_repaired", ()) if each["stack"] == name and each["finding"] in errors]
    reasons = [each["reason"] for each in entries if each["reason"]]
    failed = [each["claim"] for each in record.get("proof", ()) if not each["holds"] and each["stack"] == name]
    if failed and not reasons:
        reasons = [f"the copy was not proved: {', '.join(failed)}"]
    return _short("; ".join(dict.fromkeys(reasons)) or "there is no repair of the graph for it")


def _open(name: str, document: dict[str, Any]) -> str:
    entries = [each for each in document["not_checked"] if each["stack"] in (name, None) and each["essential"]]
    return _short("; ".join(dict.fromkeys(each["reason"] for each in entries)))


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= LONGEST else f"{flat[: LONGEST - 1]}…"


def _check(cell: dict[str, Any]) -> None:
    """Holds the stacks to the verdict of the report: a healthy report has healthy stacks, another one has not."""
    healthy = all(stack["state"] == "healthy" for stack in cell["stacks"].values())
    if healthy != (cell["verdict"] == "healthy") or healthy != (cell["exit"] == 0):
        raise RuntimeError(f"the stacks do not add up to the verdict: {cell}")
