"""`repro`: the smallest weight-free model and script that show a failure, run before they are handed over."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvdoctor.doctor import Options, step_test
from kvdoctor.findings import SEVERITIES, Finding
from kvdoctor.model_folder import ModelFolder, open_folder
from kvdoctor.out_folder import Pending, refuse_unfit, whole_folder
from kvdoctor.repro.candidate import Candidate
from kvdoctor.repro.reducing import LARGEST, Reduction
from kvdoctor.repro.weights import INTEGERS
from kvdoctor.repro.witness import Difference, Shown, Witness, of_kind
from kvdoctor.repro.writing import Handover, write
from kvdoctor.report.document import Report, Reproducer, StackFacts
from kvdoctor.runtimes import Runtime
from kvdoctor.script import Script
from kvdoctor.skeleton import read_skeleton
from kvdoctor.stacks import StackFiles
from kvdoctor.trace import Run

SHOWN_BY = {
    "cross-cache-emptied": ("plain-loop",),
    "empty-past-rejected": ("empty-past",),
    "past-axis-frozen": ("frozen-past",),
    "nondeterministic": ("same-feed",),
    "batch-rows-interact": ("batch-rows",),
    "chunk-fails": ("chunk",),
    "cached-branch-first": ("cached-branch-first",),
}
"""Checks whose failure another run shows than the first of those below that went wrong."""

OTHERWISE = ("plain-loop", "held-loop", "one-token-prompt", "batch", "other-encoder-length", "chunk", "long-past")
WRONG = ("failed", "differs", "died")


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for."""

    path: str
    out: str
    force: bool = False


@dataclass(frozen=True)
class Failure:
    """What is to be reproduced: a finding, the stack, and the run that shows it; None where a file is refused."""

    finding: Finding
    facts: StackFacts
    stack: StackFiles
    run: Run | None


class NotShown(Exception):
    """Why there is no reproducer; for the report."""


