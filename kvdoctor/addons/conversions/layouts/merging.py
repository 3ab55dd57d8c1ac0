"""From two graphs to a merged decoder: an `If` on a switch, with the graph of the first step and that of later ones.

Weights are moved into the enclosing graph, those of equal content once. A value of a branch never has a name of the
enclosing graph, and no branch returns a value of it (operator `If` of ONNX; old runtimes refuse both).

Some weights stay in their branch: scalars and vectors of integers, where shape inference looks for them (as with
Optimum), and inputs of a DequantizeLinear in front of a MatMul: ONNX Runtime 1.24 to 1.31 fuses the two and looks for
scale and weight only in the branch (microsoft/onnxruntime issue 28306: "Missing required scale").
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

from kvdoctor.addons.conversions.layouts.naming import MERGED, PortNames, first_of
from kvdoctor.addons.conversions.layouts.registry import ConvertedModels, DoesNotFit, EqualTensors, LayoutSource
from kvdoctor.contract import CacheContract
from kvdoctor.errors import UsageError
from kvdoctor.model.edit import (
    declare,
    fresh_name,
    function_key,
    make_node,
    prune,
    rename_all,
    rename_banned,
    replace_all,
)
from kvdoctor.model.operators import has
from kvdoctor.model.proto import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TensorShapeProto,
    ValueInfoProto,
)
from kvdoctor.model.traverse import all_names, normalize_domain, output_of, own_names
from kvdoctor.model.view import declared
from kvdoctor.report.repair_record import Change

SWITCH = "use_cache_branch"
NODE = "optimum::if"


@dataclass
class MergePlan:
    """Inputs and results of a merge; `kept` maps outputs of the first step to pasts that later steps pass through."""

    root: Path
    kept: dict[str, str]
    dropped: list[str] = field(default_factory=list)
    shared: int = 0


def merge(first: ModelProto, later: ModelProto, work: MergePlan) -> ModelProto:
    """Merge two halves, which are consumed; inputs and outputs of one name become one.

    Outputs that only one half has are left out and added to `work.dropped`, unless later steps can pass their past
    through (`work.kept`).

    Raises:
        UsageError: the halves cannot be merged; the message says why.
    """
    model = deepcopy(first)
    model.ClearField("graph")
    unite_opsets(model, later)
    model.ir_version = max(first.ir_version, later.ir_version, 4)
    unite_functions(model, later)
    _unite_outputs(first, later, work)
    for half in (first, later):
        prune(half)
        half.graph.ClearField("value_info")
    inputs = _unite_inputs(first.graph, later.graph)
    meaning, shared = _match_axis_names(first.graph, later.graph), {value.name for value in first.graph.input}
    alone = [inputs[value.name] for value in later.graph.input if value.name not in shared]
    for dim in [dim for value in (*alone, *later.graph.output) for dim in _dims(value)]:
        if dim.dim_param:
            dim.dim_param = meaning.get(dim.dim_param, dim.dim_param)
    outer = {*inputs, SWITCH}
    weights, work.shared = lift_weights((first.graph, later.graph), outer, work.root)
    outer |= {tensor.name for tensor in weights}
    for graph in (first.graph, later.graph):
        _make_branch(graph, outer)
    return _build_merged(model, first.graph, later.graph, list(inputs.values()), weights)


def _build_merged(
    model: ModelProto, first: GraphProto, later: GraphProto, inputs: list[ValueInfoProto], weights: list[TensorProto]
) -> ModelProto:
    graph = model.graph
    graph.name = "merged"
    graph.input.extend(inputs)
    graph.input.append(declare(SWITCH, TensorProto.BOOL, (1,)))
    graph.initializer.extend(weights)
    for one, other in zip(first.output, later.output, strict=True):
        graph.output.append(_unite_output(one, other))
    first.name, later.name = "no_past", "with_past"
    for half in (first, later):
        half.ClearField("input")
    node = graph.node.add(op_type="If", name=NODE, input=[SWITCH], output=[value.name for value in graph.output])
    node.attribute.add(name="else_branch", type=AttributeProto.GRAPH, g=first)
    node.attribute.add(name="then_branch", type=AttributeProto.GRAPH, g=later)
    return model


def unite_opsets(model: ModelProto, later: ModelProto) -> None:
    """Let a model import the opsets of another one as well.

    Raises:
        UsageError: the two use different versions.
    """
    known = {normalize_domain(entry.domain): entry.version for entry in model.opset_import}
    for entry in later.opset_import:
        version = known.setdefault(normalize_domain(entry.domain), entry.version)
        if version != entry.version:
            raise UsageError(
                f"the two graphs use different opsets of {entry.domain or 'ai.onnx'!r}, {version} and {entry.version}: "
                "one file can hold only one of them; export both with the same opset"
            )
        if entry.domain not in {other.domain for other in model.opset_import}:
            model.opset_import.add(domain=entry.domain, version=entry.version)


def unite_functions(model: ModelProto, later: ModelProto) -> None:
    """Let a model have the functions of another one as well.

    Raises:
        UsageError: the two define different ones of one name.
    """
    known = {function_key(function): function for function in model.functions}
    for function in later.functions:
        key = function_key(function)
        if key not in known:
            model.functions.append(function)
        elif known[key] != function:
            raise UsageError(
                f"the two graphs define different functions of one name, {function.domain}.{function.name}: one file "
                "can hold only one of them; inline the functions first (onnx.inliner.inline_local_functions)"
            )


def _unite_outputs(first: ModelProto, later: ModelProto, work: MergePlan) -> None:
    """Give both halves the same outputs, in the order of the first."""
    theirs = {value.name for value in later.graph.output}
    takes = {value.name: value for value in later.graph.input}
    known = all_names(later.graph)
    for value in first.graph.output:
        past = takes.get(work.kept.get(value.name, ""))
        if value.name in theirs or past is None:
            continue
        if value.name in known:
            rename_all(later.graph, {value.name: fresh_name(f"{value.name}.inner", known)})
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


def _unite_inputs(first: GraphProto, later: GraphProto) -> dict[str, ValueInfoProto]:
    """The inputs of both halves, those of the first step first."""
    united: dict[str, ValueInfoProto] = {}
    for graph in (first, later):
        # Old files list their weights among the inputs.
        weights = {tensor.name for tensor in graph.initializer}
        replace_all(graph.input, [value for value in graph.input if value.name not in weights])
        for value in graph.input:
            if value.name in united:
                _unite_declarations(united[value.name], value)
            else:
                united[value.name] = deepcopy(value)
    return united


def _unite_declarations(one: ValueInfoProto, other: ValueInfoProto) -> None:
    """Make one declaration valid for both halves: a size that differs becomes open."""
    mine, theirs = declared(one), declared(other)
    if mine.dtype != theirs.dtype or len(mine.shape or ()) != len(theirs.shape or ()):
        raise UsageError(
            f"the input {one.name!r} is {mine.dtype} of rank {len(mine.shape or ())} for the first step and "
            f"{theirs.dtype} of rank {len(theirs.shape or ())} later: one input cannot have both"
        )
    pairs = zip(one.type.tensor_type.shape.dim, other.type.tensor_type.shape.dim, strict=True)
    for index, (dim, their) in enumerate(pairs):
        if dim.HasField("dim_value") and dim != their:
            dim.CopyFrom(their)
            if their.HasField("dim_value"):
                dim.CopyFrom(TensorShapeProto.Dimension(dim_param=f"{one.name}_dim_{index}"))


def _match_axis_names(first: GraphProto, later: GraphProto) -> dict[str, str]:
    """The names in the first half of the axes of the later one, from the inputs that both have.

    A name that is on no common input but that the first half uses for another axis is changed, because the runtime
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
            meaning[name] = fresh_name(name, known) if name in used else name
    return meaning


