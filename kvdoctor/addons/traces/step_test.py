"""The trace in a step-test (`--trace`): each run is compared with the contract, run again, and judged by the checks."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvdoctor.addons.traces.options import TraceChoices
from kvdoctor.analysis.configs import SideCars, decoder_config
from kvdoctor.contract import CacheContract
from kvdoctor.decode.messages import AddedExperiment
from kvdoctor.decode.runs import REPLAY, Run
from kvdoctor.diagnose.context import RunContext, extend_context
from kvdoctor.diagnose.not_checked import find_undecided_steps
from kvdoctor.diagnose.run_checks import CheckResults, run_checks
from kvdoctor.findings import Finding, NotChecked, Round
from kvdoctor.options import Options
from kvdoctor.records import record

if TYPE_CHECKING:
    from kvdoctor.addons.traces.check import TraceCheck
    from kvdoctor.addons.traces.runs import Recording, TraceRun
    from kvdoctor.addons.traces.step import ContractViolation


SPECIAL = ("eos_token_id", "pad_token_id")
NOT_AGAIN = "only a run decides, and the trace was not run again"


@record(slots=False, kw_only=True)
class CallerContext(RunContext):
    """Round `caller`: adds one run of the caller's loop, its comparison with the contract, and the same steps here."""

    trace_check: "TraceCheck"
    trace_run: "TraceRun"
    replay: Run | None


@record
class TracePart:
    """A trace whose runs call a stack; None and no runs where no contract is complete."""

    path: str
    stack: str | None = None
    recording: "Recording | None" = None
    checked: "tuple[TraceCheck, ...]" = ()
    results: CheckResults = CheckResults()
    round: Round = "caller"

    def list_experiments(self, stack: str) -> tuple[AddedExperiment, ...]:
        """The replays, on the stack that the trace calls."""
        path = str(Path(self.path).absolute())
        return tuple(
            AddedExperiment(name, "kvdoctor.addons.traces.replay", {"path": path, "run": str(number), "name": name})
            for number, name in enumerate(self._replays if stack == self.stack else ())
        )

    @property
    def _replays(self) -> tuple[str, ...]:
        return tuple(f"{REPLAY}-{number + 1}" if number else REPLAY for number in range(len(self.checked)))

    def judge(self, context: RunContext, options: Options) -> CheckResults:
        """What breaks the contract, and a note on each run."""
        found, same = CheckResults(), list[CallerContext]()
        if self.recording is None or context.stack.name != self.stack:
            return found
        from kvdoctor.addons.traces.check import compare_trace
        from kvdoctor.addons.traces.runs import with_likeliest

        for run, name in zip(self.recording.runs, self._replays, strict=True):
            replay = context.find_run(name)
            again = compare_trace(with_likeliest(run, context.contract), context.contract)  # its readings are settled
            again = replace(again, also=self.checked[0].also)
            checked = _confirm(again, replay, context.folder.side_cars)
            caller = extend_context(context, CallerContext, trace_check=checked, trace_run=run, replay=replay)
            more = self._judge_run(caller, options)
            if len(self.checked) > 1 and not (more.findings or more.not_checked):
                same.append(caller)
            else:
                found += more
        found = found if len(self.checked) == 1 else _name_once(found)
        return replace(found, notes=(self._describe_same(same), *found.notes)) if same else found

    def _describe_same(self, runs: list[CallerContext]) -> str:
        steps = sum(run.trace_check.steps for run in runs)
        differences = [step.difference for run in runs if run.replay is not None for step in run.replay.steps]
        furthest = max((one.relative for one in differences if one is not None), default=0.0)
        which = (
            f"all {len(runs)} runs" if len(runs) == len(self.checked) else f"{len(runs)} of {len(self.checked)} runs"
        )
        text = f"trace {self.path}: {which} ({steps} steps of {self.stack}) follow the contract, and give the same here"
        alone = [str(run.trace_run.name) for run in runs if run.trace_run.has_last_step_again]
        again = f"; the last step of {' and '.join(alone)} was compared with the expected tokens alone"
        return f"{text} ({furthest:.1e}){again if alone else ''}"

    def _judge_run(self, caller: CallerContext, options: Options) -> CheckResults:
        from kvdoctor.addons.traces.runs import list_open

        run, stack = caller.trace_run, caller.stack.name
        found = run_checks(caller, "caller", options.selection)
        findings = tuple(replace(one, where=f"{run.place}{one.where}") for one in found.findings)
        reasons = list_open(run, caller.replay, caller.contract) if run.name is not None else ()
        opened = (NotChecked(stack, "KV420", f"run {run.name}: {reason}", essential=True) for reason in reasons)
        open_doubts = caller.trace_check.doubts if caller.replay is None or caller.replay.outcome in NOT_RUN else ()
        doubted = (
            NotChecked(stack, "KV208", f"whether {one.inputs[0]} is right at step {step.number}: {NOT_AGAIN}", True)
            for step, one in open_doubts[:1]
        )
        undecided = (*doubted, *find_undecided_steps(stack, findings))
        shown = self.path if run.name is None else f"{self.path}, run {run.name}"
        note = describe_trace(caller.trace_check, caller.replay, shown, stack)
        return replace(found, findings=findings) + CheckResults(not_checked=(*opened, *undecided), notes=(note,))


