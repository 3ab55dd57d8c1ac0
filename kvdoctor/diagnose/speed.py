"""`speed`: how fast each stack decodes here, and what got slower since an earlier report."""

import os
import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.analysis.thresholds import Threshold
from kvdoctor.contract import CacheContract
from kvdoctor.decode.messages import SPINNING, SpeedDone, SpeedJob, count_threads
from kvdoctor.decode.runs import quote_error
from kvdoctor.decode.speed import PASTS, SpeedDifference, find_worse
from kvdoctor.diagnose.build_report import build_report, stack_facts
from kvdoctor.diagnose.context import ContractContext, SpeedContext, extend_context
from kvdoctor.diagnose.decodings import measure_size
from kvdoctor.diagnose.examine import list_thresholds, settle_unknown
from kvdoctor.diagnose.inspection import build_context, check_files, read_contracts
from kvdoctor.diagnose.not_checked import find_unmet_preconditions
from kvdoctor.diagnose.run_checks import CheckResults, leave_open, run_checks
from kvdoctor.errors import UsageError, as_argument
from kvdoctor.options import Options
from kvdoctor.report.document import Report
from kvdoctor.report.facts import SpeedFacts
from kvdoctor.runtime.client import Runtime

SLOWER = "KV503"
TIMES = 2
"""Figures of a length that are times: noise concerns no others."""


