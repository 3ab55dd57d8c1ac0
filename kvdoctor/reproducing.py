"""`repro`: the smallest weight-free model and script that show a failure, run before they are handed over."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvdoctor.contract import Axis, CacheContract
from kvdoctor.doctor import Options, step_test
from kvdoctor.experiments import load
from kvdoctor.findings import SEVERITIES, Finding
from kvdoctor.lowering import MENDS
from kvdoctor.model_folder import ModelFolder, open_folder
from kvdoctor.onnx_schema import ModelProto
from kvdoctor.out_folder import Pending, refuse_unfit, whole_folder
from kvdoctor.report.document import Report, Reproducer
from kvdoctor.repro.candidate import Candidate
from kvdoctor.repro.program import OTHER_NODE
from kvdoctor.repro.reducing import LARGEST, Reduction, Target
from kvdoctor.repro.sizes import with_free_axis
from kvdoctor.repro.surgery import name_nodes, operator_of
from kvdoctor.repro.weights import INTEGERS, note_digests
from kvdoctor.repro.witness import Difference, Shown, Witness
from kvdoctor.repro.writing import Handover, write
from kvdoctor.runtimes import Runtime
from kvdoctor.script import Script
from kvdoctor.skeleton import read_skeleton
from kvdoctor.stacks import StackFiles
from kvdoctor.tolerances import TOLERANCES
from kvdoctor.trace import Run, Step

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

FROZEN: "dict[str, tuple[Axis, tuple[str, ...]]]" = {
    "past-axis-frozen": ("past", ("dummy-past-runs", "plain-loop")),
    "batch-axis-frozen": ("batch", ("batch",)),
    "sequence-axis-frozen": ("new", ("plain-loop", "chunk")),
}
"""Checks that read a fixed size off the file: the axis, and the experiments that feed another size."""

ALONE = {"step-fails", "chunk-fails", "empty-past-rejected", *FROZEN}
"""Checks whose failing call has a past as it should be: any other past of that shape will do as well."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for."""

    path: str
    out: str
    force: bool = False


@dataclass(frozen=True)
class Failure:
    """What is to be reproduced: a finding and its stack, and the experiment that shows it under a contract.

    `run` is how that went; None where a file is refused, or where a contract that promises more was made up for it.
    """

    finding: Finding
    stack: StackFiles
    contract: CacheContract
    experiments: tuple[str, ...]
    run: Run | None = None

    @property
    def question(self) -> str:
        """What the experiment asks, in words."""
        return next((e.question for e in load() if e.name in self.experiments), "")


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
            return report
        folder = open_folder(request.path)
        try:
            failure = _failure(counted, report, folder)
            return _reproduced(failure, folder, (request, options), (runtime, Path(scratch)), report)
        except NotShown as reason:
            return replace(report, reproducer=Reproducer(None, str(reason)))


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
        if finding.name in ("session-refused", *MENDS):
            return Failure(finding, stack, facts.contract, ())
        runs = {run.experiment: run for run in report.runs if run.stack == stack.name}
        first = SHOWN_BY.get(finding.name, ())
        for name in (*first, *(OTHERWISE if finding.name not in FROZEN else ())):
            if name in runs and runs[name].outcome in WRONG:
                return Failure(finding, stack, facts.contract, (name,), runs[name])
        if finding.name in FROZEN:
            axis, experiments = FROZEN[finding.name]
            return Failure(finding, stack, with_free_axis(facts.contract, axis), experiments)
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
    whole, yardstick, node = _placed(whole, yardstick, witness)
    experiment = failure.experiments[0] if failure.experiments else ""
    target = Target(node[0], _steps(failure))
    reduction = Reduction(lambda candidate: witness.sees(candidate, yardstick, experiment), target)
    found = reduction.smallest(whole)
    if found is None:
        raise NotShown(_why_not(reduction))
    with whole_folder(Path(request.out)) as pending:
        found = _final(found, failure, witness, options)
        report = replace(report, environment={**report.environment, "onnxruntime": runtime.versions["onnxruntime"]})
        handover = Handover(failure.finding, failure.question, node, folder, report, options, found, yardstick)
        reproducer = write(pending.path, handover, request.out)
        _prove(pending, options)
        pending.kept = True
    return replace(report, reproducer=reproducer)


