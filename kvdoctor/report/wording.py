"""What reports say, in words and rows; where it stands on a page is the renderers' business."""

from collections.abc import Iterator, Sequence

from kvdoctor.contract import CacheContract, Slot, describe
from kvdoctor.findings import SEVERITIES, Finding
from kvdoctor.report import contract_words
from kvdoctor.report.document import FileFacts, Report, StackFacts
from kvdoctor.report.safe import LONGEST_QUOTED, printable, shortened
from kvdoctor.trace import Run, Seen, Step

KIBI = 1024


def headline(finding: Finding) -> str:
    """`error[KV203] cross-cache-emptied: a decode step returns ...`."""
    stack = f" ({finding.stack})" if finding.stack else ""
    return f"{finding.severity}[{finding.code}] {finding.name}{stack}: {finding.cause}"


def evidence(finding: Finding) -> Iterator[tuple[str, str]]:
    """The lines under a headline, in their fixed order: (label, text)."""
    where = (
        finding.where if finding.file is None or finding.file in finding.where else f"{finding.file}, {finding.where}"
    )
    if (reason := known_reason(finding)) is not None:
        yield "known", reason
    yield "where", where
    yield "promised", finding.promised
    yield "observed", finding.observed
    for reason in finding.because:
        yield "because", reason
    for consequence in finding.follows:
        yield "so", consequence
    if finding.confidence == "suspected":
        yield "how sure", "suspected, not shown by a run"
    if finding.repair.command:
        yield "repair", f"{finding.repair.command}"
        yield "", finding.repair.text
    else:
        yield "repair", finding.repair.text


def known_reason(finding: Finding) -> str | None:
    """Why a finding is known and does not count, by the baseline; None for one that counts."""
    return None if finding.known is None else str(finding.known)


def outcome(run: Run) -> str:
    """`failed at step 2`, `passed`, ..."""
    at = run.failed_step
    return f"{run.outcome} at step {at}" if run.outcome in ("failed", "differs") and at is not None else run.outcome


def place_rows(run: Run) -> Iterator[tuple[str, str]]:
    """All that is known of the place of a run's fault: (label, text)."""
    if run.no_place is not None:
        yield "place", f"not found: {run.no_place}"
    if run.place is None:
        return
    place = run.place
    node = f'{place.node.op} "{place.node.name}"' if place.node else "no single node"
    layer = f", layer {place.layer}" if place.layer is not None else ""
    yield "place", node + layer + (f", in {place.scope}" if place.scope else "")
    for name, seen in place.shapes.items():
        yield "came in", f"{name} {describe(seen.dtype, seen.shape)}"
    for line in place.provenance:
        yield "from", line
    if place.frozen_by is not None:
        yield "frozen by", place.frozen_by
    yield "blame", f"{place.blame}: {place.words}"


def detail(run: Run, why: str = "") -> str:
    """What stands beside an outcome: the place of a failure, the size of a difference, the reason of a skip."""
    if run.outcome == "failed":
        place = f'in {run.node.op} "{run.node.name}"' if run.node else "the runtime stops with an error"
        return place if not why else f"{why}"
    differences = [step.difference for step in run.steps if step.difference]
    worst = max((difference.relative for difference in differences), default=None)
    twin = run.unrounded.worst if run.unrounded is not None and run.unrounded.relative else None
    unrounded = f", {twin:.1e} where nothing is rounded" if twin is not None else ""
    if run.outcome in ("passed", "ambiguous") and worst is not None:
        twice = "the same twice: " if run.repeats and run.outcome == "passed" else ""
        return f"{twice}logits within {worst:.1e}{unrounded}"
    if twin is not None and worst is None:
        return f"logits {'within' if run.outcome != 'differs' else 'off by'} {twin:.1e} where nothing is rounded"
    if run.outcome == "differs":
        finite = all(difference.finite for difference in differences)
        gap = run.reason or "logits not finite"
        if worst is not None and finite and run.reason is None:
            gap = f"logits off by {worst:.2g}{unrounded}"
        return f"{gap}; {why}" if why else gap
    return run.reason or why


