"""The steps of `repro`: diagnose, choose a failure, reduce the model, write the reproducer, and run it."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvdoctor.addons.reproducer.layers import find_operator, name_nodes
from kvdoctor.addons.reproducer.messages import CallScript, MadeArray
from kvdoctor.addons.reproducer.oracle import Candidate, Oracle, ScriptOutcome
from kvdoctor.addons.reproducer.reduce import MAX_BYTES, Reduction
from kvdoctor.addons.reproducer.weights import INTEGERS, free_axis, store_digests
from kvdoctor.addons.reproducer.write import OTHER_NODE, ReproContents, write_reproducer
from kvdoctor.analysis.model_folder import ModelFolder, open_folder
from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.choices import CPU
from kvdoctor.contract import Axis, CacheContract
from kvdoctor.decode.experiments import load
from kvdoctor.decode.runs import WRONG, Run
from kvdoctor.decode.tolerances import TOLERANCES
from kvdoctor.diagnose.examine import list_thresholds
from kvdoctor.diagnose.pipeline import RunPlan, step_test
from kvdoctor.findings import Finding, reaches
from kvdoctor.model.output_folder import Pending, refuse_unfit, whole_folder
from kvdoctor.model.proto import ModelProto, TensorProto, ValueInfoProto
from kvdoctor.model.skeleton import read_skeleton
from kvdoctor.model.traverse import all_nodes, graphs_in
from kvdoctor.options import Options
from kvdoctor.records import record
from kvdoctor.repair.check_advice import check_advice
from kvdoctor.repair.lowering.lower import LOWERED_CHECKS
from kvdoctor.report.document import Report, Reproducer
from kvdoctor.runtime.client import Runtime
from kvdoctor.runtime.process import NO_TELEMETRY
from kvdoctor.runtime.providers import read_provider
from kvdoctor.runtime.scratch import scratch_folder

EXPERIMENTS_BY_CHECK = {
    "cross-cache-emptied": ("plain-loop",),
    "empty-past-rejected": ("empty-past",),
    "past-axis-frozen": ("frozen-past",),
    "nondeterministic": ("same-feed",),
    "batch-rows-interact": ("batch-rows",),
    "chunk-fails": ("chunk",),
    "cached-branch-first": ("cached-branch-first",),
    "wrong-at-lengths": ("each-length", "near-thresholds", "long-past", "rows-near-thresholds"),
    "chunk-differs": ("chunk", "second-turn", "chunks-near-thresholds"),
}
"""Experiments that show the failure of a check, where these are not the default ones."""

DEFAULT_EXPERIMENTS = (
    *("plain-loop", "held-loop", "one-token-prompt", "batch", "other-encoder-length", "chunk", "long-past"),
)

ON_PROVIDERS = ("target-fails", "target-differs")
"""Checks whose failing runs are on another provider; those in another release of the runtime cannot be run here."""

FROZEN: "dict[str, tuple[Axis, tuple[str, ...]]]" = {
    "past-axis-frozen": ("past", ("dummy-past-runs", "plain-loop")),
    "batch-axis-frozen": ("batch", ("batch",)),
    "sequence-axis-frozen": ("new", ("plain-loop", "chunk")),
}
"""Checks that find a fixed size in the file: the axis, and the experiments that feed another size."""

ANY_PAST = {"step-fails", "chunk-fails", "empty-past-rejected", *FROZEN}
"""Checks whose failing call has a correct past: it fails with any other past of that shape as well."""


@record(slots=False)
class Failure:
    """The failure to reproduce: the `experiments` may show it, none where the runtime refuses a file.

    `run` showed it; None if a file is refused, or if `contract`, to run under, is not the one of the diagnosis.
    """

    finding: Finding
    stack: StackFiles
    contract: CacheContract
    experiments: tuple[str, ...]
    run: Run | None = None

    @property
    def question(self) -> str:
        """The question of the experiment."""
        return next((e.question for e in load() if e.name in self.experiments), "")


class NotReproduced(Exception):
    """There is no reproducer. The message says why, for the report."""


def repro(path: str, out: str, options: Options, *, force: bool) -> Report:
    """Diagnose a model, and write a reproducer of its first failure, without its weights, to the folder `out`.

    Raises:
        UsageError: the path does not exist, or `out` must not be written; nothing was written.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    if Path(path).exists():
        refuse_unfit(Path(out), Path(path), force)
    with Runtime(options.limits) as runtime, scratch_folder() as scratch:
        report = replace(step_test(path, options, runtime, RunPlan(check_advice=check_advice)), command="repro")
        findings = tuple(_findings_that_count(report, options))
        if not findings:
            return report
        folder = open_folder(path)
        try:
            failure = _choose_failure(findings, report, folder)
            # What the CPU shows as well needs no other provider.
            elsewhere = failure.finding.name in ON_PROVIDERS
            others = tuple(name for name in options.providers if name != CPU) if elsewhere else ()
            options = replace(options, providers=others or (CPU,))
            lengths = tuple(one.length for one in list_thresholds(failure.stack, failure.contract))
            oracle = Oracle(runtime, failure.stack.name, options.provider, options.seed, Path(scratch), lengths)
            return _Reproduction(out, options, folder, failure, oracle).run(report)
        except NotReproduced as reason:
            return replace(report, reproducer=Reproducer(None, str(reason)))


