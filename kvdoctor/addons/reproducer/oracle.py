"""Candidates for a reproducer, models without weights and a script: runs them, and tells whether they fail as before.

Two failures are the same if the same call ends in the same way at the same node. The runtime's message is not read for
a cause; it is only compared: without numbers and names, the messages of the candidate and the model must be equal,
since a wrong cut makes other nodes fail.
"""

import contextlib
import math
import re
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from kvdoctor.addons.reproducer.messages import (
    CallPlaying,
    CallScript,
    CallScripted,
    Comparison,
    MadeArray,
    PlayJob,
    RecordJob,
    ScriptCall,
    ScriptPlayed,
    make_array,
)
from kvdoctor.addons.reproducer.weights import (
    INTEGERS,
    MAX_FLOATS,
    MAX_INTEGERS,
    WIDTHS,
    ReplacedWeights,
    SizeMap,
    WeightReplacer,
    find_uses,
)
from kvdoctor.contract import DECODING, CacheContract, Phase, Port
from kvdoctor.decode.messages import ExperimentJob, RunDone, WorkerError
from kvdoctor.errors import WorkerDied
from kvdoctor.model.external_data import BITS
from kvdoctor.model.proto import ModelProto, TensorProto
from kvdoctor.model.traverse import all_nodes, graphs_in, subgraphs
from kvdoctor.model.view import GraphView
from kvdoctor.records import record
from kvdoctor.runtime.client import Runtime


