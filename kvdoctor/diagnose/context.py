"""The contexts of checks: what is known of one file or one stack in each round. Each extends the one before it."""

from collections.abc import Iterator, Mapping
from dataclasses import field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from kvdoctor.analysis.model_folder import ModelFolder
from kvdoctor.analysis.processed_presents import ProcessedPresent, list_rounded
from kvdoctor.analysis.proof import Proof
from kvdoctor.analysis.stacks import OnnxFile, StackFiles
from kvdoctor.choices import Consumer, Required
from kvdoctor.contract import CacheContract, Slot
from kvdoctor.decode.runs import PAGED_LOOP, ObservedTensor, Run, Step
from kvdoctor.decode.tolerances import ALIKE, UNLIKE, Tolerance, find_tolerance
from kvdoctor.errors import as_argument
from kvdoctor.findings import Advice
from kvdoctor.model.view import Declared, GraphView
from kvdoctor.records import record

if TYPE_CHECKING:
    from pathlib import Path

    from kvdoctor.decode.experiments import Use
    from kvdoctor.decode.golden import GoldenDifference
    from kvdoctor.decode.messages import AddedExperiment, FileRefused, PairedSide
    from kvdoctor.decode.speed import SpeedDifference
    from kvdoctor.diagnose.locate.search import LargestValue
    from kvdoctor.report.facts import SpeedFacts
    from kvdoctor.runtime.client import Runtime
    from kvdoctor.runtime.targets import Target, TargetResult


@record(slots=False, kw_only=True)
class FileContext:
    """Round `file`: one file. `weights` says that their values may be read, `unrun` that the model is not run."""

    folder: ModelFolder
    file: OnnxFile
    weights: bool = False
    unrun: bool = False

    def advise_graph_repair(self, text: str) -> Advice:
        """Advice to let kvdoctor repair the graph; `text` is the alternative, as in `or export again`."""
        return Advice("graph", text, f"kvdoctor re-export {as_argument(self.folder.shown)} -o {self.folder.out}")


@record(slots=False, kw_only=True)
class ContractContext:
    """Round `contract`: one stack and its cache contract.

    `consumer` is the loop that will use the model, `required` are the uses that must work, `targets` the runtimes in
    which it must run. `tolerances` are shares of the logits' standard deviation that pass in place of the table's.
    `runs` are the experiments, none where nothing was run. `added` are experiments of add-ons. `proof` is what
    the graph proves, where that was tried already.
    """

    folder: ModelFolder
    stack: StackFiles
    contract: CacheContract
    consumer: Consumer = "plain"
    required: tuple[Required, ...] = ()
    targets: "tuple[Target, ...]" = ()
    tolerances: Mapping[str, float] = field(default_factory=dict)
    runs: tuple[Run, ...] = ()
    added: "tuple[AddedExperiment, ...]" = ()
    proof: Proof | None = None

    def find_run(self, experiment: str) -> Run | None:
        """The run of that experiment, if there was one."""
        return self._run_of.get(experiment)

    @cached_property
    def _run_of(self) -> dict[str, Run]:
        """The first run of each experiment: checks ask for them six thousand times."""
        return {run.experiment: run for run in reversed(self.runs)}

    @property
    def tolerance(self) -> Tolerance:
        """How far logits of this contract may lie apart and still be the same."""
        return find_tolerance(self.contract.exactness, self.tolerances)

    @property
    def checked_loop(self) -> Run | None:
        """The run of the loop that is used: held, where that is asked for or an emptied cache breaks the plain one."""
        held = self.find_run("held-loop")
        if held is not None and held.outcome != "skipped" and (self.consumer == "held" or self.emptied_slots):
            return held
        return self.find_run("plain-loop") or self.find_run(PAGED_LOOP)

    @property
    def emptied_slots(self) -> tuple[Slot, ...]:
        """Slots that a decode step returns without elements, by the graph or by what the runs showed."""
        return tuple(slot for slot in self.contract.slots if slot.emptied)

    @property
    def decode_graph(self) -> GraphView:
        """The graph that decodes with the cache."""
        view = self.stack.main.view
        if view is None:
            raise LookupError(f"{self.stack.main.name} of stack {self.stack.name} was not read")
        return view

    @property
    def decode_file(self) -> str:
        """The name of the file that decodes with the cache."""
        return self.stack.main.name

    @property
    def decode_view(self) -> GraphView | None:
        """The graph that decodes with the cache; None where it is not one file of the stack, or cannot be read."""
        name = self.contract.graph("decode").file
        return next((file.view for file in self.stack.files.values() if file.name == name), None)

    @property
    def rounded_presents(self) -> dict[str, ProcessedPresent]:
        """The presents of a decode step that its graph rounds on the way to the output alone, by name."""
        view = self.decode_view
        return list_rounded(view, self.contract) if view is not None else {}

    @property
    def logits_name(self) -> str:
        """The name of the output with the logits."""
        port = self.contract.graph("decode").port("logits")
        return port.name if port else "logits"

    @property
    def is_proved(self) -> bool:
        """Whether the graph alone decides that its steps are right at every length, rows with padding aside."""
        return self.proof is not None and self.proof.covers(self.contract.usable_length)

    @property
    def passes_parity(self) -> bool:
        """Whether the checked loop was compared with a run without a cache, and agreed."""
        run = self.checked_loop
        return run is not None and run.outcome == "passed" and self.contract.new_tokens != 1

    @property
    def loop_is_wrong(self) -> bool:
        """Whether the checked loop failed or differed: this confirms what the graph makes a check suspect."""
        run = self.checked_loop
        return run is not None and run.outcome in ("differs", "failed")

    @property
    def uses(self) -> "Mapping[str, Use]":
        """The uses that experiments try, by their names."""
        from kvdoctor.decode.experiments import uses  # with numpy, which no inspection needs

        return uses()

    @property
    def side(self) -> "PairedSide":
        """The stack as a job of the worker names it."""
        from kvdoctor.decode.messages import PairedSide

        return PairedSide(self.stack.name, self.folder.root.absolute(), self.contract)

    def declared_pairs(self) -> Iterator[tuple[Slot, Declared, Declared]]:
        """Every slot with its past and its present, as declared by the graph that decodes."""
        graph = self.decode_graph
        for slot in self.contract.slots:
            if slot.present is not None and slot.past in graph.inputs and slot.present in graph.outputs:
                yield slot, graph.inputs[slot.past], graph.outputs[slot.present]

    def observed_presents(self, slot: Slot) -> Iterator[tuple[Step, ObservedTensor]]:
        """What decode steps of the plain loop returned for a slot."""
        run = self.find_run("plain-loop")
        for step in run.steps if run else ():
            if step.phase == "decode" and slot.present in step.returned:
                yield step, step.returned[slot.present]

    def advise_graph_repair(self, text: str) -> Advice:
        """Advice to let kvdoctor repair the graph; `text` is the alternative, as in `or export again`."""
        options = "".join(f" --target {target.asked}" for target in self.targets)
        command = f"kvdoctor re-export {as_argument(self.folder.shown)} -o {self.folder.out}{options}"
        advice = Advice("graph", text, command)
        if self.stack.stages or self.stack.operator:  # a repair knows graphs that are one file
            return Advice("re-export", advice.instead)
        return advice


