"""The steps of `diff`: both sides, stack by stack, and the verdict."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kvdoctor.addons.comparison.contract_diff import compare_contracts, compare_graphs, pair_up
from kvdoctor.addons.comparison.document import (
    Difference,
    DiffReport,
    FindingDiff,
    Logits,
    NotCompared,
    StackDiff,
    decide,
)
from kvdoctor.addons.comparison.options import DiffChoices
from kvdoctor.addons.comparison.results_diff import (
    AGREEMENTS,
    LOCAL,
    CannotCompareLogits,
    compare_findings,
    compare_logits,
    compare_outcomes,
    needs_no_run,
)
from kvdoctor.addons.comparison.sides import DiagnosedSide, compare_golden, diagnose_sides, find_golden
from kvdoctor.errors import UsageError
from kvdoctor.findings import Finding, means_incomplete
from kvdoctor.options import Options
from kvdoctor.report.document import Report
from kvdoctor.report.facts import StackFacts
from kvdoctor.report.wording import shorten_names


@dataclass
class _Comparison:
    """Both sides and the options; with why B is worse, and what could not be compared."""

    a: DiagnosedSide
    b: DiagnosedSide
    choices: DiffChoices
    options: Options
    reasons: list[str] = field(default_factory=list)
    missing: list[NotCompared] = field(default_factory=list)

    @property
    def static(self) -> bool:
        """Whether nothing is run, as asked for or since A is a contract."""
        return self.choices.static or self.a.required


def compare(path_a: str, path_b: str, choices: DiffChoices, options: Options) -> DiffReport:
    """Compare B with A.

    Raises:
        UsageError: a path does not exist, or a report cannot be read or was made with other options.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    if choices.static and choices.agree is not None:
        raise UsageError("--agree compares logits, and --static runs nothing: remove one of them")
    if (golden := find_golden(path_a, path_b)) is not None:
        if choices.static or choices.agree is not None:
            raise UsageError("golden numbers are compared by running the model: remove --static and --agree")
        diff = compare_golden(*golden, options, _arguments(choices, options))
        swapped = () if golden[0] == path_a else (f"{golden[0]} is A, as what was recorded before, in either order",)
        return replace(diff, notes=(*diff.notes, *swapped))
    with diagnose_sides(path_a, path_b, options, choices.static) as (a, b):
        if a.required and choices.agree is not None:
            raise UsageError("a contract is compared without a run, and --agree compares logits: remove --agree")
        sides = _Comparison(a, b, choices, options)
        pairs = list(match_stacks(a.report.stacks, b.report.stacks))
        stacks = tuple(_compare_stack(sides, old, new) for old, new in pairs)
        findings = _compare_findings(sides, pairs)
        reasons = [*sides.reasons, *(one.because for one in findings if one.effect == "worse")]
        missing = [*sides.missing, *_not_compared(sides, "A", a.report), *_not_compared(sides, "B", b.report)]
        return DiffReport(
            arguments=_arguments(choices, options),
            seed=options.seed,
            verdict=decide(stacks, findings, worse=bool(reasons), incomplete=any(e.essential for e in missing)),
            a=a.facts(),
            b=b.facts(),
            reasons=tuple(dict.fromkeys(reasons)),
            stacks=stacks,
            findings=findings,
            not_compared=tuple(dict.fromkeys(missing)),
            notes=tuple(_notes(a.report, b.report)),
            measured={"a": a.report.measured, "b": b.report.measured},
        )


def match_stacks(
    a: tuple[StackFacts, ...], b: tuple[StackFacts, ...]
) -> Iterator[tuple[StackFacts | None, StackFacts | None]]:
    """Pair the stacks of both sides: by name, then by layout, then the only remaining one of each side."""
    return pair_up(a, b, lambda stack: stack.name, lambda stack: stack.layout, rest=True)


def _compare_stack(sides: _Comparison, old: StackFacts | None, new: StackFacts | None) -> StackDiff:
    if old is None or new is None:
        if old is not None and sides.b.report.stacks:
            sides.reasons.append(f"contract broken: the stack {old.name} ({old.layout}) is gone")
        return StackDiff(old.name if old else None, new.name if new else None)
    diff = StackDiff(old.name, new.name)
    if not sides.a.required:
        pairs = ((sides.a, old), (sides.b, new))
        files = [[file for file in side.report.model.files if file.path in stack.files] for side, stack in pairs]
        diff = replace(diff, graph=compare_graphs(*files))
    if old.contract is None or new.contract is None:
        sides.missing.append(NotCompared(new.name, "contract", "one side has none", essential=True))
    else:
        diff = replace(diff, contract=compare_contracts(old.contract, new.contract))
        changes = (change for change in diff.contract if change.effect == "worse")
        sides.reasons += (f"contract broken: {_describe(change)}" for change in changes)
    have_runs = not sides.static and sides.a.report.runs and sides.b.report.runs
    return _compare_runs(sides, diff, (old.name, new.name)) if have_runs else diff


