"""The structure of a graph violates the ONNX specification.

What it means: the file has a graph that the standard does not allow: a value computed twice or by nothing, an operator
with the wrong number of inputs, a missing attribute. If the runtime refuses the file too, this is the reason, and an
error; if it opens the file anyway, it is a note, and only checked with `--thorough`. `inspect`, which opens no file in
a runtime, reports a suspected warning. Where a value has two definitions, none, or itself as a part, nothing is run.

How it is decided: by the rules of ONNX that ONNX Runtime shares, at every node, so all places are listed (with `-v`, in
JSON and on the page). A step-test asks onnx.checker too, which checks more and stops at the first place: with a graph
input in place of each weight, and without shape inference, which refuses healthy merged decoders: shapes are checked
where the cache contract cannot be read from a graph without branches. Operators or versions that are unknown to the
installed onnx, other domains and local functions are not judged.

Reproduce: `python -c "import onnx; onnx.checker.check_model('MODEL')"`.

Repair: export again, without the tool that changed the graph afterwards.
"""

from typing import Any

from kvdoctor.analysis.stacks import OnnxFile
from kvdoctor.decode.runs import quote_error
from kvdoctor.diagnose.checks.cache_mismatch import require_equal_ranks
from kvdoctor.diagnose.checks.graph_unsorted import needs_later
from kvdoctor.diagnose.context import ContractContext, FileContext, RunContext
from kvdoctor.findings import Advice, Fault, Faults, Severity, check
from kvdoctor.model.flow import FLAWS
from kvdoctor.model.proto import ModelProto
from kvdoctor.model.skeleton import payload_left_out
from kvdoctor.model.traverse import STANDARD, all_nodes, graphs_in
from kvdoctor.model.validity import find_violations

LONGEST = 300
MOST = 100
EXPORT_AGAIN = Advice("re-export", "export again, without the tool that changed the graph afterwards")


@check("KV004", "invalid-graph", "file")
def invalid_graph_unrun(context: FileContext) -> Faults:
    """Files of a model that is not run. Where it is, the runtime's answer decides, in the round `runs`."""
    if context.unrun and context.file.view is not None:
        problems = find_violations(context.file.view)
        if problems:
            yield _report(context.file, problems, "warning").also(confidence="suspected")


@check("KV004", "invalid-graph", "contract")
def unfollowed_graph(context: ContractContext) -> Faults:
    """A value without one definition, or shapes that no operator takes: nothing is read, and nothing is run."""
    flaws = [lack for lack in context.contract.missing if lack.reason in FLAWS]
    found = {lack.subject: f"{lack.subject!r}: {lack.reason}" for lack in flaws}
    if found:
        yield _report(context.stack.main, tuple(found.values()), "error").also(subject=tuple(found))
        return
    require_equal_ranks(context)
    for file in context.stack.members if context.contract.missing else ():
        if file.view is not None and len([*file.view.scopes()]) == 1 and (complaint := _ask_checker(file, shapes=True)):
            yield _report(file, (f"onnx.checker: {complaint}",), "error")


@check("KV004", "invalid-graph", "runs")
def invalid_graph(context: RunContext) -> Faults:
    """Files that the runtime refuses; with --thorough the other files as well."""
    refused = {one.file: one.errors for one in context.refusals if one.opens_at is None}
    for file in context.stack.members:
        if file.name not in refused and not context.thorough:
            continue
        problems, words = list_problems(file), next(iter(refused.get(file.name, {}).values()), None)
        if problems:
            effects = (f"the runtime refuses the file: {quote_error(words)}",) if words else ()
            yield _report(file, problems, "error" if words else "note").also(effects=effects)


def _report(file: OnnxFile, problems: tuple[str, ...], severity: Severity) -> Fault:
    listed = [one if len(one) <= LONGEST else f"{one[: LONGEST - 3]}..." for one in problems[:MOST]]
    left = [f"and {len(problems) - MOST} more"] if len(problems) > MOST else []
    several = len(problems) > 1
    fault = Fault(severity, (file.name,), "the structure of the graph is not valid", EXPORT_AGAIN, file=file.name)
    observed = f"{len(problems)} places break its rules" if several else listed[0]
    fault = fault.compare("a graph that the ONNX specification allows", observed)
    return fault.also(evidence=tuple(listed + left) if several else ())


def list_problems(file: OnnxFile) -> tuple[str, ...]:
    """What the rules and onnx.checker find in a file; empty for a valid graph, and for one that was not read."""
    if file.view is None:
        return ()
    found = find_violations(file.view)
    complaint = None if found else _ask_checker(file)
    return found if complaint is None else (f"onnx.checker: {complaint}",)


def _ask_checker(file: OnnxFile, *, shapes: bool = False) -> str | None:
    """The error of onnx.checker for a file, or None, with its `shapes` as well. Unknown operators are not checked."""
    if file.view is None or any(needs_later(list(scope.graph.node)) for scope in file.view.scopes()):
        return None  # the order of nodes has a check of its own, and the runtime does not mind it
    import onnx

    model = onnx.load_model_from_string(file.view.model.SerializeToString())
    if model.ir_version > onnx.IR_VERSION or not _is_known(model, onnx.defs):
        return None
    _replace_weights(model)
    try:
        onnx.checker.check_model(model)
        if shapes:  # a stale size that is declared for a value is minded by no runtime
            del model.graph.output[:], model.graph.value_info[:]
            onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError) as error:
        return " ".join(str(error).split())
    return None


def _is_known(model: ModelProto, defs: Any) -> bool:
    """Whether every standard operator and version is one of this onnx."""
    versions = {entry.domain: entry.version for entry in model.opset_import}
    version = next((versions[name] for name in STANDARD if name in versions), None)
    if version is None or version > defs.onnx_opset_version():
        return False
    own = {(function.domain, function.name) for function in model.functions}
    standard = (node for node in all_nodes(model) if node.domain in STANDARD)
    return all((node.domain, node.op_type) in own or defs.has(node.op_type) for node in standard)


def _replace_weights(model: ModelProto) -> None:
    """Replace each initializer whose values were not read by a graph input."""
    from onnx import TensorProto, helper

    outer = {value.name for value in model.graph.input}
    for graph in graphs_in(model.graph):
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
