"""Stores byte-identical weights once.

Requires: initializers of the same type, shape and bytes. Weights of quantized operators stay in the graph of their
node, because ONNX Runtime looks for them only there.
Ensures: all readers use one of them, in the outermost graph that holds a copy, or in the main graph if two branches
hold one each; the others are removed. Values, nodes and outputs stay as they are.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from kvdoctor.diagnose.checks.duplicate_weights import alike, locate_weight
from kvdoctor.model.edit import new_name, rename_reads
from kvdoctor.model.operators import operators_with
from kvdoctor.model.proto import TensorProto
from kvdoctor.model.traverse import graphs_in, nodes_in, own_names
from kvdoctor.model.view import GraphView, Scope
from kvdoctor.model.weights import Weight
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.workspace import Change, RepairContext

QUANTIZED = operators_with("weights", "quantize", "static")
"""Operators that need their weights in their own graph."""


def apply(context: RepairContext) -> tuple[Change, ...]:
    """Merge the copies of every file that the findings name."""
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
    for group in alike(weights).values():
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


REPAIR = Repair("tied-weights", ("duplicate-weights",), "weights", "bits", apply)