def steps_table(run: Run, contract: CacheContract) -> tuple[list[str], list[list[str]]]:
    """The table of steps: a header and a row for each step."""
    kinds = [kind for kind in ("self-attention", "cross-attention") if contract.of_kind(kind)]
    header = [
        "step",
        "past",
        "new",
        *(f"{kind.removesuffix('-attention')} fed -> returned" for kind in kinds),
        "logits",
    ]
    rows = []
    for step in run.steps:
        cells = [str(step.step), str(step.past_length), str(step.new_tokens)]
        cells += [_fed_and_returned(step, contract.of_kind(kind)[0], run) for kind in kinds]
        rows.append([*cells, _logits(step)])
    return header, rows


def _fed_and_returned(step: Step, slot: Slot, run: Run) -> str:
    given = step.fed.get(slot.past)
    # In the first graph of a pair another input may bear the name.
    fed = _shape(given) if given is not None and len(given.shape) == len(slot.axes) else "-"
    if not step.returned:
        return f"{fed} -> fails"
    name = slot.filled_by if step.phase == "prefill" else slot.present
    seen = step.returned.get(name or "")
    marks = [word for word, is_so in (("empty", seen and seen.empty), ("null", seen and seen.null)) if is_so]
    held = " held" if run.experiment == "held-loop" and slot.carry == "hold" and step.phase == "decode" else ""
    return f"{fed}{held} -> {_shape(seen)}" + (f" {', '.join(marks)}" if marks else "")


def _shape(seen: Seen | None) -> str:
    return "none" if seen is None else f"[{','.join(map(str, seen.shape))}]"


def _logits(step: Step) -> str:
    if not step.returned:
        return "-"
    if step.difference is None:
        return "returned"
    return f"{step.difference.relative:.1e}" if step.difference.finite else "not finite"


def contract_rows(stack: StackFacts) -> Iterator[tuple[str, str]]:
    """The cache contract for people: (label, text)."""
    contract = stack.contract
    if contract is None:
        return
    yield "layout", f"{stack.layout}: {', '.join(stack.files)}"
    yield from contract_words.rows(contract)
    yield from _memory(stack)
    for lacking in contract.missing[:6]:
        yield "missing", f"{lacking.subject}: {lacking.reason}"


def _memory(stack: StackFacts) -> Iterator[tuple[str, str]]:
    size = stack.cache
    if size is None or size.bytes_per_token is None or not size.parts:
        return
    states = sum(part.bytes or 0 for part in size.parts if part.counted == "once")
    sizes = (
        (size.bytes_per_token, "per token"),
        (size.bytes_per_encoder_state, "per encoder state"),
        (states, "of states"),
    )
    text = ", ".join(f"{in_bytes(number)} {of}" for number, of in sizes if number)
    if size.bytes_at_context:
        text += f"; {in_bytes(size.bytes_at_context)} at the context of {size.context} tokens"
    if text:
        yield "memory", f"{text}, for each sequence"


def in_bytes(number: int) -> str:
    """Bytes for people: `512 B`, `1.5 KiB`."""
    if number < KIBI:
        return f"{number} B"
    value, units = float(number), ["KiB", "MiB", "GiB", "TiB"]
    for unit in units:
        value /= KIBI
        if value < KIBI or unit == units[-1]:
            return f"{value:.1f} {unit}"
    return f"{number} B"


def file_row(file: FileFacts) -> list[str]:
    """File, role, size, IR, opsets, producer."""
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in file.opsets.items())
    weights = f" + {', '.join(file.external)}" if file.external else ""
    return [
        file.path + weights,
        file.role,
        in_bytes(file.bytes),
        str(file.ir_version or "-"),
        opsets,
        file.producer or "",
    ]


def port_rows(file: FileFacts, everything: bool) -> Iterator[list[str]]:
    """Inputs and outputs: direction, name, type. Cache tensors that look alike are one row unless all are asked for."""
    from kvdoctor.case import first_and_count  # here: a kept report is shown without what reads graphs

    for direction, ports in (("in", file.inputs), ("out", file.outputs)):
        groups: dict[str, list[str]] = {}
        for port in ports:
            shape = port["shape"]
            text = (
                f"{port['dtype'] or '?'}[{', '.join('?' if d is None else str(d) for d in shape)}]"
                if shape is not None
                else f"{port['dtype'] or '?'}, no shape"
            )
            cache_like = port["name"].startswith(("past", "present")) and not everything
            groups.setdefault(text if cache_like else f"{text}\0{port['name']}", []).append(port["name"])
        for text, names in groups.items():
            yield [direction, first_and_count(tuple(names)), text.partition("\0")[0]]


