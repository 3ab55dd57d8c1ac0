"""The same feed gives different logits.

What it means: two runs of the same call differ: dropout or another source of random numbers was left in the graph, or
the export was made in training mode. A warning where a dropout is on that the runtime here takes out when it optimises:
at its level `off`, and in other runtimes, the logits are left to chance.

How it is decided: the reference run is made twice, and so is one decode step. A Dropout that is on is read off the
graph: its `training_mode` is the constant true, and its ratio is not 0.

Reproduce: `kvdoctor step-test MODEL -v`, experiment `same-feed`.

Repair: export again in evaluation mode.

Source: the ONNX operator schema, Dropout since version 12.
"""

from collections.abc import Iterator

from kvdoctor.case import Case, first_and_count, leading_cause
from kvdoctor.checks.caused import Words, caused
from kvdoctor.findings import Advice, Fault, check
from kvdoctor.graph import Scope
from kvdoctor.onnx_schema import NodeProto, TensorProto

WORDS = Words(
    cause="the same feed twice gives different logits",
    promised="the same logits for the same feed",
    advice="export again in evaluation mode (`model.eval()`)",
)


@check("KV314", "nondeterministic", "contract", "runs")
def nondeterministic(case: Case) -> Iterator[Fault]:
    """Reference runs that differ from themselves, and dropouts that are on."""
    if case.declared_faults is not None:
        yield from caused(case, "nondeterministic", WORDS)
        return
    leading = leading_cause(case)
    if leading is None or leading[0] != "nondeterministic":
        yield from _left_on(case)


def _left_on(case: Case) -> Iterator[Fault]:
    """One fault for each file of the stack that holds dropouts which are on."""
    for file in case.stack.files.values() if case.stack else ():
        scopes = tuple(file.view.scopes()) if file.view else ()
        names = tuple(
            node.name or node.output[0] for scope in scopes for node in scope.graph.node if _drops(scope, node)
        )
        if names:
            yield Fault(
                severity="warning",
                file=file.name,
                subject=names,
                where=f'{file.name}, Dropout "{first_and_count(names)}"',
                promised=WORDS.promised,
                observed="its input training_mode is the constant true",
                cause="a dropout is on: a runtime that does not take it out drops other values in each call",
                advice=Advice("re-export", WORDS.advice),
            )


def _drops(scope: Scope, node: NodeProto) -> bool:
    if node.op_type != "Dropout" or node.domain not in ("", "ai.onnx") or len(node.input) < 3:
        return False
    mode, ratio = scope.constant(node.input[2]), scope.constant(node.input[1]) if node.input[1] else None
    return mode is not None and _is_nonzero(mode) and (ratio is None or _is_nonzero(ratio))


def _is_nonzero(tensor: TensorProto) -> bool:
    """Whether a scalar is not zero; one whose payload was not read counts as zero."""
    return any(tensor.raw_data) or any((*tensor.int32_data, *tensor.float_data))
