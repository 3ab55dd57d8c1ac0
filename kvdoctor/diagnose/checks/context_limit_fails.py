"""A sequence length that is declared usable fails, or is wrong.

What it means: a config, or the size of a buffer, declares how many tokens a sequence may have, but the loop fails or
differs from the reference run before that: a position table, a rotary table or a mask ends earlier. Or positions stop
counting: from some token on all tokens have the same position, or the positions from 0 again (a Cast to uint8), with
and without the cache, so that both agree and both are wrong; also where no length is declared, unless a table of
positions ends there. A step that fails beyond the declared length is not a fault.

How it is decided: the loop is run to the declared length. One token at each of 50 positions must have a different key
in the first layer at every position, or, if keys do not encode positions, at none; also beyond each length that the
graph compares with, or at which a type to which it casts positions ends or rounds (float16: 2,048).

Reproduce: `kvdoctor step-test MODEL --thorough -v`, experiments `full-context` and `numbering`.

Repair: export again with tables of the declared length, or declare the length that the graph supports. `--require
full-context` makes the finding an error.
"""

from dataclasses import replace

from kvdoctor.analysis.thresholds import find_thresholds
from kvdoctor.diagnose.checks._attribution import AT_LENGTHS, cause_at_length, find_faulty_uses, leave_to_other
from kvdoctor.diagnose.checks._faults import CauseText, build_fault, list_nodes
from kvdoctor.diagnose.checks.side_cars.graph_sizes import positions
from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Faults, check

NUMBERS = CauseText(
    cause="from position {} on, tokens get positions of earlier ones, before the declared length",
    declared="a different position for each token, up to the declared length",
    advice="export again with tables of the declared length, or declare the length that the graph supports",
)
UNDECLARED = replace(
    NUMBERS,
    cause="from position {} on, tokens get positions of earlier ones, cache or not; no file declares a limit",
    declared="a different position for each token",
    advice="export again with wider positions or longer tables, or declare the length that the graph supports",
)


@check("KV209", "context-limit-fails", "runs", needs=("full-context", "numbering"))
def context_limit_fails(context: RunContext) -> Faults:
    """The full context, where fewer tokens work."""
    usable, rows = context.contract.usable_length, positions(context.stack, context.contract)
    leave_to_other(context)
    if usable is not None and rows is not None and rows < usable:
        return  # the config declares more than the rows of the position table, which KV020 reports
    numbering = context.find_run("numbering")
    at_lengths = [run for run, _ in find_faulty_uses(context, "differs") if run.experiment in AT_LENGTHS]
    cause = numbering.cause if numbering is not None else None
    if numbering is not None and cause is not None and cause.name == "context-limit-fails" and not at_lengths:
        words, first = NUMBERS if usable is not None else UNDECLARED, cause.from_length
        dataflow, graph = context.stack.main.dataflow, context.contract.graph("decode")
        ends = [one for one in find_thresholds(dataflow.flow, graph) if one.length <= first] if dataflow else []
        places = (f"positions in {ends[-1].node} go up to {ends[-1].length - 1:,} only",) if ends else ()
        fault = build_fault(context, numbering, replace(words, cause=words.cause.format(first)), "warning")
        yield fault.also(evidence=(*places, *fault.evidence))
        return
    if usable is None:
        return
    for outcome in ("failed", "differs"):
        for run, use in find_faulty_uses(context, outcome):
            if run.experiment != "full-context" or not run.steps or cause_at_length(context, run) is not None:
                continue  # reported as what changes from that length on
            last = run.wrong_step or run.steps[-1]
            tokens = last.past_length + last.new_tokens
            what = f"a sequence of {tokens} tokens is declared usable, but {'fails' if run.error else 'is wrong'}"
            declared = f"{usable} tokens, by the config or the smallest buffer"
            words = replace(NUMBERS, cause=what, declared=declared)
            fault = build_fault(context, run, words, use.severity).also(error=run.error, use=use.required)
            place, nodes = run.node.shown if run.node else fault.where, list_nodes(run) or fault.nodes
            observed = f"step {run.failed_step}: {run.error}" if run.error else fault.observed
            yield fault.also(where=place, observed=observed, nodes=nodes)