@record(slots=False)
class Candidate:
    """A candidate for a reproducer: the skeleton of each file, which was read from `folder`, and the calls.

    `strength` is the factor of the noise in matrices, `cuts` says what was removed.
    """

    folder: Path
    models: dict[str, ModelProto]
    script: CallScript
    contract: CacheContract
    sizes: SizeMap = field(default_factory=SizeMap)
    strength: float = 1.0
    cuts: tuple[str, ...] = ()

    @property
    def inputs(self) -> dict[str, set[str]]:
        """The inputs of each file."""
        return {file: set(GraphView(model).inputs) for file, model in self.models.items()}

    def weight_bytes(self) -> int:
        """The bytes of noise."""
        total = 0
        for model in self.models.values():
            tables = find_uses(model).tables
            for tensor in _list_tensors(model):
                most = MAX_INTEGERS if tensor.data_type in INTEGERS else MAX_FLOATS
                if math.prod(tensor.dims) > most:
                    dims = self.sizes.dims(tensor, tensor.name in tables)
                    total += math.prod(dims) * BITS.get(tensor.data_type, 32) // 8
        return total

    def write(self, folder: Path, seed: int, names: "dict[str, str] | None" = None) -> ReplacedWeights:
        """Write the files with noise for weights; `names` are new names of the files."""
        tally = ReplacedWeights()
        origins: dict[str, str] = {}
        used = {call.file for call in self.script.calls} | set(self.script.files)
        for file in sorted(used & set(self.models)):
            target = folder / (names or {}).get(file, file)
            target.parent.mkdir(parents=True, exist_ok=True)
            parent = (self.folder / file).parent
            cleaned = WeightReplacer(parent, seed, self.sizes, self.strength, tally, origins).clean(self.models[file])
            target.write_bytes(cleaned.SerializeToString(deterministic=True))
        return tally

    def fitted_contract(self) -> CacheContract:
        """The contract of the candidate: the decoder's graphs, without the ports and slots that were removed."""
        contract = self.sizes.contract(self.contract)
        phases: dict[str, Phase] = {phase: contract.phases[phase] for phase in DECODING}
        views = {name: GraphView(model) for name, model in self.models.items()}
        graphs = {}
        for name in {served.graph for served in phases.values()}:
            graph, view = contract.graphs[name], views[contract.graphs[name].file]
            graphs[name] = replace(
                graph,
                inputs=tuple(port for port in graph.inputs if port.name in view.inputs),
                outputs=tuple(port for port in graph.outputs if port.name in view.outputs),
            )
        inputs = {port.name for graph in graphs.values() for port in graph.inputs}
        slots = tuple(slot for slot in contract.slots if slot.past in inputs)
        return replace(contract, phases=phases, graphs=graphs, slots=slots)

    def resized_script(self) -> CallScript:
        """The script for the remaining inputs, in the sizes of the candidate."""
        script = self.script.fitting(self.inputs)
        ports = {(graph.file, port.name): port for graph in self.contract.graphs.values() for port in graph.inputs}
        calls = []
        for call in script.calls:
            feeds = dict(call.feeds)
            for name, value in call.feeds.items():
                if isinstance(value, MadeArray) and (call.file, name) in ports:
                    feeds[name] = self._resize(value, ports[call.file, name])
            calls.append(replace(call, feeds=feeds))
        return replace(script, calls=tuple(calls))

    def _resize(self, given: MadeArray, port: Port) -> MadeArray:
        axes = port.axes if len(port.axes) == len(given.shape) else ("batch",) * len(given.shape)
        pairs = zip(given.shape, axes, strict=True)
        shape = tuple(self.sizes.of(size) if axis in WIDTHS else size for size, axis in pairs)
        numbers, vocabulary = given.numbers, self.contract.vocabulary
        if numbers is not None and shape != given.shape:
            part = make_array(given)[tuple(slice(0, size) for size in shape)]
            numbers = tuple(part.ravel().astype(np.float64).tolist())
        if vocabulary is not None and port.role == "token_ids" and self.sizes.of(vocabulary) != vocabulary:
            fewer = self.sizes.of(vocabulary)
            numbers = tuple(float(fewer // 4 + n % (fewer // 2)) for n in make_array(given).ravel().tolist())
        return replace(given, shape=shape, numbers=numbers)


def _list_tensors(model: ModelProto) -> list[TensorProto]:
    found = [attribute.t for node in all_nodes(model) for attribute in node.attribute if attribute.HasField("t")]
    bodies = [body for function in model.functions for node in function.node for body in subgraphs(node)]
    for graph in [inner for outer in (model.graph, *bodies) for inner in graphs_in(outer)]:
        found += [*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)]
    return found


CAUSES = ("same-feed", "later-token", "why", "why-chunk")
"""Experiments that identify a cause."""


@record
class ScriptOutcome:
    """How a script ended: failed, died, refused, ran, crashed or nothing; `title` is that of the last call.

    `node` is the innermost one that the error names, `pattern` its text without names, numbers and shapes, or the
    signal. `differences` are those of each comparison, in standard deviations of the logits, None where not finite. Of
    an experiment whose logits differ, `outcome` is its own, and `pattern` the causes, and whether they are finite.
    """

    outcome: str
    title: str = ""
    node: str = ""
    pattern: str = ""
    text: str = ""
    differences: tuple[float | None, ...] = ()

    @property
    def signature(self) -> tuple[str, str, str, str]:
        """Equal for equal failures."""
        return (self.outcome, self.title, self.node, self.pattern)


@dataclass
class Oracle:
    """Runs scripts and experiments of one stack in the worker. `thresholds` are those of its diagnosis."""

    runtime: Runtime
    stack: str
    provider: str
    seed: int
    scratch: Path
    thresholds: tuple[int, ...] = ()

    def record(self, folder: Path, contract: CacheContract, experiment: str, exact: bool = False) -> CallScript:
        """Run an experiment and record its calls, up to its failure."""
        job = RecordJob(
            stack=self.stack,
            folder=folder.absolute(),
            contract=contract,
            experiment=experiment,
            exact=exact,
            seed=self.seed,
            provider=self.provider,
            thresholds=self.thresholds,
        )
        calls: list[ScriptCall] = []
        level = "all"
        comparisons: list[Comparison] = []
        with contextlib.suppress(WorkerDied):  # the script is what it reported until then
            for event in self.runtime.ask(job):
                if isinstance(event, CallScripted):
                    calls.append(event.call)
                    comparisons += [event.compared] if event.compared else []
                elif isinstance(event, RunDone):
                    level = event.run.level
        return CallScript("differs", tuple(calls), tuple(comparisons), level=level)

    def play(self, folder: Path, script: CallScript) -> ScriptOutcome:
        """Run a script with the files of a folder."""
        call, outcome = -1, ScriptOutcome("nothing")
        try:
            # Read all events: unread ones would be taken for the answer to the next job.
            for event in self.runtime.ask(PlayJob(folder.absolute(), script, provider=self.provider)):
                if isinstance(event, CallPlaying):
                    call = event.call
                elif isinstance(event, ScriptPlayed):
                    outcome = _describe_end(event, script)
                elif isinstance(event, WorkerError):
                    outcome = ScriptOutcome("crashed", text=event.text)
        except WorkerDied as death:
            title = script.calls[call].title if call >= 0 else "opening"
            return ScriptOutcome("died", title, pattern=death.limit or death.how, text=death.how)
        return outcome

    def examine(self, folder: Path, contract: CacheContract, experiment: str) -> ScriptOutcome:
        """Run an experiment, and those that look for causes, with the files of a folder."""
        names = tuple(dict.fromkeys((experiment, "plain-loop", "chunk", *CAUSES)))
        job = ExperimentJob(self.stack, folder.absolute(), contract, names, seed=self.seed, provider=self.provider)
        runs = {run.experiment: run for run in self.runtime.examine(job).runs}
        run = runs.get(experiment)
        finite = all(step.difference.finite for step in (run.steps if run else ()) if step.difference)
        causes = tuple(
            (name, found.name if found else runs[name].outcome)
            for name in CAUSES
            if name in runs and ((found := runs[name].cause) or runs[name].outcome == "differs")
        )
        return ScriptOutcome(run.outcome if run else "skipped", pattern=f"{causes}, finite: {finite}")

    def shows_failure(self, candidate: Candidate, failure: ScriptOutcome, experiment: str) -> bool:
        """Whether a candidate shows the failure of the model."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            if candidate.script.kind != "differs":
                return self.run_candidate(candidate, Path(folder)).signature == failure.signature
            candidate.write(Path(folder), self.seed)
            return self.examine(Path(folder), candidate.fitted_contract(), experiment) == failure

    def run_candidate(self, candidate: Candidate, folder: Path) -> ScriptOutcome:
        """Write the files of a candidate into a folder, and run its script."""
        candidate.write(folder, self.seed)
        return self.play(folder, candidate.resized_script())


def _describe_end(event: ScriptPlayed, script: CallScript) -> ScriptOutcome:
    if event.outcome != "failed" or event.call is None:
        pattern = _remove_names(event.text)
        return ScriptOutcome(event.outcome, pattern=pattern, text=event.text, differences=event.differences)
    text = event.unoptimized or event.text
    pattern = _remove_names(text) + ("" if event.unoptimized is not None else ", with optimizations only")
    title = script.calls[event.call].title
    return ScriptOutcome("failed", title, event.names[-1] if event.names else "", pattern, text)


def _remove_names(text: str) -> str:
    """The innermost error message without names, numbers and shapes."""
    inner = re.sub(r"Load model from .*? failed:", "", text.rpartition("Status Message:")[2])
    quoted = re.sub(r"'[^']*'|\"[^\"]*\"|\{[^}]*\}|\[[^\]]*\]|\([^)]*\)", " ", inner)
    bare = re.sub(r"\S*[/\\_.]\S*|[0-9a-fx]*\d[0-9a-fx]*", " ", quoted)
    return " ".join(bare.split())
