"""The proof of a conversion: the copy's own loops pass, and call by call it computes what the original computes."""

from collections.abc import Iterator

from kvdoctor.contract import CacheContract
from kvdoctor.decode.messages import PairedDone, PairedJob, PairedSide
from kvdoctor.records import record
from kvdoctor.repair.conversions.registry import Converted
from kvdoctor.repair.proof import prove_loops, prove_no_new_finding
from kvdoctor.repair.session import DiagnosisSide, RepairSession
from kvdoctor.report.repair_record import Proof

MOST_NOT_RUN = 2
"""Calls that the base does not run are listed up to this number."""


@record
class Base:
    """What the conversion of a stack is compared with: the original, or the copy of it that was repaired.

    `side` is None if its cache contract could not be read. `repaired` are the names of the checks whose findings were
    repaired before.
    """

    stack: str
    side: PairedSide | None
    repaired: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """It in words."""
        return "the repaired copy" if self.repaired else "the original"


def prove_conversions(
    session: RepairSession, made: Converted, base: Base, before: DiagnosisSide, after: DiagnosisSide
) -> Iterator[Proof]:
    """The claims on a converted stack, and whether they hold; `before` is the diagnosis of the base."""
    yield from prove_loops(base.stack, after, before)
    yield prove_no_new_finding(base.stack, before.report, after.report, made.reveals)
    yield from _compare(session, made, base, after.contract(base.stack))


def _compare(session: RepairSession, made: Converted, base: Base, converted: CacheContract | None) -> Iterator[Proof]:
    """Run both models side by side."""
    stack = base.stack
    what = "logits and caches" if made.rows == "all" else "the last row of logits and the caches"
    claim = f"{what} of every call are those of {base.words}"
    if made.stored:
        kind = made.stored[0].kind
        claim += f", but for the rounding to {kind}"
        if not made.drift:
            yield Proof(stack, claim, False, f"what {kind} costs could not be measured on {base.words}")
            return
    if base.side is None or converted is None or not converted.slots:
        yield Proof(stack, claim, False, "the cache contract of the copy could not be read")
        return
    job = PairedJob(
        base.side,
        PairedSide(stack, session.at.absolute(), converted),
        rows=made.rows,
        keep=made.keep,
        weights=made.weights,
        stored=made.stored,
        allowed=made.allowed,
        drift=made.drift,
        most_tokens=made.most_tokens,
        capacity=made.capacity,
        seed=session.options.seed,
        provider=session.options.provider,
        tolerances=dict(session.options.tolerances),
    )
    answers, failed = session.runtime.answer(job, PairedDone)
    done = answers[0] if answers and not failed else PairedDone(failed=f"no comparison: {failed or 'no answer'}")
    if done.failed:
        yield Proof(stack, claim, False, f"first difference: {done.failed}")
    elif not done.calls:
        reasons = "; ".join(done.not_run[:MOST_NOT_RUN])
        yield Proof(stack, claim, False, f"no call could be compared, {base.words} runs none: {reasons}")
    else:
        yield Proof(stack, claim, True, _describe(done, made, base))
        if made.capacity is not None:
            yield from _describe_capacity(stack, done, made.capacity, converted.new_tokens or 1)


def _describe_capacity(stack: str, done: PairedDone, capacity: int, new: int) -> Iterator[Proof]:
    """A full buffer was compared, and nothing is written behind it; `new` is the least number of new tokens."""
    detail = f"the longest sequence has {done.tokens} tokens, its last call a past of {done.longest}"
    yield Proof(stack, f"a buffer of {capacity} tokens was filled", done.tokens + new > capacity, detail)
    claim = f"a buffer of {capacity} tokens is not written beyond its end"
    yield Proof(stack, claim, bool(done.overflow), done.overflow or "it runs, and nothing says what it computes")


def _describe(done: PairedDone, made: Converted, base: Base) -> str:
    within = "bit for bit" if done.exact else f"within {done.worst:.1e} standard deviations"
    sizes = [
        f"prompts of {_list(done.prompts)}",
        f"steps of {_list(done.chunks)} on pasts up to {done.longest}" if done.chunks else "",
        f"batches of {_list(done.batches)}",
        f"with {_list(made.keep)} rows asked for" if made.keep else "",
        f"{len(made.weights)} outputs whose weights sum to 1" if made.weights else "",
    ]
    if made.stored and not done.exact:
        within += f" (allowed: {made.allowed:.1e}, by what a loop of {base.words} shows that rounds its cache)"
    text = f"{done.calls} calls, {within}: {', '.join(filter(None, sizes))}"
    if done.not_run:
        text += f"; not run by {base.words}: {len(done.not_run)} calls, as {done.not_run[0]}"
    return text


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
