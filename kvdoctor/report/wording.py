"""What reports say, in words and rows; where it stands on a page is the renderers' business."""

from collections.abc import Iterator

from kvdoctor.case import first_and_count
from kvdoctor.contract import CacheContract, Slot
from kvdoctor.findings import Finding
from kvdoctor.report.document import FileFacts, Report, StackFacts
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
    yield "where", where
    yield "promised", finding.promised
    yield "observed", finding.observed
    for consequence in finding.follows:
        yield "so", consequence
    if finding.confidence == "suspected":
        yield "how sure", "suspected from the declarations, not shown by a run"
    if finding.repair.command:
        yield "repair", f"{finding.repair.command}"
        yield "", finding.repair.text
    else:
        yield "repair", finding.repair.text


def outcome(run: Run) -> str:
    """`failed at step 2`, `passed`, ..."""
    at = run.failed_step
    return f"{run.outcome} at step {at}" if run.outcome in ("failed", "differs") and at is not None else run.outcome


def detail(run: Run, why: str = "") -> str:
    """What stands beside an outcome: the place of a failure, the size of a difference, the reason of a skip."""
    if run.outcome == "failed":
        place = f'in {run.node.op} "{run.node.name}"' if run.node else "the runtime stops with an error"
        return place if not why else f"{why}"
    differences = [step.difference for step in run.steps if step.difference]
    worst = max((difference.relative for difference in differences), default=None)
    if run.outcome in ("passed", "ambiguous") and worst is not None:
        return f"logits within {worst:.1e}"
    if run.outcome == "differs":
        finite = all(difference.finite for difference in differences)
        gap = run.reason or "logits not finite"
        if worst is not None and finite and run.reason is None:
            gap = f"logits off by {worst:.2g}"
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
    fed = _shape(step.fed.get(slot.past)) if slot.past in step.fed else "-"
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
    if contract.slots:
        yield "cache", _cache_in_words(contract)
    yield "axes", _axes(contract)
    yield "first step", _first_step(contract)
    yield "feed", _fed(contract)
    for verb, carry in (("feed back", "feed-back"), ("hold", "hold")):
        slots = [slot for slot in contract.slots if slot.carry == carry]
        if slots:
            yield verb, _carried(slots, verb)
    yield from _memory(stack)
    for lacking in contract.missing[:6]:
        yield "missing", f"{lacking.subject}: {lacking.reason}"


def _cache_in_words(contract: CacheContract) -> str:
    slot = contract.slots[0]
    layers = len({slot.layer for slot in contract.slots})
    kinds = [kind for kind in ("self-attention", "cross-attention") if contract.of_kind(kind)]
    sizes = f"{slot.size('kv_heads') or '?'} kv_heads, head_dim {slot.size('head_dim') or '?'}"
    return f"{layers} layers, {sizes}, {slot.dtype}; {' and '.join(kinds)} cache, axes {', '.join(slot.axes)}"


def _axes(contract: CacheContract) -> str:
    """What each axis is called where it is dynamic, and how large it is where it is a number."""
    dynamic: dict[str, dict[str, None]] = {}
    fixed: dict[str, dict[str, None]] = {}
    for phase in contract.phases.values():
        for port in contract.graphs[phase.graph].inputs:
            for axis, size in zip(port.axes, port.shape or (), strict=False):
                if axis != "fixed":
                    (fixed if isinstance(size, int) else dynamic).setdefault(axis, {})[str(size or "unnamed")] = None
    parts = [f"{title} {_listed(found)}" for title, found in (("dynamic:", dynamic), ("fixed:", fixed)) if found]
    return "; ".join(parts)


def _listed(found: dict[str, dict[str, None]]) -> str:
    return ", ".join(f"{axis} = {' or '.join(names)}" for axis, names in found.items())


def _first_step(contract: CacheContract) -> str:
    switch = contract.graph("decode").port("branch_switch")
    match contract.first_step:
        case "no-past-branch":
            name = switch.name if switch else "the switch"
            return f"{name} = false, past inputs of any length (0 is usual, they are ignored); true on every later step"
        case "no-past-graph":
            first, later = contract.graph("prefill").file, contract.graph("decode").file
            return f"{first}, which takes no past; every later step {later}"
    return "a past of length 0"


def _fed(contract: CacheContract) -> str:
    """What every step is fed besides the cache, and what the first step is fed on top of that."""
    not_fed = ("past", "branch_switch", "auxiliary")
    every = [port.name for port in contract.graph("decode").inputs if port.role not in not_fed]
    first = [p.name for p in contract.graph("prefill").inputs if p.role not in not_fed and p.name not in every]
    return f"every step: {', '.join(every)}" + (f"; first step also: {', '.join(first)}" if first else "")


def _carried(slots: list[Slot], verb: str) -> str:
    slot = slots[0]
    more = f" ({len(slots)} slots)" if len(slots) > 1 else ""
    if verb == "hold":
        return f"{slot.filled_by or '?'} of the first step -> {slot.past} at every later step{more}"
    return f"{slot.present or '?'} -> {slot.past}{more}"


def _memory(stack: StackFacts) -> Iterator[tuple[str, str]]:
    size = stack.cache
    if size is None or size.bytes_per_token is None or not (stack.contract and stack.contract.slots):
        return
    text = f"{in_bytes(size.bytes_per_token)} per token"
    if size.bytes_per_encoder_state:
        text += f", {in_bytes(size.bytes_per_encoder_state)} per encoder state"
    if size.bytes_at_context is not None:
        text += f"; {in_bytes(size.bytes_at_context)} at the context of {size.context} tokens"
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


def verdict_line(report: Report) -> str:
    """The last line: verdict and counts."""
    counts = [
        f"{number} {severity}{'s' if number > 1 else ''}"
        for severity in ("error", "warning", "note")
        if (number := sum(finding.severity == severity for finding in report.findings))
    ]
    words = {
        "healthy": "healthy",
        "unhealthy": "unhealthy",
        "incomplete": "not diagnosed: what could not be checked is listed above",
        "nothing-found": "nothing found without running it; step-test runs decode steps",
    }
    return f"{report.model.path}: {words[report.verdict]}" + (f" ({', '.join(counts)})" if counts else "")
