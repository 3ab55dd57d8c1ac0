"""Reads what the program of a probe wrote: a trace for each of its runs, and the tokens that it found. numpy only."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvdoctor.contract import CacheContract
from kvdoctor.decode.caller_trace.read import RESULT_FIELDS, SHORTER, parse_step, read_objects
from kvdoctor.decode.caller_trace.recorded import Trace
from kvdoctor.errors import UsageError
from kvdoctor.records import record

SELF_TESTS = ("rewind", "reorder")
"""Runs that end with one step more, taken after going back or changing rows; the program itself compares its tokens."""
AGAIN = "give the whole file that the program wrote with --probe, or run the probe again (docs/probe.md)"
MOST_CALLS = 4096
MOST_RUNS = 64


@record
class ProbeRun:
    """One run of a probe.

    `tokens` has a row for each sequence with the likeliest token after the prompt and after each step; none where the
    run failed, and then `error` says how. `finished` is false where the program ended before the run did.
    """

    name: str
    trace: Trace
    tokens: tuple[tuple[int, ...], ...] = ()
    error: str | None = None
    finished: bool = False


def read_probe(path: str) -> tuple[ProbeRun, ...]:
    """Read the result of a probe.

    Raises:
        UsageError: it cannot be read, or is no such file; the message names the line, and what to do.
    """
    place = Path(path)
    if not place.is_file():
        raise UsageError(f"the result {path!r} is no file; give the file that the program wrote with --probe")
    runs: dict[str, ProbeRun] = {}
    calls = 0
    try:
        for line, found in read_objects(place, cut=True, advice=AGAIN):
            name = found.get("run")
            if not isinstance(name, str) or not 0 < len(name) <= 200:
                raise UsageError(f"{path!r}, line {line} names no run: `kvdoctor step-test MODEL --trace` reads traces")
            run = runs.setdefault(name, ProbeRun(name, ()))
            if run.finished:
                raise UsageError(f"{path!r}, line {line}: the run {name[:80]!r} has ended before; give one result")
            if "tokens" in found:
                runs[name] = _ended(run, found, f"{path!r}, line {line}")
                continue
            calls += 1
            if calls > MOST_CALLS or len(runs) > MOST_RUNS:
                raise UsageError(f"the result {path!r} has more than {MOST_CALLS} calls or {MOST_RUNS} runs; {SHORTER}")
            step = replace(parse_step(found, line, path), number=len(run.trace))
            runs[name] = replace(run, trace=(*run.trace, step))
    except (OSError, ValueError) as error:
        raise UsageError(f"the result {path!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not runs:
        raise UsageError(f"the result {path!r} holds no run; give the file that the program wrote with --probe")
    return tuple(runs.values())


def _ended(run: ProbeRun, found: dict[str, Any], where: str) -> ProbeRun:
    """A run with the line that ends it."""
    tokens, error = found["tokens"], found.get("error")
    rows = tokens if isinstance(tokens, list) else [None]
    whole = all(isinstance(row, list) and all(type(token) is int for token in row) for row in rows)
    if set(found) - set(RESULT_FIELDS) or not whole or len({len(row) for row in rows if row is not None}) > 1:
        raise UsageError(f"{where} must have run, tokens (a list of ids for each sequence) and error; {AGAIN}")
    if not isinstance(error, (str, type(None))):
        raise UsageError(f"{where}: 'error' must be a text; {AGAIN}")
    return replace(run, tokens=tuple(map(tuple, rows)), error=error, finished=True)


def with_likeliest(run: ProbeRun, contract: CacheContract) -> Trace:
    """The trace of a run whose steps know which tokens the program found after them: one for each of the last calls.

    The step that ends a self test is left out: it is taken again on purpose.

    Raises:
        UsageError: the run has more tokens than calls of the decoder.
    """
    ports = (contract.graph(phase).port("logits") for phase in ("prefill", "decode"))
    names = {port.name for port in ports if port is not None}
    steps = list(run.trace)
    calls = [index for index, step in enumerate(steps) if names & step.got.keys()]
    tested = run.error is None or run.error.startswith(f"{run.name}:")
    if run.name in SELF_TESTS and run.finished and tested and len(calls) > 1:
        steps, calls = steps[: calls[-2] + 1], calls[:-1]
    after = list(zip(*run.tokens, strict=True))
    if len(after) > len(calls):
        wrong = f"the run {run.name[:80]!r} has {len(after)} tokens and {len(calls)} calls of the decoder"
        raise UsageError(f"{wrong}; give the whole result")
    for index, found in zip(calls[len(calls) - len(after) :], after, strict=True):
        steps[index] = replace(steps[index], likeliest=found)
    return tuple(steps)


def trace_of(path: str, name: str, contract: CacheContract) -> Trace:
    """The trace of one run.

    Raises:
        UsageError: there is none of that name.
    """
    for run in read_probe(path):
        if run.name == name:
            return with_likeliest(run, contract)
    raise UsageError(f"the result {path!r} has no run {name!r}")
