"""The table of contents of `diff`: both sides, stack by stack, and the verdict."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvdoctor.case import first_and_count
from kvdoctor.comparing.contract_diff import contract_deltas
from kvdoctor.comparing.findings_diff import findings_diff, needs_no_run
from kvdoctor.comparing.graph_diff import files_of, graph_deltas
from kvdoctor.comparing.grouping import grouped
from kvdoctor.comparing.logits import CannotCompare, is_less, logits_of_both
from kvdoctor.comparing.outcomes import HERE, outcomes
from kvdoctor.comparing.sides import Seen, both
from kvdoctor.errors import UsageError
from kvdoctor.findings import Finding, Selection
from kvdoctor.options import Options
from kvdoctor.report.diff_document import (
    Delta,
    DiffReport,
    DiffVerdict,
    FindingDiff,
    Logits,
    NotCompared,
    Numbers,
    StackDiff,
)
from kvdoctor.report.document import Report, StackFacts, means_incomplete

NO_RUNS = ("inspect",)
"""Commands whose reports hold no runs."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for. B is worse where its logits do not `agree` with those of A that far; None asks for nothing."""

    a: str
    b: str
    static: bool = False
    agree: Numbers | None = None


@dataclass
class _Pair:
    """Both sides, and what comparing them brought so far. `reasons` say why B is worse."""

    a: Seen
    b: Seen
    request: Request
    options: Options
    not_compared: list[NotCompared] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    @property
    def ran(self) -> bool:
        """Whether there are runs to be compared."""
        return not self.request.static and bool(self.a.report.runs and self.b.report.runs)


def compare(request: Request, options: Options) -> DiffReport:
    """Hold B against A.

    Raises:
        UsageError: there is nothing at a path, or a report cannot be read, or was made for another loop.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    if request.static and request.agree is not None:
        raise UsageError("--agree asks for logits, and with --static nothing is run: leave one of them out")
    with both(request.a, request.b, options, request.static) as (a, b):
        pair = _Pair(a, b, request, options)
        pairs = list(paired(a.report.stacks, b.report.stacks))
        stacks = tuple(_stack(pair, old, new) for old, new in pairs)
        names = {new.name: old.name for old, new in pairs if old is not None and new is not None}
        old_findings, new_findings = _findings(pair, a.report), _findings(pair, b.report)
        # Of a side that could not be read nothing is known, so that nothing is new on the other.
        fail_on = options.fail_on if a.report.stacks else "never"
        findings = tuple(findings_diff(old_findings, new_findings, names, fail_on))
        pair.not_compared += [*_open_ends(pair, "A", a.report), *_open_ends(pair, "B", b.report)]
        pair.reasons += [one.because for one in findings if one.effect == "worse"]
        return DiffReport(
            arguments=_arguments(request, options),
            seed=options.seed,
            verdict=_verdict(pair, stacks, findings),
            a=a.facts(),
            b=b.facts(),
            reasons=tuple(dict.fromkeys(pair.reasons)),
            stacks=stacks,
            findings=findings,
            not_compared=tuple(dict.fromkeys(pair.not_compared)),
            notes=tuple(_notes(a.report, b.report)),
            measured={"a": a.report.measured, "b": b.report.measured},
        )


def paired(
    a: tuple[StackFacts, ...], b: tuple[StackFacts, ...]
) -> Iterator[tuple[StackFacts | None, StackFacts | None]]:
    """Stacks that take one another's place: by name, then by layout, then the only ones that are left."""
    left, pairs = list(b), dict[str, StackFacts]()
    for likeness in ("name", "layout"):
        for old in a:
            alike = [new for new in left if getattr(new, likeness) == getattr(old, likeness)]
            if alike and old.name not in pairs:
                pairs[old.name] = alike[0]
                left.remove(alike[0])
    alone = [old for old in a if old.name not in pairs]
    if len(alone) == len(left) == 1:
        pairs[alone[0].name] = left.pop()
    yield from ((old, pairs.get(old.name)) for old in a)
    yield from ((None, new) for new in left)


def _stack(pair: _Pair, old: StackFacts | None, new: StackFacts | None) -> StackDiff:
    """One stack, on both sides."""
    if old is None or new is None:
        if old is not None and pair.b.report.stacks:
            pair.reasons.append(f"contract broken: the stack {old.name} ({old.layout}) is gone")
        return StackDiff(old.name if old else None, new.name if new else None)
    contract: tuple[Delta, ...] = ()
    if old.contract is None or new.contract is None:
        pair.not_compared.append(NotCompared(new.name, "contract", "one side has none", essential=True))
    else:
        contract = contract_deltas(old.contract, new.contract)
    pair.reasons += [f"contract broken: {_in_short(one)}" for one in contract if one.effect == "worse"]
    files = files_of(old, pair.a.report.model.files), files_of(new, pair.b.report.model.files)
    found = StackDiff(old.name, new.name, contract, grouped(graph_deltas(*files)))
    return _with_behaviour(pair, found, old.name, new.name) if pair.ran else found


