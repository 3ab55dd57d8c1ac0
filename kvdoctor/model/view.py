"""GraphView: read-only questions to a graph, its subgraphs and its functions. No weights, no runtime."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from kvdoctor.contract import Dim
from kvdoctor.model.operators import has, operators_with
from kvdoctor.model.proto import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto
from kvdoctor.model.traverse import bodies_of, constant_tensor, describe_node, input_of, nodes_in, normalize_domain
from kvdoctor.records import record

ELEMENT_TYPES = {number: name.lower() for name, number in TensorProto.DataType.items()}
"""ONNX names of element types: float, float16, int64, bool, ..."""

COPIES = operators_with("copy")

PASSES_ON = operators_with("copy", "cast", "view")
"""Operators through which a flag stays the same flag."""


@record
class Declared:
    """A tensor as the file declares it. `shape` is None where the file gives no shape."""

    name: str
    dtype: str
    shape: tuple[Dim, ...] | None

    @property
    def fixed(self) -> "tuple[str, tuple[int | None, ...]] | None":
        """The element type and the sizes that are numbers, None for others; None where no shape is declared."""
        if self.shape is None:
            return None
        return self.dtype, tuple(size if isinstance(size, int) else None for size in self.shape)

    def like(self, other: "Declared") -> bool:
        """Whether it may hold what the other holds: the same element type and rank, and no other size."""
        if self.shape is None or other.shape is None or len(self.shape) != len(other.shape):
            return False
        pairs = zip(self.shape, other.shape, strict=True)
        fits = all(one == size for one, size in pairs if isinstance(one, int) and isinstance(size, int))
        return fits and self.dtype == other.dtype


SWITCH = "use_cache_branch"
"""Optimum's name of the switch, which says that the cache is used."""


@record(slots=False)
class Scope:
    """A graph, a subgraph or a function body, with the scope around it. `path` is for people."""

    graph: GraphProto
    path: str
    outer: "Scope | None" = None

    @cached_property
    def producers(self) -> dict[str, NodeProto]:
        """The node that makes each value of this scope."""
        return {name: node for node in self.graph.node for name in node.output if name}

    @cached_property
    def initializers(self) -> dict[str, TensorProto]:
        """Initializers of this scope by name."""
        return {tensor.name: tensor for tensor in self.graph.initializer}

    def constant(self, name: str) -> TensorProto | None:
        """The tensor of a value that is a constant or an initializer, in this scope or one around it.

        Values that only pass through Identity count. An initializer that is also a graph input is no constant.
        """
        name = self.through(name)
        node = self.producers.get(name)
        if node is not None:
            if not has(node.op_type, "constant"):
                return None
            return constant_tensor(node)
        if name in self.initializers:
            return self.initializers[name]
        return self.outer.constant(name) if self.outer else None

    def through(self, name: str, operators: frozenset[str] = COPIES) -> str:
        """Walk back over nodes of some operators, by their first input; a loop in a damaged graph ends it."""
        for _ in range(len(self.graph.node)):
            node = self.producers.get(name)
            if node is None or node.op_type not in operators or not node.input:
                break
            name = node.input[0]
        return name


@record
class Branches:
    """The `If` of a merged decoder: its node, the body that uses the cache and the other one.

    `on` is the value of the switch for which the cache is used: false where the switch says that it is the first step.
    `others` are further `If`s that the same switch decides.
    """

    node: NodeProto
    cached: Scope
    no_past: Scope
    on: bool = True
    others: tuple["Branches", ...] = ()

    def bodies(self, cached: bool) -> tuple[tuple[NodeProto, Scope], ...]:
        """Every `If` of the switch with the body that it runs."""
        return tuple((one.node, one.cached if cached else one.no_past) for one in (self, *self.others))

    def taken(self, cached: bool) -> dict[str, str]:
        """The attribute with the body that each `If` of the switch runs, by the first value that it makes."""
        found = {}
        for node, body in self.bodies(cached):
            name = next(attribute.name for attribute in node.attribute if attribute.g is body.graph)
            found[next(filter(None, node.output), "")] = name
        return found