def cost_line(measured: dict[str, float]) -> str | None:
    """What switching the cache off costs, in one line; None where it was not measured."""
    parts = []
    for length in sorted({int(label.partition(":")[2]) for label in measured}):
        cached, uncached = measured.get(f"cached:{length}"), measured.get(f"uncached:{length}")
        if cached and uncached:
            parts.append(f"{uncached / cached:.1f} times at {length} tokens ({_ms(uncached)} : {_ms(cached)})")
    return f"without the cache a step takes {', '.join(parts)} as long as with it" if parts else None


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def counts(report: Report) -> str:
    """`1 error, 2 notes, 1 known`; empty where nothing was found."""
    found = {
        severity: sum(f.severity == severity for f in report.findings) for severity in ("error", "warning", "note")
    }
    told = [f"{number} {severity}{'s' * (number > 1)}" for severity, number in found.items() if number]
    known = sum(finding.known is not None for finding in report.findings)
    return ", ".join([*told, *([f"{known} known"] if known else [])])


def gate_line(verdict: str, reports: Sequence[Report]) -> str:
    """The verdict over all models, how many have which, how many findings are known, how many were not run again."""
    known = [sum(finding.known is not None for finding in report.findings) for report in reports]
    pairs = list(zip(reports, known, strict=True))
    healthy = sum(report.verdict == "healthy" and not count for report, count in pairs)
    only = sum(report.verdict == "healthy" and count > 0 for report, count in pairs)
    words = {"unhealthy": "unhealthy", "incomplete": "not diagnosed", "nothing-found": "not run"}
    numbers = {word: sum(report.verdict == name for report in reports) for name, word in words.items()}
    kept = sum(bool(report.measured.get("cached")) for report in reports)
    return "".join(
        [
            f"gate: {verdict}; {healthy} of {len(reports)} model{'s' * (len(reports) != 1)} healthy",
            f", {only} with nothing but what is known" if only else "",
            *(f", {number} {word}" for word, number in numbers.items() if number),
            f"; {sum(known)} known finding{'s' * (sum(known) > 1)}" if any(known) else "",
            f"; {kept} unchanged and not run again" if kept else "",
        ]
    )


def verdict_line(report: Report) -> str:
    """The last line: verdict and counts."""
    known = any(finding.known is not None for finding in report.findings)
    words = {
        "healthy": "nothing but what is known" if known else "healthy",
        "unhealthy": "unhealthy",
        "incomplete": "not diagnosed: what could not be checked is listed above",
        "nothing-found": "nothing found without running it; step-test runs decode steps",
    }
    found = counts(report)
    return f"{report.model.path}: {words[report.verdict]}" + (f" ({found})" if found else "")


def in_short(report: Report) -> str:
    """Verdict, the findings that count by the `fail_on` that was asked for, and what could not be checked."""
    fail_on = report.arguments.get("fail_on")
    lowest = SEVERITIES.index(fail_on) if fail_on in SEVERITIES else len(SEVERITIES) - 1
    lines = [verdict_line(report)]
    for finding in report.findings:
        if SEVERITIES.index(finding.severity) >= lowest:
            lines += ["", headline(finding), *(f"  {label:<11}{text}" for label, text in evidence(finding))]
    for entry in report.not_checked:
        stack = f" ({entry.stack})" if entry.stack else ""
        lines += [f"not checked: {entry.code}{stack} {entry.reason}"] if entry.essential else []
    return "\n".join(printable(shortened(line, LONGEST_QUOTED)) for line in lines)


def reproducer_line(report: Report) -> str | None:
    """What `repro` wrote, or why it wrote nothing."""
    if report.command != "repro":
        return None
    made = report.reproducer
    if made is None:
        return "nothing to reproduce: no finding of the severity asked for, and no folder was made"
    if made.out is None:
        return f"no reproducer, nothing was written: {made.reason}"
    return f"reproducer: {made.out} ({made.bytes:,} bytes, no weights): {made.shows}; python {made.out}/reproduce.py"
