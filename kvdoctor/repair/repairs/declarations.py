"""Repairs that change no computation: order and names of nodes, names of axes, copies of weights, values of configs."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvdoctor.analysis.configs import DECODER_PARTS
from kvdoctor.analysis.proof.prove import StaleShape, find_stale_shapes
from kvdoctor.contract import Slot
from kvdoctor.diagnose.checks.duplicate_weights import group_equal, locate_weight
from kvdoctor.diagnose.checks.side_cars.config_json import config_json
from kvdoctor.diagnose.checks.side_cars.disagreement import Disagreement
from kvdoctor.diagnose.checks.side_cars.genai_config import genai_config
from kvdoctor.diagnose.checks.side_cars.tokenizer import END, generation_stops
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.model.edit import describe_graph, fresh_name, keep_only, new_name, node_order, rename_reads, sort_nodes
from kvdoctor.model.operators import operators_with
from kvdoctor.model.proto import GraphProto, NodeProto, TensorProto, ValueInfoProto
from kvdoctor.model.traverse import graphs_in, nodes_in, own_names
from kvdoctor.model.view import GraphView, Scope
from kvdoctor.model.weights import Weight
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.workspace import Change, RepairContext, describe_type, find_declared
from kvdoctor.report.wording import join_some


def sort_and_name(context: RepairContext) -> tuple[Change, ...]:
    """Sorts the nodes of every graph topologically, and gives each a name of its own.

    Requires: an order exists, and every value is computed once.
    Ensures: the same nodes, inputs and outputs; only names of nodes differ, those of values stay as they are.
    """
    return tuple(change for name in context.files for change in _sort_and_name(context, name))


def _sort_and_name(context: RepairContext, file: str) -> Iterator[Change]:
    model = context.model(file)
    for scope in list(GraphView(model).scopes()):
        before = _list_titles(scope.graph)
        if node_order(scope.graph.node) is None:
            context.cannot(f"the nodes of {scope.path} form a cycle", "export again without the tool that changed it")
        if sort_nodes(scope.graph):
            moved = next(b for a, b in zip(_list_titles(scope.graph), before, strict=True) if a != b)
            yield Change(file, f"{scope.path}, order of nodes", f"{moved} before its inputs", "sorted topologically")
        if renamed := _name_uniquely(scope.graph.node):
            shown = join_some(renamed, 3, "; ", "; and {} more")
            shared = f"{len(renamed)} nodes share the name of another"
            yield Change(file, f"{scope.path}, names of nodes", shared, shown)


def _list_titles(graph: GraphProto) -> list[str]:
    return [node.name or next(iter(node.output), node.op_type) for node in graph.node]


def _name_uniquely(nodes: "list[NodeProto]") -> list[str]:
    known, seen = {node.name for node in nodes}, set[str]()
    renamed = []
    for node in nodes:
        if node.name and node.name in seen:
            old = node.name
            node.name = fresh_name(old, known)
            renamed.append(f"{node.op_type} {old!r} is {node.name!r}")
        seen.add(node.name)
    return renamed


def name_axes(context: RepairContext) -> tuple[Change, ...]:
    """Gives different lengths different symbolic names.

    Requires: a growing slot whose present has the axis name of its past, shapes inside the graph that make the runtime
    plan its memory wrongly, or shapes that are declared and not computed.
    Ensures: the length of such a present is named `past + new`, by the names of the two; if a step failed because of
    them, the shapes declared inside the graph are removed, which no runtime needs. A declared shape that is not
    computed is removed inside the graph, and corrected at an output. The computation is unchanged.
    """
    file = context.file_of("decode")
    view, changes = context.view(file), list[Change]()
    new = name_of_new_axis(context)
    for slot in context.drivable.growing:
        if slot.present is not None and slot.growth == "grow":
            changes += _rename_axis(view, slot, new, file)
    if any(finding.severity == "error" for finding in context.found("axis-name-collision")):
        dropped = 0
        for graph in graphs_in(view.model.graph):
            dropped += len(graph.value_info)
            del graph.value_info[:]
        if dropped:
            changes.append(Change(file, "shapes declared inside the graphs", f"{dropped} declarations", "none"))
    changes += _correct_stale(view, find_stale_shapes(context.stack, context.drivable), file)
    return tuple(changes)


def _correct_stale(view: GraphView, stale: tuple[StaleShape, ...], file: str) -> Iterator[Change]:
    """Take stale shapes from inside the graph; of an output the axis: one entry, or a length without a name."""
    graph = view.model.graph
    inside = {one.name for one in stale}.intersection(value.name for value in graph.value_info)
    keep_only(graph.value_info, lambda value: value.name not in inside)
    if inside:
        yield Change(file, "main graph, declared shapes that are not computed", f"{len(inside)} declarations", "none")
    for one in stale:
        for value in (value for value in graph.output if value.name == one.name):
            before = describe_type(value)
            for axis in one.axes:
                dim = value.type.tensor_type.shape.dim[axis]
                dim.Clear()
                if one.found[axis] == 1:
                    dim.dim_value = 1
            yield Change(file, f"main graph, output {one.name!r}", before, describe_type(value))


def name_of_new_axis(context: RepairContext) -> str:
    """The name of the axis of new tokens in the decode graph."""
    return str(context.drivable.graph("decode").declared_new_tokens or "sequence_length")


def _rename_axis(view: GraphView, slot: Slot, new: str, file: str) -> Iterator[Change]:
    axis = slot.axes.index("past")
    past = find_declared(view.model.graph.input, slot.past)
    output = find_declared(view.model.graph.output, slot.present)
    if output is None or not (name := _axis_name(past, axis)):
        return
    scope, inner_name = view.behind(output.name)
    inner = find_declared(scope.graph.output, inner_name) or output
    for place, value in {"main graph": output, describe_graph(view, scope.graph): inner}.items():
        if _axis_name(value, axis) == name:
            before = describe_type(value)
            value.type.tensor_type.shape.dim[axis].dim_param = f"{name} + {new}"
            yield Change(file, f"{place}, output {value.name!r}", before, describe_type(value))


def _axis_name(value: ValueInfoProto | None, axis: int) -> str:
    dims = value.type.tensor_type.shape.dim if value is not None else ()
    return str(dims[axis].dim_param) if axis < len(dims) else ""


QUANTIZED = operators_with("weights", "quantize", "static")
"""Operators that need their weights in their own graph."""


def tie_weights(context: RepairContext) -> tuple[Change, ...]:
    """Stores byte-identical weights once.

    Requires: initializers of the same type, shape and bytes. Weights of quantized operators stay in the graph of their
    node, because ONNX Runtime looks for them only there.
    Ensures: all readers use one of them, in the outermost graph that holds a copy, or in the main graph if two branches
    hold one each; the others are removed. Values, nodes and outputs stay as they are.
    """
    return tuple(change for file in context.files_of("duplicate-weights") for change in _merge_copies(context, file))


def _merge_copies(context: RepairContext, file: str) -> Iterator[Change]:
    model, source = context.model(file), context.copy.file(file)
    inputs = {value.name for value in model.graph.input}
    places = {found.location: found.path for found in source.external if found.bytes is not None}
    held: dict[int, tuple[Scope, TensorProto]] = {}
    weights: list[Weight] = []
    quantized: dict[int, set[str]] = {}
    for scope in GraphView(model).scopes():
        nodes = (node for node in nodes_in(scope.graph.node) if node.op_type in QUANTIZED)
        quantized[id(scope.graph)] = {name for node in nodes for name in node.input}  # read at any depth
        for tensor in scope.graph.initializer:
            weight = locate_weight(tensor, {**places, source.path.name: Path(source.path)})
            if weight is not None and tensor.name not in inputs:
                weights.append(weight)
                held[id(weight)] = (scope, tensor)
    for group in group_equal(weights).values():
        copies = [held[id(weight)] for weight in group]
        for mergeable in _group_mergeable(copies, quantized):
            if len(mergeable) > 1:
                yield _tie(context, file, mergeable, group[0].length)


def _group_mergeable(
    copies: list[tuple[Scope, TensorProto]], quantized: Mapping[int, set[str]]
) -> Iterator[list[tuple[Scope, TensorProto]]]:
    """Copies that may be merged: all of them, or those of one graph if a quantized operator reads them."""
    if not any(tensor.name in quantized[id(scope.graph)] for scope, tensor in copies):
        yield copies
        return
    by_graph: dict[int, list[tuple[Scope, TensorProto]]] = {}
    for scope, tensor in copies:
        by_graph.setdefault(id(scope.graph), []).append((scope, tensor))
    yield from by_graph.values()


def _tie(context: RepairContext, file: str, copies: list[tuple[Scope, TensorProto]], length: int) -> Change:
    model = context.model(file)
    depths = [scope.path.count(",") if scope.outer is not None else -1 for scope, _ in copies]
    (keeper, kept), outermost = copies[depths.index(min(depths))], {id(scope.graph) for scope, _ in copies}
    names = [f"{tensor.name} ({scope.path})" for scope, tensor in copies]
    name = str(kept.name)
    if len(outermost) > 1 and keeper.outer is not None:
        name = new_name(model, name)
        hoisted = model.graph.initializer.add()
        hoisted.CopyFrom(kept)
        hoisted.name = name
    elif len(outermost) > 1 and any(name in own_names(body) for body in list(graphs_in(keeper.graph))[1:]):
        # A branch with a value of that name would hide the weight.
        kept.name = new_name(model, f"{name}.tied")
        rename_reads(keeper.graph, {name: kept.name})
        name = str(kept.name)
    for scope, tensor in copies:
        old = str(tensor.name)
        if scope.graph is keeper.graph and tensor is kept and name == old:
            continue
        index = next(i for i, each in enumerate(scope.graph.initializer) if each is tensor or each == tensor)
        del scope.graph.initializer[index]
        rename_reads(scope.graph, {old: name})
    saved = f"{(len(copies) - 1) * length:,} bytes fewer"
    return Change(file, "initializers", f"{len(copies)} copies: {', '.join(names)}", f"one, {name!r}; {saved}")


COMPARED: dict[str, Callable[[ContractContext], list[Disagreement]]] = {
    "config.json": config_json,
    "genai_config.json": genai_config,
    "generation_config.json": generation_stops,
}

NO_WINDOW = "no window"
"""The right value that the comparison gives if the graph has no window."""


def correct_configs(context: RepairContext) -> tuple[Change, ...]:
    """Corrects values in a config that the graph contradicts.

    Requires: a key of config.json or genai_config.json whose right value the graph shows beyond doubt, or an end token
    of generation_config.json or genai_config.json that the tokenizer names.
    Ensures: those keys, and no others, have the values of the graph; end tokens are added. Keys with several possible
    values are left and reported.
    """
    checked = ContractContext(folder=context.copy.folder, stack=context.stack, contract=context.drivable)
    changes: list[Change] = []
    for finding in context.found("config-disagrees"):
        name = finding.file or ""
        content = context.copy.side_car(name)
        if name not in COMPARED or not isinstance(content, dict):
            context.cannot(f"{name} describes how the graph was traced, which the graph does not show", "export again")
        changes += _correct_keys(name, content, COMPARED[name](checked))
    if not changes:
        context.cannot("the graph does not show the right value", "correct the config by hand, or export again")
    return tuple(changes)


def _correct_keys(name: str, content: dict[str, Any], found: list[Disagreement]) -> Iterator[Change]:
    for one in found:
        if one.right == NO_WINDOW:
            holder, key = _find_holder(name, content, one.key.rpartition(".")[0])
            if holder is not None and key in holder:
                now = f"removed, since the graph shows {one.observed}"
                yield Change(name, one.key, json.dumps(holder.pop(key)), now)
            continue
        holder, key = _find_holder(name, content, one.key)
        value = _parse_value(one.right)
        if holder is None or value is None or (key not in holder and key != END) or holder.get(key) == value:
            continue
        before = json.dumps(holder[key]) if key in holder else "left out"
        holder[key] = value
        says = "shows" if one.against == "the graph" else "has"
        yield Change(name, one.key, before, f"{json.dumps(value)}, since {one.against} {says} {one.observed}")


def _find_holder(name: str, content: dict[str, Any], path: str) -> tuple[dict[str, Any] | None, str]:
    """The object that holds a key: by its path, or the part of config.json for the decoder."""
    *parts, key = path.split(".")
    if name == "config.json":
        parts = [part for part in DECODER_PARTS if isinstance(content.get(part), dict)][:1]
    holder: Any = content
    for part in parts:
        holder = holder.get(part) if isinstance(holder, dict) else None
    return (holder if isinstance(holder, dict) else None), key


def _parse_value(right: str) -> int | bool | str | list[int] | None:
    """A right value as JSON; None if it is described as text or may be one of several."""
    if match := re.fullmatch(r"(\d+)( at most)?", right):
        return int(match[1])
    if re.fullmatch(r"\[\d+(, \d+)*\]", right):
        return [int(number) for number in re.findall(r"\d+", right)]
    if right in ("true", "false"):
        return right == "true"
    with contextlib.suppress(ValueError):
        text = json.loads(right) if right.startswith('"') else None
        return text if isinstance(text, str) else None
    return None


ADVICE = ("Take names and sizes from the graph (`kvdoctor contract MODEL`), not from the config.",)


REPAIRS = (
    Repair("sorted-nodes", ("graph-unsorted", "session-refused", "invalid-graph"), "file", "bits", sort_and_name),
    Repair("axis-names", ("axis-name-collision",), "names", "bits", name_axes),
    Repair("tied-weights", ("duplicate-weights",), "weights", "bits", tie_weights),
    Repair("config-values", ("config-disagrees",), "side-cars", "bits", correct_configs, ADVICE),
)
