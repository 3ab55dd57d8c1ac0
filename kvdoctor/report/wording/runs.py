"""Runs in text: outcome, steps, differences in standard deviations of the logits (`SD`), fault location, speed-up."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from kvdoctor.choices import CPU
from kvdoctor.contract import CacheContract, Slot, describe
from kvdoctor.decode.runs import HISTORY, OWN_SESSION, PLAIN_LOOP, LogitsDifference, PartDifference, Run, Step
from kvdoctor.report.document import Report
from kvdoctor.report.facts import TargetFacts
from kvdoctor.report.wording import format_milliseconds, join_some

HEADER = ["step", "max diff", "max diff, SD", "KL, nats", "top 1"]
FLOAT32 = "float32, SD"
NOT_COMPARED = "not compared"
"""The logits of a step that nothing was compared with."""
MOST_PARTS = 12


def format_outcome(run: Run) -> str:
    """`failed at step 2`, `passed`, ..."""
    at = run.failed_step if run.outcome in ("failed", "differs") else None
    return run.outcome if at is None else f"{run.outcome} at step {at}"


def format_difference(relative: float) -> str:
    """`1.2 SD`, `1.7e-06 SD`; 0 is `0`."""
    if relative == 0:
        return "0"
    return f"{relative:.2g} SD" if relative >= 0.1 else f"{relative:.1e} SD"


def describe_result(run: Run, why: str = "") -> str:
    """The node that fails, the largest difference, or the reason of a skip; `why` is a known reason to fail."""
    if run.outcome == "failed":
        return why or (f"in {run.node.shown}" if run.node else "the runtime reports an error")
    differences = [step.difference for step in run.steps if step.difference]
    worst = max((difference.relative for difference in differences), default=None)
    float32 = run.unrounded.worst if run.unrounded is not None and run.unrounded.relative else None
    in_float32 = "" if float32 is None else f", {format_difference(float32)} in a float32 copy"
    if run.outcome in ("passed", "ambiguous") and worst is not None:
        again = run.repeats and run.outcome == "passed" and run.experiment == PLAIN_LOOP
        twice = "the same result twice: " if again else ""
        close = f"within {format_difference(worst)}" if worst else "identical"
        return f"{twice}logits {close}{in_float32}"
    if float32 is not None and worst is None:
        words = "off by" if run.outcome == "differs" else "within"
        return f"logits {words} {format_difference(float32)} in a float32 copy"
    if run.outcome == "differs":
        finite = all(difference.finite for difference in differences)
        gap = run.reason or "logits not finite"
        if worst is not None and finite and run.reason is None:
            gap = f"logits off by {format_difference(worst)}{in_float32}"
        return f"{gap}; {why}" if why else gap
    return run.reason or why


def describe_fault_location(run: Run) -> Iterator[tuple[str, str]]:
    """All that is known of the location of a run's fault: (label, text)."""
    if run.no_location is not None:
        yield "location", f"not found: {run.no_location}"
    if run.location is None:
        return
    place = run.location
    node = place.node.shown if place.node else "no single node"
    layer = f", layer {place.layer}" if place.layer is not None else ""
    yield "location", node + layer + (f", in {place.scope}" if place.scope else "")
    for name, seen in place.shapes.items():
        yield "input", f"{name} {describe(seen.dtype, seen.shape)}"
    yield from (("evidence", line) for line in place.provenance)
    if place.frozen_by is not None:
        yield "fixed by", place.frozen_by
    yield "fault in", f"{place.source}: {place.words}"


def tabulate_steps(run: Run, contract: CacheContract) -> tuple[list[str], list[list[str]]]:
    """A header, and a row for each step: lengths in tokens, shapes of the first cache slot of a kind, difference."""
    kinds = [kind for kind in ("self-attention", "cross-attention") if contract.of_kind(kind)]
    slots = [f"{kind.removesuffix('-attention')} past -> present" for kind in kinds]
    header = ["step", "past", "new", *slots, "logits"]
    rows = []
    for step in run.steps:
        shapes = [_past_and_present(step, contract.of_kind(kind)[0], run) for kind in kinds]
        rows.append([str(step.step), str(step.past_length), str(step.new_tokens), *shapes, format_logits(step)])
    return header, rows


def _past_and_present(step: Step, slot: Slot, run: Run) -> str:
    given = step.fed.get(slot.past)
    # In the first graph of a pair another input may bear the name.
    is_slot = given is not None and len(given.shape) == len(slot.axes)
    fed = f"[{','.join(map(str, given.shape))}]" if given is not None and is_slot else "-"
    if not step.returned:
        return f"{fed} -> fails"
    name = slot.filled_by if step.phase == "prefill" else slot.present
    seen = step.returned.get(name or "")
    marks = [word for word, is_so in (("empty", seen and seen.empty), ("null", seen and seen.null)) if is_so]
    held = " held" if run.experiment == "held-loop" and slot.carry == "hold" and step.phase == "decode" else ""
    back = "none" if seen is None else f"[{','.join(map(str, seen.shape))}]"
    return f"{fed}{held} -> {back}" + (f" {', '.join(marks)}" if marks else "")


