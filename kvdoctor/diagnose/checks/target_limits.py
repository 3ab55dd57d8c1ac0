"""The file exceeds a limit of a target: its IR version, its opset, or an operator.

How it is decided: by a table that was measured by opening small models in every release (docs/targets.md), for each
`--target`. Without a target, the installed runtime is compared if it refuses the file, and `inspect` compares with the
newest release of the table. The limits of a release that is not in the table are measured when it is run. If the target
is run, the run decides: a file that it opens is not reported.

Reproduce: `kvdoctor inspect MODEL --target onnxruntime==1.16.3`, or open the file with that release.

Repair: `kvdoctor re-export MODEL -o FIXED --target ...` lowers IR version and opset where the operators of the
graph allow, and proves the copy under the target. It names what cannot be lowered, and the export that would help.

Source: ONNX Runtime, docs/Versioning.md, for the rule; the numbers are measured.
"""

from collections.abc import Callable, Iterator

from kvdoctor.analysis.stacks import OnnxFile
from kvdoctor.decode.runs import quote_error
from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Fault, Faults, check
from kvdoctor.records import record
from kvdoctor.report.wording import shorten_names
from kvdoctor.runtime.targets import Target, TargetResult, of_release
from kvdoctor.runtime.targets.limits import Demands, ReleaseLimits, newest_limits, read_demands


@record
class LimitExceeded:
    """A file that exceeds a limit of a target; `text` is the error of the target, None if it was not run."""

    file: str
    target: Target
    demands: Demands
    limits: ReleaseLimits
    text: str | None


def is_ruled_out(file: OnnxFile, limits: ReleaseLimits | None) -> bool:
    """Whether a release does not open a file, by its limits."""
    if file.view is None or limits is None:
        return False
    return bool(read_demands(file.view).first_lacking(limits))


@check("KV401", "ir-too-new", "targets")
def ir_too_new(context: RunContext) -> Faults:
    """The IR version is newer than a target supports.

    What it means: every release of onnxruntime has a largest IR version that it opens. A current exporter, or a tool
    that saved the file again, writes a newer one, often without need.
    """
    found = _find_excesses(context, lambda asked, limits: asked.ir > limits.ir)
    what = f"IR version {max((excess.demands.ir for excess in found), default=0)}"
    yield from _report_excesses(context, found, what, lambda one: f"supports up to {one.limits.ir}", confirmed=True)


@check("KV402", "opset-too-new", "targets")
def opset_too_new(context: RunContext) -> Faults:
    """The opset is newer than a target supports.

    What it means: every release of onnxruntime has a largest ONNX opset that it opens. A current exporter writes a
    newer one, often without need.
    """
    found = _find_excesses(context, lambda asked, limits: asked.opset > limits.opset)
    what = f"opset {max((excess.demands.opset for excess in found), default=0)}"
    yield from _report_excesses(context, found, what, lambda excess: f"supports up to {excess.limits.opset}")


@check("KV403", "operator-unsupported", "targets")
def operator_unsupported(context: RunContext) -> Faults:
    """The graph has an operator, or an attribute of one, that a target does not support on the CPU.

    What it means: every release of onnxruntime has a fixed set of operators beyond the standard, with fixed inputs and
    attributes. The graph uses one that the target does not have.
    """
    found = _find_excesses(context, lambda asked, limits: bool(asked.lacking(limits)))
    names = tuple(dict.fromkeys(name for excess in found for name in excess.demands.describe_lacking(excess.limits)))
    what = shorten_names(names) if names else ""
    lacking = sorted({name for excess in found for name in excess.demands.lacking(excess.limits)})

    def describe(excess: LimitExceeded) -> str:
        return f"has no {', no '.join(excess.demands.describe_lacking(excess.limits))} with these inputs and attributes"

    for fault in _report_excesses(context, found, what, describe):
        yield fault.also(apart=(*fault.apart, *lacking))


def _report_excesses(
    context: RunContext,
    found: list[LimitExceeded],
    what: str,
    takes: Callable[[LimitExceeded], str],
    confirmed: bool = False,
) -> Faults:
    """One finding for all files and targets."""
    if not found:
        return
    files = tuple(dict.fromkeys(excess.file for excess in found))
    targets = {excess.target: excess for excess in found}
    refused = next((excess for excess in found if excess.text is not None), None)
    observed = [f"{shorten_names(files)}: {what}"]
    observed += [f"{target.words} {takes(excess)}" for target, excess in targets.items()]
    named = shorten_names(tuple(target.words for target in targets))
    advice = "or export again for that runtime: an older opset, and no contrib operators newer than it"
    fault = Fault("error", files, f"{what}: too new for {named}", context.advise_graph_repair(advice))
    fault = fault.compare(f"a model for {named}", "; ".join(observed)).also(where=f"file {shorten_names(files)}")
    fault = fault.also(apart=tuple(target.asked for target in targets if target in context.targets))
    fault = fault.also(file=context.decode_file if context.decode_file in files else files[0])
    if refused is not None:
        fault = fault.also(effects=(f"{refused.target.words} refuses the file: {quote_error(refused.text or '')}",))
    yield fault.also(confidence="confirmed" if confirmed or refused is not None else "suspected")


def _find_excesses(context: RunContext, exceeds: Callable[[Demands, ReleaseLimits], bool]) -> list[LimitExceeded]:
    """The files that exceed a limit, by target, except files that the target opened anyway."""
    views = {file.name: file.view for file in context.stack.members if file.view is not None}
    asked = {name: read_demands(view) for name, view in views.items()}
    found = []
    for target, result in _list_targets(context):
        limits = target.limits
        for name, wanted in asked.items():
            if limits is None or not exceeds(wanted, limits):
                continue
            text = result.refused(name) if result is not None else None
            is_open = result is not None and text is None and (result.is_local or result.took_steps)
            if not is_open:
                found.append(LimitExceeded(name, target, wanted, limits, text))
    return found


def _list_targets(context: RunContext) -> Iterator[tuple[Target, TargetResult | None]]:
    """The targets that were asked for, else the local runtime; each with its result, if it was run."""
    results = {result.target.asked: result for result in context.target_results if result.not_run is None}
    if context.targets:
        for target in context.targets:
            result = results.get(target.asked)
            # One that was run may have been measured there.
            yield (result.target if result is not None else target), result
    elif context.local_runtime is not None:
        yield context.local_runtime, TargetResult(context.local_runtime, context.runs, context.refusals, is_local=True)
    else:
        yield of_release(newest_limits().release), None