@dataclass(frozen=True, eq=False)
class GraphView:
    """Questions to one model. Whoever holds it must not change the model."""

    model: ModelProto
    main: Scope = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "main", Scope(self.model.graph, "graph"))

    @cached_property
    def inputs(self) -> dict[str, Declared]:
        """Graph inputs by name; those that initializers give a value to are left out."""
        given = {*self.main.initializers, *(tensor.values.name for tensor in self.model.graph.sparse_initializer)}
        return {v.name: declared(v) for v in self.model.graph.input if v.name not in given}

    @cached_property
    def outputs(self) -> dict[str, Declared]:
        """Graph outputs by name."""
        return {value.name: declared(value) for value in self.model.graph.output}

    @cached_property
    def opsets(self) -> dict[str, int]:
        """Opset version by domain; the standard domain is the empty name."""
        return {normalize_domain(o.domain): o.version for o in self.model.opset_import}

    @property
    def producer(self) -> str:
        """Name and version of the program that wrote the file."""
        return f"{self.model.producer_name} {self.model.producer_version}".strip()

    def scopes(self) -> tuple[Scope, ...]:
        """The main graph and every subgraph, outer ones first. Function bodies hold no graph values of their own."""
        return self._scopes

    @cached_property
    def _scopes(self) -> tuple[Scope, ...]:
        return tuple(scopes_below(self.main))

    @cached_property
    def operators(self) -> dict[str, int]:
        """How often each operator occurs, at any depth and in functions."""
        counts: dict[str, int] = {}
        bodies = [scope.graph.node for scope in self.scopes()] + [function.node for function in self.model.functions]
        for nodes in bodies:
            for node in nodes:
                counts[node.op_type] = counts.get(node.op_type, 0) + 1
        return counts

    @cached_property
    def named_nodes(self) -> dict[str, NodeProto]:
        """The nodes by name, at any depth."""
        return {node.name: node for scope in self.scopes() for node in scope.graph.node if node.name}

    @cached_property
    def branches(self) -> tuple[str, Branches] | None:
        """The switch input and the `If`s it decides: found by their condition, never by being the only node."""
        flags = {name for name, port in self.inputs.items() if port.dtype == "bool"}
        found: dict[str, list[Branches]] = {}
        for node in self.model.graph.node:
            if has(node.op_type, "branch") and node.input:
                switch, holds = self._condition(node.input[0])
                bodies = {a.name: Scope(a.g, f"{describe_node(node)}, {a.name}", self.main) for a in node.attribute}
                if switch in flags and {"then_branch", "else_branch"} <= set(bodies):
                    yes, no = bodies["then_branch"], bodies["else_branch"]
                    found.setdefault(switch, []).append(Branches(node, *((yes, no) if holds else (no, yes))))
        for switch, ifs in found.items():
            reads = [self._own_reads(one.cached, one.no_past) for one in ifs]
            mine, others = (set().union(*each) for each in zip(*reads, strict=True))
            if switch == SWITCH or mine or others:  # else the `If`s choose something else than the cache
                inverted = switch != SWITCH and len(others) > max(1, len(mine))
                all_ifs = [Branches(one.node, one.no_past, one.cached, on=False) if inverted else one for one in ifs]
                first = all_ifs.pop(next((at for at, each in enumerate(reads) if any(each)), 0))
                return switch, replace(first, others=tuple(all_ifs))
        return None

    def cached_bodies(self) -> list[Scope]:
        """What runs in steps that use the cache: the bodies that the switch then chooses, else the main graph."""
        return [body for _, body in self.branches[1].bodies(cached=True)] if self.branches is not None else [self.main]

    def _own_reads(self, one: Scope, other: Scope) -> tuple[set[str], set[str]]:
        """Inputs that may be a past, and that one body of two reads alone."""
        may_be = {name for name, port in self.inputs.items() if "float" in port.dtype and len(port.shape or ()) >= 3}
        mine, others = (
            may_be & {name for node in nodes_in(scope.graph.node) for name in node.input} for scope in (one, other)
        )
        return mine - others, others - mine

    def behind(self, output: str, cached: bool = True) -> "tuple[Scope, str]":
        """Where a graph output comes from: the scope that makes it and the name of the value there.

        In a merged decoder that is the cached branch, or the other one; elsewhere the main graph.
        """
        if self.branches is None:
            return self.main, output
        name = self.main.through(output)
        for node, body in self.branches[1].bodies(cached):
            made = list(node.output)
            if name in made and made.index(name) < len(body.graph.output):
                return body, str(body.graph.output[made.index(name)].name)
        return self.main, output

    def emptied(self, output: str) -> tuple[int, ...] | None:
        """The shape of the constant without elements that an output returns when the cache is used, or None."""
        scope, name = self.behind(output)
        tensor, node = scope.constant(name), scope.producers.get(scope.through(name))
        shape = tuple(tensor.dims) if tensor is not None else None
        if tensor is None and node is not None and has(node.op_type, "fill") and node.input:
            sizes = scope.constant(node.input[0])
            shape = integers(sizes) if sizes is not None and sizes.data_type == TensorProto.INT64 else None
        return shape if shape is not None and 0 in shape else None

    def _condition(self, name: str) -> tuple[str, bool]:
        """Walk from the condition of an `If` back to the value that decides it; False when it was negated."""
        holds = True
        for _ in range(len(self.model.graph.node)):
            name = self.main.through(name, PASSES_ON)
            node = self.main.producers.get(name)
            if node is None or node.op_type != "Not":
                break
            name, holds = input_of(node, 0), not holds
        return name, holds


def integers(tensor: TensorProto) -> tuple[int, ...] | None:
    """The numbers of a short tensor of integers; None of any other."""
    if tensor.data_type not in (TensorProto.INT64, TensorProto.INT32) or prod(tensor.dims) > 64:
        return None
    wide = tensor.data_type == TensorProto.INT64
    if tensor.raw_data:
        width = 8 if wide else 4
        count = len(tensor.raw_data) // width
        return struct.unpack(f"<{count}{'q' if wide else 'i'}", tensor.raw_data[: count * width])
    return tuple(tensor.int64_data if wide else tensor.int32_data)


def declared(value: ValueInfoProto) -> Declared:
    """Read a value's declared type; an empty dtype where it has none or is no tensor."""
    if not value.type.HasField("tensor_type"):
        return Declared(value.name, "", None)
    tensor = value.type.tensor_type
    dtype = ELEMENT_TYPES.get(tensor.elem_type, "")
    if not tensor.HasField("shape"):
        return Declared(value.name, "" if dtype == "undefined" else dtype, None)
    sizes: list[Dim] = [
        int(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or None for dim in tensor.shape.dim
    ]
    # ONNX Runtime takes any size for a number below 0, as older exporters write it.
    return Declared(value.name, dtype, tuple(None if isinstance(size, int) and size < 0 else size for size in sizes))


def scopes_below(scope: Scope) -> Iterator[Scope]:
    """A graph and every subgraph in it, outer ones first."""
    yield scope
    for node in scope.graph.node:
        for attribute in node.attribute:
            for body in bodies_of(attribute):
                yield from scopes_below(Scope(body, f"{describe_node(node)}, {attribute.name}", scope))