def repro(request: Request, options: Options) -> Report:
    """Diagnose a model, and write into OUT what shows its leading failure without its weights.

    Raises:
        UsageError: there is nothing at the path, or OUT must not be written; nothing was written.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    if Path(request.path).exists():
        refuse_unfit(Path(request.out), Path(request.path), request.force)
    with Runtime(options.limits) as runtime, tempfile.TemporaryDirectory(prefix="kvdoctor-") as scratch:
        report = replace(step_test(request.path, options, runtime), command="repro")
        counted = tuple(_counted(report, options))
        if not counted:
            return _noted(report, "nothing to reproduce: no finding of the severity asked for")
        folder = open_folder(request.path)
        try:
            failure = _failure(counted, report, folder)
            return _reproduced(failure, folder, (request, options), (runtime, Path(scratch)), report)
        except NotShown as reason:
            return replace(_noted(report, f"nothing was written: {reason}"), reproducer=Reproducer(None, str(reason)))


def _counted(report: Report, options: Options) -> Iterator[Finding]:
    """The findings that make the exit code 1."""
    lowest = "error" if options.fail_on == "never" else options.fail_on
    yield from (f for f in report.findings if SEVERITIES.index(f.severity) >= SEVERITIES.index(lowest))


def _failure(findings: tuple[Finding, ...], report: Report, folder: ModelFolder) -> Failure:
    """The first finding that a run shows.

    Raises:
        NotShown: none does.
    """
    for finding in findings:
        facts = next((stack for stack in report.stacks if stack.name == finding.stack), None)
        stack = next((stack for stack in folder.stacks if stack.name == finding.stack), None)
        if facts is None or stack is None or facts.contract is None:
            continue
        if finding.name == "session-refused":
            return Failure(finding, facts, stack, None)
        runs = {run.experiment: run for run in report.runs if run.stack == stack.name}
        for name in (*SHOWN_BY.get(finding.name, ()), *OTHERWISE):
            if name in runs and runs[name].outcome in WRONG:
                return Failure(finding, facts, stack, runs[name])
    names = ", ".join(dict.fromkeys(f"{finding.code} {finding.name}" for finding in findings))
    raise NotShown(f"{names} is read off the files, and no run of the model shows it; send the report instead")


def _reproduced(
    failure: Failure,
    folder: ModelFolder,
    asked: tuple[Request, Options],
    means: tuple[Runtime, Path],
    report: Report,
) -> Report:
    (request, options), (runtime, scratch) = asked, means
    witness = Witness(runtime, failure.stack.name, options.provider, options.seed, scratch)
    whole, yardstick = _original(failure, folder, witness)
    experiment = failure.run.experiment if failure.run is not None else ""
    reduction = Reduction(lambda candidate: witness.sees(candidate, yardstick, experiment), failure.run)
    found = reduction.smallest(whole)
    if found is None:
        raise NotShown(_why_not(reduction))
    with whole_folder(Path(request.out)) as pending:
        found = _final(found, failure, witness, options)
        handover = Handover(failure.finding, failure.run, folder, report, options, found, yardstick)
        reproducer = write(pending.path, handover, request)
        _prove(pending, options)
        pending.kept = True
    return replace(
        _noted(report, f"written: {request.out} ({reproducer.bytes:,} bytes); run python {request.out}/reproduce.py"),
        reproducer=reproducer,
    )


def _original(failure: Failure, folder: ModelFolder, witness: Witness) -> tuple[Candidate, Shown | Difference]:
    """The model itself as the largest candidate, and what it shows.

    Raises:
        NotShown: the failure does not come again.
    """
    contract = failure.facts.contract
    assert contract is not None  # noqa: S101 - chosen with one
    root, run = folder.root.absolute(), failure.run
    if run is None:
        file = failure.finding.file or failure.stack.main.name
        script = Script("refused", (), files=(file,))
    else:
        recorded = witness.record(root, contract, run)
        kind = {"failed": "fails", "died": "dies"}.get(run.outcome, "differs")
        script = recorded if kind == "differs" else of_kind(recorded, kind, comparisons=())
    files = {call.file for call in script.calls} | set(script.files)
    models = {file.name: read_skeleton(file.path, INTEGERS).model for file in folder.files if file.name in files}
    whole = Candidate(root, models, script, contract)
    if script.kind == "differs" and run is not None:
        return whole, witness.differs(root, contract, run.experiment)
    shown = witness.play(root, script)
    if shown.outcome not in ("failed", "died", "refused"):
        raise NotShown("the failure does not come again when the same calls are made a second time")
    return whole, shown


def _final(found: Candidate, failure: Failure, witness: Witness, options: Options) -> Candidate:
    """The candidate with the script that it is handed over with.

    Raises:
        NotShown: its logits do not differ in the calls as they were written down.
    """
    if found.script.kind != "differs" or failure.run is None:
        return found
    with tempfile.TemporaryDirectory(dir=witness.scratch) as folder:
        found.write(Path(folder), options.seed)
        script = witness.record(Path(folder), found.fitted_contract(), failure.run, exact=True)
    return replace(found, script=script.trimmed())


def _why_not(reduction: Reduction) -> str:
    if reduction.too_large is not None:
        return (
            f"without its weights the smallest model that could be made takes {reduction.too_large >> 20} MiB of noise, more "
            f"than {LARGEST >> 20} MiB: nothing to send"
        )
    if reduction.spent:
        return "no smaller model that shows the failure was found within the time and the runs set for it"
    return "the failure hangs on the weights: the model with noise in their place does not show it"


def _prove(pending: Pending, options: Options) -> None:
    """Run what is handed over as it will be run: by itself, in a fresh process.

    Raises:
        NotShown: it does not show the failure.
    """
    quiet = {"ORT_DISABLE_TELEMETRY": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "reproduce.py"],
            cwd=pending.path,
            env=os.environ | quiet,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=options.limits.timeout * 2 + 60,
        )
    except subprocess.TimeoutExpired:
        raise NotShown("the reproducer did not end in time when it was tried") from None
    if done.returncode != 1:
        last = (done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no words"])[-1]
        raise NotShown(f"the reproducer did not show the failure when it was tried by itself ({last[:300]})")


def _noted(report: Report, text: str) -> Report:
    return replace(report, notes=(*report.notes, text))