def format_logits(step: Step) -> str:
    """The difference of the logits of a step; and whether they were compared at all."""
    if not step.returned:
        return "-"
    if step.difference is None:
        return NOT_COMPARED
    return format_difference(step.difference.relative) if step.difference.finite else "not finite"


def tabulate_differences(run: Run) -> tuple[list[str], list[list[str]]] | None:
    """A header, and a row for each step that was compared with a reference run; None where none was."""
    rows = [[str(step.step), *_cells(step.difference)] for step in run.steps if step.difference is not None]
    float32 = run.unrounded.relative if run.unrounded is not None else ()
    if len(float32) != len(rows) or not rows:
        return (HEADER, rows) if rows else None
    return [*HEADER, FLOAT32], [[*row, f"{off:.1e}"] for row, off in zip(rows, float32, strict=True)]


def _cells(difference: LogitsDifference) -> list[str]:
    if not difference.finite:
        return ["not finite", *["-"] * (len(HEADER) - 2)]
    word = {1.0: "same", 0.0: "different"}.get(difference.same_top1, f"{difference.same_top1:.0%} same")
    if difference.near_ties > 0:
        # Where candidates lie closer together than the noise, which of them leads tells nothing.
        word = "near tie" if difference.near_ties == 1 else f"{word}, near tie"
    return [f"{difference.max_abs:.1e}", f"{difference.relative:.1e}", f"{difference.kl:.1e}", word]


def describe_parity(run: Run) -> Iterator[tuple[str, str]]:
    """Label and text: the effect of rounding, the cache after the last step."""
    if text := describe_rounding(run):
        yield "rounding", text
    last = next((step for step in reversed(run.steps) if step.slots), None)
    if last is not None:
        worst = max(last.slots, key=lambda name: last.slots[name])
        off = f"off by at most {last.slots[worst]:.1e} standard deviations of the slot ({worst})"
        compared = f"{len(last.slots)} growing slots compared with those of one call over the same tokens"
        yield "cache", f"after step {last.step}, {compared}: {off}"


def describe_comparisons(runs: Iterable[Run]) -> str:
    """In which other runs of a graph that takes one token a call the logits of its loop are the same."""
    passed = {run.experiment for run in runs if run.shows == "passed"}
    texts = {PLAIN_LOOP: "when run again", OWN_SESSION: "in a fresh session", "batch": "for each batch row alone"}
    found = ", ".join(text for name, text in texts.items() if name in passed)
    return found + ", and others after other tokens" * (HISTORY in passed)


def describe_rounding(run: Run) -> str:
    """How much of the difference is rounding, by the same experiment on a float32 copy; empty without such a run."""
    float32 = run.unrounded
    if float32 is None:
        return ""
    if float32.outcome not in ("passed", "differs"):
        return f"a float32 copy of the model gives no clearer answer ({float32.outcome})"
    sd = "standard deviations of the logits"
    if float32.outcome == "passed":
        worst = max((s.difference.relative for s in run.steps if s.difference is not None), default=0.0)
        within = f"a float32 copy of the model is within {float32.worst:.1e} {sd}"
        return f"{within}: the difference of up to {worst:.1e} is rounding alone"
    off = f"a float32 copy of the model is off by {float32.worst:.2g} {sd}"
    return f"{off}: this is more than rounding, which alone leaves at most 2e-4"


def describe_difference(run: Run, step: Step | None) -> str | None:
    """How far the logits of a step are off, in the model and in a float32 copy; None where neither is known."""
    found = step.difference if step is not None else None
    if found is not None and not found.finite:
        return "not finite"
    words = [f"off by {found.relative:g} standard deviations"] if found is not None else []
    if run.hidden and run.unrounded is not None:
        words.append(f"off by {run.unrounded.at(step):g} in a float32 copy of the model")
    return ", ".join(words) or None


def format_cache_speedup(measured: dict[str, float]) -> str | None:
    """`cache speed-up: 1.6x at 5 tokens (0.51 ms -> 0.32 ms)`, of the seconds by `cached:N` and `uncached:N` tokens."""
    parts = []
    for length in sorted({int(label.partition(":")[2]) for label in measured}):
        cached, uncached = measured.get(f"cached:{length}"), measured.get(f"uncached:{length}")
        if cached and uncached:
            times = f"{format_milliseconds(uncached)} -> {format_milliseconds(cached)}"
            gain = f"{uncached / cached:.1f}x" if uncached > cached else "none"
            parts.append(f"{gain} at {length} tokens ({times})")
    return f"cache speed-up: {', '.join(parts)}" if parts else None


def describe_parts(parts: Sequence[PartDifference]) -> str:
    """All parts in one line, in standard deviations; parts that agree before the first one that differs as one."""
    first = next((index for index, part in enumerate(parts) if part.differs), len(parts))
    listed = []
    if before := parts[:first]:
        last = f" to {_name_part(before[-1])}" if len(before) > 1 else ""
        worst = max(before, key=lambda part: part.relative)
        listed.append(f"{_name_part(before[0])}{last} within {_format_part(worst)}")
    listed += [f"{_name_part(part)} {_format_part(part)}" for part in parts[first:]]
    return join_some(listed, MOST_PARTS + bool(before), "; ")


