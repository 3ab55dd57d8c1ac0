"""The runs of a trace, compared with those that a program was to play, and with the model that is at hand."""

from collections.abc import Iterator, Mapping

from kvdoctor.addons.traces.check import find_stacks, phase_of
from kvdoctor.addons.traces.runs import DueRun, Recording, TraceRun
from kvdoctor.contract import Axis, CacheContract, PhaseName
from kvdoctor.decode.runs import Run
from kvdoctor.errors import UsageError

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
    """Describe the first token that is not the expected one."""
    for row, (found, expected) in enumerate(zip(run.tokens, due.expect, strict=False)):
        for step, (token, wanted) in enumerate(zip(found, expected, strict=False)):
            if wanted not in (ANY, token):
                return f"sequence {row}, step {step}: token {token} in place of {wanted}"
    return None


def _find_other_id(run: TraceRun, due: DueRun, contract: CacheContract) -> str | None:
    """Describe the first token that a run was fed in place of the one that is due."""
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