def _findings_that_count(report: Report, options: Options) -> Iterator[Finding]:
    """The findings that make the exit code 1, and crashes on a provider: each is a fault of the runtime to send.

    Those of a provider that was asked for come first.
    """
    lowest = "error" if options.fail_on == "never" else options.fail_on
    crashed = {run.experiment for run in report.runs if run.outcome == "died" and run.provider != CPU}
    first = ON_PROVIDERS if {*options.providers} - {CPU} else ()
    for finding in sorted(report.findings, key=lambda one: one.name not in first):
        if reaches(finding, lowest) or (finding.name in ON_PROVIDERS and not crashed.isdisjoint(finding.subject)):
            yield finding


def _choose_failure(findings: tuple[Finding, ...], report: Report, folder: ModelFolder) -> Failure:
    """The first finding that a run shows.

    Raises:
        NotReproduced: there is none.
    """
    for finding in findings:
        facts = next((stack for stack in report.stacks if stack.name == finding.stack), None)
        stack = next((stack for stack in folder.stacks if stack.name == finding.stack), None)
        if facts is None or stack is None or facts.contract is None:
            continue
        if stack.stages:
            raise NotReproduced(f"{stack.name} is a pipeline of {len(stack.stages)} files, and a reproducer has one")
        if finding.name in ("session-refused", *LOWERED_CHECKS):
            return Failure(finding, stack, facts.contract, ())
        elsewhere = finding.name in ON_PROVIDERS
        runs = {
            run.experiment: run for run in report.runs if run.stack == stack.name and (run.provider != CPU) == elsewhere
        }
        first = finding.subject if elsewhere else EXPERIMENTS_BY_CHECK.get(finding.name, ())
        for name in (*first, *(DEFAULT_EXPERIMENTS if finding.name not in FROZEN else ())):
            if name in runs and runs[name].outcome in WRONG:
                return Failure(finding, stack, facts.contract, (name,), runs[name])
        if finding.name in FROZEN:
            axis, experiments = FROZEN[finding.name]
            return Failure(finding, stack, free_axis(facts.contract, axis), experiments)
    names = ", ".join(dict.fromkeys(f"{finding.code} {finding.name}" for finding in findings))
    raise NotReproduced(f"{names} comes from the files, and no run of the model shows it; send the report instead")


