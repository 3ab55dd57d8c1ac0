"""From two graphs to a merged decoder: an `If` on a switch, with the graph of the first step and that of later ones.

Weights stand in the outer graph, those of equal content once (`lifting.py`). A value of a branch never has a name of
the outer graph, and no branch returns an outer value (operator `If` of ONNX; old runtimes refuse both).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvdoctor.errors import UsageError
from kvdoctor.graph import declared
from kvdoctor.layouts.graphs import keep_needed
from kvdoctor.layouts.lifting import lift
from kvdoctor.onnx_schema import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TensorShapeProto,
    ValueInfoProto,
)
from kvdoctor.scoping import all_names, fresh, rename, replace_all, step_aside

SWITCH = "use_cache_branch"
NODE = "optimum::if"


@dataclass
class Merging:
    """What is decided on the way; `held` leads from outputs of the first step to pasts that later steps pass on."""

    root: Path
    held: dict[str, str]
    dropped: list[str] = field(default_factory=list)
    shared: int = 0


def merge(first: ModelProto, later: ModelProto, work: Merging) -> ModelProto:
    """A merged decoder; what the two halves call alike is one. The halves are used up.

    Outputs that only one half has are left out, and named in `work.dropped`, unless later steps can pass through the
    past that belongs to them (`work.held`).

    Raises:
        UsageError: the halves do not fit together; the message says why.
    """
    model = ModelProto()
    model.CopyFrom(first)
    model.ClearField("graph")
    _unite_opsets(model, later)
    model.ir_version = max(first.ir_version, later.ir_version, 4)
    _unite_functions(model, later)
    _unite_outputs(first, later, work)
    for half in (first, later):
        keep_needed(half)
        half.graph.ClearField("value_info")
    inputs = _united_inputs(first.graph, later.graph)
    shared = {value.name for value in first.graph.input}
    _translate(later.graph, inputs, _meaning(first.graph, later.graph), shared)
    outer = {*inputs, SWITCH}
    weights, work.shared = lift((first.graph, later.graph), outer, work.root)
    outer |= {tensor.name for tensor in weights}
    for graph in (first.graph, later.graph):
        _seal(graph, outer)
    return _joined(model, first.graph, later.graph, list(inputs.values()), weights)


def _joined(
    model: ModelProto,
    first: GraphProto,
    later: GraphProto,
    inputs: list[ValueInfoProto],
    weights: list[TensorProto],
) -> ModelProto:
    graph = model.graph
    graph.name = "merged"
    graph.input.extend(inputs)
    switch = graph.input.add(name=SWITCH)
    switch.type.tensor_type.elem_type = TensorProto.BOOL
    switch.type.tensor_type.shape.dim.add(dim_value=1)
    graph.initializer.extend(weights)
    for one, other in zip(first.output, later.output, strict=True):
        graph.output.append(_united_output(one, other))
    first.name, later.name = "no_past", "with_past"
    for half in (first, later):
        half.ClearField("input")
    node = graph.node.add(op_type="If", name=NODE, input=[SWITCH], output=[value.name for value in graph.output])
    node.attribute.add(name="else_branch", type=AttributeProto.GRAPH, g=first)
    node.attribute.add(name="then_branch", type=AttributeProto.GRAPH, g=later)
    return model


def _unite_opsets(model: ModelProto, later: ModelProto) -> None:
    known = {_domain(entry.domain): entry.version for entry in model.opset_import}
    for entry in later.opset_import:
        version = known.setdefault(_domain(entry.domain), entry.version)
        if version != entry.version:
            raise UsageError(
                f"the two graphs use different opsets of {entry.domain or 'ai.onnx'!r}, {version} and {entry.version}: "
                "one file can hold only one; export both with the same opset"
            )
        if entry.domain not in {other.domain for other in model.opset_import}:
            model.opset_import.add(domain=entry.domain, version=entry.version)


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _unite_functions(model: ModelProto, later: ModelProto) -> None:
    known = {(f.domain, f.name, getattr(f, "overload", "")): f for f in model.functions}
    for function in later.functions:
        key = function.domain, function.name, getattr(function, "overload", "")
        if key not in known:
            model.functions.append(function)
        elif known[key] != function:
            raise UsageError(
                f"the two graphs bring different functions of one name, {function.domain}.{function.name}: one file "
                "can hold only one; inline the functions first (onnx.inliner.inline_local_functions)"
            )


def _unite_outputs(first: ModelProto, later: ModelProto, work: Merging) -> None:
    """Let both halves have the same outputs, in the order of the first."""
    theirs = {value.name for value in later.graph.output}
    takes = {value.name: value for value in later.graph.input}
    known = all_names(later.graph)
    for value in first.graph.output:
        past = takes.get(work.held.get(value.name, ""))
        if value.name in theirs or past is None:
            continue
        if value.name in known:
            rename(later.graph, {value.name: fresh(f"{value.name}.inner", known)})
        later.graph.node.append(
            NodeProto(op_type="Identity", name=f"{value.name}.pass_through", input=[past.name], output=[value.name])
        )
        later.graph.output.add(name=value.name).type.CopyFrom(past.type)
        theirs.add(value.name)
    mine = {value.name for value in first.graph.output}
    work.dropped += [value.name for value in first.graph.output if value.name not in theirs]
    work.dropped += [value.name for value in later.graph.output if value.name not in mine]
    both = [value.name for value in first.graph.output if value.name in theirs]
    for half in (first, later):
        by_name = {value.name: value for value in half.graph.output}
        replace_all(half.graph.output, [by_name[name] for name in both])


def _united_inputs(first: GraphProto, later: GraphProto) -> dict[str, ValueInfoProto]:
    """The inputs of both, those of the first before those that only later steps have."""
    united: dict[str, ValueInfoProto] = {}
    for graph in (first, later):
        # Old files list their weights among the inputs.
        weights = {tensor.name for tensor in graph.initializer}
        replace_all(graph.input, [value for value in graph.input if value.name not in weights])
        for value in graph.input:
            if value.name in united:
                _agree(united[value.name], value)
            else:
                united[value.name] = ValueInfoProto()
                united[value.name].CopyFrom(value)
    return united


def _agree(one: ValueInfoProto, other: ValueInfoProto) -> None:
    """Let one declaration hold for both halves: a size that differs becomes open."""
    mine, theirs = declared(one), declared(other)
    if mine.dtype != theirs.dtype or len(mine.shape or ()) != len(theirs.shape or ()):
        raise UsageError(
            f"the input {one.name!r} is {mine.dtype} of rank {len(mine.shape or ())} for the first step and "
            f"{theirs.dtype} of rank {len(theirs.shape or ())} later: one input cannot be both"
        )
    pairs = zip(one.type.tensor_type.shape.dim, other.type.tensor_type.shape.dim, strict=True)
    for index, (dim, their) in enumerate(pairs):
        if dim.HasField("dim_value") and dim != their:
            dim.CopyFrom(their)
            if their.HasField("dim_value"):
                dim.CopyFrom(TensorShapeProto.Dimension(dim_param=f"{one.name}_dim_{index}"))


def _meaning(first: GraphProto, later: GraphProto) -> dict[str, str]:
    """What the first half calls the axes of the later one: by the inputs of both.

    A name that is on no input of both, and that the first half uses for something of its own, is changed: the runtime
    takes equal names for equal sizes.
    """
    mine = {value.name: value for value in first.input}
    meaning: dict[str, str] = {}
    for value in later.input:
        pairs = zip(_dims(value), _dims(mine[value.name]), strict=True) if value.name in mine else ()
        for their, dim in pairs:
            if their.dim_param and dim.dim_param:
                meaning.setdefault(their.dim_param, dim.dim_param)
    used = {dim.dim_param for value in first.input for dim in _dims(value)}
    known = used | {dim.dim_param for value in (*later.input, *later.output) for dim in _dims(value)}
    for name in [dim.dim_param for value in later.input for dim in _dims(value) if dim.dim_param]:
        if name not in meaning:
            meaning[name] = fresh(name, known) if name in used else name
    return meaning


def _translate(later: GraphProto, united: dict[str, ValueInfoProto], meaning: dict[str, str], shared: set[str]) -> None:
    """Call the axes of the later half as the first one does: on its outputs, and on the inputs that it alone has."""
    alone = [united[value.name] for value in later.input if value.name not in shared]
    for dim in [dim for value in (*alone, *later.output) for dim in _dims(value)]:
        if dim.dim_param:
            dim.dim_param = meaning.get(dim.dim_param, dim.dim_param)


def _dims(value: ValueInfoProto) -> Sequence[TensorShapeProto.Dimension]:
    return value.type.tensor_type.shape.dim  # type: ignore[no-any-return, unused-ignore]


def _united_output(one: ValueInfoProto, other: ValueInfoProto) -> ValueInfoProto:
    """What holds for an output of both branches; a size in which they differ is open."""
    united = ValueInfoProto()
    united.CopyFrom(one)
    mine, theirs = declared(one), declared(other)
    if mine.dtype != theirs.dtype:
        raise UsageError(f"the output {one.name!r} is {mine.dtype} in the first step and {theirs.dtype} later")
    dims, others = united.type.tensor_type.shape.dim, other.type.tensor_type.shape.dim
    if mine.shape is None or theirs.shape is None or len(dims) != len(others):
        united.type.tensor_type.ClearField("shape")
        return united
    for index, (dim, their) in enumerate(zip(dims, others, strict=True)):
        if dim.HasField("dim_value") and their.dim_param:
            dim.CopyFrom(their)
        elif dim != their and not (dim.dim_param and (their.HasField("dim_value") or their.dim_param.isdigit())):
            dim.CopyFrom(TensorShapeProto.Dimension(dim_param=f"{one.name}_dim_{index}"))
    return united


def _seal(graph: GraphProto, outer: set[str]) -> None:
    """Let a graph be a branch: nothing in it has an outer name, and it returns only what it makes."""
    known = all_names(graph) | outer
    replace_all(graph.input, [])
    step_aside(graph, outer, known)
    own = {name for node in graph.node for name in node.output}
    returned: set[str] = set()
    for value in graph.output:
        if value.name not in own or value.name in returned:
            name = fresh(f"{value.name}.returned", known)
            graph.node.append(NodeProto(op_type="Identity", name=name, input=[value.name], output=[name]))
            value.name = name
        returned.add(value.name)
