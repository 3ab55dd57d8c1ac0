"""Locates the fault of a step whose logits differ: compares its call with the one without a cache, and says why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvdoctor.contract import CacheContract, PhaseName, Slot
from kvdoctor.decode.messages import TrialModel
from kvdoctor.decode.runs import FaultLocation, FaultSource, Step
from kvdoctor.diagnose.locate.cache_sides import change_entries, find_wrong_side
from kvdoctor.diagnose.locate.first_divergence import CallPair, Divergence, DivergenceSearch, Take
from kvdoctor.diagnose.locate.graph_runner import GraphRunner
from kvdoctor.diagnose.locate.match_values import FlatFile
from kvdoctor.diagnose.locate.optimizers import find_pass, name_pass
from kvdoctor.diagnose.locate.runnable import RunnableGraph, layers_of_pasts, locate_at
from kvdoctor.errors import CannotCheck
from kvdoctor.model.operators import operator_of
from kvdoctor.records import record
from kvdoctor.report.wording import shorten_names

CONTENT = ("token_ids", "token_and_position", "embeddings", "encoder_states", "past")
LEVELS = ("basic", "extended", "all")
MOST_DEVIATIONS = 1e6
"""Standard deviations beyond which they are no measure: equal numbers have none."""


@record(slots=False)
class PhaseGraph:
    """The graph of a phase: the phase, its file and the branches that it takes."""

    name: PhaseName
    file: Path
    taken: dict[str, bool]


@dataclass
class DifferenceSearch:
    """Finds where a step with the cache first diverges from the run without one; `before` is the step before it."""

    runner: GraphRunner
    contract: CacheContract
    step: Step
    before: Step | None
    total: int
    left: PhaseGraph
    right: PhaseGraph
    feeds: tuple[Path, Path]
    provider: str
    passes: float

    def locate(self) -> FaultLocation:
        """Locate the fault; the errors are those of `DivergenceSearch.run`."""
        flat = self.runner.flatten(self.left.file, self.left.taken)
        same = (self.left.file, self.left.taken) == (self.right.file, self.right.taken)
        other = flat if same else self.runner.flatten(self.right.file, self.right.taken)
        left, right = self._graph(flat, self.left, self.feeds[0]), self._graph(other, self.right, self.feeds[1])
        fed = ((port, self.step.fed.get(port.name)) for port in self.contract.graph(self.left.name).inputs)
        rows = (seen.shape[port.axes.index("batch")] for port, seen in fed if seen is not None and "batch" in port.axes)
        sizes = (self.step.new_tokens, self.total, next(rows, 1))
        search = DivergenceSearch(self.runner, CallPair(left, right, *sizes, self.passes, self._caches(other)))
        divergence = search.run()
        if divergence is None:
            return self._locate_outside(search.pairs[left.logits][1])
        if divergence.node is None:
            return self._describe_cache(search)
        return self._describe(left, divergence, self._find_exchanged(search, divergence))

    def _graph(self, flat: RunnableGraph, phase: PhaseGraph, feeds: Path) -> FlatFile:
        graph = self.contract.graph(phase.name)
        ports, logits = graph.inputs, graph.port("logits")
        if logits is None or logits.name not in flat.results:
            raise CannotCheck("a graph returns no logits")
        roles = [port.role for port in ports]
        numbered = {port.name: f"{port.role} {roles[:at].count(port.role)}" for at, port in enumerate(ports)}
        named = {port.name: numbered[port.name] for port in ports if port.role != "past"}
        content = tuple(port.name for port in ports if port.role in CONTENT)
        held = {slot.past: self._cache_value(flat, slot, phase.name) for slot in self.contract.slots}
        slots = {past: value for past, value in held.items() if value}
        return FlatFile(flat, named, content, slots, feeds, flat.results[logits.name])

    def _cache_value(self, flat: RunnableGraph, slot: Slot, phase: PhaseName) -> str | None:
        """The value of a graph that holds the whole cache of a slot."""
        if phase == "decode" and slot.kind != "self-attention" and slot.carry == "hold":
            return slot.past
        name = slot.present if phase == "decode" else slot.filled_by
        value = flat.results.get(name or "")
        while value is not None and (node := flat.producers.get(value)) is not None and node.has("copy"):
            value = node.input(0) or None
        return value

    def _caches(self, other: RunnableGraph) -> Mapping[str, tuple[str, Take]]:
        """The pasts that were fed, each with the value of the reference run that begins with the same entries."""
        found: dict[str, tuple[str, Take]] = {}
        for slot in self.contract.growing if self.step.past_length else ():
            value, seen = self._cache_value(other, slot, self.right.name), self.step.fed.get(slot.past)
            if self.left.name == "decode" and value in other.producers and seen is not None and value is not None:
                at = slot.axes.index("past")
                rules: Take = [None] * len(slot.axes)
                rules[at] = [1, 0, seen.shape[at]]
                found[slot.past] = (value, rules)
        return found

    def _find_exchanged(self, search: DivergenceSearch, divergence: Divergence) -> tuple[str, str] | None:
        """Where a node reads a past: that past, and the one that holds the entries expected in it."""
        caches = search.sides.caches
        past = next((name for name in (divergence.node.reads if divergence.node else ()) if name in caches), None)
        if past is None:
            return None
        holders = search.holders(divergence.value, caches[past][1])
        return None if past in holders or not holders else (past, holders[0])

    def _describe(self, graph: FlatFile, divergence: Divergence, exchanged: tuple[str, str] | None) -> FaultLocation:
        node, flat = divergence.node, graph.flat
        assert node is not None  # noqa: S101 - asked only where there is one
        source: FaultSource = "graph" if divergence.sudden or divergence.root is not None else "precision"
        words, cause = self._explain(graph, divergence, exchanged)
        lines = []
        same = [flat.label(name) for name in divergence.equal if exchanged is None or name != exchanged[0]]
        if same:
            several = len(same) > 1
            lines = [f"its input{'s' * several} {' and '.join(same)} {'are' if several else 'is'} right"]
        if divergence.compared < divergence.values:
            compared = f"{divergence.compared} of {divergence.values} intermediate tensors could be compared"
            lines.append(f"{compared}; the earliest divergence may be before it")
        fed = [name for name in node.inputs if name in self.step.fed and name not in flat.producers]
        return locate_at(
            node,
            words,
            source,
            layer=node.layer(layers_of_pasts(self.contract)),
            shapes={flat.label(name): self.step.fed[name] for name in fed},
            provenance=tuple(lines),
            cause=cause,
            scores=any(one.has("softmax") and divergence.value in one.reads for one in flat.nodes),
        )

    def _explain(self, graph: FlatFile, divergence: Divergence, exchanged: tuple[str, str] | None) -> tuple[str, str]:
        """How the value differs, and the check whose fault that is, empty where the place alone does not tell."""
        off = f"off by {divergence.relative:g} standard deviations"
        if divergence.relative < 0:
            off = "infinite or NaN in other entries than the reference"
        elif divergence.relative > MOST_DEVIATIONS:
            off = "different from a reference whose entries are all equal"
        if exchanged is not None:
            layers = {slot.layer for slot in self.contract.slots if slot.past in exchanged}
            name = "key-value-swapped" if len(layers) == 1 else "layers-swapped"
            return f"{exchanged[0]} does not hold the expected entries, {exchanged[1]} does", name
        if divergence.switches:
            chosen = shorten_names(tuple(map(graph.flat.label, divergence.switches)))
            words = f"the graph chooses {chosen} by a length: with the values of the run without a cache"
            name = "cache-misread" if change_entries(graph, divergence.switches) else "branches-disagree"
            return f"its output is {off}; {words} the logits are right", name
        root = graph.flat.label(divergence.root) if divergence.root is not None else None
        if root is not None and divergence.numbers is not None and divergence.numbers[0] != divergence.numbers[1]:
            got, wanted = map(list, divergence.numbers)
            words = f"{root} is {got}, and {wanted} in the run without a cache: with that value the logits are right"
            return words, name_numbers(graph.flat, divergence.root or "")
        held = (slot for slot in self.contract.slots if {"layers", "parts"} & set(slot.axes) or "state" in slot.kind)
        packed = {slot.past for slot in held}  # a state may hold those of all layers
        side = find_wrong_side(graph, divergence.value, packed) if divergence.sudden else None
        if side is not None:
            return f"its output is {off}: {side[1]}", side[0]
        if root is not None:
            of_root = "" if divergence.root == divergence.value else f" of {root}"
            return f"its output is {off}; with the reference value{of_root} the logits are right", ""
        if divergence.sudden:
            return f"its output is {off}, and so are later values", ""
        return f"no single node stands out: differences grow from node to node, and its output is {off}", ""

    def _describe_cache(self, search: DivergenceSearch) -> FaultLocation:
        """Say which slots of the cache that was fed are wrong, and whether they hold the entries of others."""
        caches = search.sides.caches
        wrong = [name for name in caches if search.differs(name)]
        holders = [(name, search.holders(name, caches[name][1])) for name in wrong[:2]]
        lines = [f"the entries expected in {name} are in {found[0]}" for name, found in holders if found]
        returned = f", as step {self.before.step} returned it" if self.before else ""
        slot = next((slot for slot in self.contract.slots if slot.past == wrong[0]), None)
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        words = f"the past fed as {wrong[0]}{more} differs from the cache of the run without one{returned}"
        shapes, layer = {name: self.step.fed[name] for name in wrong[:4]}, slot.layer if slot else None
        cause = "new-entries-wrong"
        return locate_at(None, words, "graph", layer=layer, shapes=shapes, provenance=tuple(lines), cause=cause)

    def _locate_outside(self, take: Take) -> FaultLocation:
        """Find the optimization level or the provider at fault: without optimization nothing differs."""
        names = [port.name for p in (self.left, self.right) if (port := self.contract.graph(p.name).port("logits"))]
        for level in LEVELS:
            if self._wrong(names, level, None, take):
                cpu = "CPUExecutionProvider"
                if self.provider != cpu and not self._wrong(names, level, cpu, take):
                    return locate_at(None, f"the same step is right on the CPU and wrong on {self.provider}", "kernel")
                found = find_pass(lambda disabled: not self._wrong(names, level, None, take, disabled))  # noqa: B023
                words = f"the step is wrong from optimization level {level!r} on, and right below it"
                return locate_at(None, words + name_pass(found), "optimization")
        raise CannotCheck("run alone, the step returns the logits of the run without a cache")

    def _wrong(
        self, names: Sequence[str], level: str, provider: str | None, take: Take, disabled: tuple[str, ...] = ()
    ) -> bool:
        left = TrialModel(self.left.file.absolute(), None, self.feeds[0], level, provider, disabled)
        right = TrialModel(self.right.file.absolute(), None, self.feeds[1], "off", provider, ())
        found = self.runner.compare(left, right, [(names[0], names[-1], take)])[0]
        return found is None or not 0 <= found.relative <= self.passes


def name_numbers(flat: RunnableGraph, value: str) -> str:
    """The check whose fault wrong numbers are: of positions, or of a mask; empty where they are neither."""
    reached = {value}
    for node in flat.nodes:
        if any(node.input(at) in reached for at in operator_of(node.op).places):
            return "positions-not-offset"
        if not reached.isdisjoint(node.reads):
            if node.has("compare"):
                return "mask-not-offset"
            reached.update(node.makes)
    return ""
