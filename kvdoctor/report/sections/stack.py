"""One stack: its cache over time, its contract, its differences, its experiments and their steps, its memory plan."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvdoctor.analysis.memory import CachePart, MemoryPlan
from kvdoctor.contract import CacheContract, SlotKind
from kvdoctor.decode.runs import LOOPS, REPLAY, WRONG, Run
from kvdoctor.report.blocks import Block, Lines, Picture, Section, Span, Table, Text, lines, names, pairs, plain, table
from kvdoctor.report.document import Report
from kvdoctor.report.escaping import shortened
from kvdoctor.report.facts import StackFacts
from kvdoctor.report.wording import format_bytes, format_count, join_some
from kvdoctor.report.wording.contract import describe_contract, describe_logits, describe_proof, list_slots
from kvdoctor.report.wording.health import load_experiments
from kvdoctor.report.wording.runs import (
    describe_fault_location,
    describe_parity,
    describe_result,
    format_cache_speedup,
    format_outcome,
    list_target_releases,
    select_local_runs,
    tabulate_differences,
    tabulate_parts,
    tabulate_steps,
    tabulate_targets,
)

if TYPE_CHECKING:
    from kvdoctor.decode.experiments import Experiment

RESULT = "question: result, differences in standard deviations (SD) of the logits"
CHARTED = (*LOOPS, "frozen-past", REPLAY)
"""The loops, whose cache is drawn, and whose differences are listed by every measure also where they passed."""
MOST_FILES, LONGEST, LONGEST_RESULT, LONGEST_ERROR = 12, 900, 600, 1200


def show_stack(stack: StackFacts, report: Report, name: str) -> Section:
    """The section of a stack; links lead to it by `name`."""
    runs = select_local_runs(report, stack.name)
    return Section(Span(stack.name), tuple(_list_parts(stack, report, runs)), name)


def _list_parts(stack: StackFacts, report: Report, runs: Sequence[Run]) -> Iterator[Block]:
    done, known = [run for run in runs if run.outcome != "skipped"], load_experiments(runs)
    if stack.contract is None:
        files = (part for file in stack.files[:MOST_FILES] for part in (Span(file), " "))
        yield Lines(((f"{stack.layout}: ", *tuple(files)[:-1]), "No cache contract could be read."))
    else:
        yield Section("the cache over time", (Picture("loops", (done, stack.contract)),))
        yield Section("the cache contract", tuple(_show_contract(stack)))
        if done:
            from kvdoctor.decode.tolerances import find_tolerance  # loads numpy, which an inspection does not need

            judged = [run for run in done if _counts(known.get(run.experiment))]
            limit = find_tolerance(stack.contract.exactness, report.arguments.get("tolerances", {}))
            drawn = Picture("differences", (judged, stack.contract, limit)), Picture("layers", (judged, stack.contract))
            yield Section("differences of the logits from the run without a cache", drawn)
        faster = tuple(lines(filter(None, [format_cache_speedup(find_step_seconds(report, stack.name))])))
        timed = Picture("times", (report, stack.name), faster)
        yield Section("time per step, measured on this machine", (timed,), extra=True)
    if report.command == "inspect" or is_plan_requested(report.arguments):
        yield from show_memory(stack)
    yield Section("experiments", tuple(_show_experiments(runs, known)), extra=True)
    if (largest := _find_measured(report, stack.name).get("largest_value")) is not None:
        yield Section("the largest value of a call", (Lines((largest,)),), extra=True)
    if stack.contract is not None:
        # Of a workaround the outcome says enough, unless a message ended it.
        shown = [run for run in done if run.steps and (run.error or not _is_workaround(known.get(run.experiment)))]
        steps = (_show_steps(run, stack.contract, _counts(known.get(run.experiment))) for run in shown)
        yield Section("steps", tuple(steps), extra=True)
    yield from show_targets(report, stack)


def find_step_seconds(report: Report, stack: str) -> dict[str, float]:
    """Seconds per step of a stack, of the copy where the report is of a repair."""
    times = _find_measured(report, stack).get("step_seconds")
    return times if isinstance(times, dict) else {}


def _find_measured(report: Report, stack: str) -> dict[str, Any]:
    listed = [one[stack] for one in (report.measured, report.measured.get("after")) if one and stack in one]
    return next((one for one in listed if isinstance(one, dict)), {})


def _show_contract(stack: StackFacts) -> Iterator[Block]:
    assert stack.contract is not None  # noqa: S101 - of a stack that has one
    described = (*describe_contract(stack), *describe_logits(stack), *describe_proof(stack))
    listed = tuple(pairs((label, shortened(text, LONGEST)) for label, text in described))
    yield Picture("contract", (stack.contract,), listed)
    header = ("past input", "type", "growth", "carry to the next step", "present output")
    slots = table(header, map(names, list_slots(stack.contract)), of="slot")
    yield Section(f"all {format_count(len(slots.rows), 'slot')} of the graph", (slots,), folded=True, extra=True)


def _show_experiments(runs: Sequence[Run], known: "Mapping[str, Experiment]") -> Iterator[Block]:
    """Every run with its outcome, question and result: what counts, known workarounds, and what was skipped."""
    if not runs:
        yield Lines(("No decode step was run.",))
        return
    done = [run for run in runs if run.outcome != "skipped"]
    tried = [run for run in runs if _is_workaround(known.get(run.experiment))]
    rows = [_describe_run(run, known.get(run.experiment)) for run in done if run not in tried]
    if rows:
        yield table(("experiment", "outcome", RESULT), rows, look="runs")
    if tried:
        rows = [_describe_run(run, known.get(run.experiment)) for run in tried]
        made = table(("workaround", "outcome", RESULT), rows, look="runs")
        yield Section("workarounds that are often tried; no verdict rests on them", (made,))
    if skipped := [run for run in runs if run.outcome == "skipped" and run not in tried]:
        reasons = [_describe_run(run, known.get(run.experiment))[::2] for run in skipped]
        title = f"{format_count(len(skipped), 'experiment')} skipped, with reasons"
        yield Section(title, (table(("experiment", "reason"), reasons, look="runs"),), folded=True)


def _is_workaround(experiment: "Experiment | None") -> bool:
    return experiment is not None and bool(experiment.why) and not (experiment.judged or experiment.on_request)


def _describe_run(run: Run, experiment: "Experiment | None") -> tuple[Text, Text, Text]:
    """Name, outcome, and question with result. Only what decides the verdict has the color of a fault."""
    why = experiment.why if experiment and not experiment.judged else ""
    question = experiment.question if experiment else ""
    if experiment and run.steps and (experiment.lengths or experiment.name == "long-past"):
        question += f", up to a past of {max(step.past_length for step in run.steps)}"
    result = ": ".join(filter(None, (question, describe_result(run, why))))
    return run.experiment, _make_outcome(run, _counts(experiment)), shortened(result, LONGEST_RESULT)


def _counts(experiment: "Experiment | None") -> bool:
    """Whether a verdict may rest on the experiment."""
    return experiment is None or experiment.judged


def _make_outcome(run: Run, counts: bool) -> Span:
    return Span(format_outcome(run), run.shows if counts else "plain")


def _show_steps(run: Run, contract: CacheContract, counts: bool) -> Section:
    """The steps of a run, how close they are, the message that ended it, and where its fault is."""
    content: list[Block] = [_make_table(*tabulate_steps(run, contract))]
    is_wrong = counts and run.shows in WRONG
    if (is_wrong or run.experiment in CHARTED) and (differences := tabulate_differences(run)) is not None:
        content.append(_make_table(*differences, f"logits of {run.experiment} compared with {run.yardstick}"))
        content += pairs(describe_parity(run))
    error = [("runtime", Span(shortened(run.error, LONGEST_ERROR)))] if run.error else []
    located = [(label, shortened(text, LONGEST)) for label, text in describe_fault_location(run)]
    content += pairs([*error, *located])
    if (parts := tabulate_parts(run)) is not None:
        content.append(_make_table(*parts, f"parts of the model in {run.experiment}, in standard deviations"))
    title = (Span(run.experiment), ", step by step: ", _make_outcome(run, counts=counts))
    return Section(title, tuple(content), folded=not is_wrong)


def _make_table(header: list[str], rows: list[list[str]], title: str = "") -> Table:
    return table(header, rows, title, "step")


def show_targets(report: Report, stack: StackFacts, in_short: bool = False) -> Iterator[Section]:
    """The outcomes of a stack on each target runtime; `in_short` those experiments as one that have the same ones."""
    found = []
    for header, rows in tabulate_targets(report, stack.name):
        same: dict[tuple[str, ...], list[str]] = {}
        for name, *cells in rows:
            same.setdefault(tuple(cells), []).append(name)
        found.append(table(header, [[join_some(e, 1), *cells] for cells, e in same.items()] if in_short else rows))
    if found:
        fails = any("FAILS " in plain(cell) for made in found for row in made.rows for cell in row)
        title = "on each target runtime" + "; FAILS 2 means: fails at step 2" * fails
        yield Section(title, (*found, *lines(list_target_releases(report, stack.name), "dim")))


KINDS: dict[SlotKind, str] = {"self-attention": "self", "cross-attention": "cross", "hidden-memory": "hidden"}
KINDS |= {"encoder-states": "encoder", "conv-state": "state", "recurrent-state": "state", "counter": "counter"}
COUNTED = {
    "tokens": ("token", "tokens"),
    "capacity": ("token", "tokens, the fixed capacity"),
    "window": ("token", "tokens, the window of the layer"),
    "encoder-states": ("encoder state", "encoder states"),
}
SOURCES = {"config": " (from the config)", "graph": " (from the graph)", "option": ""}
MOST_PARTS = 12


def is_plan_requested(arguments: dict[str, Any]) -> bool:
    """Whether the user asked for the plan with one of its options."""
    return any(arguments.get(name) is not None for name in ("batch", "context", "encoder_length"))


def show_memory(stack: StackFacts) -> Iterator[Section]:
    """The plan of a stack, if it has a cache to plan."""
    if stack.cache is not None and stack.cache.parts:
        yield Section(_format_title(stack.cache), tuple(pairs(_describe_plan(stack.cache))))


def _format_title(plan: MemoryPlan) -> str:
    """`memory plan for 4 sequences of 64 tokens and 1500 encoder states`."""
    each = []
    if plan.context is not None:
        each.append(f"{plan.context} tokens{SOURCES[plan.context_from or 'option']}")
    if plan.encoder_length is not None:
        each.append(f"{plan.encoder_length} encoder states{SOURCES[plan.encoder_length_from or 'option']}")
    return f"memory plan for {format_count(plan.batch, 'sequence')}" + (f" of {' and '.join(each)}" if each else "")


def _describe_plan(plan: MemoryPlan) -> Iterator[tuple[str, str]]:
    """Label and text: the parts with their arithmetic, the sums, what is unknown, notes, windows that are not known."""
    yield from ((KINDS[part.kind], _part(part)) for part in plan.parts[:MOST_PARTS])
    if len(plan.parts) > MOST_PARTS:
        yield "", f"{len(plan.parts) - MOST_PARTS} more parts (all in --format json)"
    yield from _sums(plan)
    yield from (("not known", f"{unknown.subject}: {unknown.reason}") for unknown in plan.unknown[:MOST_PARTS])
    yield from (("note", note) for note in plan.notes)
    attended = [part for part in plan.parts if part.kind == "self-attention"]
    if attended and not any(part.window or part.growth == "ring" for part in attended):
        yield "window", "no layer is known to have an attention window; keeping fewer tokens may change the logits"


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
    lacking = {part.counted for part in plan.parts if part.positions is None}
    lengths = {"tokens": "--context N", "encoder-states": "--encoder-length N"}
    options = [option for counted, option in lengths.items() if counted in lacking]
    known = sum(part.bytes for part in plan.parts if part.bytes is not None and not part.once_for_the_batch)
    sizes = ((part.counted, part.bytes_per_position) for part in plan.parts if part.bytes is None)
    per = [f"{format_bytes(size)} per {COUNTED[counted][0]}" for counted, size in sizes if size is not None]
    unknown = ["what is not known"] if plan.unknown else []
    text = " + ".join(([format_bytes(known)] if known else []) + per + unknown)
    return f"{text}; for the total, give {' and '.join(options)}" if options else text