def _compare_runs(sides: _Comparison, diff: StackDiff, names: tuple[str, str]) -> StackDiff:
    """The difference of a stack with the outcomes of its experiments and its logits."""
    outcomes = tuple(compare_outcomes(sides.a.report, sides.b.report, *names))
    for one in outcomes:
        if one.effect == "worse":
            under = f" under {one.target}" if one.target != LOCAL else ""
            sides.reasons.append(f"parity lost: {one.experiment} {one.a} -> {one.b}{under}")
    return replace(diff, experiments=outcomes, logits=_compare_logits(sides, names))


def _compare_logits(sides: _Comparison, names: tuple[str, str]) -> Logits | None:
    agree, stack, logits = sides.choices.agree, names[1], None
    reason = "a report has no logits; give both models"
    if not (sides.a.stored or sides.b.stored):
        try:
            logits, verdict = compare_logits(sides.a, sides.b, names, sides.options.tolerances)
        except CannotCompareLogits as error:
            reason = str(error)
        else:
            if agree is None or AGREEMENTS.index(logits.agree) >= AGREEMENTS.index(agree):
                return logits
            if agree != "logits" or verdict != "ambiguous":
                sides.reasons.append(f"logits of {stack} do not agree as required: --agree {agree}")
                return logits
            reason = "the difference of the logits is between noise and a fault"
    sides.missing.append(NotCompared(stack, "logits", reason, essential=agree is not None))
    return logits


def _compare_findings(
    sides: _Comparison, pairs: list[tuple[StackFacts | None, StackFacts | None]]
) -> tuple[FindingDiff, ...]:
    if sides.a.required:
        return ()  # a contract says what a model must have, and nothing of faults
    names = {new.name: old.name for old, new in pairs if old is not None and new is not None}
    # If A could not be read, its findings are unknown, so that none of B is new.
    fail_on = sides.options.fail_on if sides.a.report.stacks else "never"
    old, new = _comparable_findings(sides, sides.a.report), _comparable_findings(sides, sides.b.report)
    return tuple(compare_findings(old, new, names, fail_on))


def _comparable_findings(sides: _Comparison, report: Report) -> list[Finding]:
    """The findings that both sides could have, by the checks selected for both and by whether both were run."""
    selections = (sides.options.selection, sides.a.report.selection, sides.b.report.selection)
    static = sides.static or any(side.report.command == "inspect" for side in (sides.a, sides.b))
    return [
        finding
        for finding in report.findings
        if all(selection.takes(finding.code, finding.name) for selection in selections)
        and (not static or needs_no_run(finding))
    ]


def _not_compared(sides: _Comparison, name: str, report: Report) -> Iterator[NotCompared]:
    """What is unknown on a side. Gaps of A cannot make B worse; gaps of B prevent the verdict "better"."""
    static = sides.static
    if not report.stacks:
        why = next((entry.reason for entry in report.not_checked), "") or "nothing could be read"
        yield NotCompared(None, "contract", f"{name}: {why}", essential=True)
    elif report.command == "inspect" and not static:
        reason = f"{name} is a report of `kvdoctor {report.command}`, without runs; --static compares the rest"
        yield NotCompared(None, "behavior", reason, essential=True)
    for entry in report.not_checked:
        if entry.essential:
            yield NotCompared(entry.stack, entry.code, f"{name}: {entry.reason}", name == "B" and not static)
    for finding in _comparable_findings(sides, report):
        if means_incomplete(finding.code):
            yield NotCompared(finding.stack, finding.code, f"{name}: {finding.cause}", essential=name == "B")


def _notes(a: Report, b: Report) -> Iterator[str]:
    old, new = a.environment.get("onnxruntime"), b.environment.get("onnxruntime")
    if old and new and old != new:
        yield f"A was run with onnxruntime {old}, B with {new}: differences may come from the runtime"
    if a.seed != b.seed:
        yield f"A was run with seed {a.seed}, B with {b.seed}"


def _describe(change: Difference) -> str:
    """`input position_ids is new`, `slot past.0.key and 3 more: carry feed-back -> hold`."""
    what = f"{change.what} {shorten_names(change.subject)}" if change.subject else change.what
    if change.before is None or change.after is None:
        return f"{what} is {'new' if change.before is None else 'gone'}"
    return f"{what}: {change.field} {change.before} -> {change.after}"


def _arguments(choices: DiffChoices, options: Options) -> dict[str, object]:
    own = {"static": choices.static, "agree": choices.agree}
    return {**options.as_arguments(), **{name: value for name, value in own.items() if value}}
