"""Writes each node in an older opset.

A node that fits the older schema of its operator stands (see older_schema.py). The others are given to onnx's
converter, one at a time, with the constants that feed it: there it either has an adapter for the operator, or says that
it has none. What it gives is held against the schemas of the older opset.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import onnx
from onnx import checker, defs, helper, shape_inference, version_converter

from kvdoctor.case import first_and_count
from kvdoctor.graph import GraphView, Scope
from kvdoctor.lowering import CannotLower
from kvdoctor.lowering.older_schema import fitted, without_silent
from kvdoctor.lowering.value_types import Types, value_types
from kvdoctor.report.document import Change
from kvdoctor.targets.demands import STANDARD

CONTROL_FLOW = ("If", "Loop", "Scan")
CONTROL_FLOW_SINCE = 13
"""From this opset on only the types that they may pass on have changed."""
MOST_CONSTANT = 1024
"""Elements of a constant that the converter is shown: axes, splits, sizes."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """A node, the nodes that say the same in the older opset, and where it stands."""

    body: "onnx.GraphProto | onnx.FunctionProto"
    node: onnx.NodeProto
    by: tuple[onnx.NodeProto, ...]
    place: str


@dataclass(frozen=True, slots=True)
class _Site:
    """Where a node stands: its body, the opset there, the constants and types of its values."""

    body: "onnx.GraphProto | onnx.FunctionProto"
    place: str
    opset: int
    scope: Scope | None
    types: Types

    def type_of(self, name: str) -> onnx.TypeProto | None:
        """The type of a value, if it is known."""
        return self.types.get((id(self.body), name)) or self.types.get((0, name))


def lowered_nodes(model: onnx.ModelProto, opset: int) -> list[Replaced]:
    """The nodes that must be written otherwise in an older opset.

    Raises:
        CannotLower: some node cannot be; all of them are named.
    """
    replaced, blocks = [], dict[str, list[str]]()
    if _opset(model.opset_import) > defs.onnx_opset_version():
        raise CannotLower(
            (f"opset {_opset(model.opset_import)} is newer than onnx {onnx.__version__} knows",), "pip install -U onnx"
        )
    for site, node in _sites(model, opset):
        try:
            by = _lowered(node, site, opset)
        except _Blocked as reason:
            blocks.setdefault(str(reason), []).append(node.name)
            continue
        if by is not None:
            replaced.append(Replaced(site.body, node, by, site.place))
    if blocks:
        raise CannotLower(
            tuple(f"{reason} (node {first_and_count(tuple(nodes))})" for reason, nodes in blocks.items()),
            f"export again at that opset: kvdoctor re-export MODEL --from CHECKPOINT -o OUT --opset {opset}",
        )
    return replaced


def put_in_place(model: onnx.ModelProto, replaced: list[Replaced], file: str) -> Iterator[Change]:
    """Put the new nodes where the old ones stand, and take away the constants that only they needed."""
    told: dict[tuple[str, str, str], int] = {}
    left = {name for one in replaced for name in one.node.input} - {
        name for one in replaced for node in one.by for name in node.input
    }
    for one in replaced:
        before, after = _words(one.node), " -> ".join(_words(node) for node in one.by)
        index = next(i for i, node in enumerate(one.body.node) if node is one.node)
        del one.body.node[index]
        for offset, node in enumerate(one.by):
            one.body.node.insert(index + offset, node)
        if before != after:
            told[one.place, before, after] = told.get((one.place, before, after), 0) + 1
    for (place, before, after), count in told.items():
        yield Change(file, f"{count} x {before.partition(' ')[0]}, {place}", before, after)
    _drop_unused(model, left)


def _drop_unused(model: onnx.ModelProto, names: set[str]) -> None:
    """Take away constants of those names that nothing reads any more: a runtime would warn of each."""
    graphs = [scope.graph for scope in GraphView(model).scopes()]
    bodies = [*graphs, *model.functions]
    read = {name for body in bodies for node in body.node for name in node.input}
    read |= {value.name for graph in graphs for value in (*graph.output, *graph.input)}
    unused = names - read - {name for function in model.functions for name in function.output}
    for graph in graphs if unused else ():
        for index in reversed([i for i, tensor in enumerate(graph.initializer) if tensor.name in unused]):
            del graph.initializer[index]
    for body in bodies if unused else ():
        made = [i for i, node in enumerate(body.node) if node.op_type == "Constant" and node.output[0] in unused]
        for index in reversed(made):
            del body.node[index]


class _Blocked(Exception):
    """A node cannot be written in the older opset."""


def _sites(model: onnx.ModelProto, opset: int) -> Iterator[tuple[_Site, onnx.NodeProto]]:
    """Every node that stands in a newer opset, at any depth and in functions."""
    own = {(function.domain, function.name) for function in model.functions}
    version = _opset(model.opset_import)
    if version > opset:
        types: Types | None = None
        for scope in GraphView(model).scopes():
            for node in scope.graph.node:
                if (node.domain, node.op_type) not in own and _changed(node, version, opset):
                    types = types if types is not None else value_types(model)
                    yield _Site(scope.graph, scope.path, version, scope, types), node
    for function in model.functions:
        version = _opset(function.opset_import)
        for node in function.node if version > opset else ():
            if (node.domain, node.op_type) not in own and _changed(node, version, opset):
                yield _Site(function, f"function {function.name}", version, None, {}), node


def _opset(imports: Iterable[onnx.OperatorSetIdProto]) -> int:
    return next((entry.version for entry in imports if entry.domain in STANDARD), 1)


def _changed(node: onnx.NodeProto, version: int, opset: int) -> bool:
    """Whether a standard operator is another one in the older opset. One that ONNX does not know is the runtime's."""
    if node.domain not in STANDARD or not defs.has(node.op_type):
        return False
    return _since(node.op_type, version) != _since(node.op_type, opset)


