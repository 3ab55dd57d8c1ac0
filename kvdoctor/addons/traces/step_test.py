"""The trace in a step-test (`--trace`): each run is compared with the contract, run again, and judged by the checks."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvdoctor.addons.traces.options import TraceChoices
from kvdoctor.analysis.configs import decoder_config
from kvdoctor.analysis.model_folder import SideCars
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
        """The name of the experiment that runs each run again."""
        return tuple(f"{REPLAY}-{number + 1}" if number else REPLAY for number in range(len(self.checked)))

    def judge(self, context: RunContext, options: Options) -> CheckResults:
        """What breaks the contract, and a note on each run."""
        found, same = CheckResults(), list[CallerContext]()
        if self.recording is None or context.stack.name != self.stack:
            return found
        for run, name in zip(self.recording.runs, self._replays, strict=True):
            replay = context.find_run(name)
            checked = _confirm(self._check(run, context.contract), replay, context.folder.side_cars)
            caller = extend_context(context, CallerContext, trace_check=checked, trace_run=run, replay=replay)
            more = self._judge_run(caller, options)
            if len(self.checked) > 1 and not (more.findings or more.not_checked):
                same.append(caller)
            else:
                found += more
        found = found if len(self.checked) == 1 else _name_once(found)
        return replace(found, notes=(self._describe_same(same), *found.notes)) if same else found

    def _check(self, run: "TraceRun", contract: CacheContract) -> "TraceCheck":
        """The comparison of a run with the contract whose readings were settled."""
        from kvdoctor.addons.traces.check import compare_trace
        from kvdoctor.addons.traces.runs import with_likeliest

        also = self.checked[0].also
        return replace(compare_trace(with_likeliest(run, contract), contract), also=also)

    def _describe_same(self, runs: list[CallerContext]) -> str:
        """One line for all runs that show no fault."""
        steps = sum(run.trace_check.steps for run in runs)
        differences = [step.difference for run in runs if run.replay is not None for step in run.replay.steps]
        furthest = max((one.relative for one in differences if one is not None), default=0.0)
        which = (
            f"all {len(runs)} runs" if len(runs) == len(self.checked) else f"{len(runs)} of {len(self.checked)} runs"
        )
        text = f"trace {self.path}: {which} ({steps} steps of {self.stack}) follow the contract, and give the same here"
        alone = [str(run.trace_run.name) for run in runs if run.trace_run.has_last_step_again]
        text += f" ({furthest:.1e})"
        return text + (f"; the last step of {' and '.join(alone)} was compared by the program alone" if alone else "")

    def _judge_run(self, caller: CallerContext, options: Options) -> CheckResults:
        from kvdoctor.addons.traces.describe import NOT_RUN, describe_trace
        from kvdoctor.addons.traces.due import list_open

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
    from kvdoctor.addons.traces.due import find_called
    from kvdoctor.addons.traces.runs import read_recording, with_likeliest

    recording = read_recording(path)
    stack, also = find_called(recording, drivable, path)
    checked = tuple(
        replace(compare_trace(with_likeliest(run, drivable[stack]), drivable[stack]), also=also)
        for run in recording.runs
    )
    reasons = (f"the trace has no run {name}: the program ended before it" for name in recording.missing)
    ended = tuple(NotChecked(stack, "KV420", reason, essential=True) for reason in reasons)
    return TracePart(path, stack, recording, checked, CheckResults(not_checked=ended))
