"""The memory plan of a cache in words, rows and tables."""

from collections.abc import Iterator
from typing import Any

from kvdoctor.analysis.memory import Alternative, CachePart, MemoryPlan
from kvdoctor.contract import SlotKind
from kvdoctor.report.wording.units import format_bytes, format_count

KINDS: dict[SlotKind, str] = {
    "self-attention": "self",
    "cross-attention": "cross",
    "hidden-memory": "hidden",
    "encoder-states": "encoder",
    "conv-state": "state",
    "recurrent-state": "state",
    "counter": "counter",
}
COUNTED = {
    "tokens": ("token", "tokens"),
    "capacity": ("token", "tokens, the fixed capacity"),
    "window": ("token", "tokens, the window of the layer"),
    "encoder-states": ("encoder state", "encoder states"),
}
SOURCES = {"config": " (from the config)", "graph": " (from the graph)", "option": ""}
NAMES = {"static-buffer": "static", "shared-buffer": "shared", "all-heads": "all heads"}
MOST_PARTS = 12

Table = tuple[list[str], list[list[str]]]


def is_plan_requested(arguments: dict[str, Any]) -> bool:
    """Whether the user asked for the plan with one of its options."""
    return any(arguments.get(name) is not None for name in ("batch", "context", "encoder_length"))


def format_plan_title(plan: MemoryPlan) -> str:
    """`memory plan for 4 sequences of 64 tokens and 1500 encoder states`."""
    each = []
    if plan.context is not None:
        each.append(f"{plan.context} tokens{SOURCES[plan.context_from or 'option']}")
    if plan.encoder_length is not None:
        each.append(f"{plan.encoder_length} encoder states{SOURCES[plan.encoder_length_from or 'option']}")
    return f"memory plan for {format_count(plan.batch, 'sequence')}" + (f" of {' and '.join(each)}" if each else "")


def describe_plan(plan: MemoryPlan) -> Iterator[tuple[str, str]]:
    """Label and text: the parts with their arithmetic, the sums, what is unknown, notes."""
    for part in plan.parts[:MOST_PARTS]:
        yield KINDS[part.kind], _part(part)
    if len(plan.parts) > MOST_PARTS:
        yield "", f"{len(plan.parts) - MOST_PARTS} more parts (all in --format json)"
    yield from _sums(plan)
    for unknown in plan.unknown[:MOST_PARTS]:
        yield "not known", f"{unknown.subject}: {unknown.reason}"
    for note in plan.notes:
        yield "note", note


def _part(part: CachePart) -> str:
    """`2 layers, key and value: 4 tensors x 2 kv_heads x 16 head_dim x 4 B = 512 B per token; x 64 tokens = ...`."""
    words = [format_count(len(part.layers), "layer")] if part.layers else []
    words += [" and ".join(name for name in part.parts if name != "state") or part.kind.replace("-", " ")]
    words += [f"window of {part.window} tokens"] if part.window is not None else []
    text = f"{', '.join(words)}, {part.dtype}: {' x '.join(_factor(f.size, f.of) for f in part.factors)}"
    unit, positions = COUNTED.get(part.counted, ("", ""))
    if part.bytes_per_position is None:
        return text
    if part.counted == "once":
        once = ", once for all sequences" if part.once_for_the_batch else ""
        return f"{text} = {format_bytes(part.bytes_per_position)}{once}"
    text += f" = {part.bytes_per_position} B per {unit}"
    if part.positions is None or part.bytes is None:
        return text
    return f"{text}; x {part.positions} {positions} = {format_bytes(part.bytes)}"


def _factor(size: int | None, of: str) -> str:
    unit = of[:-1] if size == 1 and of == "tensors" else of
    return f"{'?' if size is None else size} {unit}" if of not in ("fixed", "state") else str(size or "?")


