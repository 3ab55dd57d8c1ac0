"""Stores byte-identical weights once: merged, and tied by name.

Requires: initializers of the same type, shape and bytes. Weights of quantised operators stay in the graph of their
node, since ONNX Runtime looks for them there alone.
Ensures: all readers use one of them, which stands in the outermost graph that holds a copy, or in the main graph where
two branches hold one each; the others are gone. Values, nodes and outputs stand as they were.
"""

from collections.abc import Iterator
from pathlib import Path

from kvdoctor.checks.duplicate_weights import Stored, alike, stored
from kvdoctor.graph import GraphView, Scope
from kvdoctor.onnx_schema import ModelProto, TensorProto
from kvdoctor.repairs import Change, Patient, Repair
from kvdoctor.rewiring import fresh, made_in, readers, rename_reads
from kvdoctor.scoping import graphs

QUANTISED = ("QuantizeLinear", "DequantizeLinear", "MatMulInteger", "MatMulNBits", "GatherBlockQuantized", "QLinear")
"""Beginnings and ends of operators that want their weights beside them."""


def apply(patient: Patient) -> tuple[Change, ...]:
    """Merge the copies of every file that the findings name."""
    changes: list[Change] = []
    for file in dict.fromkeys(finding.file for finding in patient.found("duplicate-weights") if finding.file):
        if file in patient.files:
            changes += _merged(patient, file)
    return tuple(changes)


def _merged(patient: Patient, file: str) -> Iterator[Change]:
    model, source = patient.model(file), patient.copy.file(file)
    inputs = {value.name for value in model.graph.input}
    places = {found.location: found.path for found in source.external if found.bytes is not None}
    held: dict[int, tuple[Scope, TensorProto]] = {}
    weights: list[Stored] = []
    for scope in GraphView(model).scopes():
        for tensor in scope.graph.initializer:
            weight = stored(tensor, {**places, source.path.name: Path(source.path)})
            if weight is not None and tensor.name not in inputs:
                weights.append(weight)
                held[id(weight)] = (scope, tensor)
    for group in alike(weights).values():
        copies = [held[id(weight)] for weight in group]
        for mergeable in _together(copies):
            if len(mergeable) > 1:
                yield _tie(patient, file, mergeable, group[0].length)


def _together(copies: list[tuple[Scope, TensorProto]]) -> Iterator[list[tuple[Scope, TensorProto]]]:
    """Copies that may become one: all of them, or those of one graph where a quantised operator reads them."""
    if not any(_for_quantised(scope, tensor) for scope, tensor in copies):
        yield copies
        return
    by_graph: dict[int, list[tuple[Scope, TensorProto]]] = {}
    for scope, tensor in copies:
        by_graph.setdefault(id(scope.graph), []).append((scope, tensor))
    yield from by_graph.values()


def _for_quantised(scope: Scope, tensor: TensorProto) -> bool:
    found = (node.op_type for node, _ in readers(scope.graph, tensor.name))
    return any(kind.startswith(QUANTISED) or kind.endswith(QUANTISED) for kind in found)


def _tie(patient: Patient, file: str, copies: list[tuple[Scope, TensorProto]], length: int) -> Change:
    model = patient.model(file)
    depths = [scope.path.count(",") if scope.outer is not None else -1 for scope, _ in copies]
    (keeper, kept), outermost = copies[depths.index(min(depths))], {id(scope.graph) for scope, _ in copies}
    names = [f"{tensor.name} ({scope.path})" for scope, tensor in copies]
    name = str(kept.name)
    if len(outermost) > 1 and keeper.outer is not None:
        name = fresh(model, name)
        hoisted = model.graph.initializer.add()
        hoisted.CopyFrom(kept)
        hoisted.name = name
    elif len(outermost) > 1:
        # A body that makes a value of that name would be taken for it.
        name = _unshadowed(model, keeper, kept)
    for scope, tensor in copies:
        old = str(tensor.name)
        if scope.graph is keeper.graph and tensor is kept and name == old:
            continue
        index = next(i for i, each in enumerate(scope.graph.initializer) if each is tensor or each == tensor)
        del scope.graph.initializer[index]
        rename_reads(scope.graph, {old: name})
    saved = f"{(len(copies) - 1) * length:,} bytes fewer"
    return Change(file, "initializers", f"{len(copies)} copies: {', '.join(names)}", f"one, {name!r}; {saved}")


def _unshadowed(model: ModelProto, keeper: Scope, kept: TensorProto) -> str:
    name = str(kept.name)
    if any(name in made_in(body) for body in list(graphs(keeper.graph))[1:]):
        old, name = name, fresh(model, f"{name}.tied")
        rename_reads(keeper.graph, {old: name})
        kept.name = name
    return name


REPAIR = Repair(name="tied-weights", mends=("duplicate-weights",), stage="weights", keeps="bits", apply=apply)
