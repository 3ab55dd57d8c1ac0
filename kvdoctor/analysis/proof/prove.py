"""The proof that decoding with a cache and without one agree, for every past, chunk and batch.

Each output of the decode graph must be uniform: the same function of absolute positions in every call. The entries of
each past are by definition what the step of their token returned; every concatenation of a past and new entries must
join entries of that function. Where another graph or branch serves the first step, its outputs must be the same
functions, with an empty past. Rows with padding, rounding, and what a runtime does are not part of the proof.

The types also show stale shapes: a tool that keeps the last token before the output head leaves the names of all tokens
in the shapes that the file declares. ONNX Runtime computes shapes itself; compilers, and loops that allocate outputs,
take them from the file.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

from kvdoctor.analysis.proof import Proof
from kvdoctor.analysis.proof.constants import (
    digest_weights,
    has_one_float,
    identify,
    input_type,
    read_constant,
    slot_shape,
)
from kvdoctor.analysis.proof.masks import hides_later, is_plain, is_weak
from kvdoctor.analysis.proof.types import BATCH, ENCODER, NEW, PAST, Axis, Lengths, Type, size_of
from kvdoctor.analysis.proof.walk import Keys, Typed, Walk
from kvdoctor.analysis.stacks import OnnxFile, StackFiles
from kvdoctor.contract import CacheContract, Dim, Graph, PhaseName, Slot
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.operators import ports_of
from kvdoctor.model.traverse import name_node
from kvdoctor.model.view import GraphView, declared
from kvdoctor.records import record

KINDS = ("self-attention", "cross-attention", "hidden-memory", "encoder-states")


FORMS = {"static": "a buffer of fixed size", "ring": "a ring", "replace": "a state", "paged": "a pool of blocks"}


class NotProved(Exception):
    """What stands in the way, as a report says it; and the node, where it is one."""

    def __init__(self, reason: str, node: FlatNode | None = None) -> None:
        super().__init__(reason)
        self.node = node


def prove(stack: StackFiles, contract: CacheContract) -> Proof | None:
    """Prove a stack; None where it has no cache to prove anything of."""
    if contract.missing or contract.no_decoder or not contract.slots or contract.frozen_past is not None:
        return None
    prover = Prover(stack, contract)
    try:
        prover.check_form()
        return replace(prover.prove(single=prover.takes_one), single=prover.takes_one)
    except NotProved as why:
        many, node = str(why), why.node
    # Of one new token a mask hides nothing: what a graph without one gets wrong are several.
    if node is None or not node.has("softmax", "product", "attend"):
        return Proof(exceptions=(many,))
    try:
        found = prover.prove(single=True)
    except NotProved:
        return Proof(exceptions=(many,))
    return replace(found, single=True, exceptions=(many,))


@record(slots=False)
class Mixing:
    """The first node that may mix later tokens into earlier ones.

    It may weigh scores that no mask hides, `unmasked`; `bent` is what changes them after a mask hid them.
    """

    node: FlatNode
    unmasked: bool = False
    bent: FlatNode | None = None


def find_mixing(stack: StackFiles, contract: CacheContract) -> Mixing | None:
    """Where types end in a graph whose logits change with later tokens; None where they say nothing of it."""
    prover = Prover(stack, contract)
    try:
        prover.check_form()
        walk = prover.walk("prefill", prover.lengths("prefill"), {})
        prover.logits(walk, "prefill")
    except NotProved as why:
        if (node := why.node) is None:
            return None
    else:
        return None
    scores = walk.values.get(node.input(0))
    rank = len(scores.type.shape or ()) if scores is not None else 0
    if node.has("softmax") and rank and (node.number("axis", -1) + 1) % rank == 0:
        bent = _find_bent(walk, node)
        return Mixing(node, bent is None, bent)
    return Mixing(node, node.has("attend"))


def _find_bent(walk: Walk, softmax: FlatNode) -> FlatNode | None:
    """The last node that bounds scores after a mask hid those of later tokens, else the first one after that mask."""
    name, caps = softmax.input(0), list[FlatNode]()
    while (node := walk.flow.producers.get(name)) is not None and node.has("elementwise"):
        name = next((one for one in node.inputs if _hides(walk.values.get(one))), node.input(0))
        caps += [node] if node.has("cap") else []
        if _hides(walk.values.get(name)):
            return caps[0] if caps else node
    return None


def _hides(value: Typed | None) -> bool:
    """Whether a mask hides the scores of later tokens."""
    return value is not None and any(hides_later(value.type, *axes) for axes, _ in value.type.regions)


_WALKS: WeakKeyDictionary[GraphView, Walk] = WeakKeyDictionary()
"""The last walk over each decode graph."""
SIZES = {BATCH: 2, NEW: 3, PAST: 5, ENCODER: 7}


def find_types(stack: StackFiles, contract: CacheContract) -> dict[str, Type]:
    """The position types of the values of the decode graph; none where its form has none."""
    view = stack.main.graph
    if view not in _WALKS:
        prover = Prover(stack, contract)
        with suppress(NotProved):
            prover.walk("decode", Lengths(opset=view.opsets.get("", 0)), {})
    return {name: value.type for name, value in _WALKS[view].values.items()} if view in _WALKS else {}


def find_shapes(stack: StackFiles, contract: CacheContract) -> dict[str, tuple[int, ...]]:
    """The shapes of the inputs and values of the decode graph in a step of these sizes, where types say them."""
    shapes = {name: one.shape for name, one in find_types(stack, contract).items() if one.shape is not None}
    sizes = {shape: tuple(map(size_of, shape)) for shape in {*shapes.values()}}
    known = {shape: listed for shape, listed in sizes.items() if all(one.symbols <= SIZES.keys() for one in listed)}
    return {name: tuple(one.at(SIZES) for one in known[shape]) for name, shape in shapes.items() if shape in known}


def looks_back_to_start(stack: StackFiles, contract: CacheContract) -> bool:
    """Whether each mask is known to hide no earlier token: there is no window in the attention."""
    types, dataflow = find_types(stack, contract), stack.main.dataflow
    scores = (types.get(one.input(0)) for one in (dataflow.flow.nodes if dataflow else ()) if one.has("softmax"))
    masks = [one.regions for one in scores if one is not None and one.regions]
    return bool(masks) and all(any(is_plain(marks[2]) for _, marks in regions) for regions in masks)


Shape = tuple[int, ...]


@record
class StaleShape:
    """A value of the main graph with the shape that it declares and the one that it has in a step; `axes` differ."""

    name: str
    dtype: str
    declared: tuple[Dim, ...]
    found: Shape
    axes: tuple[int, ...]


def find_stale_shapes(stack: StackFiles, contract: CacheContract) -> tuple[StaleShape, ...]:
    """The values that a decode step computes in other shapes than declared, by types alone; presents are left out."""
    graph, read = stack.main.graph.model.graph, {port.name for port in contract.graph("decode").inputs}
    if contract.missing or len({value.name for value in graph.input} & read) < len(read):
        return ()
    found = find_shapes(stack, contract)
    return tuple(compare_declared(stack.main.graph, contract, found, found))


def compare_declared(
    view: GraphView, contract: CacheContract, fed: Mapping[str, Shape], found: Mapping[str, Shape]
) -> Iterator[StaleShape]:
    """The values whose declared axes have the name of an input's axis, and another length than that in one call."""
    presents = {port.name for port in contract.graph("decode").outputs if port.role == "present"}
    lengths: dict[str, set[int]] = {}
    for name, port in view.inputs.items():
        for size, length in zip(port.shape or (), fed.get(name, ()), strict=False):
            if isinstance(size, str):
                lengths.setdefault(size, set()).add(length)
    known = {size: next(iter(those)) for size, those in lengths.items() if len(those) == 1}
    graph = view.model.graph
    for value in (*graph.output, *graph.value_info):
        shape, one = found.get(value.name), declared(value)
        if shape is None or one.shape is None or len(shape) != len(one.shape) or value.name in presents:
            continue
        if 0 in shape:  # an output that one branch leaves empty
            continue
        pairs = enumerate(zip(one.shape, shape, strict=True))
        axes = tuple(at for at, (size, length) in pairs if known.get(str(size), length) != length)
        if axes:
            yield StaleShape(value.name, one.dtype, one.shape, shape, axes)


