"""The rules of ONNX refuse the structure of a graph.

What it means: onnx.checker finds a graph that the standard does not allow: a value made twice, an operator with the
wrong number of inputs, an attribute that is missing. Where the runtime opens the file all the same it is a note, and
only looked for with `--thorough`; where the runtime refuses it too, this is the reason, and an error.

How it is decided: onnx.checker is asked about the structure, with a graph input in the place of each weight, and
without shape inference, which refuses healthy merged decoders. Operators or versions that this onnx does not know are
not held against the graph.

Reproduce: `python -c "import onnx; onnx.checker.check_model('MODEL')"`.

Repair: export again, without the tool that changed the graph afterwards.
"""

from collections.abc import Iterator
from typing import Any

from kvdoctor.case import Case
from kvdoctor.checks.graph_unsorted import needs_later
from kvdoctor.findings import Advice, Fault, check
from kvdoctor.graph import bodies_of
from kvdoctor.onnx_schema import ModelProto
from kvdoctor.skeleton import payload_left_out
from kvdoctor.stacks import OnnxFile

STANDARD = ("", "ai.onnx")
LONGEST = 300


@check("KV004", "invalid-graph", "runs")
def invalid_graph(case: Case) -> Iterator[Fault]:
    """Files that are refused, and, if all is to be tried, the others."""
    assert case.stack is not None  # noqa: S101 - asked only where there is a stack
    refused = {file: errors for file, errors, opens_at in case.refusals if opens_at is None}
    for file in case.stack.files.values():
        if file.name not in refused and not case.thorough:
            continue
        complaint = refusal_by_rule(file)
        if complaint is None:
            continue
        words = next(iter(refused.get(file.name, {}).values()), None)
        yield Fault(
            severity="error" if words else "note",
            file=file.name,
            subject=(file.name,),
            where=f"file {file.name}",
            promised="a graph that the rules of ONNX allow",
            observed=f"onnx.checker: {complaint}",
            cause="the structure of the graph is not valid",
            advice=Advice("re-export", "export again, without the tool that changed the graph afterwards"),
            follows=(f"the runtime refuses the file: {words}",) if words else (),
        )


def refusal_by_rule(file: OnnxFile) -> str | None:
    """What onnx.checker says against the structure of a file, or None. It is asked only about what it knows."""
    if file.view is None or any(needs_later(list(scope.graph.node)) for scope in file.view.scopes()):
        return None  # the order of nodes has a check of its own, and the runtime does not mind it
    import onnx

    model = onnx.load_model_from_string(file.view.model.SerializeToString())
    if model.ir_version > onnx.IR_VERSION or not _is_known(model, onnx.defs):
        return None
    _without_weights(model)
    try:
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, ValueError) as error:
        return " ".join(str(error).split())[:LONGEST]
    return None


def _is_known(model: ModelProto, defs: Any) -> bool:
    """Whether every standard operator and version is one of this onnx."""
    versions = {entry.domain: entry.version for entry in model.opset_import}
    version = next((versions[name] for name in STANDARD if name in versions), None)
    if version is None or version > defs.onnx_opset_version():
        return False
    own = {(function.domain, function.name) for function in model.functions}
    graphs, nodes = [model.graph], [node for function in model.functions for node in function.node]
    while graphs:
        nodes += graphs.pop().node
        while nodes:
            node = nodes.pop()
            if node.domain in STANDARD and (node.domain, node.op_type) not in own and not defs.has(node.op_type):
                return False
            graphs += [body for attribute in node.attribute for body in bodies_of(attribute)]
    return True


def _without_weights(model: ModelProto) -> None:
    """Put a graph input in the place of each initializer whose values are not here."""
    from onnx import TensorProto, helper

    outer = {value.name for value in model.graph.input}
    graphs = [model.graph]
    while graphs:
        graph = graphs.pop()
        absent = [t for t in graph.initializer if payload_left_out(t) or t.data_location == TensorProto.EXTERNAL]
        for tensor in absent:
            graph.initializer.remove(tensor)
            if tensor.name not in outer:
                outer.add(tensor.name)
                model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("t") and (payload_left_out(attribute.t) or attribute.t.data_location):
                    kept = attribute.t
                    attribute.t.CopyFrom(TensorProto(name=kept.name, data_type=TensorProto.FLOAT, dims=[0]))
                graphs += bodies_of(attribute)