def _sums(plan: MemoryPlan) -> Iterator[tuple[str, str]]:
    """A sequence, the batch, and a step."""
    if plan.bytes_per_sequence is None or plan.bytes_total is None:
        yield "sequence", _partial_sum(plan)
        return
    terms = [(KINDS[part.kind], part.bytes or 0) for part in plan.parts if not part.once_for_the_batch]
    summed = {kind: sum(size for other, size in terms if other == kind) for kind, _ in terms}
    sums = " + ".join(f"{format_bytes(size)} {kind}" for kind, size in summed.items())
    yield "sequence", f"{sums} = {format_bytes(plan.bytes_per_sequence)}" if len(summed) > 1 else sums
    once = sum(part.bytes or 0 for part in plan.parts if part.once_for_the_batch)
    more = f" + {format_bytes(once)} once" if once else ""
    yield "batch", f"x {plan.batch}{more} = {format_bytes(plan.bytes_total)}; each beam of a beam search is a sequence"
    if plan.bytes_in_step is not None and plan.bytes_in_step > plan.bytes_total:
        less = " (one token less)" if any(part.growth in ("grow", "shared") for part in plan.parts) else ""
        peak = format_bytes(plan.bytes_in_step)
        yield "in a step", f"{peak}: past{less} and present are both in memory while the step runs"


def _partial_sum(plan: MemoryPlan) -> str:
    """The known part of a sequence, and the options that give the rest."""
    options = []
    if any(part.counted == "tokens" and part.positions is None for part in plan.parts):
        options.append("--context N")
    if any(part.counted == "encoder-states" and part.positions is None for part in plan.parts):
        options.append("--encoder-length N")
    known = sum(part.bytes for part in plan.parts if part.bytes is not None and not part.once_for_the_batch)
    per = [
        f"{format_bytes(part.bytes_per_position)} per {COUNTED[part.counted][0]}"
        for part in plan.parts
        if part.bytes is None and part.bytes_per_position is not None
    ]
    unknown = ["what is not known"] if plan.unknown else []
    text = " + ".join(([format_bytes(known)] if known else []) + per + unknown)
    return f"{text}; for the total, give {' and '.join(options)}" if options else text


def tabulate_alternatives(plan: MemoryPlan) -> Table | None:
    """The memory of the cache as it is, and of other ways to store it."""
    if not plan.alternatives:
        return None
    batch = [] if plan.batch == 1 else [f"batch of {plan.batch}"]
    header = ["stored as", "per token", "per sequence", *batch, "of current", "in a step"]
    table = []
    choices: list[tuple[str, Alternative | MemoryPlan]] = [("current", plan)]
    choices += [(NAMES.get(choice.name, choice.name), choice) for choice in plan.alternatives]
    for name, choice in choices:
        sizes = [choice.bytes_per_token, choice.bytes_per_sequence, *([choice.bytes_total] if batch else [])]
        table.append([name, *map(_size, sizes), _share(choice, plan), _size(choice.bytes_in_step)])
    return header, table


def _size(number: int | None) -> str:
    return "-" if number is None else format_bytes(number)


def _share(choice: Alternative | MemoryPlan, current: MemoryPlan) -> str:
    """The total as a share of the current one; per token where there is no total."""
    pairs = ((choice.bytes_total, current.bytes_total), (choice.bytes_per_token, current.bytes_per_token))
    for size, whole in pairs:
        if size is not None and whole:
            return f"{size / whole:.0%}"
    return "-"


def list_assumptions(plan: MemoryPlan) -> Iterator[tuple[str, str]]:
    """What each alternative assumes, and why a window is none of them."""
    for choice in plan.alternatives:
        yield NAMES.get(choice.name, choice.name), choice.explained
    attended = [part for part in plan.parts if part.kind == "self-attention"]
    if attended and not any(part.window or part.growth == "ring" for part in attended):
        yield "window", "no layer is known to have an attention window; keeping fewer tokens may change the logits"


def tabulate_paging(plan: MemoryPlan) -> Table | None:
    """The unused memory of a paged cache by block size."""
    if not plan.paged:
        return None
    header = ["block size", "blocks", "per sequence", "unused now", "unused on average"]
    table = [
        [
            f"{row.block_size} tokens",
            str(row.blocks_per_sequence),
            _size(row.bytes_per_sequence),
            format_bytes(row.wasted_bytes),
            format_bytes(row.average_wasted_bytes),
        ]
        for row in plan.paged
    ]
    return header, table