def measure_speed(
    path: str, options: Options, earlier: Report | None, runtime: Runtime, against: str | None = None
) -> Report:
    """Measure each stack that can be run; `earlier` is a report of `speed` to compare with, of the file `against`.

    Raises:
        UsageError: there is nothing at the path, or the earlier report holds no speed.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    if earlier is not None and not earlier.speed:
        raise UsageError("the earlier report holds no speed; `kvdoctor speed MODEL --output speed.json` writes one")
    folder = open_folder(path)
    results, stacks, measured = check_files(folder, options), [], list[SpeedFacts]()
    contracts = read_contracts(folder, options)
    for stack in folder.stacks:
        context = build_context(folder, stack, contracts[stack.name], options)
        contract, _ = settle_unknown(context, options, runtime)
        stacks.append(stack_facts(stack, contract, folder.side_cars))
        context = replace(context, contract=contract)
        unmet = next(find_unmet_preconditions(stack, contract), None)
        facts, reason = _measure(context, options, runtime) if unmet is None else (None, unmet)
        if facts is None:
            results += _leave_open(stack.name, reason)
            continue
        measured.append(facts)
        before = _find_before(earlier, stack.name, contract) if earlier is not None else None
        differences: tuple[SpeedDifference, ...] = ()
        reasons = _leave_open(stack.name, before) if isinstance(before, str) else CheckResults()
        if isinstance(before, SpeedFacts):
            differences, reasons = _compare(facts, before)
            if any(not one.noisy for one in differences):
                with Runtime(runtime.limits, runtime.python) as fresh:  # the peak of the memory is that of a process
                    differences = _confirm(differences, before, _measure(context, options, fresh)[0])
        judged = extend_context(context, SpeedContext, speed=facts, differences=differences)
        results += reasons + run_checks(judged, "speed", options.selection)
    if earlier is not None and Path(path).is_dir():  # of a file, the others are not asked for
        here = {measure_size(one.contract) for one in stacks if one.contract is not None}
        others = {one.name for one in earlier.stacks if one.contract and measure_size(one.contract) not in here}
        for name in sorted({one.stack for one in earlier.speed} - others - {one.name for one in stacks}):
            results += _leave_open(name, "it was measured in the earlier report, and is not there any more")
    report = build_report("speed", folder, options, results, stacks)
    environment = {"onnxruntime": runtime.versions.get("onnxruntime", ""), **report.environment}
    arguments = report.arguments if against is None else {**report.arguments, "against": against}
    return replace(report, environment=environment, speed=tuple(measured), arguments=arguments)


def _measure(context: ContractContext, options: Options, runtime: Runtime) -> tuple[SpeedFacts | None, str]:
    """The figures of a stack, or why there are none."""
    thresholds = list_thresholds(context.stack, context.contract)
    lengths, spinning = tuple(one.length for one in thresholds), {SPINNING: "1"}  # as in a caller's own session
    job = SpeedJob(context.side, lengths, seed=options.seed, provider=options.provider, settings=spinning)
    if options.progress is not None:
        options.progress(f"speed of {context.stack.name}", 1, 1)
    answers, failed = runtime.answer(job, SpeedDone)
    if failed or not answers:
        return None, failed or "no answer"
    done = answers[0]
    left_out = (*_list_left_out(context, done, thresholds), *done.left_out)
    if not done.points:
        return None, "; ".join(left_out) or "no length of the past was measured"
    machine, measured = (describe_processor(), count_threads(), options.provider), (done.points, done.steps)
    return SpeedFacts(context.stack.name, *machine, *measured, done.grown_bytes, left_out), ""


def _list_left_out(context: ContractContext, done: SpeedDone, thresholds: tuple[Threshold, ...]) -> Iterator[str]:
    """Why lengths of the past were not measured: a sequence may not be so long, or the runtime fails."""
    contract, limit = context.contract, context.contract.usable_length
    if limit is not None and (beyond := tuple(past for past in PASTS if past >= limit)):
        by = "the config allows" if contract.context_limit == limit else "the smallest buffer of the cache has"
        yield f"{_name_pasts(beyond)}: {by} {limit:,} tokens"
    if not done.failing:
        return
    if done.longest is None:
        step_test, error = f"kvdoctor step-test {as_argument(context.folder.shown)}", quote_error(done.error)
        yield f'{_name_pasts(done.failing)}: the runtime fails ("{error}"); {step_test} looks for the cause'
    else:
        node = next(one.node for one in thresholds if one.length == done.longest)
        lengths = f"{done.longest:,} tokens run, and {done.longest + 1:,} fail"
        yield f"{_name_pasts(done.failing)}: {lengths}; {done.longest:,} is a length threshold of the graph ({node})"


def _name_pasts(pasts: tuple[int, ...]) -> str:
    """`no past of 128 or 1,024 tokens was measured`."""
    return f"no past of {' or '.join(f'{past:,}' for past in pasts)} tokens was measured"


def _find_before(earlier: Report, name: str, contract: CacheContract) -> SpeedFacts | str:
    """The figures of the earlier report to compare with, or why there are none."""
    contracts = {one.name: one.contract for one in earlier.stacks if one.contract is not None}
    sizes, size = {name: measure_size(one) for name, one in contracts.items()}, measure_size(contract)
    other = f"the earlier report is of another model, {earlier.model.path}: "
    before = next((one for one in earlier.speed if one.stack == name), None)
    if before is not None and sizes.get(name, size) == size:
        counts = ([slot.size("kv_heads") for slot in one.slots] for one in (contracts.get(name, contract), contract))
        old, new = (sorted({heads for heads in heads_of if heads is not None}) for heads_of in counts)
        shown = (f"caches of {' and '.join(map(str, heads))} key-value heads" for heads in (old, new))
        return f"{other}{'; this one has '.join(shown)}" if old and new and old != new else before
    measured = ", ".join(one.stack for one in earlier.speed)
    if size in sizes.values():
        return f"the earlier report, of {earlier.model.path}, has no figures of {name}, but of {measured}"
    there = "; ".join(dict.fromkeys(one.describe() for one in sizes.values()))
    return f"{other}{there}; this one has {size.describe()}"


def _confirm(
    differences: tuple[SpeedDifference, ...], before: SpeedFacts, again: SpeedFacts | None
) -> tuple[SpeedDifference, ...]:
    """Those that a second measurement has as well: another job on the machine slows one of them down."""
    if again is None:
        return differences
    worse = {(one.past, one.what) for one in _compare(again, before)[0] if not one.noisy}
    return tuple(one for one in differences if one.noisy or (one.past, one.what) in worse)


def _compare(now: SpeedFacts, old: SpeedFacts) -> tuple[tuple[SpeedDifference, ...], CheckResults]:
    """What got worse since the earlier report, and what cannot be compared: it is never the same."""
    for what in ("processor", "threads", "provider"):
        if getattr(old, what) != getattr(now, what):
            reason = f"the earlier report is from another machine or setting: {what} {getattr(old, what)}"
            return (), _leave_open(now.stack, f"{reason}, and here {getattr(now, what)}")
    compared = {point.past for point in now.points} & {point.past for point in old.points}
    if not compared:
        return (), _leave_open(now.stack, "no length of the past was measured both times")
    differences = tuple(find_worse(now.points, old.points))
    gone = ", ".join(map(str, sorted({point.past for point in old.points} - compared)))
    why = f" ({'; '.join(now.left_out)})" if now.left_out else ""
    lost = _leave_open(now.stack, f"the earlier report has a past of {gone}, which was not measured now{why}")
    reasons = lost if gone else CheckResults()
    noisy = [f"{one.what} at a past of {one.past}" for one in differences if one.noisy]
    if not noisy:
        return differences, reasons
    reason = f"the rounds vary too much to decide: {', '.join(noisy)}"
    everything = len(noisy) == len(compared) * TIMES
    return differences, reasons + leave_open(now.stack, SLOWER, reason, essential=everything)


def _leave_open(stack: str, reason: str) -> CheckResults:
    return leave_open(stack, SLOWER, f"speed: {reason}")


def describe_processor() -> str:
    """The name of the processor, and how many cores the process may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{name or platform.processor() or platform.machine()}, {os.cpu_count()} cores"