def _confirm(checked: "TraceCheck", replay: Run | None, files: SideCars) -> "TraceCheck":
    """The comparison, with what running its step both ways showed to be an error.

    That is a doubt, or a mask that leaves out one token of a prompt: an end token, where no file says otherwise.
    """
    places = (None, checked.step.number) if checked.step is not None else ()
    if replay is not None and replay.outcome == "differs" and replay.failed_step in places:
        breaks = (replace(one, suspected=None if _hides_end(one, files) else one.suspected) for one in checked.breaks)
        return replace(checked, breaks=tuple(breaks))
    for step, one in checked.doubts if replay is not None else ():
        shows = "failed" if one.kind == "token-unknown" else "differs"
        if replay is not None and (replay.outcome, replay.failed_step) == (shows, step.number):
            return replace(checked, step=step, breaks=(one,), failed=None, steps=step.number + 1)
    return checked


def _hides_end(one: "ContractViolation", files: SideCars) -> bool:
    """Whether the token that a mask leaves out may end a text: a file says so, or none names such ids."""
    named = [part.get(key) for part in (files.generation, decoder_config(files.config)) for key in SPECIAL]
    known = [part for part in named if part is not None]
    ends = named[:: len(SPECIAL)]
    listed = [each for part in ends for each in (part if isinstance(part, list) else [part])]
    return one.hidden is not None and (not known or one.hidden in listed)


def _name_once(found: CheckResults) -> CheckResults:
    """The results with one finding for the runs that show the same: the first of them, and the others by name."""
    kept: dict[tuple[str, str, str], Finding] = {}
    for one in found.findings:
        key = (one.code, one.cause, one.observed.partition(": ")[2].partition(" is off by")[0])
        first = kept.setdefault(key, one)
        if first is not one:
            also = one.where.partition(",")[0]
            kept[key] = replace(first, effects=(*first.effects, f"the same in {also}"))
    return replace(found, findings=tuple(kept.values()))


def open_part(options: Options, contracts: Mapping[str, CacheContract]) -> TracePart | None:
    """The trace that is given; None without one.

    Raises:
        UsageError: it cannot be read, or fits no stack.
    """
    path = options.of(TraceChoices).trace
    if path is None:
        return None
    drivable = {name: contract for name, contract in contracts.items() if contract.slots and not contract.missing}
    if not drivable:
        reason = "the trace was not compared with a contract: none is complete"
        missing = (NotChecked(None, "KV208", reason, essential=True),)
        return TracePart(path, results=CheckResults(not_checked=missing))
    from kvdoctor.addons.traces.check import compare_trace
    from kvdoctor.addons.traces.runs import find_called, read_recording, with_likeliest

    recording = read_recording(path)
    stack, also = find_called(recording, drivable, path)
    checked = tuple(
        replace(compare_trace(with_likeliest(run, drivable[stack]), drivable[stack]), also=also)
        for run in recording.runs
    )
    reasons = (f"the trace has no run {name}: the program ended before it" for name in recording.missing)
    ended = tuple(NotChecked(stack, "KV420", reason, essential=True) for reason in reasons)
    cut = () if recording.cut is None else (f"trace {path}: line {recording.cut} is cut off and was left out",)
    return TracePart(path, stack, recording, checked, CheckResults(not_checked=ended, notes=cut))


NOT_RUN = ("skipped", "died")