def tabulate_parts(run: Run) -> tuple[list[str], list[list[str]]] | None:
    """A header and a row for each part of a run; None where its parts were not compared."""
    if not run.parts:
        return None
    first = next((part for part in run.parts if part.differs), None)
    rows = []
    for layer, parts in groupby(run.parts, key=lambda part: part.layer):
        for index, part in enumerate(parts):
            shown = "" if layer is None or index else str(layer)
            mark = "first that differs" if part is first else "differs" if part.differs else ""
            rows.append([shown, part.part, _format_part(part), mark])
    return ["layer", "part", "largest difference", ""], rows


def _name_part(part: PartDifference) -> str:
    return part.part if part.layer is None else f"layer {part.layer} {part.part}"


def _format_part(part: PartDifference) -> str:
    return "not finite" if part.relative < 0 else f"{part.relative:.1e}"


MOST_COLUMNS = 5
"""Runtimes next to one another on 80 columns."""

OUTCOMES = {"passed": "ok", "failed": "FAILS", "differs": "DIFFERS", "died": "CRASHES", "skipped": "-"}
OUTCOMES |= dict.fromkeys(("ambiguous", "inconclusive"), "unclear")


def select_local_runs(report: Report, stack: str) -> list[Run]:
    """The runs of a stack on the local runtime, the onnxruntime of this Python."""
    others = {target.place for target in report.targets} - {(_local_runtime(report), CPU)}
    return [run for run in report.runs if run.stack == stack and (run.target, run.provider) not in others]


def tabulate_targets(report: Report, stack: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Tables of header and rows; none where no target was run. A target that was not run has no column."""
    found = {target.place: target for target in report.targets if stack not in target.not_run}
    if not found or not any(run.stack == stack for run in report.runs):
        return
    others = [target for place, target in found.items() if place != (_local_runtime(report), CPU)]
    local = {run.experiment: run for run in select_local_runs(report, stack)}
    of_stack = [run for run in report.runs if run.stack == stack]
    for start in range(0, max(len(others), 1), MOST_COLUMNS):
        columns = others[start : start + MOST_COLUMNS]
        runs = [{run.experiment: run for run in of_stack if (run.target, run.provider) == one.place} for one in columns]
        here = f"{_local_runtime(report).partition('==')[2]} (local)"
        rows = []
        for name in _experiment_names(local, runs):
            cells = (_target_cell(stack, one, known.get(name)) for one, known in zip(columns, runs, strict=True))
            rows.append([name, _cell(local.get(name)), *cells])
        titles = (target.onnxruntime if target.provider == CPU else target.asked for target in columns)
        yield ["experiment", here, *titles], rows


def list_target_releases(report: Report, stack: str) -> Iterator[str]:
    """The runtime release that each named target ships, and where providers ran a stack."""
    for target in report.targets:
        if target.provider != CPU:
            yield from _describe_provider(target, stack)
        elif target.asked != target.runtime:
            yield f"{target.asked} ships onnxruntime {target.onnxruntime}"


def _describe_provider(target: TargetFacts, stack: str) -> Iterator[str]:
    """Where a provider ran, how far it may be off, and what ran on the CPU all the same."""
    on = f" on {target.adapter}" if target.adapter else ""
    if stack in target.tolerance:
        yield f"{target.asked}{on}: logits within {target.tolerance[stack]:g} standard deviations of the CPU's pass"
    yield from (f"{target.asked}: {one}" for one in target.on_cpu.get(stack, ()))


def list_target_limits(report: Report) -> Iterator[str]:
    """The file format versions that each target supports."""
    for target in report.targets:
        if target.ir is not None and target.provider == CPU:
            yield f"{target.asked} supports IR versions up to {target.ir} and opsets up to {target.opset}"


def _experiment_names(local: dict[str, Run], others: list[dict[str, Run]]) -> list[str]:
    """The experiments that findings rest on and that any runtime ran, in the order in which they are run."""
    from kvdoctor.decode.experiments import load

    names = []
    for experiment in load():
        known = [runs[experiment.name] for runs in (local, *others) if experiment.name in runs]
        rests = experiment.judged and experiment.shown and not (experiment.explains or experiment.on_request)
        # Where the file does not load, the skipped plain loop stands for all experiments.
        if rests and any(run.outcome != "skipped" or run.experiment == "plain-loop" for run in known):
            names.append(experiment.name)
    return names


def _target_cell(stack: str, target: TargetFacts, run: Run | None) -> str:
    if run is not None and run.outcome == "skipped" and target.refused.get(stack):
        return "REFUSED"
    if run is not None and run.experiment in target.other_logits.get(stack, ()):
        return "DIFFERS"
    return _cell(run)


def _cell(run: Run | None) -> str:
    if run is None:
        return "-"
    at = f" {run.failed_step}" if run.outcome == "failed" and run.failed_step is not None else ""
    return OUTCOMES[run.shows] + at


def _local_runtime(report: Report) -> str:
    return f"onnxruntime=={report.environment.get('onnxruntime', '?')}"