def _dims(value: ValueInfoProto) -> Sequence[TensorShapeProto.Dimension]:
    return value.type.tensor_type.shape.dim  # type: ignore[no-any-return, unused-ignore]


def _unite_output(one: ValueInfoProto, other: ValueInfoProto) -> ValueInfoProto:
    """One declaration for an output of both branches; a size that differs is open."""
    united = deepcopy(one)
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


def _make_branch(graph: GraphProto, outer: set[str]) -> None:
    known = all_names(graph) | outer
    replace_all(graph.input, [])
    rename_banned(graph, outer, known)
    own = {name for node in graph.node for name in node.output}
    returned: set[str] = set()
    for value in graph.output:
        if value.name not in own or value.name in returned:
            name = fresh_name(f"{value.name}.returned", known)
            graph.node.append(make_node("Identity", [value.name], name))
            value.name = name
        returned.add(value.name)


INTEGERS = (TensorProto.INT32, TensorProto.INT64)


def lift_weights(graphs: tuple[GraphProto, GraphProto], outer: set[str], root: Path) -> tuple[list[TensorProto], int]:
    """Move the weights out of two graphs, under names that are unused in both and not `outer` ones.

    Gives them, and how many are weights of both graphs. Changes the graphs; bytes are read below `root`.
    """
    mine = []
    for graph in graphs:
        stay = _find_fused(graph)
        stay |= {
            one.name for one in graph.initializer if not one.dims or (len(one.dims) == 1 and one.data_type in INTEGERS)
        }
        mine.append({tensor.name: tensor for tensor in graph.initializer if tensor.name not in stay})
    sameness = EqualTensors(root)
    keys = [{name: sameness.key(tensor) for name, tensor in weights.items()} for weights in mine]
    locals_ = [own_names(graph) for graph in graphs]
    known, used = outer | {name for graph in graphs for name in all_names(graph)}, set(outer)
    lifted: dict[object, TensorProto] = {}
    for index, graph in enumerate(graphs):
        names: dict[str, str] = {}
        for name, tensor in mine[index].items():
            key = keys[index][name]
            if key not in lifted:
                # The other graph may use the name for another value.
                theirs = name in locals_[1 - index] and keys[1 - index].get(name) != key
                lifted[key] = deepcopy(tensor)
                lifted[key].name = fresh_name(f"{name}_merged", known) if theirs or name in used else name
                used.add(lifted[key].name)
            names[name] = lifted[key].name
        replace_all(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in names])
        others = {old: new for old, new in names.items() if old != new}
        taken = all_names(graph) | set(others.values())
        rename_all(graph, {name: fresh_name(name, taken) for name in sorted(own_names(graph) & set(others.values()))})
        rename_all(graph, others)
    return list(lifted.values()), len(set(keys[0].values()) & set(keys[1].values()))


