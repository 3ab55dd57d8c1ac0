"""Runs in words: outcome, steps, differences of the logits, fault location, and the speed-up by the cache.

Differences of logits are given in standard deviations of the logits, `SD` for short.
"""

from collections.abc import Iterable, Iterator

from kvdoctor.contract import CacheContract, Slot, describe
from kvdoctor.decode.runs import HISTORY, OWN_SESSION, PLAIN_LOOP, LogitsDifference, ObservedTensor, Run, Step
from kvdoctor.report.wording.units import format_milliseconds

UNIT = "differences in standard deviations (SD) of the logits"
"""Stands above tables in which differences have the unit SD."""
HEADER = ["step", "max diff", "max diff, SD", "1 - cosine", "KL, nats", "top 1", "top 5"]
FLOAT32 = "float32, SD"


def format_outcome(run: Run) -> str:
    """`failed at step 2`, `passed`, ..."""
    at = run.failed_step
    return f"{run.outcome} at step {at}" if run.outcome in ("failed", "differs") and at is not None else run.outcome


def format_difference(relative: float) -> str:
    """`1.2 SD`, `1.7e-06 SD`; 0 is `0`."""
    if relative == 0:
        return "0"
    return f"{relative:.2g} SD" if relative >= 0.1 else f"{relative:.1e} SD"


def describe_result(run: Run, why: str = "") -> str:
    """What stands beside an outcome: the node that fails, the largest difference, the reason of a skip.

    `why` is the known reason for an experiment that no verdict rests on to fail.
    """
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
    for line in place.provenance:
        yield "evidence", line
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
        cells = [str(step.step), str(step.past_length), str(step.new_tokens)]
        cells += [_past_and_present(step, contract.of_kind(kind)[0], run) for kind in kinds]
        rows.append([*cells, format_logits(step)])
    return header, rows


def _past_and_present(step: Step, slot: Slot, run: Run) -> str:
    given = step.fed.get(slot.past)
    # In the first graph of a pair another input may bear the name.
    fed = _shape(given) if given is not None and len(given.shape) == len(slot.axes) else "-"
    if not step.returned:
        return f"{fed} -> fails"
    name = slot.filled_by if step.phase == "prefill" else slot.present
    seen = step.returned.get(name or "")
    marks = [word for word, is_so in (("empty", seen and seen.empty), ("null", seen and seen.null)) if is_so]
    kept = " kept" if run.experiment == "held-loop" and slot.carry == "hold" and step.phase == "decode" else ""
    return f"{fed}{kept} -> {_shape(seen)}" + (f" {', '.join(marks)}" if marks else "")


def _shape(seen: ObservedTensor | None) -> str:
    return "none" if seen is None else f"[{','.join(map(str, seen.shape))}]"


def format_logits(step: Step) -> str:
    """The difference of the logits of a step; `returned` where they were not compared."""
    if not step.returned:
        return "-"
    if step.difference is None:
        return "returned"
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
    return [
        f"{difference.max_abs:.1e}",
        f"{difference.relative:.1e}",
        f"{1 - difference.cosine:.1e}",
        f"{difference.kl:.1e}",
        word,
        f"{difference.same_top5:.0%} same",
    ]


def describe_parity(run: Run) -> Iterator[tuple[str, str]]:
    """Label and text: the trend of the error over the steps, the effect of rounding, the cache after the last step."""
    if text := describe_growth(run):
        yield "error", text
    if text := describe_rounding(run):
        yield "rounding", text
    last = next((step for step in reversed(run.steps) if step.slots), None)
    if last is not None:
        yield "cache", _cache_difference(last)


def _cache_difference(last: Step) -> str:
    worst = max(last.slots, key=lambda name: last.slots[name])
    return (
        f"after step {last.step}, {len(last.slots)} growing slots compared with those of one call over the same "
        f"tokens: off by at most {last.slots[worst]:.1e} standard deviations of the slot ({worst})"
    )


def describe_growth(run: Run) -> str | None:
    """The trend of the difference over the steps; None where there are too few steps for one."""
    if run.growth is None:
        return None
    found = {step.step: step.difference.relative for step in run.steps if step.difference is not None}
    match run.growth.shape:
        case "flat":
            return "does not grow with the steps"
        case "linear":
            first, last = found[min(found) + 1], found[max(found)]
            return f"grows with the steps, from {first:.1e} to {last:.1e} standard deviations of the logits"
        case _:
            return f"sets in at step {run.growth.step}"


def describe_comparisons(runs: Iterable[Run]) -> str:
    """What the loop of a graph that takes one token a call was compared with, in words."""
    passed = {run.experiment for run in runs if run.shows == "passed"}
    words = {
        PLAIN_LOOP: "a second pass",
        OWN_SESSION: "a session of its own",
        HISTORY: "other histories and states",
        "batch": "each row of a batch alone",
    }
    found = [text for name, text in words.items() if name in passed]
    return " and ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)


def describe_rounding(run: Run) -> str:
    """How much of the difference is rounding, by the same experiment on a float32 copy; empty without such a run."""
    float32 = run.unrounded
    if float32 is None:
        return ""
    if float32.outcome not in ("passed", "differs"):
        return f"a float32 copy of the model gives no clearer answer ({float32.outcome})"
    if float32.outcome == "passed":
        worst = max((s.difference.relative for s in run.steps if s.difference is not None), default=0.0)
        return (
            f"a float32 copy of the model is within {float32.worst:.1e} standard deviations of the logits: "
            f"the difference of up to {worst:.1e} is rounding alone"
        )
    return (
        f"a float32 copy of the model is off by {float32.worst:.2g} standard deviations of the logits: this is more "
        "than rounding, which alone leaves at most 2e-4"
    )


def describe_difference(run: Run, step: Step | None) -> str | None:
    """How far the logits of a step are off, in the model and in a float32 copy; None where neither is known."""
    found = step.difference if step is not None else None
    if found is not None and not found.finite:
        return "not finite"
    words = [f"off by {found.relative:g} standard deviations of the logits"] if found is not None else []
    if run.hidden and run.unrounded is not None:
        words.append(f"off by {run.unrounded.at(step):g} in a float32 copy of the model")
    return ", ".join(words) or None


def format_cache_speedup(measured: dict[str, float]) -> str | None:
    """`cache speed-up: 1.6x at 5 tokens (0.51 ms -> 0.32 ms)`; `none` where the cache does not pay at a length.

    None where no step was timed.

    Args:
        measured: Seconds per step by `cached:N` and `uncached:N`, N the number of tokens before the step.
    """
    parts = []
    for length in sorted({int(label.partition(":")[2]) for label in measured}):
        cached, uncached = measured.get(f"cached:{length}"), measured.get(f"uncached:{length}")
        if cached and uncached:
            times = f"{format_milliseconds(uncached)} -> {format_milliseconds(cached)}"
            gain = f"{uncached / cached:.1f}x" if uncached > cached else "none"
            parts.append(f"{gain} at {length} tokens ({times})")
    return f"cache speed-up: {', '.join(parts)}" if parts else None
