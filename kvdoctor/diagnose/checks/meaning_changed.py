"""An operator computes something else in a target's release than in newer ones.

What it means: the target opens the file and runs it, by an older meaning of an operator. The model then differs from
its checkpoint, often only beyond some length: a window is one entry longer, hidden tokens are attended to.

How it is decided: by a table of operators whose meaning changed between two releases on the CPU, of which each row was
run on both sides (docs/targets.md). Reported without a run, where the old meaning is wrong for every decoder: a window,
`softcap` with a mask, `nonpad_kv_seqlen`. Where a run under the target differs, that finding names the row.

Reproduce: `kvdoctor inspect MODEL --target onnxruntime==1.22.0`

Repair: use a release from the named one on, or export again without that use of the operator.

Source: the pull requests of ONNX Runtime that the table names.
"""

from collections.abc import Iterator, Set

from kvdoctor.decode.runs import WRONG, Run
from kvdoctor.diagnose.checks.target_limits import is_ruled_out
from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Advice, Fault, Faults, check
from kvdoctor.report.wording import shorten_names
from kvdoctor.runtime.targets import TargetResult
from kvdoctor.runtime.targets.limits import Meaning, describe_operator, find_meanings


@check("KV406", "meaning-changed", "targets")
def meaning_changed(context: RunContext) -> Faults:
    """An operator that computes something else in a target's release than in newer ones."""
    right = {run.experiment for run in context.runs if run.outcome not in WRONG}
    seen = {result.target for result in context.target_results if _differs(result, right)}
    targets = [target for target in context.targets if target not in seen]
    for file in context.stack.members:
        for change, nodes in (find_meanings(file.view) if file.view is not None else {}).items():
            older = [t for t in targets if t.is_after(change) is False and not is_ruled_out(file, t.limits)]
            if not (older and change.predicts):
                continue
            named = shorten_names(tuple(target.words for target in older))
            operator = describe_operator(change.operator)
            cause = f"{operator} computes something else with {named} than from {change.since} on"
            advice = Advice("re-export", f"use onnxruntime {change.since} or newer, or export without that use of it")
            fault = Fault("warning", nodes, cause, advice, apart=tuple(target.asked for target in older))
            fault = fault.compare(change.after, f"{shorten_names(nodes)} with {named}", evidence=(str(change),))
            yield fault.also(file=file.name, nodes=nodes, where=f"file {file.name}", confidence="suspected")


def list_changes(context: RunContext, result: TargetResult, run: Run | None) -> Iterator[str]:
    """What changed its meaning between the local runtime and the target, and concerns the calls of a run."""
    here, there, steps = context.local_runtime, result.target, run.steps if run is not None else ()
    met = {
        "all": True,
        "chunk": any(step.past_length and step.new_tokens > 1 for step in steps),
        # Of `batch-rows` the steps are the single rows.
        "batch": (run is not None and run.experiment == "batch-rows")
        or any(one.shape[0] > 1 for step in steps for one in step.fed.values() if len(one.shape) > 1),
    }
    changes: dict[Meaning, None] = {}
    for file in context.stack.members:
        changes |= dict.fromkeys(find_meanings(file.view) if file.view is not None else ())
    for change in changes:
        if here is not None and met[change.calls] and {here.is_after(change), there.is_after(change)} == {True, False}:
            yield str(change)


def _differs(result: TargetResult, right: Set[str]) -> bool:
    """Whether a run that is right locally is wrong under the target, or has other logits."""
    wrong = any(run.outcome in WRONG and run.experiment in right for run in result.runs)
    return wrong or any(gap.verdict == "fail" for gap in result.gaps.values())