@record(slots=False)
class _Reproduction:
    out: str
    options: Options
    folder: ModelFolder
    failure: Failure
    oracle: Oracle

    @property
    def experiment(self) -> str:
        """The first experiment that may show the failure; empty if a file is refused."""
        return self.failure.experiments[0] if self.failure.experiments else ""

    def run(self, report: Report) -> Report:
        """Reduce the model, write the reproducer, and run it; gives the report with the reproducer.

        Raises:
            NotReproduced: a step fails.
        """
        whole, outcome, node = self._locate(*self._reproduce_original())
        # The steps of the run are given if a synthetic past may replace the one that they were fed.
        steps = self.failure.run.steps if self.failure.run and self.failure.finding.name in ANY_PAST else ()
        reduction = Reduction(
            lambda candidate: self.oracle.shows_failure(candidate, outcome, self.experiment), node[0], steps
        )
        found = self._take_node_alone(whole)
        if found is None or not self.oracle.shows_failure(found, outcome, self.experiment):
            found = reduction.find_smallest(whole)
        if found is None:
            raise NotReproduced(_explain_no_candidate(reduction))
        runtime = self.oracle.runtime
        versions, on = {"onnxruntime": runtime.versions["onnxruntime"]}, runtime.find_provider(self.options.provider)
        versions |= {on.name: on.version} if on.version else {}
        report = replace(report, environment=report.environment | versions)
        with whole_folder(Path(self.out)) as pending:
            found = self._with_final_script(found)
            finding, question = self.failure.finding, self.failure.question
            contents = ReproContents(finding, question, node, self.folder, report, self.options, found, outcome)
            reproducer = write_reproducer(pending.path, contents, self.out)
            _prove(pending, self.options)
            pending.kept = True
        return replace(report, reproducer=reproducer)

    def _take_node_alone(self, whole: Candidate) -> Candidate | None:
        run = self.failure.run
        place = run.location if run is not None and run.outcome == "died" else None
        if place is None or place.node is None:
            return None
        call = whole.script.calls[-1]
        model = whole.models[call.file]
        constants = {tensor.name: tensor for graph in graphs_in(model.graph) for tensor in graph.initializer}
        floats = {name for name, seen in place.shapes.items() if seen.dtype == "float"}
        # Both branches of a merged decoder may have a node of that name.
        named = (one for one in all_nodes(model) if one.name == place.node.name)
        node = next((one for one in named if floats.union(constants, ("",)).issuperset(one.input)), None)
        if node is None:
            return None
        computed = list(dict.fromkeys(name for name in node.input if name in floats))
        alone = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
        alone.graph.name = "alone"
        alone.graph.node.append(node)
        alone.graph.initializer.extend(constants[name] for name in node.input if name in constants)
        for name in computed:
            alone.graph.input.add(name=name).type.tensor_type.elem_type = TensorProto.FLOAT
        alone.graph.output.extend(ValueInfoProto(name=name) for name in node.output if name)
        feeds: dict[str, Any] = {
            name: MadeArray("float", place.shapes[name].shape, seed=100 + at) for at, name in enumerate(computed)
        }
        script = replace(whole.script, calls=(replace(call, feeds=feeds),))
        cuts = ("everything but the node in which the process ends",)
        return replace(whole, models={call.file: alone}, script=script, cuts=cuts)

    def _reproduce_original(self) -> tuple[Candidate, ScriptOutcome]:
        """The original model as the largest candidate, and the failure that it shows.

        Raises:
            NotReproduced: it does not fail a second time.
        """
        root, run, contract = self.folder.root.absolute(), self.failure.run, self.failure.contract
        if run is not None and run.died_by == "memory":
            raise NotReproduced("the run was ended by its memory limit, which a program without that limit cannot show")
        if run is not None and run.outcome == "differs":
            script = self.oracle.record(root, contract, self.experiment)
            whole = Candidate(root, _read_skeletons(self.folder, script), script, contract)
            return whole, self.oracle.examine(root, contract, self.experiment)
        for script in self._scripts(root):
            outcome = self.oracle.play(root, script)
            if outcome.outcome in ("failed", "died", "refused"):
                return Candidate(root, _read_skeletons(self.folder, script), script, contract), outcome
        raise NotReproduced("the same calls do not fail a second time")

    def _scripts(self, root: Path) -> Iterator[CallScript]:
        """The scripts that may show the failure: opening a file, or the calls of an experiment up to its failure."""
        failure = self.failure
        if not failure.experiments:
            yield CallScript("refused", (), files=(failure.finding.file or failure.stack.main.name,))
        for experiment in failure.experiments:
            recorded = self.oracle.record(root, failure.contract, experiment)
            died = failure.run is not None and failure.run.outcome == "died"
            if recorded.calls:
                yield replace(recorded, kind="dies" if died else "fails", comparisons=()).trimmed()

    def _locate(self, whole: Candidate, outcome: ScriptOutcome) -> tuple[Candidate, ScriptOutcome, tuple[str, str]]:
        """The name and the operator of the failing node. Nodes without names get names, and the script runs again."""
        if whole.script.kind == "differs" or not whole.script.calls:
            return whole, outcome, ("", "")
        model = whole.models[whole.script.calls[-1].file]
        if operator := find_operator(model, outcome.node):
            return whole, outcome, (outcome.node, operator)
        for each in whole.models.values():
            name_nodes(each)
        if whole.weight_bytes() <= MAX_BYTES and outcome.outcome == "failed":
            with tempfile.TemporaryDirectory(dir=self.oracle.scratch) as scratch:
                again = self.oracle.run_candidate(whole, Path(scratch))
            operator = find_operator(model, again.node)
            if operator and replace(again, node="").signature == replace(outcome, node="").signature:
                return whole, again, (again.node, operator)
        return whole, outcome, ("", "")

    def _with_final_script(self, found: Candidate) -> Candidate:
        """The candidate with the script to write; one whose logits differ is recorded again, with exact values.

        Raises:
            NotReproduced: the logits of the recorded calls do not differ.
        """
        if found.script.kind != "differs":
            return found
        with tempfile.TemporaryDirectory(dir=self.oracle.scratch) as scratch:
            folder = Path(scratch)
            found.write(folder, self.options.seed)
            script = self.oracle.record(folder, found.fitted_contract(), self.experiment, exact=True).trimmed()
            differences = self.oracle.play(folder, script).differences
        tolerance = TOLERANCES[found.contract.exactness].fails
        off = [relative is None or relative > tolerance for relative in differences]
        if True not in off:
            raise NotReproduced("the recorded calls of the model without its weights show no difference")
        comparisons = script.comparisons[: off.index(True) + 1]
        return replace(found, script=replace(script, comparisons=comparisons).trimmed())