def _original(failure: Failure, folder: ModelFolder, witness: Witness) -> tuple[Candidate, Shown | Difference]:
    """The model itself as the largest candidate, and what it shows.

    Raises:
        NotShown: the failure does not come again.
    """
    root, run = folder.root.absolute(), failure.run
    if run is not None and run.died_by == "memory":
        raise NotShown("the run was ended at its limit of memory, and a program without that limit is nothing to send")
    if run is not None and run.outcome == "differs":
        script = witness.record(root, failure.contract, failure.experiments[0])
        whole = Candidate(root, _skeletons(folder, script), script, failure.contract)
        return whole, witness.differs(root, failure.contract, failure.experiments[0])
    for script in _scripts(failure, root, witness):
        shown = witness.play(root, script)
        if shown.outcome in ("failed", "died", "refused"):
            return Candidate(root, _skeletons(folder, script), script, failure.contract), shown
    raise NotShown("the failure does not come again when the same calls are made a second time")


def _scripts(failure: Failure, root: Path, witness: Witness) -> Iterator[Script]:
    """What may end in the failure: opening a file, or the calls of an experiment up to its failure."""
    if not failure.experiments:
        yield Script("refused", (), files=(failure.finding.file or failure.stack.main.name,))
    for experiment in failure.experiments:
        recorded = witness.record(root, failure.contract, experiment)
        died = failure.run is not None and failure.run.outcome == "died"
        if recorded.calls:
            yield replace(recorded, kind="dies" if died else "fails", comparisons=()).trimmed()


def _skeletons(folder: ModelFolder, script: Script) -> dict[str, ModelProto]:
    files = {call.file for call in script.calls} | set(script.files)
    # Logits can be compared only where one weight stays one weight, in all files.
    compared = script.kind == "differs"
    models = {}
    for file in (file for file in folder.files if file.name in files):
        models[file.name] = read_skeleton(file.path, INTEGERS, digests=compared).model
        if compared:
            note_digests(models[file.name], file.path.parent)
    return models


def _placed(
    whole: Candidate, yardstick: Shown | Difference, witness: Witness
) -> tuple[Candidate, Shown | Difference, tuple[str, str]]:
    """Name and operator of the failing node; a node without a name is given one, and asked for again."""
    if not isinstance(yardstick, Shown) or not whole.script.calls:
        return whole, yardstick, ("", "")
    model = whole.models[whole.script.calls[-1].file]
    if operator := operator_of(model, yardstick.node):
        return whole, yardstick, (yardstick.node, operator)
    for each in whole.models.values():
        name_nodes(each)
    if whole.weight_bytes() <= LARGEST and yardstick.outcome == "failed":
        with tempfile.TemporaryDirectory(dir=witness.scratch) as scratch:
            again = witness.look_at(whole, Path(scratch))
        operator = operator_of(model, again.node)
        if operator and (again.outcome, again.title, again.words) == (
            yardstick.outcome,
            yardstick.title,
            yardstick.words,
        ):
            return whole, again, (again.node, operator)
    return whole, yardstick, ("", "")


def _steps(failure: Failure) -> tuple[Step, ...]:
    """The steps of the run, where the past that they were fed may be made up."""
    return failure.run.steps if failure.run is not None and failure.finding.name in ALONE else ()


def _final(found: Candidate, failure: Failure, witness: Witness, options: Options) -> Candidate:
    """The candidate with the script that it is handed over with.

    Raises:
        NotShown: its logits do not differ in the calls as they were written down.
    """
    if found.script.kind != "differs":
        return found
    with tempfile.TemporaryDirectory(dir=witness.scratch) as folder:
        found.write(Path(folder), options.seed)
        script = witness.record(Path(folder), found.fitted_contract(), failure.experiments[0], exact=True).trimmed()
        tolerance = TOLERANCES[found.contract.exactness].fails
        off = [
            not finite or relative > tolerance for relative, finite in witness.play(Path(folder), script).differences
        ]
    if True not in off:
        raise NotShown("the calls of the model without its weights, written down, show no difference")
    return replace(found, script=replace(script, comparisons=script.comparisons[: off.index(True) + 1]).trimmed())


def _why_not(reduction: Reduction) -> str:
    if reduction.too_large is not None:
        return (
            f"the smallest model that could be made without its weights takes {reduction.too_large >> 20} MiB of "
            f"noise, more than {LARGEST >> 20} MiB: nothing to send"
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
    if done.returncode != 1 or OTHER_NODE in done.stdout:
        last = (done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no words"])[-1]
        raise NotShown(f"the reproducer did not show the failure when it was tried by itself ({last[:300]})")
