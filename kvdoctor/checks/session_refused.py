"""The runtime does not open the file.

What it means: ONNX Runtime refuses to make a session, at every optimisation level or only at the higher ones. Where the
model runs at a lower level, an optimisation of the runtime is at fault, and that level is a way round it; where a step
fails there too, the graph is broken at every level: tools that shrink merged decoders do that to their branches.

Reproduce: open the file with `onnxruntime.InferenceSession` at the level that the finding names.

Repair: export again for this runtime, or use a runtime that takes the file's IR version, opsets and operators.
"""

from collections.abc import Iterator

from kvdoctor.case import Case
from kvdoctor.checks.invalid_graph import refusal_by_rule
from kvdoctor.checks.target_limits import is_ruled_out
from kvdoctor.findings import Advice, Fault, check
from kvdoctor.stacks import OnnxFile


@check("KV010", "session-refused", "runs")
def session_refused(case: Case) -> Iterator[Fault]:
    """Files that no session could be made of, or only at a lower level."""
    files = {file.name: file for file in case.stack.files.values()} if case.stack else {}
    for file, errors, opens_at in case.refusals:
        if opens_at is None and file in files and refusal_by_rule(files[file]) is not None:
            continue  # KV004 says why
        if opens_at is None and file in files and _is_too_new(case, files[file]):
            continue  # KV401 to KV403 say why
        levels: dict[str, list[str]] = {}
        for level, error in errors.items():
            levels.setdefault(error, []).append(level)
        text = "; ".join(f"level {', '.join(names)}: {error}" for error, names in levels.items())
        follows: tuple[str, ...] = ()
        if opens_at is None:
            cause = "the runtime refuses the file at every optimisation level"
            advice = Advice("re-export", "export again for this runtime; its own words above say what it does not take")
        elif fails_where_opened(case):
            cause = f"the runtime refuses the file; where level {opens_at!r} opens it, a step fails"
            advice = Advice("re-export", "export again, without whatever tool changed the graph afterwards")
            run = case.judged
            place = f' in {run.node.op} "{run.node.name}"' if run and run.node else ""
            follows = (f"opened at level {opens_at!r}, step {run.failed_step if run else '?'} fails{place}",)
        else:
            cause = f"an optimisation of the runtime fails on the file; level {opens_at!r} opens it"
            advice = Advice("caller", f"set the graph optimisation level to {opens_at!r} when you open the session")
        yield Fault(
            severity="error",
            file=file,
            subject=(file,),
            where=f"file {file}",
            promised="a model that the runtime opens",
            observed=text,
            cause=cause,
            advice=advice,
            follows=follows,
        )


def _is_too_new(case: Case, file: OnnxFile) -> bool:
    """Whether a file asks for more than the runtime here takes, and is told so: for it, or for a target."""
    if case.here is None or not is_ruled_out(file, case.here.limits):
        return False
    stays = {stay.target.asked: stay.target for stay in case.stays}
    held = [stays.get(target.asked, target) for target in case.targets] or [case.here]
    return any(is_ruled_out(file, target.limits) for target in held)


def fails_where_opened(case: Case) -> bool:
    """Whether a file that opens at a lower level only fails there as well: the graph is broken at every level."""
    opened = any(opens_at is not None for _, _, opens_at in case.refusals)
    return opened and case.judged is not None and case.judged.outcome == "failed"