@record(slots=False, kw_only=True)
class RunContext(ContractContext):
    """Rounds `runs` and `targets`: adds the runtimes, and the result of round `contract`.

    `local_runtime` is the one that `runs` are from, None where nothing is run. `refusals` are files that it did not
    open. `target_results` are what the model showed under each target that was run. `declared_faults` are the names of
    the errors of round `contract`. `timings` are seconds by label; `thorough` asks for every check. `predicted` says
    that the runs are abstract ones. `largest` is the largest value of a call in float16.
    """

    local_runtime: "Target | None" = None
    refusals: "tuple[FileRefused, ...]" = ()
    target_results: "tuple[TargetResult, ...]" = ()
    declared_faults: tuple[str, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    thorough: bool = False
    predicted: bool = False
    largest: "LargestValue | None" = None


@record
class LocalRun:
    """The run under the runtime of this Python: its worker, the contract it was given, and the file with its logits."""

    runtime: "Runtime"
    contract: CacheContract
    logits: "Path | None"


@record
class GoldenComparison:
    """How what a stack returns compares with golden numbers.

    `difference` is the first place where it differs, None where it agrees; `words` says what was compared and how
    closely. `correlation` decides where the weights are rounded otherwise, None where the tolerance does.
    """

    golden: str
    tolerance: Tolerance
    words: str
    difference: "GoldenDifference | None" = None
    correlation: float | None = None

    @property
    def unclear(self) -> bool:
        """Whether rounded weights explain the difference as well as a fault does."""
        return self.correlation is not None and UNLIKE <= self.correlation < ALIKE


@record(slots=False, kw_only=True)
class GoldenContext(RunContext):
    """Round `golden`: adds the comparison with golden numbers."""

    golden: GoldenComparison


@record(slots=False, kw_only=True)
class SpeedContext(ContractContext):
    """Round `speed`: adds how fast the stack decodes, and what is worse than in an earlier report."""

    speed: "SpeedFacts"
    differences: "tuple[SpeedDifference, ...]" = ()


Extended = TypeVar("Extended", bound=ContractContext)


def extend_context(context: ContractContext, kind: type[Extended], **added: Any) -> Extended:
    """The context of a later round: everything that is known, and what was added since."""
    return kind(**{one.name: getattr(context, one.name) for one in fields(context)} | added)
