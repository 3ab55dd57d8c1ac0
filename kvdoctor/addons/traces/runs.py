"""Reads a trace with several runs: what each fed and got, and the tokens that it found. numpy only.

The programs of `kvdoctor loop` write one: the first line has the runs that are due, a line of its own ends each run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvdoctor.addons.traces.check import find_stacks, phase_of
from kvdoctor.addons.traces.recorded import GUIDE, RUNS_FIELDS, SHORTER, Trace, parse_step, read_objects
from kvdoctor.contract import Axis, CacheContract, PhaseName
from kvdoctor.decode.runs import Run
from kvdoctor.errors import UsageError
from kvdoctor.records import record

SELF_TESTS = ("rewind", "reorder")
"""Runs that end with one step more, taken after going back or changing rows."""
AGAIN = "give the whole file that the program wrote with --record, or record again (docs/trace.md)"
MOST_CALLS = 4096
MOST_RUNS = 64

Rows = tuple[tuple[int, ...], ...]
"""Token ids, a row for each sequence."""


@record
class DueRun:
    """A run that a program was to play: it feeds the prompts, then `follow` token by token; -1 expects nothing.

    `again` is expected of the step that ends a self test.
    """

    name: str
    prompts: Rows
    follow: Rows
    expect: Rows
    again: tuple[int, ...] = ()


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
    """The runs of a trace, the names of those that were due and are not there, and the number of a line that is cut."""

    runs: tuple[TraceRun, ...]
    missing: tuple[str, ...] = ()
    cut: int | None = None

    @property
    def first(self) -> Trace:
        """The calls of the first run that has some."""
        return next((run.trace for run in self.runs if run.trace), ())


def read_recording(path: str) -> Recording:
    """Read a trace of one run or of several.

    Raises:
        UsageError: it cannot be read, or is no trace; the message names the line, and what to do.
    """
    place = Path(path)
    try:
        if not place.is_file():
            reason = "is no file" if place.exists() else "does not exist"
            raise UsageError(f"the trace {path!r} {reason}; give a file of JSON lines")
        return _read_runs(place)
    except (OSError, ValueError) as error:  # a null character in the path is a ValueError
        raise UsageError(f"the trace {path!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _read_runs(path: Path) -> Recording:
    due: dict[str, DueRun] = {}
    runs: dict[str | None, TraceRun] = {}
    calls, cut = 0, None
    for line, found in read_objects(path):
        if found is None:
            cut = line
            continue
        where = f"{str(path)!r}, line {line}"
        if "runs" in found:
            due = {one.name: one for one in _read_due(found, where, not runs and not due)}
            continue
        name = _read_name(found, where)
        if (due or runs) and (name is None) is not (None in runs):
            other = "no run, as other lines do" if name is None else "a run, and the first line does not"
            raise UsageError(f"{where} names {other}; give one trace")
        run = runs.setdefault(name, TraceRun(name, (), finished=name is None, due=due.get(name or "")))
        if run.finished and name is not None:
            raise UsageError(f"{where}: the run {name[:80]!r} has ended before; give one trace")
        if name is not None and "tokens" in found:
            runs[name] = _ended(run, found, where)
            continue
        calls += 1
        if calls > MOST_CALLS or len(runs) > MOST_RUNS:
            raise UsageError(f"the trace {str(path)!r} has more than {MOST_CALLS} steps or {MOST_RUNS} runs; {SHORTER}")
        step = replace(parse_step(found, line, str(path)), number=len(run.trace))
        runs[name] = replace(run, trace=(*run.trace, step))
    recording = Recording(tuple(runs.values()), tuple(name for name in due if name not in runs), cut)
    if not recording.first:
        error = next((run.error for run in recording.runs if run.error), "the program ended before any")
        reason = f"has no call of the model: {error[:300]}" if due or runs else f"holds no step; {GUIDE}"
        raise UsageError(f"the trace {str(path)!r} {reason}")
    if due or any(run.finished for run in recording.runs):
        return recording
    # Runs of a program of the caller's own, which says no ends.
    return replace(recording, runs=tuple(replace(run, finished=True) for run in recording.runs))


def _read_name(found: dict[str, Any], where: str) -> str | None:
    """The run of a line, where it names one."""
    name = found.get("run")
    if name is None or (isinstance(name, str) and 0 < len(name) <= 200):
        return name
    raise UsageError(f"{where}: 'run' must be a text of up to 200 characters; {GUIDE}")


def _read_due(found: dict[str, Any], where: str, may: bool) -> tuple[DueRun, ...]:
    """The runs of a `vectors.json`, which only the first line may have."""
    try:
        due = tuple(_parse_due(one) for one in found["runs"])
    except (TypeError, KeyError, IndexError, ValueError):
        due = ()
    if not may or not due:
        raise UsageError(f"{where}: 'runs' must be those of vectors.json, and in the first line alone; {AGAIN}")
    return due


def _parse_due(one: dict[str, Any]) -> DueRun:
    """A run of a `vectors.json`; raises an error of Python where it is none."""
    names = [call["call"] for call in one["calls"]]
    end = names.index("rewind") if "rewind" in names else len(names)
    first, *steps = [call for call in one["calls"][:end] if "expect" in call]
    again = [tuple(call["expect"]) for call in one["calls"][end:] if "expect" in call]
    rows = [*first["rows"], *(row for call in steps for row in call["rows"]), *(call["expect"] for call in steps)]
    if not isinstance(one["name"], str) or not _is_rows([*rows, first["expect"], *map(list, again)]):
        raise ValueError(one)
    follow = tuple(tuple(token for call in steps for token in call["rows"][row]) for row in range(len(first["rows"])))
    expect = tuple(zip(first["expect"], *(call["expect"] for call in steps), strict=True))
    return DueRun(one["name"], tuple(map(tuple, first["rows"])), follow, expect, *again[:1])


def _is_rows(found: Any) -> bool:
    return isinstance(found, list) and all(
        isinstance(row, list) and all(type(token) is int for token in row) for row in found
    )


def _ended(run: TraceRun, found: dict[str, Any], where: str) -> TraceRun:
    tokens, error = found["tokens"], found.get("error")
    again = tokens[-1] if run.name in SELF_TESTS and error is None and isinstance(tokens, list) and tokens else None
    calls = tokens if again is None else tokens[:-1]
    if set(found) - set(RUNS_FIELDS) or not _is_rows(tokens) or len({len(row) for row in calls}) > 1:
        raise UsageError(f"{where} must have run, tokens (a list of ids for each call) and error; {AGAIN}")
    if not isinstance(error, (str, type(None))):
        raise UsageError(f"{where}: 'error' must be a text; {AGAIN}")
    wanted = run.due.again if run.due is not None else ()
    if again is not None and any(one not in (ANY, token) for one, token in zip(wanted, again, strict=False)):
        error = f"{run.name}: {again} in place of {list(wanted)}"
    return replace(run, tokens=tuple(zip(*calls, strict=True)), error=error, finished=True)


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


SIZES: tuple[Axis, ...] = ("kv_heads", "head_dim", "layers")
"""Sizes of a cache that are those of the model, in every run."""
ANY = -1
"""In place of an expected token, where several are right."""


def find_called(recording: Recording, contracts: Mapping[str, CacheContract], path: str) -> tuple[str, tuple[str, ...]]:
    """The stack that was called, and others that fit as well.

    Raises:
        UsageError: it is none of this model: the inputs are others, or a size of the model is another in every run.
    """
    name, *also = find_stacks(recording.first, contracts, path)
    contract = contracts[name]
    if any(run.due for run in recording.runs):
        inputs = {port.name for graph in contract.graphs.values() for port in graph.inputs}
        if strange := next((fed for step in recording.first for fed in step.fed if fed not in inputs), None):
            raise UsageError(
                f"the trace {path!r} feeds {strange[:200]!r}, which this model does not have; "
                f"give the model that the program was written for"
            )
    other = [next(_list_other_sizes(contract, run), None) for run in recording.runs if run.trace and run.name]
    if other and all(other):
        raise UsageError(f"the trace {path!r} is of another model: {other[0]}; give the one that the program called")
    return name, tuple(also)


def _list_other_sizes(contract: CacheContract, run: TraceRun) -> Iterator[str]:
    for slot in contract.slots:
        fed = next((step.fed[slot.past] for step in run.trace if slot.past in step.fed), None)
        for axis, size in zip(slot.axes, fed.shape if fed is not None else (), strict=False):
            if axis in SIZES and slot.size(axis) not in (None, size):
                yield f"{slot.past} was fed with {size} {axis}, and the model has {slot.size(axis)}"


def list_open(run: TraceRun, replay: Run | None, contract: CacheContract) -> Iterator[str]:
    """Why a run that shows no fault decides nothing."""
    if not run.finished:
        yield "the program ended before it did"
    elif run.due is not None and run.error is None and not all(run.tokens or ((),)):
        yield "the program found no tokens"
    if run.due is not None and (other := _find_other_id(run, run.due, contract)):
        yield f"the program did not feed what the run asks: {other}"
    if replay is None or replay.outcome in ("skipped", "died", "inconclusive"):
        yield f"it could not be run again here: {(replay.reason if replay is not None else None) or 'no result'}"
    elif replay.outcome == "ambiguous":
        yield "the difference of its outputs is between rounding and a fault"
    elif replay.outcome == "passed" and not any(step.difference is not None for step in replay.steps):
        yield "nothing in it can be compared: give a trace of this model, with the seed of the loop (--seed)"
    elif replay.outcome == "passed" and run.due is not None and (other := _find_other_token(run, run.due)):
        yield f"{other}, and the same steps give the token here too: the runs are those of another model"


def _find_other_token(run: TraceRun, due: DueRun) -> str | None:
    for row, (found, expected) in enumerate(zip(run.tokens, due.expect, strict=False)):
        for step, (token, wanted) in enumerate(zip(found, expected, strict=False)):
            if wanted not in (ANY, token):
                return f"sequence {row}, step {step}: token {token} in place of {wanted}"
    return None


def _find_other_id(run: TraceRun, due: DueRun, contract: CacheContract) -> str | None:
    longest = max(map(len, due.prompts), default=0)
    follow = due.follow or ((),) * len(due.prompts)
    asked = [(0,) * (longest - len(one)) + one + more for one, more in zip(due.prompts, follow, strict=False)]
    fed = _list_fed_ids(run, contract)
    if fed is None:
        return None
    if len(fed) != len(asked):
        return f"{len(fed)} sequences in place of {len(asked)}"
    for row, (ids, right) in enumerate(zip(fed, asked, strict=True)):
        for place, (one, wanted) in enumerate(zip(ids, right, strict=False)):
            if one != wanted:
                return f"sequence {row}: token {one} in place of {wanted} at position {place}"
    return None


def _list_fed_ids(run: TraceRun, contract: CacheContract) -> list[list[int]] | None:
    """The ids that a run was fed, by sequence; None where the trace does not have them all."""
    phases: tuple[PhaseName, ...] = ("embed",) if "embed" in contract.phases else ("prefill", "decode")
    names = {port.name for name in phases for port in contract.graph(name).inputs if port.role == "token_ids"}
    rows: list[list[int]] = []
    for step in run.trace:
        tensors = [step.fed[name] for name in names if name in step.fed]
        if phase_of(step, contract, None) == "encode" or not tensors:
            continue
        if not tensors[0].has_values or tensors[0].empty:
            return None
        ids = tensors[0].array().reshape(-1, tensors[0].shape[-1] if tensors[0].shape else 1).astype(int).tolist()
        if rows and len(ids) != len(rows):
            return rows  # another number of rows: a self test
        rows = [[*before, *new] for before, new in zip(rows, ids, strict=True)] if rows else ids
    return rows or None
