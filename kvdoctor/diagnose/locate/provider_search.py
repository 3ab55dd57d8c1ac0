"""Where a provider departs from the CPU: the same call runs on both, and the first operator that differs is named.

The values of the call are compared in the order of the graph. The operator at fault is the first that differs when it
runs alone on the inputs that the CPU computed for it: rounding that adds up over the nodes before it has no part in it.
A call that ends the process is halved instead: each trial that ends it gets a fresh process.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from kvdoctor.choices import CPU
from kvdoctor.contract import PhaseName
from kvdoctor.decode.messages import ExperimentJob, TrialModel, ValueDifference
from kvdoctor.decode.runs import FaultLocation, ObservedTensor, Run
from kvdoctor.diagnose.locate.difference import find_pass, name_pass
from kvdoctor.diagnose.locate.first_divergence import MOST_BYTES, MOST_PATCHES, chunks, element_type
from kvdoctor.diagnose.locate.graph_runner import GraphRunner, Pair, TrialFailed, side
from kvdoctor.diagnose.locate.runnable import RunnableGraph, RunnableNode, layers_of_pasts, locate_at
from kvdoctor.diagnose.locate.search import FailureSearch, LocateContext, branches_taken, file_of
from kvdoctor.errors import CannotCheck

LEVELS = ("basic", "extended", "all")
MOST_VALUES = 200
MOST_SECONDS = 300.0
"""A provider may compile a program for each part of a graph, and each trial that crashes needs a new process."""
FACTOR = 10.0
"""How much farther off than the tolerance an operator alone must be: its outputs have units of their own."""


def locate_crash(run: Run, context: LocateContext, job: ExperimentJob) -> FaultLocation:
    """The node in which the process ends, with the shapes that it was fed; raises `CannotCheck` where none is found."""
    phase, feeds = _save_call(run.experiment, run.failed_step or 0, context, job)
    runner = _make_runner(context)
    file, taken = file_of(context, phase), branches_taken(context, phase)
    flat, node = FailureSearch(runner, file, feeds, taken).node()
    fed = [name for name in node.reads if name in flat.producers or name not in flat.constants]
    values = runner.run(runner.variant(flat, values=fed), feeds)
    seen = {flat.label(name): ObservedTensor(one.dtype, one.shape) for name, one in values.items()}
    empty = [name for name, one in seen.items() if 0 in one.shape]
    words = "the process ends in this node" + (f", whose input {empty[0]} has no elements" if empty else "")
    return _place(node, words, context, seen)


def locate_departure(run: Run, step: int, context: LocateContext, job: ExperimentJob) -> FaultLocation:
    """The operator with which a provider first departs from the CPU, at the step or, where none does, before it.

    Raises:
        CannotCheck: no call of these steps differs when both are given the same pasts.
    """
    runner = _make_runner(context)
    for phase, feeds in _list_calls(run.experiment, step, context, replace(job, provider=CPU)):
        search = _Departure(runner, context, phase, feeds)
        found = search.find_operator() or search.find_level()
        if found is not None:
            return found
    raise CannotCheck("no single operator departs from the CPU: small differences add up from node to node")


def _list_calls(
    experiment: str, step: int, context: LocateContext, job: ExperimentJob
) -> Iterator[tuple[PhaseName, Path]]:
    """The calls to look at: the one of the step, the one without a cache that it was compared with, earlier steps."""
    yield _save_call(experiment, step, context, job)
    reference = context.calls / f"{experiment}-reference.npz"
    if reference.is_file():
        yield "prefill", reference
    yield from (_save_call(experiment, at, context, job) for at in range(step))


def _make_runner(context: LocateContext) -> GraphRunner:
    deadline = time.monotonic() + MOST_SECONDS
    return GraphRunner(context.runtime, context.calls, context.provider, deadline, crashes=True, seconds=MOST_SECONDS)


def _save_call(experiment: str, step: int, context: LocateContext, job: ExperimentJob) -> tuple[PhaseName, Path]:
    """The phase of the last call that began at a step, and the file with its feeds: the experiment runs once more."""
    if context.stack.stages:
        raise CannotCheck("the decoder is a pipeline of several files, in which no node is searched for")
    phases: tuple[PhaseName, ...] = ("prefill", "decode")
    files = {phase: context.calls / f"{experiment}-last-{phase}.npz" for phase in phases}
    for file in files.values():
        file.unlink(missing_ok=True)
    again = replace(job, experiments=(experiment,), keep_calls=context.calls, keep_step=step, keep_logits=None)
    context.runtime.examine(again)
    saved = [(file.stat().st_mtime_ns, phase) for phase, file in files.items() if file.is_file()]
    if not saved:
        raise CannotCheck("the feeds of the call were not saved")
    phase = max(saved)[1]
    return phase, files[phase]


def _place(
    node: RunnableNode, words: str, context: LocateContext, shapes: dict[str, ObservedTensor], *more: str
) -> FaultLocation:
    layer = node.layer(layers_of_pasts(context.contract))
    return locate_at(node, words, "kernel", layer=layer, shapes=shapes, provenance=more)


@dataclass
class _Departure:
    """The search in one call."""

    runner: GraphRunner
    context: LocateContext
    phase: PhaseName
    feeds: Path
    found: dict[str, ValueDifference] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return file_of(self.context, self.phase)

    def find_operator(self) -> FaultLocation | None:
        """The first operator that differs alone; None where none does."""
        flat = self.runner.flatten(self.file, branches_taken(self.context, self.phase))
        # A kernel may leave out an optional output that nothing reads, such as the mean of a normalization.
        used = {name for node in flat.nodes for name in node.reads} | set(flat.results.values())
        order = [name for node in flat.nodes for name in node.makes if name in used and flat.is_tensor(name)]
        sizes = self.runner.sizes(flat, order, self.feeds, CPU)
        order = [name for name in order if name in sizes]
        needed = [(at, 8 * prod(sizes[name])) for at, name in enumerate(order)]
        tried = 0
        for portion in chunks(needed, MOST_BYTES, MOST_VALUES):
            names = [order[at] for at in portion]
            self.found |= self._compare(flat, names)
            for name in (name for name in names if self._differs(name, self.context.tolerance.passes)):
                node = flat.producers[name]
                if tried < MOST_PATCHES and self._is_first(node):
                    tried += 1
                    alone = self._compare_alone(flat, node, name)
                    if alone is not None and not 0 <= alone <= FACTOR * self.context.tolerance.passes:
                        return self._describe(flat, node, name, alone)
        return None

    def _describe(self, flat: RunnableGraph, node: RunnableNode, name: str, alone: float) -> FaultLocation:
        off = "is not finite in the same entries" if alone < 0 else f"is off by {alone:g} standard deviations"
        words = f"{node.in_file.shown}: on the inputs that the CPU computed, {flat.label(name)} {off} from the CPU's"
        reads = [one for one in node.reads if one not in flat.constants]
        shapes = self.runner.sizes(flat, reads, self.feeds, CPU)
        observed = {flat.label(one): ObservedTensor("", shape) for one, shape in shapes.items()}
        returned = [port for port, value in flat.results.items() if value == name]
        return _place(node, words, self.context, observed, *(f"it is returned as {port}" for port in returned))

    def _differs(self, name: str, limit: float) -> bool:
        return name in self.found and not 0 <= self.found[name].relative <= limit

    def _is_first(self, node: RunnableNode) -> bool:
        """Whether the inputs of a node differ far less than what it returns."""
        worst = max((self.found[name].relative for name in node.reads if name in self.found), default=0.0)
        own = [self.found[name].relative for name in node.makes if name in self.found]
        return all(self.found[name].relative >= 0 for name in node.reads if name in self.found) and any(
            relative < 0 or relative > 2 * worst for relative in own
        )

    def _compare(self, flat: RunnableGraph, names: list[str]) -> dict[str, ValueDifference]:
        """The differences of values; none of a value with which the provider does not run the graph."""
        variant = self.runner.variant(flat, values=names)
        left = side(variant, self.feeds)
        pairs: list[Pair] = [(variant.outputs[name], variant.outputs[name], []) for name in names]
        try:
            found = self.runner.compare(left, replace(left, provider=CPU), pairs)
        except TrialFailed:
            half = len(names) // 2
            return self._compare(flat, names[:half]) | self._compare(flat, names[half:]) if half else {}
        # Unequal shapes are a difference as well.
        return {name: one or ValueDifference("", -1.0) for name, one in zip(names, found, strict=True)}

    def _compare_alone(self, flat: RunnableGraph, node: RunnableNode, name: str) -> float | None:
        """How far an output is off where the node runs on the CPU's inputs; None where that cannot be run."""
        made = [one for one in dict.fromkeys(node.reads) if one in flat.producers]
        if any(one not in self.found or not self.found[one].dtype for one in made):
            return None
        given = {one: element_type(self.found[one].dtype) for one in made}
        try:
            left = self.runner.variant(flat, values=[name], given=given)
            right = self.runner.variant(flat, values=[name, *made])
            inject: list[Pair] = [(one, right.outputs[one], []) for one in made]
            models = side(left, self.feeds), replace(side(right, self.feeds), provider=CPU)
            found = self.runner.compare(*models, [(left.outputs[name], right.outputs[name], [])], inject)[0]
        except TrialFailed:
            return None
        return -1.0 if found is None else found.relative

    def find_level(self) -> FaultLocation | None:
        """The optimization level from which the whole call differs, and the pass; None where no level does."""
        port = self.context.contract.graph(self.phase).port("logits")
        right = TrialModel(self.file.absolute(), None, self.feeds, "off", CPU)

        def is_right(level: str, disabled: tuple[str, ...] = ()) -> bool:
            left = replace(right, level=level, provider=None, disabled=disabled)
            found = self.runner.compare(left, right, [(port.name, port.name, [])])[0] if port else None
            return found is not None and 0 <= found.relative <= self.context.tolerance.fails

        level = None if port is None else next((one for one in LEVELS if not is_right(one)), None)
        if level is None:
            return None
        words = f"the call departs from the CPU from optimization level {level!r} on, and no operator of the file alone"
        return locate_at(None, words + name_pass(find_pass(lambda off: is_right(level, off))), "optimization")
