"""Locates the fault of one failed or differing run, and the node that fails: by the name that the runtime gives it.

Of a model in float16 it also finds the largest value of a call.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.choices import CPU
from kvdoctor.contract import CacheContract, PhaseName, Role
from kvdoctor.decode.messages import TrialModel
from kvdoctor.decode.runs import FaultLocation, Node, Run
from kvdoctor.decode.tolerances import Tolerance
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.diagnose.locate.difference import DifferenceSearch, PhaseGraph, find_pass, name_pass
from kvdoctor.diagnose.locate.failing_node import FailingNode
from kvdoctor.diagnose.locate.graph_runner import SECONDS, GraphRunner, TrialFailed
from kvdoctor.diagnose.locate.runnable import RunnableGraph, RunnableNode, layers_of_pasts, locate_at
from kvdoctor.errors import CannotCheck, describe_crash
from kvdoctor.model.operators import Trait
from kvdoctor.records import record
from kvdoctor.runtime.client import Runtime

MOST_ROUNDS = 6
"""Times that a branch which a failing `If` takes is written out, or another node is seen to fail first."""
LEVELS = ("off", "basic", "extended", "all")


@record(slots=False)
class LocateContext:
    """What a search needs: the stack and its contract, the runtime, and the folder of the saved calls."""

    stack: StackFiles
    contract: CacheContract
    runtime: Runtime
    provider: str
    calls: Path
    tolerance: Tolerance

    @classmethod
    def of(cls, context: ContractContext, runtime: Runtime, provider: str, calls: Path) -> "LocateContext":
        """What is known of a stack that was run."""
        return cls(context.stack, context.contract, runtime, provider, calls, context.tolerance)


def locate_fault(run: Run, context: LocateContext) -> Run:
    """The run with the location of its fault, or with the reason why that was not found."""
    return guard_search(run, lambda: replace(run, location=_locate(run, context)))


def guard_search(run: Run, search: Callable[[], Run]) -> Run:
    """The run that a search returns; where it fails, the run with the reason."""
    try:
        return search()
    except CannotCheck as reason:
        return replace(run, no_location=str(reason))
    except TrialFailed:
        return replace(run, no_location="the runtime does not run the instrumented graph")
    except Exception as error:  # a fault of ours must not hide what the run showed
        return replace(run, no_location=describe_crash("the search", error))


def _locate(run: Run, context: LocateContext) -> FaultLocation:
    runner = GraphRunner(context.runtime, context.calls, context.provider, time.monotonic() + SECONDS)
    if context.stack.stages:
        raise CannotCheck("the decoder is a pipeline of several files, in which no node is searched for")
    feeds = context.calls / f"{run.experiment}.npz"
    if not feeds.is_file():
        other_shape = "the logits have a different shape, so intermediate values cannot be compared"
        raise CannotCheck(other_shape if run.outcome == "differs" else "the feeds of the call were not saved")
    locate = _locate_failure if run.outcome == "failed" else _locate_difference
    return locate(run, context, runner, feeds)


def _locate_failure(run: Run, context: LocateContext, runner: GraphRunner, feeds: Path) -> FaultLocation:
    from kvdoctor.decode.calls import load_call

    step = run.steps[-1]
    phase: PhaseName = "decode" if step.phase == "decode" else "prefill"
    file = file_of(context, phase)
    called = TrialModel(file.absolute(), None, feeds, run.level)
    if run.passes_with == "no-buffer-reuse":
        return locate_at(None, "the same call passes when the runtime reuses no buffers", "buffer-reuse")
    if run.passes_with == "no-optimization":
        level = next((level for level in LEVELS if not runner.passes(replace(called, level=level))), "all")
        found = find_pass(lambda disabled: runner.passes(replace(called, level=level, disabled=disabled)))
        words = f"the call fails from optimization level {level!r} on"
        return locate_at(None, words + name_pass(found), "optimization")
    flat, node = FailureSearch(runner, file, feeds, branches_taken(context, phase)).node()
    axes = {port.name: port.axes for port in context.contract.graph(phase).inputs}
    carried, layers = _describe_carried_pasts(run, context.contract), layers_of_pasts(context.contract)
    place = FailingNode(runner, flat, node, load_call(feeds), axes, carried, layers).locate(feeds)
    if context.provider != CPU and runner.passes(replace(called, provider=CPU)):
        return replace(place, source="kernel", words=f"the same call passes on the CPU, not on {context.provider}")
    return place


def _locate_difference(run: Run, context: LocateContext, runner: GraphRunner, feeds: Path) -> FaultLocation:
    reference = context.calls / f"{run.experiment}-reference.npz"
    step = run.wrong_step
    if step is None or not reference.is_file():
        raise CannotCheck("no reference run covers this step, so no node was searched for")
    if any(slot.prepended for slot in context.contract.slots):
        raise CannotCheck("new entries come before the past: the keys of the two runs stand in another order")
    index = run.steps.index(step)
    left, right = (
        PhaseGraph(name, file_of(context, name), branches_taken(context, name))
        for name in (("decode" if step.phase == "decode" else "prefill"), "prefill")
    )
    before = run.steps[index - 1] if index else None
    total = step.new_tokens + step.past_length * (step.phase == "decode")
    limit, files = context.tolerance.passes, (left, right, (feeds, reference))
    return DifferenceSearch(runner, context.contract, step, before, total, *files, context.provider, limit).locate()


def file_of(context: LocateContext, phase: PhaseName) -> Path:
    """The file of the graph of a phase."""
    name = context.contract.graph(phase).file
    return next(file.path for file in context.stack.files.values() if file.name == name)


def branches_taken(context: LocateContext, phase: PhaseName) -> dict[str, bool]:
    """The branch that a merged decoder takes in a phase, by the first value of each `If`."""
    name, switch = context.contract.graph(phase).file, context.contract.phases[phase].switch
    view = next((file.view for file in context.stack.files.values() if file.name == name), None)
    if view is None or view.branches is None or switch is None:
        return {}
    branches = view.branches[1]
    return {value: name == "then_branch" for value, name in branches.taken(switch == branches.on).items()}


def _describe_carried_pasts(run: Run, contract: CacheContract) -> Mapping[str, str]:
    """For each past fed in the last step that is a present of the step before: which step returned it."""
    if len(run.steps) < 2:
        return {}
    before, last = run.steps[-2], run.steps[-1]
    return {
        slot.past: f"step {before.step} returned it as {name}"
        for slot in contract.slots
        if (name := slot.present if before.phase == "decode" else slot.filled_by) in before.returned
        and slot.past in last.fed
        and last.fed[slot.past] == before.returned[name or ""]
    }


@dataclass
class FailureSearch:
    """Finds the failing node of one saved call of the file `source`; `taken` are the branches that are known."""

    runner: GraphRunner
    source: Path
    feeds: Path
    taken: dict[str, bool]

    def node(self) -> tuple[RunnableGraph, RunnableNode]:
        """Find the node, in the graph written out as deep as it is nested; `CannotCheck` where it cannot be found."""
        for _ in range(MOST_ROUNDS):
            flat = self.runner.flatten(self.source, self.taken)
            node = self._find_first(flat)
            branch = self._branch_taken(flat, node)
            if branch is None:
                return flat, node
            self.taken[node.makes[0]] = branch
        raise CannotCheck("the failing node is nested deeper than branches were written out")

    def _find_first(self, flat: RunnableGraph) -> RunnableNode:
        wanted = flat.ends
        for _ in range(MOST_ROUNDS):
            node = self._find_failing(flat, wanted)
            if node is None:
                raise CannotCheck("the same call passes once branches and functions are written out")
            wanted = [name for name in node.reads if name in flat.producers]
            if not wanted or self._find_failing(flat, wanted) is None:
                return node
        raise CannotCheck("no single node fails each time")

    def _find_failing(self, flat: RunnableGraph, wanted: list[str]) -> RunnableNode | None:
        """The node that fails while some values are computed, None where all can be."""
        try:
            self.runner.run(self.runner.variant(flat, shapes=wanted), self.feeds)
        except TrialFailed as failure:
            named = [flat.by_name[name] for name in failure.names if name in flat.by_name]
            return named[-1] if named else self._halve(flat, wanted)
        return None

    def _halve(self, flat: RunnableGraph, wanted: list[str]) -> RunnableNode:
        """The runtime names no node: halve the graph until one is left."""
        nodes = flat.before(wanted)
        runs, fails = 0, len(nodes)
        while fails - runs > 1:
            middle = (runs + fails) // 2
            values = [name for node in nodes[:middle] for name in node.makes]
            try:
                self.runner.run(self.runner.variant(flat, shapes=values), self.feeds)
                runs = middle
            except TrialFailed:
                fails = middle
        if not nodes:
            raise CannotCheck("the runtime fails before any node")
        return nodes[fails - 1]

    def _branch_taken(self, flat: RunnableGraph, node: RunnableNode) -> bool | None:
        """Which branch a failing `If` takes; None for other nodes."""
        if not node.has("branch") or node.domain or not node.makes:
            return None
        condition = node.inputs[0]
        variant = self.runner.variant(flat, values=[condition])
        numbers = self.runner.run(variant, self.feeds)[condition].values
        return bool(numbers[0]) if numbers else None


LARGEST_HALF = 65504.0
CONTENT: tuple[Role, ...] = ("token_ids", "embeddings", "encoder_states", "past")
ENLARGING: tuple[Trait, ...] = ("product", "add", "subtract", "multiply", "power")
"""What makes larger values of others, but for exponentials: one may be infinite, and a share of it is then zero."""


@record
class LargestValue:
    """The largest value of float16 in a call, as a share of what the type holds: infinite where it is not finite."""

    share: float
    node: Node
    layer: int | None

    def __str__(self) -> str:
        """As reports show it: `layer 34 reaches 0.7 of float16's range, in Add "/model/layers.34/Add"`."""
        reached = f"reaches {self.share:.2g} of float16's range" if self.share <= 1 else "leaves float16's range"
        return f"{'the model' if self.layer is None else f'layer {self.layer}'} {reached}, in {self.node.shown}"


def find_largest(context: LocateContext) -> LargestValue | None:
    """The largest value of float16 in a call without a cache, or the first that is not finite; None if unknown.

    Products, sums, powers and inputs of norms are looked at. Of scores after their product, and of logits, negative
    values are left out: they may be so low on purpose, to hide a key or a token.
    """
    import numpy as np

    feeds = context.calls / "plain-loop-last-prefill.npz"
    if not feeds.is_file() or context.stack.stages:
        return None
    runner = GraphRunner(context.runtime, context.calls, context.provider, time.monotonic() + SECONDS)
    try:
        flat = runner.flatten(file_of(context, "prefill"), branches_taken(context, "prefill"))
        graph = context.contract.graph("prefill")
        wanted = {name for node in flat.nodes if node.has("normalize") for name in node.inputs[:1]}
        bent = {name for node in flat.nodes if node.has("exponential") for name in node.makes}
        enlarging = (node for node in flat.nodes if node.has(*ENLARGING) and bent.isdisjoint(node.inputs))
        wanted.update(name for node in enlarging for name in node.makes)
        wanted &= flat.depending_on(port.name for port in graph.inputs if port.role in CONTENT)
        makers = {name: node for node in flat.nodes for name in node.makes if name in wanted}
        values = runner.arrays(flat, makers, feeds)
    except (CannotCheck, TrialFailed):
        return None
    products = [name for node in flat.nodes if node.has("product") for name in node.makes]
    ends = [flat.results[port.name] for port in graph.outputs if port.role == "logits"]
    ends += [name for node in flat.nodes if node.has("softmax", "exponential") for name in node.inputs]
    hidden = {name for node in flat.before(ends, products) for name in node.makes}
    layers, found = layers_of_pasts(context.contract), list[LargestValue]()
    for name, node in makers.items():
        if name in values and values[name].dtype == np.float16:
            # Where it hides nothing, -Inf is written on purpose as well, as in a mask that is not added yet.
            array = values[name][~np.isneginf(values[name])]
            most = float((array if name in hidden else np.abs(array)).max(initial=0))
            share = most / LARGEST_HALF if most <= LARGEST_HALF else math.inf
            found.append(LargestValue(share, node.in_file, node.layer(layers)))
    return max(found, key=lambda one: one.share, default=None)