@dataclass(eq=False, repr=False)
class Prover:
    """The proof of one stack; what it reads of the files is read once.

    `tables` are masks that a skeleton leaves out, `constants` the types of small ones, `weights` the digests of a pair.
    """

    stack: StackFiles
    contract: CacheContract
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    constants: dict[Any, Type] = field(default_factory=dict)
    weights: dict[str, dict[str, bytes]] = field(default_factory=dict)
    keys: Keys = field(default_factory=Keys)

    @property
    def takes_one(self) -> bool:
        """Whether a graph of its own serves the later steps, and takes one token each time."""
        phases = self.contract.phases
        one = self.contract.graph("decode").declared_new_tokens == 1
        return one and phases["prefill"].graph != phases["decode"].graph

    def check_form(self) -> None:
        """Refuse what position types do not describe yet.

        Raises:
            NotProved: there is such a thing.
        """
        contract = self.contract
        open_ports = [one.subject for one in contract.ambiguities if one.unknown and not one.settled]
        if open_ports:
            raise NotProved(f"input {open_ports[0]!r} (the file leaves open what it takes)")
        for slot in contract.slots:
            grows = slot.growth in ("grow", "shared", "delta", "constant")
            if slot.kind not in KINDS or not grows or slot.trimmed or slot.prepended:
                form = "cut to a window" if slot.trimmed else "the new entries come first" if slot.prepended else None
                raise NotProved(f"past {slot.past!r} ({form or FORMS.get(slot.growth, slot.kind)})")
            if slot.first in ("dummy", "zeros"):
                raise NotProved(f"past {slot.past!r} (the first step takes {slot.first})")
        graphs = [contract.graph("prefill"), contract.graph("decode")]
        if any(graph.stages for graph in graphs):
            raise NotProved("a pipeline of several files")
        if any(isinstance(graph.declared_new_tokens, int) for graph in graphs[: 1 if self.takes_one else None]):
            raise NotProved("the graph takes a fixed number of new tokens")

    def prove(self, single: bool) -> Proof:
        """The proof for any number of new tokens, or for one.

        Raises:
            NotProved: there is none.
        """
        self.keys = Keys()
        if single or self.contract.phases["prefill"] != self.contract.phases["decode"]:
            first = self.walk("prefill", self.lengths("prefill", first=True), {})
            slots = self.contract.slots
            held = [slot for slot in slots if slot.growth == "constant" and slot.filled_in == "prefill"]
            filled = {slot.past: self.output(first, slot.filled_by) for slot in held if slot.filled_by}
            given = {name: replace(one, type=replace(one.type, regions=())) for name, one in filled.items()}
            decode = self.walk("decode", self.lengths("decode", single=single), given)
            self.check(decode, "decode")
            self._compare(first, decode)
            walks = [first, decode]
        else:
            walks = [self.walk("decode", self.lengths("decode"), {})]
            self.check(walks[0], "decode")
        if "embed" in self.contract.phases:
            # Each embedding depends on its token and its position alone.
            walk = self.walk("embed", self.lengths("embed"), {})
            for port in self.contract.graph("embed").outputs:
                self.output(walk, port.name)
        limits = [(limit, name) for walk in walks for name, limit in walk.limits.items()]
        up_to, table = min(limits, key=itemgetter(0), default=(None, ""))
        nodes = [(walk, node) for walk in walks for node in walk.flow.nodes if node.has("softmax", "attend")]
        taken = [walk.values.get(name) for walk, node in nodes for name in node.inputs]
        weak = any(is_weak(one.type) for one in taken if one is not None)
        operators = [ports_of(node.domain, node.op) for _, node in nodes]
        one_row = any(ports is not None and "last_index" in ports.roles.values() for ports in operators)
        rounded = any(node.has("quantize-dynamically") for walk in walks for node in walk.flow.nodes)
        return Proof(up_to, table, weak_mask=weak, rounded=rounded, one_row=one_row and not single)

    def walk(self, phase: PhaseName, lengths: Lengths, given: dict[str, Typed]) -> Walk:
        """The types of all values of the graph of a phase; `given` are inputs that another graph makes.

        Raises:
            NotProved: there are no types for such a graph.
        """
        file = self._file(phase)
        first = phase == "prefill" and self.contract.phases["prefill"].switch is not None
        dataflow = file.first_dataflow if first else file.dataflow
        if dataflow is None:
            raise NotProved("a graph that is too large")
        flow = dataflow.flow
        if flow.flaws or flow.iterations:
            raise NotProved("a Loop or Scan" if flow.iterations else "a graph that is not valid")
        values = dict(self._constants(file, flow.constants, first))
        graph = self.contract.graph(phase)
        values |= self._inputs(graph, phase, lengths, given)
        walk = Walk(flow, lengths, self.keys, values)
        walk.run()
        if phase == "decode" and not lengths.padded:
            _WALKS[file.graph] = walk
        return walk

    def lengths(self, phase: PhaseName, first: bool = False, single: bool = False) -> Lengths:
        """How the lengths of a walk over the graph of a phase read."""
        view = self._file(phase).graph
        return Lengths(first, single, view.opsets.get("", 0), has_one_float(view))

    def _file(self, phase: PhaseName) -> OnnxFile:
        if self.contract.phases[phase].graph == self.contract.phases["decode"].graph:
            return self.stack.main
        if phase == "embed":
            return self.stack.files["embedding"]
        return self.stack.files["decoder"]

    def _constants(self, file: OnnxFile, constants: Any, first: bool) -> Iterator[tuple[str, Typed]]:
        from kvdoctor.analysis.abstract_run.tables import read_tables

        if file.name not in self.tables:
            self.tables[file.name] = read_tables(file.graph, file.path)
        tables, outer = self.tables[file.name], {one.name for one in file.graph.model.graph.initializer}
        if self.stack.is_pair and file.name not in self.weights:  # the files have other names for the same weights
            self.weights[file.name] = digest_weights(file.graph, file.path)
        weights = self.weights.get(file.name, {})
        for name, tensor in constants.items():
            payload = tensor.raw_data or tuple(tensor.int64_data) or tuple(tensor.float_data)
            table, content = tables.get(name), (tensor.data_type, tuple(tensor.dims), payload)
            if table is not None or not payload:
                own = (file.name, "" if name in outer else first, name)
                place = identify(tensor, table) or weights.get(name) or own
                yield name, Typed(read_constant(tensor, table), self.keys.of("constant", place))
                continue
            if content not in self.constants:
                self.constants[content] = read_constant(tensor, None)
            yield name, Typed(self.constants[content], self.keys.of("constant", content))

    def _inputs(self, graph: Graph, phase: PhaseName, lengths: Lengths, given: dict[str, Typed]) -> dict[str, Typed]:
        found: dict[str, Typed] = {}
        slots = {slot.past: slot for slot in self.contract.slots}
        for port in graph.inputs:
            slot = slots.get(port.name)
            if port.name in given:
                found[port.name] = given[port.name]
            elif slot is not None and slot.growth != "constant":
                shape = slot_shape(slot, lengths.past, self.contract)
                kind = Type("f", shape, uniform=True, calm=True, past=True)
                found[port.name] = Typed(kind, self.keys.of("slot", slot.past))
            elif "int" in port.dtype and port.dtype not in ("int64", "int32"):
                raise NotProved(f"input {port.name!r} ({port.dtype})")
            else:
                kind = input_type(port, self.contract, phase, lengths)
                found[port.name] = Typed(kind, self.keys.of("input", port.role, port.name))
        return found

    def output(self, walk: Walk, name: str) -> Typed:
        """An output that is uniform.

        Raises:
            NotProved: it is not.
        """
        value = walk.values.get(walk.flow.results.get(name, name))
        if value is None:
            raise NotProved(f"output {name!r} (no node makes it)")
        if not walk.lengths.is_uniform(value.type):
            raise NotProved(describe(value.broken) if value.broken else f"output {name!r}", value.broken)
        return value

    def check(self, walk: Walk, phase: PhaseName) -> None:
        """What later calls take of a walk. Raises NotProved: logits or presents are not what they must be."""
        logits = self.logits(walk, phase)
        axes = logits.type.shape or ()
        if not logits.type.last and not any(walk.lengths.new in axis for axis in axes):
            raise NotProved("the logits, which have no axis of new tokens")
        for slot in self.contract.slots:
            if slot.growth == "constant" and (slot.present is None or slot.emptied):
                continue
            present = self.output(walk, slot.present or "")
            if slot.growth == "constant":
                if present.key != walk.values[slot.past].key:
                    raise NotProved(f"output {slot.present!r} (not the past {slot.past!r})")
                continue
            if present.type.shape != self._returned(slot, walk) or present.type.last:
                raise NotProved(f"output {slot.present!r} (not an entry for each token)")
            keys = self.keys
            if any(reduce(keys.follow, steps, present.key) != key for steps, key in walk.streams.get(slot.past, ())):
                raise NotProved(f"past {slot.past!r} (joined with other entries than {slot.present!r} has)")

    def _returned(self, slot: Slot, walk: Walk) -> tuple[Axis, ...]:
        """The axes of what a call must return of a slot: the entries of all tokens, or of the new ones."""
        return slot_shape(slot, walk.lengths.new if slot.growth == "delta" else walk.lengths.total, self.contract)

    def logits(self, walk: Walk, phase: PhaseName) -> Typed:
        """The logits of a walk. Raises NotProved: they are not uniform."""
        port = self.contract.graph(phase).port("logits")
        if port is None:
            raise NotProved("a graph without logits")
        return self.output(walk, port.name)

    def _compare(self, first: Walk, decode: Walk) -> None:
        """Whether the first step computes the same functions as later ones, with an empty past.

        Raises:
            NotProved: it may not.
        """
        one, other = self.logits(first, "prefill"), self.logits(decode, "decode")
        same = one.key == other.key and one.type.last == other.type.last
        if not same and not (other.type.last and other.key == self.keys.of("last", "", one.key)):
            raise NotProved("the first step, whose logits may be another function")
        for slot in self.contract.slots:
            if slot.growth == "constant" or slot.filled_in != "prefill":
                continue
            made, present = self.output(first, slot.filled_by or ""), self.output(decode, slot.present or "")
            if made.key != present.key or made.type.shape != self._returned(slot, first) or made.type.last:
                raise NotProved(f"the first step, whose {slot.filled_by!r} may be another function")


def describe(node: FlatNode) -> str:
    """A node by its operator and its name, or by its first output, which a node that stands for a branch has alone."""
    return f'{node.op} "{name_node(node.proto) or node.output()}"'