def _since(operator: str, version: int) -> int | None:
    """The opset that made an operator what it is in a version; None before there was one."""
    try:
        return int(defs.get_schema(operator, version, "").since_version)
    except defs.SchemaError:
        return None


def _lowered(node: onnx.NodeProto, site: _Site, opset: int) -> tuple[onnx.NodeProto, ...] | None:
    """The nodes that say the same in the older opset; None where the node itself does.

    Raises:
        _Blocked: there are none.
    """
    if _since(node.op_type, opset) is None:
        first = min(s.since_version for s in defs.get_all_schemas_with_history() if _is(s, node.op_type))
        raise _Blocked(f"{node.op_type} needs opset {first}")
    if node.op_type in CONTROL_FLOW:
        if opset < CONTROL_FLOW_SINCE:
            raise _Blocked(f"{node.op_type} is another one before opset {CONTROL_FLOW_SINCE}")
        return None
    fitting = fitted(node, site.opset, opset, [site.type_of(name) for name in node.input])
    if fitting is not None:
        return None if fitting == node else (fitting,)
    if any(attribute.ref_attr_name for attribute in node.attribute):
        raise _Blocked(f"{node.op_type} takes an attribute of its function")
    return _converted(node, site, opset)


def _is(schema: defs.OpSchema, operator: str) -> bool:
    return bool(schema.name == operator and schema.domain == "")


def _converted(node: onnx.NodeProto, site: _Site, opset: int) -> tuple[onnx.NodeProto, ...]:
    alone = _alone(without_silent(node, site.opset, opset), site)
    try:
        made = version_converter.convert_version(alone, opset)
        made.ir_version = alone.ir_version
        if all(value.type.HasField("tensor_type") for value in made.graph.input):
            checker.check_model(made)
            shape_inference.infer_shapes(made, check_type=True, strict_mode=True)
    except Exception:  # the converter and the checks raise many types, and all of them mean: not this node
        since = _since(node.op_type, site.opset)
        raise _Blocked(f"{node.op_type} of opset {since} has no form before that onnx could give it") from None
    return tuple(_spliced(node, made))


def _alone(node: onnx.NodeProto, site: _Site) -> onnx.ModelProto:
    """A model of one node, the constants that feed it, and its other inputs with what is known of their types."""
    constants, inputs = [], []
    for name in dict.fromkeys(name for name in node.input if name):
        tensor = site.scope.constant(name) if site.scope is not None else None
        if tensor is not None and _is_small(tensor):
            kept = onnx.TensorProto()
            kept.CopyFrom(tensor)
            kept.name = name
            constants.append(kept)
        else:
            inputs.append(_declared(name, site))
    outputs = [_declared(name, site) for name in node.output if name]
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    graph = helper.make_graph([copy], "one node", inputs, outputs, constants)
    imports = [helper.make_opsetid("", site.opset)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def _is_small(tensor: onnx.TensorProto) -> bool:
    count = 1
    for size in tensor.dims:
        count *= size
    return count <= MOST_CONSTANT and tensor.data_location != onnx.TensorProto.EXTERNAL


def _declared(name: str, site: _Site) -> onnx.ValueInfoProto:
    value = onnx.ValueInfoProto(name=name)
    known = site.type_of(name)
    if known is not None:
        value.type.CopyFrom(known)
    return value


def _spliced(node: onnx.NodeProto, made: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """The converted nodes under names that meet no others; constants that the converter made become nodes."""
    outer = {*node.input, *node.output, ""}
    stem = next((name for name in node.output if name), node.name)
    renamed: dict[str, str] = {}
    for tensor in made.graph.initializer:
        if tensor.name not in outer:
            renamed[tensor.name] = f"{stem}.lowered.{len(renamed)}"
            yield helper.make_node("Constant", [], [renamed[tensor.name]], value=tensor)
    for one in made.graph.node:
        for name in one.output:
            if name not in outer:
                renamed.setdefault(name, f"{stem}.lowered.{len(renamed)}")
        names = [renamed.get(name, name) for name in one.input], [renamed.get(name, name) for name in one.output]
        del one.input[:], one.output[:]
        one.input.extend(names[0])
        one.output.extend(names[1])
        one.name = node.name if one.op_type == node.op_type else f"{node.name}.{one.op_type}"
        yield one


def _words(node: onnx.NodeProto) -> str:
    attributes = ", ".join(sorted(attribute.name for attribute in node.attribute))
    return f"{node.op_type} ({len(node.input)} inputs{'; ' + attributes if attributes else ''})"
