"""The memory plan in words, rows and tables; where they stand on a page is the renderers' business."""

from collections.abc import Iterator
from typing import Any

from kvdoctor.contract import SlotKind
from kvdoctor.memory import Alternative, CachePart, MemoryPlan
from kvdoctor.report.wording import in_bytes

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
    "capacity": ("token", "tokens, its fixed length"),
    "window": ("token", "tokens, the window of the layer"),
    "encoder-states": ("encoder state", "encoder states"),
}
SOURCES = {"config": " (by the config)", "graph": " (by the graph)", "option": ""}
WAYS = {"static-buffer": "static", "shared-buffer": "shared", "all-heads": "all heads"}
MOST_PARTS = 12

Table = tuple[list[str], list[list[str]]]


def is_asked(arguments: dict[str, Any]) -> bool:
    """Whether the user asked for the plan with one of its options."""
    return any(arguments.get(name) is not None for name in ("batch", "context", "encoder_length"))


def title(plan: MemoryPlan) -> str:
    """What is planned for: `memory plan for 4 sequences of 64 tokens, 1500 encoder states each`."""
    each = []
    if plan.context is not None:
        each.append(f"{plan.context} tokens{SOURCES[plan.context_from or 'option']}")
    if plan.encoder_length is not None:
        each.append(f"{plan.encoder_length} encoder states{SOURCES[plan.encoder_length_from or 'option']}")
    sequences = f"{plan.batch} sequence{'s' if plan.batch > 1 else ''}"
    return f"memory plan for {sequences}" + (f" of {' and '.join(each)}" if each else "")


def rows(plan: MemoryPlan) -> Iterator[tuple[str, str]]:
    """Label and text: the parts with their arithmetic, the sums, what is not known, what to keep in mind."""
    for part in plan.parts[:MOST_PARTS]:
        yield KINDS[part.kind], _part(part)
    if len(plan.parts) > MOST_PARTS:
        yield "", f"and {len(plan.parts) - MOST_PARTS} more like these, all of them in --format json"
    yield from _sums(plan)
    for lack in plan.unknown[:MOST_PARTS]:
        yield "not known", f"{lack.subject}: {lack.reason}"
    for note in plan.notes:
        yield "note", note


def _part(part: CachePart) -> str:
    """`2 layers, key and value: 4 tensors x 2 kv_heads x 16 head_dim x 4 B = 512 B per token; x 64 tokens = ...`."""
    words = [f"{len(part.layers)} layer{'s' if len(part.layers) > 1 else ''}"] if part.layers else []
    words += [" and ".join(name for name in part.parts if name != "state") or part.kind.replace("-", " ")]
    words += [f"window of {part.window}"] if part.window is not None else []
    text = f"{', '.join(words)}, {part.dtype}: {' x '.join(_factor(f.size, f.of) for f in part.factors)}"
    unit, positions = COUNTED.get(part.counted, ("", ""))
    if part.bytes_per_position is None:
        return text
    if part.counted == "once":
        return f"{text} = {in_bytes(part.bytes_per_position)}" + (", once" if part.once_for_the_batch else "")
    text += f" = {_exact(part.bytes_per_position)} per {unit}"
    if part.positions is None or part.bytes is None:
        return text
    return f"{text}; x {part.positions} {positions} = {in_bytes(part.bytes)}"


def _factor(size: int | None, of: str) -> str:
    unit = of[:-1] if size == 1 and of == "tensors" else of
    return f"{'?' if size is None else size} {unit}" if of not in ("fixed", "state") else str(size or "?")


def _exact(number: int) -> str:
    return f"{number} B"


