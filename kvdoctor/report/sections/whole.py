"""All sections of a report in their order, and those of the model as a whole: from its variants to its files."""

import json
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from kvdoctor.decode.speed import SpeedPoint, spread
from kvdoctor.report.blocks import Block, Lines, Pairs, Section, Span, Text, lines, names, table
from kvdoctor.report.document import Report
from kvdoctor.report.facts import VariantFacts
from kvdoctor.report.sections.findings import show_findings, show_not_checked
from kvdoctor.report.sections.repair import show_repair
from kvdoctor.report.sections.stack import show_stack
from kvdoctor.report.wording import format_bytes, format_milliseconds
from kvdoctor.report.wording.contract import list_file_facts, list_ports
from kvdoctor.report.wording.health import describe_health, list_not_tried
from kvdoctor.report.wording.runs import list_target_limits

MOST_STACKS = 8


def list_sections(report: Report) -> Iterator[Section]:
    """All sections of a report. Of very many stacks the first ones are shown, and the others named."""
    if report.repair is not None:
        yield from show_repair(report, report.repair)
    yield show_findings(report)
    works, fails, closely = describe_health(report)
    closely += list_not_tried(report)
    yield Section("what works", tuple(lines((*works, *fails, *closely), listed=True)), "works")
    yield show_not_checked(report)
    for number, facts in enumerate(report.stacks[:MOST_STACKS]):
        yield show_stack(facts, report, f"stack-{number}")
    if left := [facts.name for facts in report.stacks[MOST_STACKS:]]:
        text = (f"{len(left)} more are in --format json: ", Span(", ".join(left)))
        yield Section("more stacks", (Lines((text,)),), "more")
    yield from show_variants(report)
    yield from show_speed(report)
    if report.notes:
        yield Section("notes", tuple(lines(report.notes, listed=True)), "notes", extra=True)
    yield show_environment(report)
    yield from show_files(report)


def show_environment(report: Report) -> Section:
    """Versions, the options of the run, and what its target runtimes support."""
    options = [
        (name.replace("_", "-"), value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for name, value in sorted(report.arguments.items())
        if value is not None and value != []
    ]
    versions = tuple(report.environment.items())
    facts = Pairs((*versions, *options, ("seed", str(report.seed))))
    limits = lines(list_target_limits(report), listed=True)
    return Section("environment and options", (facts, *limits), "environment", extra=True)


def show_files(report: Report) -> Iterator[Section]:
    """The files of the model; of those that were inspected inputs and outputs too."""
    files = report.model.files
    if not files:
        return
    rows: list[list[Text]] = [[Span(first), *rest] for first, *rest in map(list_file_facts, files)]
    content: list[Block] = [table(("file", "role", "size", "IR", "opsets", "producer"), rows, of="file")]
    if hashed := [(Span(file.path), Span(file.sha256)) for file in files if file.sha256]:
        content.append(table(("file", "SHA-256"), hashed, of="file"))
    for file in files:
        if file.inputs or file.outputs:
            ports = table(("direction", "name", "type"), map(names, list_ports(file)), of="input or output")
            folded = report.command != "inspect"
            content.append(Section(("inputs and outputs of ", Span(file.path)), (ports,), folded=folded))
    yield Section("files", tuple(content), "files", extra=True)


VARIANT_HEADER = ("variant", "size", "divergence", "same token", "first other", "most in layers")
SPEED_HEADER = (
    *("past", "first token", "step", "tokens per second", "range of rounds", "peak memory", "cache written per step"),
)
MOST_LAYERS = 3
SHARE_SHOWN = 0.02
"""Layers are named from this difference of their cache on; smaller ones cost nothing."""


def show_variants(report: Report) -> Iterator[Section]:
    """How far the variants of a model are from the most exact one."""
    for number, base in enumerate(dict.fromkeys(one.base for one in report.variants)):
        found = [one for one in report.variants if one.base == base]
        tokens = max(one.tokens for one in found)
        over = f" over {tokens} tokens that it decodes" if tokens else ""
        made = table(VARIANT_HEADER, map(_make_variant_row, found), of="variant")
        yield Section(f"variants of {base}, compared with it{over}", (made,), f"variants-{number}")


def _make_variant_row(one: VariantFacts) -> list[Text]:
    share = f" ({one.bytes / one.base_bytes:.0%})" if one.base_bytes else ""
    size = f"{format_bytes(one.bytes)}{share}"
    if one.reason is not None or one.divergence is None or one.same_top1 is None:
        return [one.stack, size, f"not compared: {one.reason}", "", "", ""]
    first = f"token {one.first_other}" if one.first_other is not None else "none"
    return [one.stack, size, f"{one.divergence:.2g} nats", f"{one.same_top1:.0%}", first, _name_layers(one.layers)]


def _name_layers(layers: dict[str, float]) -> str:
    """The layers whose cache is off most beyond that of the layer below, the worst first."""
    ordered = sorted(layers, key=int)
    below = {name: layers[before] for before, name in pairwise(ordered)}
    added = {name: layers[name] - below.get(name, 0.0) for name in ordered}
    worst = sorted((name for name in ordered if added[name] >= SHARE_SHOWN), key=lambda name: -added[name])
    return ", ".join(f"{name} ({layers[name]:.0%})" for name in worst[:MOST_LAYERS]) or "-"


def show_speed(report: Report) -> Iterator[Section]:
    """How fast each stack decodes, whether memory grows, and what was left out."""
    for number, one in enumerate(report.speed):
        title = f"speed of {one.stack}: {one.provider}, {one.threads} threads, {one.processor}"
        grown = f"{one.steps} equal steps took {format_bytes(one.grown_bytes)} more memory"
        remarks = lines((f"{one.stack}: {text}" for text in (*([grown] if one.steps else []), *one.left_out)), "dim")
        made = table(SPEED_HEADER, map(_make_speed_row, one.points), of="length")
        yield Section(title, (made, *remarks), f"speed-{number}")


def _make_speed_row(point: SpeedPoint) -> list[str]:
    step = median(point.step)
    apart = max(spread(point.first), spread(point.step))
    return [
        f"{point.past:,}",
        format_milliseconds(median(point.first)),
        format_milliseconds(step),
        f"{1 / step:,.0f}" if step else "",
        f"{apart:.0%}",
        format_bytes(point.peak_bytes),
        format_bytes(point.written),
    ]