def _with_behaviour(pair: _Pair, found: StackDiff, old: str, new: str) -> StackDiff:
    """A stack with what its runs showed on both sides."""
    experiments = tuple(outcomes(pair.a.report, pair.b.report, old, new))
    for one in experiments:
        if one.effect == "worse":
            under = f" under {one.target}" if one.target != HERE else ""
            pair.reasons.append(f"parity lost: {one.experiment} {one.a} -> {one.b}{under}")
    logits = _logits(pair, old, new)
    return StackDiff(found.a, found.b, found.contract, found.graph, experiments, logits)


def _logits(pair: _Pair, old: str, new: str) -> Logits | None:
    """The numbers of both, and whether that is as close as was asked for."""
    agree, reason = pair.request.agree, ""
    if pair.a.stored or pair.b.stored:
        reason = "a report holds no logits; give both models"
    else:
        try:
            logits, judged = logits_of_both(pair.a.side, pair.b.side, old, new)
        except CannotCompare as error:
            reason = str(error)
    if reason:
        pair.not_compared.append(NotCompared(new, "logits", reason, essential=agree is not None))
        return None
    if agree is not None and is_less(logits.agree, agree):
        if agree == "logits" and judged == "ambiguous":
            reason = "the difference of logits lies between noise and fault"
            pair.not_compared.append(NotCompared(new, "logits", reason, essential=True))
        else:
            pair.reasons.append(f"logits of {new} do not agree as was asked for: --agree {agree}")
    return logits


def _findings(pair: _Pair, report: Report) -> list[Finding]:
    """The findings that both sides can have: by the selections of both, and by what both ran."""
    selections = [pair.options.selection]
    for side in (pair.a.report, pair.b.report):
        asked = side.arguments
        selections.append(Selection(tuple(asked.get("select") or ()), tuple(asked.get("ignore") or ())))
    static = pair.request.static or any(side.report.command in NO_RUNS for side in (pair.a, pair.b))
    return [
        finding
        for finding in report.findings
        if all(selection.takes(finding.code, finding.name) for selection in selections)
        and (not static or needs_no_run(finding))
    ]


def _open_ends(pair: _Pair, name: str, report: Report) -> Iterator[NotCompared]:
    """What is open on a side. What A leaves open can make B no worse; what B does, keeps it from being better."""
    static = pair.request.static
    if not report.stacks:
        why = next((entry.reason for entry in report.not_checked), "") or "nothing could be read"
        yield NotCompared(None, "contract", f"{name}: {why}", essential=True)
    elif report.command in NO_RUNS and not static:
        reason = f"{name} is a report of `kvdoctor {report.command}`, without runs; --static compares the rest"
        yield NotCompared(None, "behaviour", reason, essential=True)
    for entry in report.not_checked:
        if entry.essential:
            yield NotCompared(entry.stack, entry.code, f"{name}: {entry.reason}", name == "B" and not static)
    for finding in _findings(pair, report):
        if means_incomplete(finding.code):
            yield NotCompared(finding.stack, finding.code, f"{name}: {finding.cause}", essential=name == "B")


def _verdict(pair: _Pair, stacks: tuple[StackDiff, ...], findings: tuple[FindingDiff, ...]) -> DiffVerdict:
    if pair.reasons:
        return "worse"
    if any(entry.essential for entry in pair.not_compared):
        return "incomplete"
    effects = {one.effect for one in findings}
    for stack in stacks:
        effects |= {one.effect for one in (*stack.contract, *stack.graph)} | {one.effect for one in stack.experiments}
    if "better" in effects:
        return "better"
    other = any(one.state != "same" for one in findings) or any(map(_is_other, stacks))
    return "different" if other else "equal"


def _is_other(stack: StackDiff) -> bool:
    """Whether anything of a stack is other on the two sides."""
    outcome = any(one.a != one.b for one in stack.experiments)
    numbers = stack.logits is not None and stack.logits.agree != "bits"
    return stack.a is None or bool(stack.contract or stack.graph) or outcome or numbers


def _notes(a: Report, b: Report) -> Iterator[str]:
    old, new = a.environment.get("onnxruntime"), b.environment.get("onnxruntime")
    if old and new and old != new:
        yield f"A was run under onnxruntime {old}, B under {new}: what is other may be the runtime's"
    if a.seed != b.seed:
        yield f"A was run with seed {a.seed}, B with {b.seed}"


def _in_short(delta: Delta) -> str:
    """`input position_ids is new`, `slot past.0.key and 3 more: carry feed-back -> hold`."""
    what = f"{delta.what} {first_and_count(delta.subject)}" if delta.subject else delta.what
    if delta.before is None or delta.after is None:
        return f"{what} is {'new' if delta.before is None else 'gone'}"
    return f"{what}: {delta.field} {delta.before} -> {delta.after}"


def _arguments(request: Request, options: Options) -> dict[str, object]:
    own = {"static": request.static, "agree": request.agree}
    return {**options.as_arguments(), **{name: value for name, value in own.items() if value}}