def describe_trace(held: "TraceCheck", run: Run | None, path: str, stack: str) -> str:
    """One line: how many steps were compared, what was found, and what stays undecided."""
    steps = f"{held.steps} step{'s' * (held.steps != 1)} of {stack}"
    if held.sequences > 1:
        steps += f" in {held.sequences} sequences"
    if held.step is not None:
        verb = "may break" if all(one.suspected for one in held.breaks) else "breaks"
        text = f"{steps} compared with the contract; step {held.step.number} ({held.step.place}) {verb} it"
    else:
        text = f"{steps} compared with the contract, none breaks it"
        text += "" if held.cached or held.sequences < 2 else "; no step used the cache"
    if held.also:
        text += f" (it fits {', '.join(held.also)} as well)"
    parts = [text]
    if held.untrue is not None and held.step is None:
        wrong, declared = held.untrue, f"where the graph declares {held.untrue.declared}"
        returned = f"step {wrong.step} returned {wrong.output} as {wrong.observed}"
        parts.append(f"with correct inputs, {returned}, {declared}")
    if held.failed is not None:
        step = f"step {held.failed.number} ({held.failed.place})"
        parts.append(f"{step} failed in the caller's runtime although its feeds are right")
    if held.step is None and run is not None:
        parts += describe_replay(run, held.failed.number if held.failed is not None else None, None)
    if held.blind:
        shown = ", ".join(held.blind[:4]) + (f" and {len(held.blind) - 4} more" if len(held.blind) > 4 else "")
        parts.append(f"not decided by shapes: the values of {shown} (give their data)")
    return f"trace {path}: {'; '.join(parts)}"


def describe_replay(run: Run | None, failed: int | None, broken: int | None) -> Iterator[str]:
    """The result of running the same steps locally; `failed` is the step that failed in the caller's program."""
    if run is None or run.outcome in NOT_RUN:
        yield f"not run again locally{f': {run.reason}' if run is not None and run.reason else ''}"
    elif run.outcome == "failed":
        where = f" in {run.node.shown}" if run.node else ""
        yield f"run again locally, step {run.failed_step} fails{' as well' if failed is not None else ''}{where}"
    elif failed is not None:
        yield f"run again locally, every step runs: only the caller's runtime fails at step {failed}"
    elif broken is not None:
        yield f"run again locally, every step runs{_off(run, broken)}"
    elif run.outcome != "differs":
        yield _count_equal(run)


def _count_equal(run: Run) -> str:
    known = [step.difference.relative for step in run.steps if step.difference is not None]
    text = f"{len(run.steps)} steps run"
    if known:
        text = f"{len(known)} of {len(run.steps)} steps give the logits of the trace"
        if len(known) < len(run.steps):
            text = f"{len(run.steps)} steps run; the {len(known)} whose logits are in the trace give the same"
        text += f" ({max(known):.1e})"
    return f"run again locally, {text}"


def _off(run: Run, broken: int) -> str:
    found = next((step.difference for step in run.steps if step.step == broken), None)
    if found is None:
        return ""
    if not found.finite:
        return f", and the logits of step {broken} are not finite"
    text = f", and the logits of step {broken} are {found.relative:.2g} SD off those with correct inputs"
    if run.outcome == "passed":
        text = f", and the logits of step {broken} are those with correct inputs"
    return text + (f"; {run.reason}" if run.cause is not None and run.reason else "")


def is_harmless(held: "TraceCheck", one: "ContractViolation", run: Run | None) -> bool:
    """Whether running a broken step again showed that what was fed, as it was fed, changes nothing."""
    if held.step is None or held.step.error is not None or run is None or run.outcome != "passed":
        return False
    compared = any(step.step == held.step.number and step.difference is not None for step in run.steps)
    known = all(name in held.step.fed and held.step.fed[name].has_values for name in one.inputs)
    return compared and (known or one.mild)


def name_location(held: "TraceCheck", one: "ContractViolation") -> str:
    """The place of a break: `trace step 2 (line 3), input past_key_values.0.key and 3 more`."""
    assert held.step is not None  # noqa: S101 - a break is one of a step
    names = one.inputs[0] + (f" and {len(one.inputs) - 1} more" if len(one.inputs) > 1 else "") if one.inputs else ""
    return f"trace step {held.step.number} ({held.step.place})" + (f", input {names}" if names else "")