def _read_skeletons(folder: ModelFolder, script: CallScript) -> dict[str, ModelProto]:
    files = {call.file for call in script.calls} | set(script.files)
    # To compare logits, a weight with several names or in several files must stay one weight.
    compared = script.kind == "differs"
    models = {}
    for file in (file for file in folder.files if file.name in files):
        models[file.name] = read_skeleton(file.path, INTEGERS, digests=compared).model
        if compared:
            store_digests(models[file.name], file.path.parent)
    return models


def _explain_no_candidate(reduction: Reduction) -> str:
    if reduction.too_large is not None:
        return (
            f"the smallest model without weights has {reduction.too_large >> 20} MiB of noise, "
            f"more than {MAX_BYTES >> 20} MiB: too large to send"
        )
    if reduction.is_exhausted:
        return "no smaller model that shows the failure was found within the limits of time and runs"
    return "the failure depends on the weights: the model with noise in their place does not show it"


def _prove(pending: Pending, options: Options) -> None:
    """Run the reproducer as a user would: by itself, in a new process.

    Raises:
        NotReproduced: it does not show the failure.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-I", "reproduce.py"],
            cwd=pending.path,
            env=os.environ | NO_TELEMETRY | read_provider(options.provider).environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=options.limits.timeout * 2 + 60,
        )
    except subprocess.TimeoutExpired:
        raise NotReproduced("the reproducer did not end within its time limit when it was tested") from None
    if done.returncode != 1 or OTHER_NODE in done.stdout:
        last = (done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"])[-1]
        raise NotReproduced(f"the reproducer did not show the failure when it was tested by itself ({last[:300]})")
