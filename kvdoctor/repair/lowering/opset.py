"""Rewrites nodes for an older or a newer opset.

A node that has the same meaning under the other schema of its operator stays (`fit_to_schema`). The others are
given to onnx's converter, one at a time, with the constants that feed them: it either has an adapter for the operator
or reports that it has none. Its result is checked against the schemas of the other opset.

The converter is not given a whole model: in onnx 1.23 it then loses the local functions and the metadata of all nodes,
and passes on operators whose meaning changed.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import onnx
from onnx import checker, defs, helper, shape_inference, version_converter

from kvdoctor.errors import KvdoctorError
from kvdoctor.model.edit import drop_unread_constants, keep_only
from kvdoctor.model.operators import has
from kvdoctor.model.traverse import STANDARD, bodies_of, graphs_in, opset_version, subgraphs
from kvdoctor.model.view import GraphView, Scope
from kvdoctor.records import record
from kvdoctor.report.repair_record import Change
from kvdoctor.report.wording import join_some, shorten_names

Way = Literal["lowered", "raised"]
"""What is done to an IR version or an opset."""


class CannotChangeVersion(KvdoctorError):
    """A model cannot be lowered to a limit, or raised to a version; `blocks` are the reasons."""

    def __init__(self, blocks: tuple[str, ...], advice: str, way: Way = "lowered") -> None:
        shown = join_some(blocks, 4, "; ", "; and {} more")
        super().__init__(f"the model cannot be {way}: {shown}; {advice}")
        self.blocks, self.advice = blocks, advice


Types = dict[tuple[int, str], onnx.TypeProto]
"""By the identity of the graph and the name; under 0 the values of the main graph, which its bodies see."""
MOST_BYTES = 1024
"""A constant of more bytes is not a shape."""
CONTROL_FLOW_SINCE = 13
"""From this opset on only their supported types have changed."""
SCAN_SINCE = 9
"""The opset in which Scan lost an input."""
ADAPTED = ("Softmax", "LogSoftmax", "Hardmax", "BatchNormalization")
"""Operators whose change of meaning the converter writes out for a newer opset; others it passes on as they are."""
RENAMED = ("Scatter",)
"""Operators that were removed for another one with the same meaning; Upsample was for one with another default."""
MOST_CONSTANT = 1024
"""Largest number of elements of a constant that the converter needs: axes, splits, sizes."""


@record
class Site:
    """The surroundings of a node: its graph or function, the opset, and the constants and types of its values."""

    body: "onnx.GraphProto | onnx.FunctionProto"
    place: str
    opset: int
    scope: Scope | None
    types: Types

    def type_of(self, name: str) -> onnx.TypeProto | None:
        """The type of a value, None if it is unknown."""
        return self.types.get((id(self.body), name)) or self.types.get((0, name))


Rewritten = tuple[Site, onnx.NodeProto, tuple[onnx.NodeProto, ...]]
"""Where a node is, the node, and the equivalent nodes of the other opset."""


def rewrite_nodes(model: onnx.ModelProto, opset: int, way: Way) -> list[Rewritten]:
    """The nodes that have another form in an older opset (`lowered`) or in a newer one (`raised`).

    Raises:
        CannotChangeVersion: some nodes have no such form; all of them are named.
    """
    replaced, blocks = [], dict[str, list[str]]()
    newest = max(opset_version(model.opset_import), opset if way == "raised" else 0)
    if newest > defs.onnx_opset_version():
        known = f"opset {newest} is newer than onnx {onnx.__version__} knows"
        raise CannotChangeVersion((known,), "pip install -U onnx", way)
    for site, node in _sites(model, opset, way):
        try:
            by = _rewrite_node(node, site, opset)
        except _Blocked as reason:
            blocks.setdefault(str(reason), []).append(node.name)
            continue
        if by is not None:
            replaced.append((site, node, by))
    if blocks:
        reasons = tuple(f"{reason} (node {shorten_names(tuple(nodes))})" for reason, nodes in blocks.items())
        again = f"kvdoctor re-export MODEL --from CHECKPOINT -o OUT --opset {opset}"
        raise CannotChangeVersion(reasons, f"export again at that opset: {again}", way)
    return replaced


def replace_nodes(model: onnx.ModelProto, replaced: list[Rewritten], file: str) -> Iterator[Change]:
    """Replace the old nodes by the new ones, and remove the constants that only the old ones needed."""
    counts = Counter[tuple[str, str, str]]()
    left = {name for _, node, _ in replaced for name in node.input}
    left -= {name for _, _, by in replaced for node in by for name in node.input}
    for site, old, by in replaced:
        before, after = _describe_node(old), " -> ".join(map(_describe_node, by))
        index = next(i for i, node in enumerate(site.body.node) if node is old)
        del site.body.node[index]
        for offset, node in enumerate(by):
            site.body.node.insert(index + offset, node)
        if before != after:
            counts[site.place, before, after] += 1
    for (place, before, after), count in counts.items():
        yield Change(file, f"{count} x {before.partition(' ')[0]}, {place}", before, after)
    drop_unread_constants(model, left)


class _Blocked(Exception):
    """A node cannot be written in the other opset."""


def _sites(model: onnx.ModelProto, opset: int, way: Way) -> Iterator[tuple[Site, onnx.NodeProto]]:
    """Every node that differs in the other opset, at any depth and in functions.

    What is not newer than an older opset stays as it is, and so does what is not older than a newer one.
    """

    def changes(version: int) -> bool:
        return version > opset if way == "lowered" else version < opset

    own = {(function.domain, function.name) for function in model.functions}
    version = opset_version(model.opset_import)
    if changes(version):
        types: Types | None = None
        for scope in GraphView(model).scopes():
            for node in scope.graph.node:
                if (node.domain, node.op_type) not in own and _differs_between(node, version, opset):
                    types = types if types is not None else infer_types(model)
                    yield Site(scope.graph, scope.path, version, scope, types), node
    for function in model.functions:
        version = opset_version(function.opset_import)
        bodies = [graph for node in function.node for body in subgraphs(node) for graph in graphs_in(body)]
        found = ((body, node) for body in (function, *bodies) for node in body.node)
        for body, node in found if changes(version) else ():
            if (node.domain, node.op_type) not in own and _differs_between(node, version, opset):
                yield Site(body, f"function {function.name}", version, None, {}), node


def _differs_between(node: onnx.NodeProto, version: int, opset: int) -> bool:
    """Whether a standard operator differs in the other opset. Operators unknown to ONNX belong to the runtime."""
    is_standard = node.domain in STANDARD and defs.has(node.op_type)
    return is_standard and _since(node.op_type, version) != _since(node.op_type, opset)


def _since(operator: str, version: int) -> int | None:
    """The opset that last changed an operator up to a version; None if it did not exist."""
    try:
        return int(defs.get_schema(operator, version, "").since_version)
    except defs.SchemaError:
        return None


def _rewrite_node(node: onnx.NodeProto, site: Site, opset: int) -> tuple[onnx.NodeProto, ...] | None:
    """The equivalent nodes of the other opset; None if the node itself is valid there.

    Raises:
        _Blocked: there are none.
    """
    if _since(node.op_type, opset) is None:
        known = (s for s in defs.get_all_schemas_with_history() if s.name == node.op_type and s.domain == "")
        first = min(schema.since_version for schema in known)
        raise _Blocked(f"{node.op_type} needs opset {first}")
    if _since(node.op_type, site.opset) is None:
        raise _Blocked(f"{node.op_type} of opset {site.opset} is the runtime's own: opset {opset} has one of that name")
    if has(node.op_type, "branch", "loop"):
        if opset < CONTROL_FLOW_SINCE:
            raise _Blocked(f"{node.op_type} has another schema before opset {CONTROL_FLOW_SINCE}")
        if node.op_type == "Scan" and site.opset < SCAN_SINCE:
            raise _Blocked(f"Scan has another schema from opset {SCAN_SINCE} on")
        return None
    fitting = fit_to_schema(node, site.opset, opset, [site.type_of(name) for name in node.input])
    if fitting is not None:
        return None if fitting == node else (fitting,)
    if any(attribute.ref_attr_name for attribute in node.attribute):
        raise _Blocked(f"{node.op_type} takes an attribute of its function")
    if defs.get_schema(node.op_type, opset, "").deprecated and node.op_type not in RENAMED:
        raise _Blocked(f"{node.op_type} was removed before opset {opset}, and what replaced it means something else")
    if site.opset < opset and node.op_type not in ADAPTED and means_other(node, site.opset, opset):
        raise _Blocked(f"{node.op_type} of opset {_since(node.op_type, site.opset)} means something else in {opset}")
    return _convert_node(node, site, opset)


def _convert_node(node: onnx.NodeProto, site: Site, opset: int) -> tuple[onnx.NodeProto, ...]:
    alone = _isolate_node(drop_default_attributes(node, site.opset, opset), site)
    try:
        made = version_converter.convert_version(alone, opset)
        made.ir_version = alone.ir_version
        if all(value.type.HasField("tensor_type") for value in made.graph.input):
            checker.check_model(made)
            shape_inference.infer_shapes(made, check_type=True, strict_mode=True)
    except Exception:  # the converter and the checks raise many types; each means that the node cannot be converted
        since = _since(node.op_type, site.opset)
        form = "older" if opset < site.opset else "newer"
        raise _Blocked(f"{node.op_type} of opset {since} has no {form} form that onnx can convert it to") from None
    return tuple(_rename_converted(node, made, "lowered" if opset < site.opset else "raised"))


def _isolate_node(node: onnx.NodeProto, site: Site) -> onnx.ModelProto:
    """A model of one node, the constants that feed it, and its other inputs with their known types."""
    constants, inputs = [], []
    for name in dict.fromkeys(name for name in node.input if name):
        tensor = site.scope.constant(name) if site.scope is not None else None
        inside = tensor is not None and tensor.data_location != onnx.TensorProto.EXTERNAL
        if tensor is not None and inside and math.prod(tensor.dims) <= MOST_CONSTANT:
            constants.append(onnx.TensorProto())
            constants[-1].CopyFrom(tensor)
            constants[-1].name = name
        else:
            inputs.append(_declare_value(name, site))
    outputs = [_declare_value(name, site) for name in node.output if name]
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    graph = helper.make_graph([copy], "one node", inputs, outputs, constants)
    imports = [helper.make_opsetid("", site.opset)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def _declare_value(name: str, site: Site) -> onnx.ValueInfoProto:
    value = onnx.ValueInfoProto(name=name)
    known = site.type_of(name)
    if known is not None:
        value.type.CopyFrom(known)
    return value


def _rename_converted(node: onnx.NodeProto, made: onnx.ModelProto, way: Way) -> Iterator[onnx.NodeProto]:
    """The converted nodes under unused names; constants of the converter become nodes."""
    outer = {*node.input, *node.output, ""}
    stem = next((name for name in node.output if name), node.name)
    renamed: dict[str, str] = {}
    for tensor in made.graph.initializer:
        if tensor.name not in outer:
            renamed[tensor.name] = f"{stem}.{way}.{len(renamed)}"
            yield helper.make_node("Constant", [], [renamed[tensor.name]], value=tensor)
    for one in made.graph.node:
        for name in one.output:
            if name not in outer:
                renamed.setdefault(name, f"{stem}.{way}.{len(renamed)}")
        names = [renamed.get(name, name) for name in one.input], [renamed.get(name, name) for name in one.output]
        del one.input[:], one.output[:]
        one.input.extend(names[0])
        one.output.extend(names[1])
        one.name = node.name if one.op_type == node.op_type else f"{node.name}.{one.op_type}"
        one.metadata_props.extend(node.metadata_props)
        yield one


def _describe_node(node: onnx.NodeProto) -> str:
    attributes = ", ".join(sorted(attribute.name for attribute in node.attribute))
    return f"{node.op_type} ({len(node.input)} inputs{'; ' + attributes if attributes else ''})"


def infer_types(model: onnx.ModelProto) -> Types:
    """The types of all values; the declared ones if the inference fails."""
    bare = onnx.ModelProto(ir_version=model.ir_version)
    bare.opset_import.extend(model.opset_import)
    bare.functions.extend(model.functions)
    bare.graph.CopyFrom(_without_weights(model.graph))
    try:
        inferred = shape_inference.infer_shapes(bare, data_prop=False)
    except Exception:  # an operator that onnx cannot infer: the declared types are used
        inferred = bare
    types: Types = {}
    _collect_types(model.graph, inferred.graph, types, outermost=True)
    return types


def _collect_types(graph: onnx.GraphProto, known: onnx.GraphProto, types: Types, outermost: bool = False) -> None:
    """Note the types of a graph and its bodies; `known` is the same graph with inferred types."""
    found = {value.name: value.type for value in (*known.input, *known.output, *known.value_info)}
    for tensor in known.initializer:
        found.setdefault(tensor.name, helper.make_tensor_type_proto(tensor.data_type, tensor.dims))
    for name, kind in found.items():
        if kind.WhichOneof("value") is not None:
            types[id(graph), name] = kind
            if outermost:
                types[0, name] = kind
    for mine, theirs in zip(graph.node, known.node, strict=True):
        for attribute, other in zip(mine.attribute, theirs.attribute, strict=True):
            for body, inner in zip(bodies_of(attribute), bodies_of(other), strict=True):
                _collect_types(body, inner, types)


def _without_weights(graph: onnx.GraphProto) -> onnx.GraphProto:
    """A copy in which inputs stand for the large initializers, and large constants have lost their values."""
    bare = onnx.GraphProto(name=graph.name)
    bare.input.extend(graph.input)
    bare.output.extend(graph.output)
    bare.value_info.extend(graph.value_info)
    for tensor in graph.initializer:
        if tensor.ByteSize() <= MOST_BYTES and tensor.data_location != onnx.TensorProto.EXTERNAL:
            bare.initializer.append(tensor)
        else:
            bare.value_info.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    for node in graph.node:
        copy = bare.node.add(op_type=node.op_type, domain=node.domain, name=node.name)
        copy.input.extend(node.input)
        copy.output.extend(node.output)
        for attribute in node.attribute:
            mine = copy.attribute.add(name=attribute.name, type=attribute.type)
            if attribute.HasField("g"):
                mine.g.CopyFrom(_without_weights(attribute.g))
            elif attribute.HasField("t") and attribute.t.ByteSize() > MOST_BYTES:
                mine.t.data_type = attribute.t.data_type
                mine.t.dims.extend(attribute.t.dims)
            else:
                mine.CopyFrom(attribute)
    return bare


OTHER_MEANING = {
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), (13,)),
    "BatchNormalization": (14,),
    "RoiAlign": (16,),
    "Resize": (11, 13, 18, 19),
    "GroupNormalization": (21,),
    "GridSample": (20,),
    "Attention": (24,),
}
"""Versions that give the same signature another meaning, from the changelogs."""
SAME_IN_NEWER = {"Attention": (24,)}
"""Of these the ones that give it only to signatures which the older version does not have."""

LENGTHS = ("Split", "num_outputs")
"""Without it and without lengths, an older Split makes as many equal parts as it has outputs."""
LENGTHS_SINCE = 18
"""The version of Split that needs one of the two."""


def fit_to_schema(
    node: onnx.NodeProto, own: int, other: int, types: Sequence[onnx.TypeProto | None]
) -> onnx.NodeProto | None:
    """The node as the schema of another opset allows it; None if its meaning would differ or is unknown.

    Most new versions of operators allow further types, or have a further attribute whose default keeps the earlier
    meaning. A node that uses neither stays as it is, or loses an attribute that has its default. A newer schema may
    also have taken an attribute away, which became an input, or ask for one that was not there. `own` is the opset of
    the node, `types` are those of the inputs, None where unknown. Source: onnx.defs, the schemas of all versions.
    """
    now, then = (defs.get_schema(node.op_type, version, "") for version in (own, other))
    # A Split into equal parts says nothing of their number, which a newer version needs.
    lacks_lengths = node.op_type == LENGTHS[0] and own < LENGTHS_SINCE <= other and not any(node.input[1:])
    if then.deprecated or means_other(node, own, other) or lacks_lengths:
        return None
    if not _same_ports(node, now, then) or not _types_allowed(then, types):
        return None
    theirs = then.attributes
    if any(_default(ours) != _default(theirs[name]) for name, ours in now.attributes.items() if name in theirs):
        return None
    fitting = drop_default_attributes(node, own, other)
    given = {attribute.name for attribute in fitting.attribute}
    needed = {name for name, attribute in then.attributes.items() if attribute.required}
    return fitting if needed <= given <= set(then.attributes) else None


def means_other(node: onnx.NodeProto, own: int, other: int) -> bool:
    """Whether a version between two opsets gives the signature of a node another meaning."""
    older, newer = sorted((own, other))
    kept = SAME_IN_NEWER.get(node.op_type, ()) if own < other else ()
    return any(older < version <= newer and version not in kept for version in OTHER_MEANING.get(node.op_type, ()))


def drop_default_attributes(node: onnx.NodeProto, own: int, other: int) -> onnx.NodeProto:
    """The node without attributes that the schema of another opset does not know, where they have their default."""
    now, then = (defs.get_schema(node.op_type, version, "") for version in (own, other))
    bare = onnx.NodeProto()
    bare.CopyFrom(node)
    keep_only(bare.attribute, lambda one: one.name in then.attributes or not _has_default_meaning(node, one, now))
    return bare


def _same_ports(node: onnx.NodeProto, now: defs.OpSchema, then: defs.OpSchema) -> bool:
    """Whether the inputs and outputs that the node has are the same ones under both schemas."""
    used = max((i + 1 for i, name in enumerate(node.input) if name), default=0)
    if not then.min_input <= used <= then.max_input or not then.min_output <= len(node.output) <= then.max_output:
        return False
    pairs = [(now.inputs, then.inputs, used), (now.outputs, then.outputs, len(node.output))]
    return all(_name(new, i) == _name(old, i) for new, old, count in pairs for i in range(count))


def _name(ports: Sequence[defs.OpSchema.FormalParameter], index: int) -> str:
    """The name of a port; the last one may stand for all that follow."""
    return str(ports[min(index, len(ports) - 1)].name).lower()


def _types_allowed(then: defs.OpSchema, types: Sequence[onnx.TypeProto | None]) -> bool:
    for index, kind in enumerate(types):
        if kind is None or kind.WhichOneof("value") != "tensor_type" or not kind.tensor_type.elem_type:
            continue
        name = helper.tensor_dtype_to_string(kind.tensor_type.elem_type).rpartition(".")[2].lower()
        allowed = then.inputs[min(index, len(then.inputs) - 1)].types
        if f"tensor({name})" not in allowed:
            return False
    return True


def _has_default_meaning(node: onnx.NodeProto, attribute: onnx.AttributeProto, now: defs.OpSchema) -> bool:
    """Whether an attribute that the other schema does not know has its default, which keeps the meaning."""
    if (node.op_type, attribute.name) == LENGTHS:
        return bool(attribute.i == len(node.output))
    default = _default(now.attributes[attribute.name]) if attribute.name in now.attributes else None
    return default is not None and not attribute.ref_attr_name and helper.get_attribute_value(attribute) == default


def _default(attribute: defs.OpSchema.Attribute) -> Any:
    value = attribute.default_value
    return helper.get_attribute_value(value) if value.name else None
