"""Locates the fault of a step whose logits differ: compares its call with the one without a cache, and says why."""

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvdoctor.choices import CPU
from kvdoctor.contract import CacheContract, PhaseName, Slot
from kvdoctor.decode.messages import TrialModel
from kvdoctor.decode.runs import FaultLocation, FaultSource, Step
from kvdoctor.diagnose.locate.first_divergence import CallPair, Divergence, DivergenceSearch, FlatFile, Take
from kvdoctor.diagnose.locate.graph_runner import GraphRunner, TrialFailed
from kvdoctor.diagnose.locate.runnable import RunnableGraph, RunnableNode, layers_of_pasts, locate_at
from kvdoctor.errors import CannotCheck
from kvdoctor.model.operators import operator_of, operators_with
from kvdoctor.records import record
from kvdoctor.report.wording import join_some, shorten_names

Holds = Callable[[tuple[str, ...]], bool]
"""Whether the step is right with these passes disabled."""
PASSES = tuple(Path(__file__).with_name("optimization_passes.txt").read_text(encoding="ascii").split())


def find_pass(is_right: Holds) -> str | None:
    """The single pass without which the step is right, found by halving in about seven sessions; None where none is.

    The names are those that `disabled_optimizers` of `InferenceSession` takes. A name that a release does not have is
    ignored by it, and no pass is named that was not shown by a run with it disabled. Source: the names of the graph
    transformers and rewrite rules in onnxruntime 1.16 to 1.31, `core/optimizer`.
    """
    left = PASSES
    try:
        if not is_right(left):
            return None
        while len(left) > 1:
            first, second = left[: len(left) // 2], left[len(left) // 2 :]
            left = first if is_right(first) else second
        return left[0] if is_right(left) else None
    except (CannotCheck, TrialFailed):
        return None


def name_pass(found: str | None) -> str:
    """The end of a sentence on a level that breaks a step."""
    return f"; it is right with the pass {found} disabled (disabled_optimizers)" if found else ""


Side = Literal["new-entries-wrong", "cache-misread"]
COPIES = operators_with("copy", "cast")
VIEWS = COPIES | operators_with("view", "permute", "repeat")
COUNTED = operators_with("arithmetic", "copy", "cast", "view", "permute") - operators_with("clamp")
"""Operators after which numbers still count something: those that bound or choose may make a mask of them."""
MEETS = operators_with("product", "attend")
"""Operators in which a past and new tokens meet that are no entries."""


def find_wrong_side(graph: FlatFile, value: str, packed: Container[str]) -> tuple[Side, str] | None:
    """The check whose fault the first wrong `value` is, and why, or None; `packed` pasts hold several parts.

    The attention uses new entries directly, and old ones by way of the cache. Where the values that are stored are not
    those that it uses, and nothing changes them on their way back, they are stored wrong; where they are the same, and
    something changes old ones on their way to the attention, they are read wrong.
    """
    for past, present in graph.slots.items():
        cached = graph.flat.depending_on({past})
        for views in (COPIES, VIEWS) if value in cached else ():
            # Views of the one side alone are at fault; those of both may undo each other.
            if (
                found := _SlotWay(graph, past, cached, views, past in packed).find_wrong_side(value, present)
            ) is not None:
                return found
    return None


def change_entries(graph: FlatFile, values: Iterable[str]) -> bool:
    """Whether some values act on entries of a cache, old and new ones, on their way to the attention."""
    entries, acting = set(graph.slots), set(values)
    for node in graph.flat.nodes:
        if node.op not in MEETS and not node.has("measure") and not entries.isdisjoint(node.reads):
            if not acting.isdisjoint(node.reads):
                return True
            entries.update(node.makes)
    return False


@record(slots=False)
class _SlotWay:
    """The way of one slot: `cached` depend on its past, `views` change nothing, `packed` pasts hold several parts."""

    graph: FlatFile
    past: str
    cached: set[str]
    views: frozenset[str]
    packed: bool

    def find_wrong_side(self, value: str, present: str) -> tuple[Side, str] | None:
        """The check and the reason, where one side alone changes entries."""
        used = next(iter(self.find_joins(value)), None)
        stored = self.find_stored(used, present) if used is not None else None
        if used is None or stored is None:
            return None
        known = {(node.op, node.inputs) for node in self.list_changes(stored)}
        read = [node for node in self.list_changes(used) if (node.op, node.inputs) not in known]
        same = self.new(used) == self.new(stored)
        if used is stored and self.views is VIEWS:
            # What is changed before it is read and stored again.
            read = [node for node in self.list_changes(used) if not (self.packed and node.has("pick"))]
        if same and read:
            node = read[0].in_file.shown
            return "cache-misread", f"{self.past} is changed before it is used, first by {node}"
        if same and any(node.has("select") for node in self.graph.flat.before([present], stored.makes)):
            return (
                "new-entries-wrong",
                f"{self.graph.flat.label(present)} is chosen after the attention used its entries",
            )
        if same or read:
            return None
        names = " and ".join(sorted(map(self.graph.flat.label, self.new(stored))))
        return (
            "new-entries-wrong",
            f"the attention reads {self.past} as it is, and uses other new entries than are stored ({names})",
        )

    def find_joins(self, value: str) -> list[RunnableNode]:
        """The nearest nodes, from a value back, in which entries of the past and new ones come together."""
        waiting, seen, found = deque([value]), {value}, []
        while waiting:
            node = self.graph.flat.producers.get(waiting.popleft())
            if node is None:
                continue
            if node.op not in MEETS and self._old(node) and self.new(node):
                found.append(node)
                continue
            fresh = [name for name in node.reads if name in self.cached and name not in seen]
            seen.update(fresh)
            waiting += fresh
        return found

    def find_stored(self, used: RunnableNode, present: str) -> RunnableNode | None:
        """Where the entries that are returned come together; of keys and values in one slot those that are `used`."""
        joins, part = self.find_joins(present), self._sources(self._old(used))
        return next((one for one in joins if self._sources(self._old(one)) == part), next(iter(joins), None))

    def new(self, node: RunnableNode) -> set[str]:
        """The values that a node adds to the past, before casts and views."""
        return self._sources(name for name in _content(node) if name in self.graph.new)

    def list_changes(self, join: RunnableNode) -> list[RunnableNode]:
        """The nodes between the past and its join that do more than view it, or multiply it with its scale."""
        nodes = self.graph.flat.before(self._old(join))
        return [node for node in nodes if not self.cached.isdisjoint(node.makes) and not self._restores(node)]

    def _old(self, node: RunnableNode) -> list[str]:
        """The inputs of a node with entries of the past alone."""
        return [name for name in _content(node) if name in self.cached and name not in self.graph.new]

    def _sources(self, names: Iterable[str]) -> set[str]:
        return {self._source(name) for name in names}

    def _source(self, name: str) -> str:
        node = self.graph.flat.producers.get(name)
        return self._source(node.input(0)) if node is not None and node.op in self.views else name

    def _restores(self, node: RunnableNode) -> bool:
        """Whether a node is a view, or multiplies quantized entries with their scale, which is a slot of its own."""
        if node.has("multiply"):
            return self._sources(node.inputs) <= self.graph.slots.keys()
        return node.op in self.views or node.has("dequantize")


def _content(node: RunnableNode) -> list[str]:
    return [name for index, name in enumerate(node.inputs) if name and operator_of(node.op).takes_content(index)]


CONTENT = ("token_ids", "token_and_position", "embeddings", "encoder_states", "past")
MOST_PLACES = 8
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
            off = "infinite or NaN in other entries than in the run without a cache"
        elif divergence.relative > MOST_DEVIATIONS:
            off = "different from a reference whose entries are all equal"
        if divergence.order is not None:
            value, (axis, *places) = divergence.order
            entries = join_some([*map(str, places)], MOST_PLACES)
            maker = graph.flat.producers.get(value)
            where = maker.in_file.shown if maker is not None else graph.flat.label(value)
            off += f" ({where} has the entries of axis {axis} in the order {entries})"
        if exchanged is not None:
            layers = {slot.layer for slot in self.contract.slots if slot.past in exchanged}
            name = "key-value-swapped" if len(layers) == 1 else "layers-swapped"
            return f"{exchanged[0]} does not hold the expected entries, {exchanged[1]} does", name
        if divergence.switches:
            chosen = shorten_names(tuple(map(graph.flat.label, divergence.switches)))
            words = f"it depends on {chosen}, which a length selects; replacing it by its value without a cache"
            name = "cache-misread" if change_entries(graph, divergence.switches) else "branches-disagree"
            return f"its output is {off}; {words} repairs the logits", name
        root = graph.flat.label(divergence.root) if divergence.root is not None else None
        if root is not None and divergence.numbers is not None and divergence.numbers[0] != divergence.numbers[1]:
            got, wanted = map(list, divergence.numbers)
            words = f"{root} is {got}, and {wanted} in the run without a cache: with that value the logits are right"
            return words, name_numbers(graph.flat, divergence.root or "")
        held = (slot for slot in self.contract.slots if {"layers", "parts"} & set(slot.axes) or "state" in slot.kind)
        packed = {slot.past for slot in held}  # a state may hold those of all layers
        side = (
            find_wrong_side(graph, divergence.value, packed) if divergence.sudden and divergence.relative >= 0 else None
        )
        if side is not None:
            return f"its output is {off}: {side[1]}", side[0]
        if root is not None:
            which = "it" if divergence.root == divergence.value else root
            return f"its output is {off}; replacing {which} by its value without a cache repairs the logits", ""
        if divergence.sudden:
            return f"its output is {off}", ""
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
                if self.provider != CPU and not self._wrong(names, level, CPU, take):
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
    """The check whose fault wrong numbers are: of positions or distances, or of a mask; empty where of neither."""
    reached, counted = {value}, {value}
    for node in flat.nodes:
        if any(node.input(at) in reached for at in operator_of(node.op).places):
            return "positions-not-offset"
        if not reached.isdisjoint(node.reads):
            if node.has("compare"):
                return "mask-not-offset"
            if node.has("softmax") and not counted.isdisjoint(node.reads):
                return "positions-not-offset"  # distances that are added to the scores
            reached.update(node.makes)
            if node.op in COUNTED and not counted.isdisjoint(_content(node)):
                counted.update(node.makes)
    return ""
