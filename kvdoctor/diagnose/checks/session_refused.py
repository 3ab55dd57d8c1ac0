"""The runtime does not open the file.

What it means: ONNX Runtime refuses to create a session, at every optimization level or only at the higher ones. If the
model runs at a lower level, an optimization of the runtime is at fault, and that level is a workaround. If a step fails
there too, the graph is broken at every level: tools that shrink merged decoders can break their branches.

Reproduce: open the file with `onnxruntime.InferenceSession` at the level that the finding names.

Repair: export again for this runtime, or use a runtime that supports the file's IR version, opsets and operators.
"""

from collections.abc import Mapping

from kvdoctor.analysis.stacks import OnnxFile
from kvdoctor.diagnose.checks._attribution import fails_where_opened
from kvdoctor.diagnose.checks._faults import list_nodes
from kvdoctor.diagnose.checks.invalid_graph import EXPORT_AGAIN, list_problems
from kvdoctor.diagnose.checks.target_limits import is_ruled_out
from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Advice, Fault, Faults, check

UNSUPPORTED = Advice("re-export", "export again for this runtime; its message above says what it does not support")


@check("KV010", "session-refused", "runs")
def session_refused(context: RunContext) -> Faults:
    """Files that the runtime does not open, or only at a lower level."""
    files = {file.name: file for file in context.stack.members}
    for refusal in context.refusals:
        file, opens_at = refusal.file, refusal.opens_at
        refused = files.get(file) if opens_at is None else None
        if refused is not None and (list_problems(refused) or _is_reported_too_new(context, refused)):
            continue  # KV004, or KV401 to KV403, report the reason
        cause = f"an optimization of the runtime fails on the file; level {opens_at!r} opens it"
        fault = Fault("error", (file,), cause, lower(opens_at), file=file)
        if opens_at is None:
            cause = "the runtime refuses the file at every optimization level"
            fault = fault.also(cause=cause, repair=UNSUPPORTED)
        elif fails_where_opened(context):
            cause = f"the runtime refuses the file; level {opens_at!r} opens it, and then a step fails"
            run = context.checked_loop
            place = f" in {run.node.shown}" if run and run.node else ""
            effect = f"opened at level {opens_at!r}, step {run.failed_step if run else '?'} fails{place}"
            fault = fault.also(cause=cause, repair=EXPORT_AGAIN, effects=(effect,), nodes=list_nodes(run))
        yield fault.compare("a model that the runtime opens", list_errors(refusal.errors))


def list_errors(errors: Mapping[str, str]) -> str:
    """The messages of the runtime by optimization level, each once."""
    levels: dict[str, list[str]] = {}
    for level, error in errors.items():
        levels.setdefault(error, []).append(level)
    return "; ".join(f"level {', '.join(names)}: {error}" for error, names in levels.items())


def lower(level: str | None) -> Advice:
    """To open the session at a level at which it opens."""
    return Advice("caller", f"set the graph optimization level to {level!r} when you open the session")


def _is_reported_too_new(context: RunContext, file: OnnxFile) -> bool:
    """Whether a file exceeds the limits of the local runtime, and KV401 to KV403 report it."""
    if context.local_runtime is None or not is_ruled_out(file, context.local_runtime.limits):
        return False
    stays = {stay.target.asked: stay.target for stay in context.target_results}
    held = [stays.get(target.asked, target) for target in context.targets] or [context.local_runtime]
    return any(is_ruled_out(file, target.limits) for target in held)