def _sums(plan: MemoryPlan) -> Iterator[tuple[str, str]]:
    """A sequence, the batch, and a step."""
    if plan.bytes_per_sequence is None or plan.bytes_total is None:
        yield "sequence", _open(plan)
        return
    terms = [(KINDS[part.kind], part.bytes or 0) for part in plan.parts if not part.once_for_the_batch]
    summed = {kind: sum(size for other, size in terms if other == kind) for kind, _ in terms}
    sums = " + ".join(f"{in_bytes(size)} {kind}" for kind, size in summed.items())
    yield "sequence", f"{sums} = {in_bytes(plan.bytes_per_sequence)}" if len(summed) > 1 else sums
    once = sum(part.bytes or 0 for part in plan.parts if part.once_for_the_batch)
    more = f" + {in_bytes(once)} once" if once else ""
    yield "batch", f"x {plan.batch}{more} = {in_bytes(plan.bytes_total)}; each beam of a beam search is a sequence"
    if plan.bytes_in_step is not None and plan.bytes_in_step > plan.bytes_total:
        less = " (one token less)" if any(part.growth in ("grow", "shared") for part in plan.parts) else ""
        yield "in a step", f"{in_bytes(plan.bytes_in_step)}: while it runs, past{less} and present are both alive"


def _open(plan: MemoryPlan) -> str:
    """What is known of a sequence, and what is to be given for the rest."""
    lacking = []
    if any(part.counted == "tokens" and part.positions is None for part in plan.parts):
        lacking.append("--context N")
    if any(part.counted == "encoder-states" and part.positions is None for part in plan.parts):
        lacking.append("--encoder-length N")
    known = sum(part.bytes for part in plan.parts if part.bytes is not None and not part.once_for_the_batch)
    per = [
        f"{in_bytes(part.bytes_per_position)} for each {COUNTED[part.counted][0]}"
        for part in plan.parts
        if part.bytes is None and part.bytes_per_position is not None
    ]
    unknown = ["what is not known"] if plan.unknown else []
    text = " + ".join(([in_bytes(known)] if known else []) + per + unknown)
    return f"{text}; give {' and '.join(lacking)} for the sum" if lacking else text


def alternatives(plan: MemoryPlan) -> Table | None:
    """What other ways of keeping the cache take, beside what it takes today."""
    if not plan.alternatives:
        return None
    one = plan.batch == 1
    header = ["kept as", "per token", "sequence", *([] if one else [f"batch of {plan.batch}"]), "of today", "in a step"]
    table = []
    ways: list[tuple[str, Alternative | MemoryPlan]] = [("today", plan)]
    ways += [(WAYS.get(way.name, way.name), way) for way in plan.alternatives]
    for name, way in ways:
        sizes = [way.bytes_per_token, way.bytes_per_sequence, *([] if one else [way.bytes_total])]
        table.append([name, *map(_size, sizes), _share(way, plan), _size(way.bytes_in_step)])
    return header, table


def _size(number: int | None) -> str:
    return "-" if number is None else in_bytes(number)


def _share(way: Alternative | MemoryPlan, today: MemoryPlan) -> str:
    """The total as a share of today's; per token where there is no total."""
    for size, whole in ((way.bytes_total, today.bytes_total), (way.bytes_per_token, today.bytes_per_token)):
        if size is not None and whole:
            return f"{size / whole:.0%}"
    return "-"


def assumptions(plan: MemoryPlan) -> Iterator[tuple[str, str]]:
    """What each way assumes, and why a window is none of them."""
    for way in plan.alternatives:
        yield WAYS.get(way.name, way.name), way.explained
    attended = [part for part in plan.parts if part.kind == "self-attention"]
    if attended and not any(part.window or part.growth == "ring" for part in attended):
        yield "window", "no layer is known to look back over one; keeping fewer tokens may change the logits"


def paged(plan: MemoryPlan) -> Table | None:
    """The waste by block size."""
    if not plan.paged:
        return None
    header = ["paged by", "blocks", "sequence", "wasted now", "wasted on average"]
    table = [
        [
            f"{row.block_size} tokens",
            str(row.blocks_per_sequence),
            _size(row.bytes_per_sequence),
            in_bytes(row.wasted_bytes),
            in_bytes(row.average_wasted_bytes),
        ]
        for row in plan.paged
    ]
    return header, table
