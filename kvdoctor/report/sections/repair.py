"""The fix report: both sides, the repairs, the changes, the proof, the costs, and what is left to the caller."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvdoctor.findings import Finding
from kvdoctor.report.blocks import Block, Lines, Section, Span, Style, Text, lines, pairs, table
from kvdoctor.report.document import Report
from kvdoctor.report.repair_record import CacheCost, CacheCosts, ExportRecord, NotRepaired, RepairRecord
from kvdoctor.report.sections.findings import make_cards
from kvdoctor.report.wording import format_bytes, format_count, format_milliseconds, join_some
from kvdoctor.report.wording.finding import format_name, format_places, group_findings

MOST_PORTS, MOST_LISTED = 8, 20
CACHE_COST_HEADER = ("rounded", "a scale for each", "divergence", "same token", "first other", "largest difference")
SHARES = {"token": "token and head", "channel": "channel", "head": "head", "tensor": "tensor"}
MOST_LAYERS = 3
"""The layers that a short table has: those that cost most."""


def show_repair(report: Report, record: RepairRecord) -> Iterator[Section]:
    """The sections of the fix report, in their order."""
    yield Section("before and after", tuple(_show_sides(record)), "before-after")
    yield Section("findings before the repair", tuple(make_cards(record.before.findings)), "found")
    if (export := record.export) is not None:
        found = "Findings on the new export, before any repair:"
        content = (*pairs(_describe_export(export, record.source)), Lines((found,)), *make_cards(export.findings))
        yield Section("new export", (Lines((format_export_title(export),)), *content), "exported")
    yield Section("repairs", (_list_repairs(record),), "done")
    yield Section("changes", tuple(show_changes(record)), "changed")
    yield Section("proof", tuple(_show_proof(record)), "proof")
    if costs := list_costs(report):
        yield Section("costs", tuple(lines(costs, listed=True)), "cost")
    if record.cache_costs:
        yield Section("cost of the cache type", tuple(show_cache_costs(record, whole=True)), "cache-cost")
    if duties := _list_duties(record):
        yield Section("what the caller must do", duties, "left")
    if record.not_repaired:
        yield Section("not repaired", tuple(lines(list_not_repaired(record), listed=True)), "not-repaired")
    if record.advice:
        title = "changes to the loop, if you cannot use the copy"
        yield Section(title, tuple(lines(record.advice, listed=True)), "advice")
    if record.undo:
        rows = [(Span(one.path), Span(one.before), Span(one.after)) for one in record.files]
        files = [table(("changed file", "SHA-256 before", "SHA-256 after"), rows, of="file")] if rows else []
        yield Section("undo", (*lines(record.undo, listed=True), *files), "undo")


def _show_sides(record: RepairRecord) -> Iterator[Block]:
    """The source and the copy: the verdict on each, and its findings by name."""
    out = record.out or "(nothing written)"
    yield Lines((("From ", Span(record.source), " to ", Span(out), ". The source was not changed."),))
    sides = [("before", record.source, record.before)]
    if record.after is not None:
        sides.append(("after", out, record.after))
    yield from pairs(
        (title, (Span(path), ": ", Span(one.verdict, one.verdict), "; ", _name_findings(one.findings)))
        for title, path, one in sides
    )


def _name_findings(found: Sequence[Finding]) -> str:
    """The names of findings, those with the same facts once."""
    named = [f"{format_name(group.first)} ({format_places(group.places)})" for group in group_findings(found)]
    return join_some(named, MOST_LISTED, "; ", "; {} more") or "no findings"


def format_export_title(record: ExportRecord) -> str:
    """The checkpoint that was exported, the exporter and its versions."""
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    return f"exported again from {record.checkpoint} with {record.exporter} ({versions}; Python: {record.way})"


def _describe_export(record: ExportRecord, replaced: str) -> Iterator[tuple[str, str]]:
    """Label and text: each choice with its reason, failed attempts, and the differences from the replaced model."""
    yield from ((choice.what, f"{choice.value}: {choice.because}") for choice in record.choices)
    yield from (("failed", failure) for failure in record.failures)
    if record.left_out:
        yield "left out", f"{', '.join(record.left_out)}: {replaced} has no such file"
    for port in record.ports[:MOST_PORTS]:
        change = f"is {port.after}; it was {port.before} in {replaced}"
        if port.before is None or port.after is None:
            gone = f"was removed: {port.before} in {replaced}"
            change = f"is new: {port.after}" if port.before is None else gone
        yield "changed", f"{port.name} of {port.file} {change}"
    if len(record.ports) > MOST_PORTS:
        yield "changed", f"{len(record.ports) - MOST_PORTS} more inputs and outputs (all in the JSON report)"
    if record.recipe is not None:
        yield "recipe", f"{record.recipe} in OUT holds the scripts, the pinned versions, the command and the log"


def _list_repairs(record: RepairRecord) -> Lines:
    """Each repair with the checks that it is for."""
    made: list[Text] = []
    for repair in record.repairs:
        why = f", for {', '.join(repair.checks)}" if repair.checks else ""
        made.append((Span(repair.name), f" ({repair.stack}){why}: {repair.summary}"))
    return Lines(tuple(made), listed=True) if made else Lines(("None.",))


def show_changes(record: RepairRecord) -> Iterator[Block]:
    """The changes, node by node."""
    if not record.changes:
        yield Lines(("None.",))
        return
    rows = [(Span(c.file), Span(c.where), Span(c.before), Span(c.after)) for c in record.changes]
    yield table(("file", "where", "before", "after"), rows, of="change", look="wrapping")


def _show_proof(record: RepairRecord) -> Iterator[Block]:
    """The claims about the copy, whether each holds, and what was compared."""
    if not record.proof:
        yield Lines(("Nothing was changed, so there is nothing to prove.",))
        return
    claims = [f"{one.stack}: {one.claim}" + (f": {one.detail}" if one.detail else "") for one in record.proof]
    results = [Span("holds", "passed") if one.holds else Span("FAILS", "failed") for one in record.proof]
    yield table(("result", "claim about the copy"), zip(results, claims, strict=True), of="claim")
    yield from lines(record.bases, listed=True)


def list_costs(report: Report) -> list[str]:
    """What the repair costs: bytes on disk, and the time of a step where both sides were timed."""
    cost = report.measured.get("cost")
    if not isinstance(cost, dict):
        return []
    before, after = cost["bytes_before"], cost["bytes_after"]
    found = [f"model files: {format_bytes(before)} before, {format_bytes(after)} after"]
    for stack, steps in cost.get("step_seconds", {}).items():
        for kind, how in (("cached", "with the cache"), ("uncached", "without the cache")):
            timed = []
            for label, both in steps.items():
                if label.startswith(f"{kind}:") and all(both):
                    old, new = map(format_milliseconds, both)
                    timed.append(f"at {label.partition(':')[2]} tokens {old} before, {new} after")
            if timed:
                found.append(f"{stack}: time of a step {how}: {'; '.join(timed)}")
    return [*found, *cost.get("gains", ())]


def show_cache_costs(record: RepairRecord, whole: bool) -> Iterator[Block]:
    """What a narrower type of the cache costs: all of it, or what a copy has and the layers that cost most."""
    for costs in record.cache_costs:
        layers = [one for one in costs.costs if one.layer is not None]
        ways = [one for one in costs.costs if one.layer is None]
        if not whole:
            ways = [one for one in ways if {one.keys, one.values} <= {"token", None}]
            layers = sorted(layers, key=lambda one: -(one.divergence or 0.0))[:MOST_LAYERS]
        rows = [_make_cost_row(one, costs) for one in (*ways, *layers)]
        yield table(CACHE_COST_HEADER, rows, _name_costs(costs))
        yield from lines(_explain_costs(costs, whole), listed=True)


def _explain_costs(costs: CacheCosts, whole: bool) -> Iterator[str]:
    if costs.sensitive_layers:
        listed = ", ".join(map(str, costs.sensitive_layers))
        option = f"--exact-layers {listed.replace(' ', '')}"
        yield f"layers that cost most of it, and had better stay as they are: {listed} ({option})"
    if whole and costs.cache_type != "float16" and len(costs.costs) > 1:
        constants = "those for a channel, head or tensor are constants here, from another random sequence"
        yield f"a copy has a scale for each token and head; {constants}"


def _name_costs(costs: CacheCosts) -> str:
    size = ""
    if costs.bytes_before and costs.bytes_after is not None:
        share = costs.bytes_after / costs.bytes_before
        size = f", {costs.bytes_before} -> {costs.bytes_after} bytes for each token ({share:.0%})"
    over = f"; its cost over {costs.tokens} tokens, one by one" if costs.tokens else ""
    exact = f" but for layer {', '.join(map(str, costs.exact_layers))}" if costs.exact_layers else ""
    return f"cache of {costs.stack} as {costs.cache_type}{exact}{size}{over}"


def _make_cost_row(one: CacheCost, costs: CacheCosts) -> list[str]:
    parts = " and ".join(part for part, shared in (("keys", one.keys), ("values", one.values)) if shared)
    what = f"layer {one.layer} alone" if one.layer is not None else parts
    shared = "-" if costs.cache_type == "float16" else SHARES.get(one.keys or one.values or "", "")
    if one.divergence is None or one.same_top1 is None or one.largest is None:
        return [what, shared, f"not measured: {one.reason}", "", "", ""]
    first = f"token {one.first_other}" if one.first_other is not None else "none"
    return [what, shared, f"{one.divergence:.2g} nats", f"{one.same_top1:.0%}", first, f"{one.largest:.2g} SD"]


def _list_duties(record: RepairRecord) -> tuple[Block, ...]:
    """What the caller of the copy must still take care of."""
    if record.out is None:
        return ()
    if not record.proved:
        text = "The copy is not proved. It was written because --keep-unproved was given; the proof lists what fails."
        return (Lines((text,), "strong"),)
    found = [finding for finding in (record.after.findings if record.after else ()) if finding.severity != "note"]
    left = list(dict.fromkeys(f"{one.name} ({one.stack or one.file}): {one.repair.instead}" for one in found))
    if record.loop:
        title = "The copy is converted. Its loop differs from that of the original:"
        return Lines((title,)), Lines((*record.loop, *left), listed=True)
    if not left:
        text = "No error or warning is left for the diagnosed loop; `kvdoctor contract` describes how to run the copy."
        return (Lines((text,)),)
    return Lines(("The copy still has these findings, which your loop must handle:",)), Lines(tuple(left), listed=True)


def list_not_repaired(record: RepairRecord) -> list[str]:
    """What was not repaired, the reason, and the alternative; what differs in its stack alone is one line."""
    found: dict[NotRepaired, list[str]] = {}
    for entry in record.not_repaired:
        found.setdefault(replace(entry, stack=None), []).append(entry.stack or "")
    made = []
    for entry, stacks in found.items():
        by = f" by {entry.repair}" if entry.repair else ""
        where = f" ({', '.join(filter(None, stacks))})" if any(stacks) else ""
        instead = f"; instead: {entry.instead}" if entry.instead else ""
        made.append(f"not repaired{by}: {entry.finding}{where}: {entry.reason}{instead}")
    return made


def format_copy(record: RepairRecord) -> str:
    """Whether a repaired copy was written, and where."""
    if record.out is None:
        return "no copy was written" + ("" if record.proved or not record.changes else ": it was not proved")
    proved = "" if record.proved else ", NOT PROVED"
    return f"written: {record.out}{proved} (fix report: {record.out}/kvdoctor-report.md)"


def outline_repair(report: Report, record: RepairRecord) -> Iterator[Block]:
    """The repair on the first screen: what is gone, the first change, the proof, and what was not repaired."""
    color: Style = "good" if record.proved else "open"
    if record.export is not None:
        yield Lines((format_export_title(record.export),), color)
    if record.changes and record.proof:
        yield Lines((_format_repaired(record),), color)
        yield from pairs(_outline_changes(record))
        yield from pairs(("gain", line) for line in report.measured.get("cost", {}).get("gains", ()))
    failed = [entry for entry in record.proof if not entry.holds]
    yield from pairs(
        ("fails", Span(f'{e.stack}: "{e.claim}"' + (f": {e.detail}" if e.detail else ""), "failed")) for e in failed
    )
    yield Section("cost of the cache type", tuple(show_cache_costs(record, whole=False)))
    yield from lines(list_not_repaired(record), "open")
    if record.out is not None:
        yield Lines((format_copy(record),), "strong")


def _format_repaired(record: RepairRecord) -> str:
    """The findings that are gone, or would be; else how many places were changed."""
    after = {(finding.code, finding.stack) for finding in (record.after.findings if record.after else ())}
    tried = {name for repair in record.repairs for name in repair.checks}
    # What a conversion alone makes go away may be what its copy is not tried with.
    everything = record.after is not None and (bool(tried) or record.export is not None)
    fitting = (f for f in record.before.findings if everything or f.name in tried)
    gone = dict.fromkeys(f"{f.code} {f.name}" for f in fitting if (f.code, f.stack) not in after)
    mark = "\u2713" if record.proved else "!"
    if gone:
        verb = "would repair" if record.is_planned else "repaired" if record.after is not None else "tried to repair"
        return f"{mark} {verb}: {', '.join(gone)}"
    verb = "would change" if record.is_planned else "changed" if record.after is not None else "tried to change"
    return f"{mark} {verb}: {format_count(len(record.changes), 'place')}"


def _outline_changes(record: RepairRecord) -> Iterator[tuple[str, str]]:
    first, others = record.changes[0], len(record.changes) - 1
    more = f" (and in {format_count(others, 'more place')})" if others else ""
    kinds: dict[str, dict[str, None]] = {}
    for one in record.repairs:
        # A conversion answers no finding.
        kinds.setdefault("repair" if one.checks else "conversion", {})[one.name] = None
    by = "; ".join(f"{kind}: {', '.join(found)}" for kind, found in kinds.items())
    yield "change", f"{first.file}: {first.where}: {first.before} \u2192 {first.after}{more}; {by}"
    holding = sum(entry.holds for entry in record.proof)
    yield "proof", f"{holding} of {format_count(len(record.proof), 'claim')} hold (-v lists them)"
    yield from (("base", line) for line in record.bases)
    yield from (("loop", line) for line in (record.loop if record.proved else ()))
