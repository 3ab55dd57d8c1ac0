"""Reads a trace with several runs: what each fed and got, and the tokens that it found. numpy only.

The programs of `kvdoctor loop` write one: the first line has the runs that are due, a line of its own ends each run.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvdoctor.addons.traces.read import RUNS_FIELDS, SHORTER, parse_step, read_first, read_objects, read_trace
from kvdoctor.addons.traces.recorded import Trace
from kvdoctor.contract import CacheContract
from kvdoctor.errors import UsageError
from kvdoctor.records import record

SELF_TESTS = ("rewind", "reorder")
"""Runs that end with one step more, taken after going back or changing rows; the program itself compares its tokens."""
AGAIN = "give the whole file that the program wrote with --record, or record again (docs/trace.md)"
MOST_CALLS = 4096
MOST_RUNS = 64

Rows = tuple[tuple[int, ...], ...]
"""Token ids, a row for each sequence."""


@record
class DueRun:
    """A run that a program was to play: it feeds the prompts, then `follow` token by token; -1 expects nothing."""

    name: str
    prompts: Rows
    follow: Rows
    expect: Rows


@record
class TraceRun:
    """One run of a trace; `name` is None where the trace has no runs and is one sequence of calls.

    `tokens` has a row for each sequence with the likeliest token after the prompt and after each step; none where the
    run failed, and then `error` says how. `finished` is false where the program ended before the run did. `due` is what
    was to be played.
    """

    name: str | None
    trace: Trace
    tokens: Rows = ()
    error: str | None = None
    finished: bool = True
    due: DueRun | None = None

    @property
    def has_last_step_again(self) -> bool:
        """Whether it ends with a step that was taken again."""
        tested = self.error is None or self.error.startswith(f"{self.name}:")
        return self.name in SELF_TESTS and self.finished and tested

    @property
    def place(self) -> str:
        """Its name before a place in it."""
        return "" if self.name is None else f"run {self.name}, "


@record
class Recording:
    """The runs of a trace, and the names of those that were due and are not there."""

    runs: tuple[TraceRun, ...]
    missing: tuple[str, ...] = ()

    @property
    def first(self) -> Trace:
        """The calls of the first run that has some."""
        return next((run.trace for run in self.runs if run.trace), ())


def read_recording(path: str) -> Recording:
    """Read a trace of one run or of several.

    Raises:
        UsageError: it cannot be read, or is no trace; the message names the line, and what to do.
    """
    first = read_first(path)
    if not isinstance(first.get("run"), str) and "runs" not in first:
        return Recording((TraceRun(None, read_trace(path)),))
    try:
        return _read_runs(Path(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"the trace {path!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _read_runs(path: Path) -> Recording:
    due: dict[str, DueRun] = {}
    runs: dict[str, TraceRun] = {}
    calls = 0
    for line, found in read_objects(path, cut=True, advice=AGAIN):
        where = f"{str(path)!r}, line {line}"
        if "runs" in found:
            due = {one.name: one for one in _read_due(found, where, not runs and not due)}
            continue
        name = found.get("run")
        if not isinstance(name, str) or not 0 < len(name) <= 200:
            raise UsageError(f"{where} names no run, as other lines do; give one trace")
        run = runs.setdefault(name, TraceRun(name, (), finished=False, due=due.get(name)))
        if run.finished:
            raise UsageError(f"{where}: the run {name[:80]!r} has ended before; give one trace")
        if "tokens" in found:
            runs[name] = _ended(run, found, where)
            continue
        calls += 1
        if calls > MOST_CALLS or len(runs) > MOST_RUNS:
            raise UsageError(f"the trace {str(path)!r} has more than {MOST_CALLS} calls or {MOST_RUNS} runs; {SHORTER}")
        step = replace(parse_step(found, line, str(path)), number=len(run.trace))
        runs[name] = replace(run, trace=(*run.trace, step))
    recording = Recording(tuple(runs.values()), tuple(name for name in due if name not in runs))
    if not recording.first:
        error = next((run.error for run in recording.runs if run.error), "the program ended before any")
        raise UsageError(f"the trace {str(path)!r} has no call of the model: {error[:300]}")
    if due or any(run.finished for run in recording.runs):
        return recording
    # Runs of a program of the caller's own, which says no ends.
    return Recording(tuple(replace(run, finished=True) for run in recording.runs))


def _read_due(found: dict[str, Any], where: str, may: bool) -> tuple[DueRun, ...]:
    """The runs of a `vectors.json`, which only the first line may have."""
    runs = found["runs"] if isinstance(found["runs"], list) else []
    for one in runs:
        named = isinstance(one, dict) and isinstance(one.get("name"), str)
        if not named or not all(_is_rows(one.get(key) or []) for key in ("prompts", "follow", "expect")):
            runs = []
    if not may or not runs:
        raise UsageError(f"{where}: 'runs' must be those of vectors.json, and in the first line alone; {AGAIN}")
    return tuple(
        DueRun(one["name"], *(tuple(map(tuple, one.get(key) or [])) for key in ("prompts", "follow", "expect")))
        for one in runs
    )


def _is_rows(found: Any) -> bool:
    return isinstance(found, list) and all(
        isinstance(row, list) and all(type(token) is int for token in row) for row in found
    )


def _ended(run: TraceRun, found: dict[str, Any], where: str) -> TraceRun:
    """A run with the line that ends it."""
    tokens, error = found["tokens"], found.get("error")
    if set(found) - set(RUNS_FIELDS) or not _is_rows(tokens) or len({len(row) for row in tokens}) > 1:
        raise UsageError(f"{where} must have run, tokens (a list of ids for each sequence) and error; {AGAIN}")
    if not isinstance(error, (str, type(None))):
        raise UsageError(f"{where}: 'error' must be a text; {AGAIN}")
    return replace(run, tokens=tuple(map(tuple, tokens)), error=error, finished=True)


def with_likeliest(run: TraceRun, contract: CacheContract) -> Trace:
    """The trace of a run whose steps know which tokens the program found after them: one for each of the last calls.

    The step that ends a self test is left out: it is taken again on purpose.

    Raises:
        UsageError: the run has more tokens than calls of the decoder.
    """
    ports = (contract.graph(phase).port("logits") for phase in ("prefill", "decode"))
    names = {port.name for port in ports if port is not None}
    steps = list(run.trace)
    calls = [index for index, step in enumerate(steps) if names & step.got.keys()]
    if run.has_last_step_again and len(calls) > 1:
        steps, calls = steps[: calls[-2] + 1], calls[:-1]
    after = list(zip(*run.tokens, strict=True))
    if len(after) > len(calls):
        wrong = f"the run {str(run.name)[:80]!r} has {len(after)} tokens and {len(calls)} calls of the decoder"
        raise UsageError(f"{wrong}; give the whole trace")
    for index, found in zip(calls[len(calls) - len(after) :], after, strict=True):
        steps[index] = replace(steps[index], likeliest=found)
    return tuple(steps)


def trace_of(path: str, number: int, contract: CacheContract) -> Trace:
    """The trace of one run.

    Raises:
        UsageError: there is none of that number.
    """
    runs = read_recording(path).runs
    if number >= len(runs):
        raise UsageError(f"the trace {path!r} has no run {number}")
    return with_likeliest(runs[number], contract)