def _find_fused(graph: GraphProto) -> set[str]:
    """Inputs of a DequantizeLinear in front of a product; scale and zero point of any other DequantizeLinear."""
    multiplied = {name for node in graph.node if has(node.op_type, "product") for name in node.input}
    found = set[str]()
    for node in graph.node:
        if has(node.op_type, "dequantize"):
            found |= set(node.input[0 if output_of(node) in multiplied else 1 :])
    return found


def find_kept(contract: CacheContract, first: PortNames, later: PortNames) -> dict[str, str]:
    """The outputs of the first step that later steps need not compute, with the pasts that hold their values."""
    pairs = {}
    for slot in contract.slots:
        if slot.growth == "constant" and slot.filled_by is not None:
            pairs[first.outputs.get(slot.filled_by, slot.filled_by)] = later.inputs.get(slot.past, slot.past)
    return pairs


def merge_halves(
    source: LayoutSource, first: ModelProto, later: ModelProto, kept: dict[str, str], made: ConvertedModels
) -> ModelProto:
    """Merge two halves with common names, and record the changes."""
    if any(value.name == SWITCH for half in (first, later) for value in half.graph.input):
        raise DoesNotFit(f"an input of the pair is named {SWITCH!r}, the name of the switch of a merged decoder")
    work = MergePlan(source.root, kept)
    returned = {value.name for value in later.graph.output}
    merged = merge(first, later, work)
    file = source.new_name(MERGED)
    names = f"{source.name('decoder')} and {source.name('decoder-with-past')}"
    made.changes.append(Change(file, "main graph", names, f'one If on "{SWITCH}"; {work.shared} weights shared'))
    through = [name for name in kept if name not in returned and name in {o.name for o in merged.graph.output}]
    if through:
        made.changes.append(
            Change(file, "cached branch", "does not return " + first_of(through), "Identity of the past")
        )
    if work.dropped:
        made.changes.append(
            Change(file, "outputs", first_of(work.dropped), "left out: only one of the graphs returns it")
        )
    return merged
