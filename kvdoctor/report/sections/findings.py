"""Findings as cards: which decide, the cause and fix of each, the picture of the cache; and the checks left open."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from kvdoctor.decode.runs import LOOPS, SEARCH, WRONG, Run, quote_error
from kvdoctor.findings import Finding
from kvdoctor.report.blocks import Block, Card, Cards, Lines, Section, Span, Table, Text, lines
from kvdoctor.report.document import Report, counts
from kvdoctor.report.escaping import cut, shortened
from kvdoctor.report.sections.cache_lengths import tabulate_lengths
from kvdoctor.report.wording.finding import (
    FindingGroup,
    format_issue,
    format_places,
    group_findings,
    group_open_checks,
    known_reason,
    list_advice,
    list_facts,
    list_sources,
)
from kvdoctor.report.wording.runs import select_local_runs
from kvdoctor.report.wording.summary import format_open

LONGEST, LONGEST_FACT, LONGEST_ADVICE, LONGEST_REASON = 900, 400, 250, 600
"""Characters of a fact in a full card and in a short one, of a short advice, and of a reason why a check is open."""
MOST_SUBJECTS, MOST_FACTS, MOST_REASONS = 16, 40, 400
TYPED = ("declared", "observed")
TYPE = re.compile(r"\w+\[[^\]]*\]")


def show_findings(report: Report) -> Section:
    """Every finding in full; of a repaired copy the findings that are left."""
    record = report.repair
    title = "findings" if record is None else "findings now"
    if record is not None and record.is_planned:
        title = "findings that the copy would have"
    return Section(title, tuple(make_cards(report.findings, report)), "findings")


def make_cards(found: Sequence[Finding], report: Report | None = None) -> Iterator[Block]:
    """Findings in full, those with the same facts once; `report` has the runs that show them, None for none."""
    groups = group_findings(found)
    pictured = find_pictured(groups) if report is not None else []
    cards = (_make_card(group, report if group in pictured else None) for group in groups)
    yield Cards(tuple(cards)) if groups else Lines(("None.",))


def _make_card(group: FindingGroup, report: Report | None) -> Card:
    first = group.first
    facts: list[tuple[str, Text]] = []
    for label, text in _list_group_facts(group):
        short = shortened(text, LONGEST)
        facts.append((label, Span(short) if label in TYPED and TYPE.fullmatch(short) else short))
    left_out = len(facts) - MOST_FACTS
    facts[MOST_FACTS:] = [("", f"{left_out} more lines are in --format json")] if left_out > 0 else []
    if subjects := list(dict.fromkeys(name for finding in group.findings for name in finding.subject)):
        named = [part for name in subjects[:MOST_SUBJECTS] for part in (Span(shortened(name, 200)), " ")][:-1]
        rest = [f" and {len(subjects) - MOST_SUBJECTS} more"] if len(subjects) > MOST_SUBJECTS else []
        facts.append(("concerns", (*named, *rest)))
    facts += [("issue", (Span(one.url, "link"), format_issue(one).removeprefix(one.url))) for one in first.issues]
    fix = tuple((label, _make_advice(first, text)) for label, text in list_advice(first))
    picture, quote = draw_cache(report, first) if report is not None else (None, None)
    more = (("more", Span(f"kvdoctor explain {first.code}", "command")), ("fingerprint", _list_fingerprints(group)))
    place = format_places(group.places) if first.stack or len(group.places) > 1 else ""
    made = _start_card(first, place, LONGEST)
    return replace(made, picture=picture, quote=quote, facts=tuple(facts), fix=fix, more=more)


def _start_card(first: Finding, place: str, longest: int) -> Card:
    cause, known = shortened(first.cause, longest), first.known is not None
    return Card(first.severity, first.code, first.name, place, cause, known=known)


def make_short_card(report: Report, group: FindingGroup, picture: bool) -> Card:
    """A finding as the first screen has it: what happens, the cause, the fix, and the other way out."""
    first = group.first
    drawn, quote = draw_cache(report, first) if picture else (None, None)
    advice, command = first.repair, first.repair.command
    way = shorten_advice(advice.instead if command else advice.text)
    fixes = (("fix", command), ("or", way)) if command else (("fix", way),)
    fix = tuple((label, _make_advice(first, text)) for label, text in fixes)
    more = (("more", f"kvdoctor explain {first.code}"),) if first.severity == "error" else ()
    place = first.file if len(group.findings) == 1 and first.file is not None else format_places(group.places)
    found = _list_short_facts(first, drawn is not None, quote)
    facts = tuple((label, cut(text, LONGEST_FACT)) for label, text in found)
    return replace(_start_card(first, place, 300), picture=drawn, quote=quote, facts=facts, fix=fix, more=more)


def _list_short_facts(finding: Finding, pictured: bool, quoted: str | None) -> Iterator[tuple[str, str]]:
    if (reason := known_reason(finding)) is not None:
        yield "known", reason
    # The end of a runtime's message stands in place of the whole, which -v has.
    said, predicted = finding.error, " as it was derived from the graph," * finding.predicted
    static = finding.experiment is None
    in_graph = (finding.file or "").endswith(".onnx")
    # Of a graph, what is expected says more than the headline where it is a shape.
    if static and not finding.evidence and (not in_graph or "[" in finding.declared):
        yield "expected" if in_graph else "declared", finding.declared
    if said is not None:
        old, new = (f": {said}", "") if quoted else (said, f'"{quote_error(said)}"')
        yield "observed", finding.observed.replace(old, new)
    elif not finding.predicted:
        yield "observed", finding.observed
    if finding.evidence:
        yield "cause", finding.evidence[0]
    # Of a call that fails, the table names the node.
    unnamed = said is not None and not pictured if finding.evidence else static or finding.slots
    where = finding.where.removeprefix(f"file {finding.file}").removeprefix(", ")
    if unnamed and where not in ("", finding.file):
        yield "where", where
    yield from (("effect", text) for text in finding.effects[: static and not pictured])
    # A name such as /model/layers.0/mlp/Mul says the module itself.
    if any(source.line or source.kind for source in finding.sources):
        yield from (("module", text) for text in list_sources(finding))
    if finding.confidence == "suspected":
        yield "certainty", f"suspected,{predicted} not confirmed by a run"


def _list_group_facts(group: FindingGroup) -> Iterator[tuple[str, str]]:
    """The facts of the first finding, then those that are different in the others, under their stacks; by label."""
    first = list(list_facts(group.first))
    others = [
        (label, f"{finding.stack or finding.file}: {text}")
        for finding in group.findings[1:]
        for label, text in list_facts(finding)
        if (label, text) not in first
    ]
    labels = list(dict.fromkeys(label for label, _ in (*first, *others)))
    yield from sorted((*first, *others), key=lambda line: labels.index(line[0]))


def shorten_advice(text: str) -> str:
    """An advice on the first screen: of a long one the last parts are left out, rather than half of one."""
    first = text[:LONGEST_ADVICE].rpartition("; ")[0] if len(text) > LONGEST_ADVICE else ""
    return f"{first}; -v says more" if first else text


def _make_advice(finding: Finding, text: str) -> Text:
    """A command stays whole: only then is it good for anything."""
    return Span(text, "command") if text == finding.repair.command else cut(text, LONGEST)


def _list_fingerprints(group: FindingGroup) -> Text:
    """The fingerprint of each finding, with its stack where there are several."""
    if len(group.findings) == 1:
        return Span(group.first.fingerprint or "none")
    shown = group.findings[:MOST_SUBJECTS]
    named = [part for one in shown for part in (Span(one.fingerprint or "none"), f" ({one.stack or one.file})", ", ")]
    left_out = len(group.findings) - len(shown)
    return (*named[:-1], *([f" and {left_out} more"] if left_out > 0 else []))


def find_deciding(report: Report, groups: Sequence[FindingGroup]) -> list[FindingGroup]:
    """The findings that are shown in full: those that count; else warnings, unless known or left by a repair."""
    main = [group for group in groups if counts(group.first, report.fail_on)]
    if main or report.repair is not None:
        return main
    return [group for group in groups if group.first.severity != "note" and group.first.known is None]


def find_pictured(groups: Iterable[FindingGroup]) -> list[FindingGroup]:
    """The errors that get a picture of the cache: the first one of each stack, and known ones before it."""
    pictured: list[FindingGroup] = []
    drawn: set[str | None] = set()
    for group in groups:
        if group.first.severity != "error":
            continue
        if group.first.stack not in drawn:
            pictured.append(group)
        if group.first.known is None:
            drawn.update(group.places)
    return pictured


def draw_cache(report: Report, finding: Finding) -> tuple[Table | None, str | None]:
    """The cache of the run that shows a finding, and the message with which it ends."""
    contract = next((stack.contract for stack in report.stacks if stack.name == finding.stack), None)
    run = _find_run(report, finding)
    drawn = tabulate_lengths(run, contract) if run is not None and contract is not None else None
    return drawn, quote_error(run.error) if drawn is not None and run is not None and run.error else None


def _find_run(report: Report, finding: Finding) -> Run | None:
    """The run that a finding is about: of its use, else the loop that is wrong, else the first wrong run."""
    if finding.stack is None or finding.name == "loop-breaks-contract":  # that is about the caller's own run
        return None
    runs = [run for run in select_local_runs(report, finding.stack) if run.shows in WRONG and run.steps]
    if not runs:
        return None
    from kvdoctor.decode.experiments import by_name  # with numpy, which a report without runs does not need

    experiments = by_name()
    judged = [run for run in runs if (known := experiments.get(run.experiment)) and known.judged and known.shown]
    judged = [run for run in judged if run.experiment != SEARCH]  # its call of an operator shows no cache
    if finding.use is not None:
        tried = [r for r in judged if (use := experiments[r.experiment].use) and use.required == finding.use]
        return next((run for run in tried if run.experiment == finding.experiment), next(iter(tried), None))
    loops = [run for run in judged if run.experiment in LOOPS]
    if report.arguments.get("consumer") == "held":
        loops = [run for run in loops if run.experiment != "plain-loop"] or loops
    errors = [run for run in judged if (use := experiments[run.experiment].use) is None or use.severity == "error"]
    shown = [run for run in judged if run.experiment == finding.experiment]
    return next(iter([*shown, *loops, *errors]), None)


def show_not_checked(report: Report) -> Section:
    """The checks that could not run, and why the others have no result, those with one reason as one."""
    groups = group_open_checks(report.not_checked)
    reasons = [format_open(report, group) for group in groups[:MOST_REASONS]]
    if (left_out := sum(len(group.entries) for group in groups[MOST_REASONS:])) > 0:
        reasons.append(f"{left_out} more checks are not shown here; --format json has all of them")
    ran = Lines(("Nothing that the verdict needs is open.",))
    left = group_open_checks(report.absent)
    absent = (f"no result: {group.describe(LONGEST_REASON)}" for group in left)
    rest = Section("other checks and experiments without a result", tuple(lines(absent, "dim", True)), folded=True)
    return Section("not checked", (Lines(tuple(reasons), "open", True) if reasons else ran, rest), "not-checked")
