"""The same feed gives different logits.

What it means: two runs of the same call differ: the graph contains dropout or another source of random numbers, or the
export was made in training mode. It is a warning if an active dropout is removed when the local runtime optimizes the
graph: at its level `off`, and in other runtimes, the logits are random.

How it is decided: the reference run is made twice, and so is one decode step. The loop of a graph that takes one token
a call is made twice, and once more in another process, in turn with a second sequence. An active Dropout is read from
the graph: its `training_mode` is the constant true, and its ratio is not 0.

Reproduce: `kvdoctor step-test MODEL -v`, experiment `same-feed`.

Repair: export again in evaluation mode.

Source: the ONNX operator schema, Dropout since version 12.
"""

from collections.abc import Iterator

from kvdoctor.diagnose.checks._attribution import leading_cause
from kvdoctor.diagnose.checks._faults import CauseText, report_cause
from kvdoctor.diagnose.context import ContractContext, RunContext
from kvdoctor.findings import Advice, Fault, check
from kvdoctor.model.operators import has
from kvdoctor.model.proto import NodeProto, TensorProto
from kvdoctor.model.traverse import name_node, normalize_domain
from kvdoctor.model.view import Scope
from kvdoctor.report.wording import shorten_names

WORDS = CauseText(
    cause="two runs with the same feed give different logits",
    declared="the same logits for the same feed",
    advice="export again in evaluation mode (`model.eval()`)",
)


@check("KV314", "nondeterministic", "runs")
def nondeterministic(context: RunContext) -> Iterator[Fault]:
    """Reference runs that differ from themselves."""
    yield from report_cause(context, "nondeterministic", WORDS)


@check("KV314", "nondeterministic", "contract")
def dropout_left_on(context: ContractContext) -> Iterator[Fault]:
    """One fault for each file with active dropouts, unless a run already shows their effect."""
    leading = leading_cause(context)
    if leading is not None and leading[0] == "nondeterministic":
        return
    for file in context.stack.members:
        scopes = tuple(file.view.scopes()) if file.view else ()
        nodes = ((scope, node) for scope in scopes for node in scope.graph.node)
        names = tuple(name_node(node) for scope, node in nodes if _is_active_dropout(scope, node))
        if names:
            cause = "a dropout is active: a runtime that does not remove it drops other values in each call"
            fault = Fault("warning", names, cause, Advice("re-export", WORDS.advice), file=file.name, nodes=names)
            fault = fault.compare(WORDS.declared, "its input training_mode is the constant true")
            yield fault.also(where=f'{file.name}, Dropout "{shorten_names(names)}"')


def _is_active_dropout(scope: Scope, node: NodeProto) -> bool:
    if not has(node.op_type, "dropout") or normalize_domain(node.domain) or len(node.input) < 3:
        return False
    mode, ratio = scope.constant(node.input[2]), scope.constant(node.input[1]) if node.input[1] else None
    return mode is not None and _is_nonzero(mode) and (ratio is None or _is_nonzero(ratio))


def _is_nonzero(tensor: TensorProto) -> bool:
    """Whether a scalar is not zero; one whose payload was not read counts as zero."""
    return any(tensor.raw_data) or any((*tensor.int32_data, *tensor.float_data))
