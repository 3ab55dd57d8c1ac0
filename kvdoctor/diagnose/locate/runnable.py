"""A flat graph that a runtime can still run: parts of it are written to a private folder, with other outputs.

Weights are not copied: tensors point into the user's files, and the runtime is given the bytes of the variant while the
worker runs in the folder that holds those files. That is the one way that every onnxruntime from 1.16 to 1.31 accepts:
links out of a folder are refused since 1.24, and hard links do not cross file systems.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvdoctor.contract import CacheContract
from kvdoctor.decode.runs import FaultLocation, FaultSource, Node
from kvdoctor.errors import CannotCheck
from kvdoctor.model.edit import fresh_name
from kvdoctor.model.external_data import external_tensors
from kvdoctor.model.flatten import (
    FlatGraph,
    FlatNode,
    Flattener,
    FunctionKey,
    ScopeNames,
    Site,
    TooLarge,
    resolved_attributes,
)
from kvdoctor.model.proto import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
)
from kvdoctor.model.skeleton import payload_left_out, read_skeleton
from kvdoctor.model.traverse import constant_tensor, nodes_in, normalize_domain, own_names, stable_order, subgraphs
from kvdoctor.records import record

MOST_NODES = 200_000
"""Nodes after functions are written out: more are not worth the minutes that running them again takes."""
LAYER = re.compile(r"(?:^|[./_])(?:layers?|h|blocks?|decoder_layers?)[./_]?(\d+)(?=[./_]|$)")
"""How exporters number layers in names: `/model/layers.0/...`, `transformer.h.3.`, `block.1`."""


@dataclass(slots=True, eq=False)
class RunnableNode(FlatNode):
    """A flat node with its copy under flat names, its path of branches and functions, and what its bodies capture."""

    copy: NodeProto = field(default_factory=NodeProto)
    path: str = ""
    captures: tuple[str, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """The values that it reads, those of its bodies included."""
        return (*filter(None, self.inputs), *self.captures)

    @property
    def makes(self) -> list[str]:
        """The values that it makes."""
        return [name for name in self.outputs if name]

    @property
    def in_file(self) -> Node:
        """The node as the file names it; one without a name by the first value that it makes."""
        return Node(str(self.proto.name) or next(iter(self.proto.output), ""), self.op)

    def layer(self, pasts: Mapping[str, int]) -> int | None:
        """Its layer: by its name, else that of a past which it reads itself; what it is computed from does not tell."""
        found = (LAYER.search(name) for name in (self.proto.name, *self.proto.output))
        named = next((int(match[1]) for match in found if match), None)
        return named if named is not None else next((pasts[name] for name in self.reads if name in pasts), None)


def layers_of_pasts(contract: CacheContract) -> dict[str, int]:
    """The layer of each past."""
    return {slot.past: slot.layer for slot in contract.slots if slot.layer is not None}


@dataclass(eq=False, repr=False)
class RunnableGraph(FlatGraph[RunnableNode]):
    """The flat graph of the model in `source`. `labels` gives what the file calls a value, if it has another name."""

    source: Path = Path()
    model: ModelProto = field(default_factory=ModelProto)
    labels: dict[str, str] = field(default_factory=dict)
    opsets: dict[str, int] = field(default_factory=dict)

    @cached_property
    def by_name(self) -> dict[str, RunnableNode]:
        """The nodes by the names of their copies."""
        return {str(node.copy.name): node for node in self.nodes}

    @property
    def ends(self) -> list[str]:
        """The computed outputs of the graph, and what nothing reads: the runtime computes that as well."""
        read = {name for node in self.nodes for name in node.reads}
        results = [value for value in self.results.values() if value in self.producers]
        loose = [name for node in self.nodes if read.isdisjoint(node.makes) for name in node.makes]
        return list(dict.fromkeys([*results, *loose]))

    @cached_property
    def keeps_calls(self) -> bool:
        """Whether a node or a body still calls a local function."""
        known = {(normalize_domain(f.domain), f.name) for f in self.model.functions}
        nodes = nodes_in(node.copy for node in self.nodes) if known else ()
        return any((normalize_domain(proto.domain), proto.op_type) in known for proto in nodes)

    def label(self, value: str) -> str:
        """What the file calls a value."""
        return self.labels.get(value, value)

    def is_tensor(self, value: str) -> bool:
        """Whether a value is a tensor by its operator."""
        node = self.producers.get(value)
        return node is None or not node.has("sequence")

    def depending_on(self, values: Iterable[str]) -> set[str]:
        """All values that depend on the content of some values, themselves included, not on lengths alone."""
        found = set(values)
        for node in self.nodes:
            if not node.has("measure") and any(name in found for name in node.reads):
                found.update(node.makes)
        return found

    def before(self, values: Iterable[str], stop: Iterable[str] = ()) -> list[RunnableNode]:
        """The nodes that values are computed by, in the order of the graph; `stop` are values that are given."""
        given, wanted, found = set(stop), list(values), set[int]()
        while wanted:
            name = wanted.pop()
            node = self.producers.get(name)
            if node is None or name in given or node.index in found:
                continue
            found.add(node.index)
            wanted += node.reads
        return [node for node in self.nodes if node.index in found]


def flatten(model: ModelProto, taken: Mapping[str, bool], source: Path) -> RunnableGraph:
    """Write out the model of a file; `taken` has the branch of each `If`, by its first value. Raises `CannotCheck`."""
    writer, names = _RunnableWriter(model, taken), ScopeNames()
    site = Site(names)
    names.update({value.name: writer.name_value(value.name, site) for value in model.graph.input})
    try:
        writer.write_graph(model.graph, site)
    except TooLarge as error:
        raise CannotCheck(str(error)) from None
    order, cyclic = stable_order([node.reads for node in writer.nodes], [node.makes for node in writer.nodes])
    if cyclic:
        raise CannotCheck("a value of the graph depends on itself")
    nodes = [writer.nodes[index] for index in order]
    for index, node in enumerate(nodes):
        node.index, node.copy.name = index, f"n{index}"
    results = {value.name: names.of(value.name, value.name) for value in model.graph.output}
    return RunnableGraph(nodes, writer.constants, results, source, model, writer.labels, writer.opsets)


class _RunnableWriter(Flattener[RunnableNode]):
    def __init__(self, model: ModelProto, taken: Mapping[str, bool]) -> None:
        branches = {value: "then_branch" if chosen else "else_branch" for value, chosen in taken.items()}
        super().__init__(model, MOST_NODES, branches)
        self.opsets = {normalize_domain(o.domain): o.version for o in model.opset_import}
        self.labels: dict[str, str] = {}
        self.used: set[str] = set()

    def name_value(self, name: str, _site: Site) -> str:
        """Its own name, if that is free."""
        flat = fresh_name(name, self.used)
        if flat != name:
            self.labels[flat] = name
        return flat

    def sparse_constant(self, _sparse: Any) -> TensorProto:
        raise CannotCheck("the graph holds sparse initializers")

    def constant_tensor(self, proto: NodeProto) -> TensorProto | None:
        return constant_tensor(proto)

    def writes_out(self, key: FunctionKey, function: FunctionProto) -> bool:
        """Not where a body would mean something else under the operator versions of the model."""
        own = {normalize_domain(o.domain): o.version for o in function.opset_import}
        fits = all(self.opsets.get(domain, version) == version for domain, version in own.items())
        if key in self.calling or not fits:
            return False
        self.opsets |= own
        return True

    def write_other(self, proto: NodeProto, inputs: tuple[str, ...], outputs: tuple[str, ...], site: Site) -> None:
        copy = NodeProto(op_type=proto.op_type, domain=proto.domain, input=inputs, output=outputs)
        copy.attribute.extend(_attributes(proto, site.call))
        captures = [name for body in subgraphs(copy) for name in _rename_captures(body, site.names, site.call)]
        self.add(RunnableNode(proto, inputs, outputs, site.call, copy=copy, path=site.path, captures=tuple(captures)))

    def write_identity(self, sources: tuple[str, ...], target: str, site: Site) -> None:
        proto, copy = (NodeProto(op_type="Identity", input=sources, output=[target]) for _ in range(2))
        self.add(RunnableNode(proto, sources, (target,), copy=copy, path=site.path))


def _attributes(proto: NodeProto, call: Mapping[str, AttributeProto] | None) -> Iterable[AttributeProto]:
    """Copies of a node's attributes; those that refer to the caller's take their value from the call."""
    for name, attribute in resolved_attributes(proto, call).items():
        copy = AttributeProto()
        copy.CopyFrom(attribute)
        copy.name = name
        yield copy


def _rename_captures(body: GraphProto, names: ScopeNames, call: Mapping[str, AttributeProto] | None) -> list[str]:
    """Put the flat names of outer values into a body that stays one; returns those that it reads."""
    own, within, captured = own_names(body), ScopeNames(names), list[str]()
    within.update({name: name for name in own})
    for node in body.node:
        for index, name in enumerate(node.input):
            if name and name not in own:
                node.input[index] = names.of(name, name)
                captured.append(node.input[index])
        attributes = list(_attributes(node, call))
        del node.attribute[:]
        node.attribute.extend(attributes)
        for inner in subgraphs(node):
            captured += [name for name in _rename_captures(inner, within, call) if name not in own]
    for value in body.output:
        if value.name not in own:
            value.name = names.of(value.name, value.name)
            captured.append(value.name)
    return captured


def locate_at(node: RunnableNode | None, words: str, source: FaultSource, **more: Any) -> FaultLocation:
    """The location of a fault at a node, None where no node of the graph has it."""
    place = None if node is None else node.in_file
    none: dict[str, Any] = {"layer": None, "shapes": {}, "provenance": (), "frozen_by": None}
    scope = node.path.removesuffix(", ") if node is not None else ""
    return FaultLocation(node=place, scope=scope, source=source, words=words, **(none | more))


@record(slots=False)
class Variant:
    """A model on disk: its file, the folder its weights are named from, and its outputs by the value they tell of."""

    path: Path
    root: Path
    outputs: Mapping[str, str]


def read_located(path: Path) -> ModelProto:
    """Read a model whose weights stay where they are; raises `UnreadableError`."""
    return read_skeleton(path, located=True).model


def write_variant(
    flat: RunnableGraph,
    to: Path,
    *,
    shapes: Iterable[str] = (),
    values: Iterable[str] = (),
    given: Mapping[str, int] | None = None,
) -> Variant:
    """Write the part of a graph that gives the shapes of some values, and others whole.

    `given` are values of the graph that become inputs, with the numbers of their element types.

    Raises:
        CannotCheck: the part needs what cannot be had, such as weights that lie on two drives.
    """
    shapes, values, given = list(shapes), list(values), given or {}
    nodes = flat.before([*shapes, *values], given)
    graph, outputs = GraphProto(name="variant"), dict[str, str]()
    graph.node.extend(node.copy for node in nodes)
    for kind, op, names in (("shape", "Shape", shapes), ("value", "Identity", values)):
        for index, name in enumerate(names):
            outputs[name] = f"kvdoctor.{kind}.{index}"
            graph.node.add(op_type=op, name=f"{kind}{index}", input=[name], output=[outputs[name]])
    reads = {name for node in nodes for name in node.reads} | {*shapes, *values}
    for name, tensor in flat.constants.items():
        if name in reads and name not in given:
            if payload_left_out(tensor):
                form = "in no form that an external reference can point to"
                raise CannotCheck(f"the values of {tensor.name!r} are {form}")
            copy = graph.initializer.add()
            copy.CopyFrom(tensor)
            copy.name = name
    # Declared sizes are left out: they may lie, and some calls are made with other ones on purpose.
    kinds = {v.name: v.type.tensor_type.elem_type for v in flat.model.graph.input if v.name not in flat.constants}
    for name, number in (kinds | dict(given)).items():
        if name in reads:
            graph.input.add(name=name).type.tensor_type.elem_type = number
    graph.output.extend(ValueInfoProto(name=name) for name in outputs.values())
    model = ModelProto(ir_version=max(flat.model.ir_version, 4), graph=graph)
    for domain, version in flat.opsets.items():
        model.opset_import.add(domain=domain, version=version)
    if flat.keeps_calls:
        model.functions.extend(flat.model.functions)
    root = share_root(model, flat.source)
    to.write_bytes(model.SerializeToString())
    return Variant(to, root, outputs)


def share_root(model: ModelProto, source: Path) -> Path:
    """Name the files of weights from one folder that holds them all, and return it."""
    real = dict[str, str]()
    entries = [e for tensor in external_tensors(model) for e in tensor.external_data if e.key == "location"]
    for entry in entries:
        real.setdefault(entry.value, os.path.realpath(source.parent / entry.value))
    if not real:
        return Path(os.path.realpath(source)).parent
    try:
        folder = Path(os.path.commonpath([str(Path(path).parent) for path in real.values()]))
    except ValueError:
        raise CannotCheck("the weights are on two drives") from None
    for entry in entries:
        entry.value = Path(real[entry.value]).relative_to(folder).as_posix()
    return folder
