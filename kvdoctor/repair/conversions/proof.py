"""The proof of a conversion: the copy's own loops pass, and call by call it computes what the original computes."""

from collections.abc import Iterator

from kvdoctor.decode.messages import PairedDone, PairedJob, PairedSide
from kvdoctor.errors import WorkerDied
from kvdoctor.repair.conversions.registry import Converted
from kvdoctor.repair.proof import prove_loops
from kvdoctor.repair.session import DiagnosisSide, RepairSession
from kvdoctor.report.repair_record import Proof

MOST_NOT_RUN = 2
"""Calls that the original does not run are listed up to this number."""


def prove_conversions(
    session: RepairSession, stack: str, made: Converted, before: DiagnosisSide, after: DiagnosisSide
) -> Iterator[Proof]:
    """The claims on a converted stack, and whether they hold."""
    yield from prove_loops(stack, after, before)
    known = {finding.name for finding in before.report.findings} | set(made.reveals)
    new = sorted({f.name for f in after.report.findings if f.severity != "note"} - known)
    yield Proof(stack, "no finding that was not there before", not new, ", ".join(new))
    yield _compare(session, stack, made, after)


def _compare(session: RepairSession, stack: str, made: Converted, after: DiagnosisSide) -> Proof:
    """Run both models side by side."""
    what = {"all": "logits and caches", "last": "the last row of logits and the caches"}[made.rows]
    claim = f"{what} of every call are those of the original"
    original, converted = session.before.contract(stack), after.contract(stack)
    if original is None or converted is None or not converted.slots:
        return Proof(stack, claim, False, "the cache contract of the copy could not be read")
    job = PairedJob(
        PairedSide(stack, session.folder.root.absolute(), original),
        PairedSide(stack, session.at.absolute(), converted),
        rows=made.rows,
        keep=made.keep,
        weights=made.weights,
        most_tokens=made.most_tokens,
        seed=session.options.seed,
        provider=session.options.provider,
        tolerances=dict(session.options.tolerances),
    )
    done = PairedDone(failed="the comparison crashed")
    try:
        for event in session.runtime.ask(job):
            done = event if isinstance(event, PairedDone) else done
    except WorkerDied as crash:
        done = PairedDone(failed=f"the worker process ended: {crash.how}")
    if done.failed:
        return Proof(stack, claim, False, f"first difference: {done.failed}")
    if not done.calls:
        return Proof(stack, claim, False, f"no call could be compared: {'; '.join(done.not_run[:MOST_NOT_RUN])}")
    return Proof(stack, claim, True, _describe(done, made))


def _describe(done: PairedDone, made: Converted) -> str:
    within = "bit for bit" if done.exact else f"within {done.worst:.1e} standard deviations"
    sizes = [
        f"prompts of {_list(done.prompts)}",
        f"steps of {_list(done.chunks)} on pasts up to {done.longest}" if done.chunks else "",
        f"batches of {_list(done.batches)}",
        f"with {_list(made.keep)} rows asked for" if made.keep else "",
        f"{len(made.weights)} outputs whose weights sum to 1" if made.weights else "",
    ]
    text = f"{done.calls} calls, {within}: {', '.join(filter(None, sizes))}"
    if done.not_run:
        text += f"; not run by the original: {len(done.not_run)} calls, as {done.not_run[0]}"
    return text


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
