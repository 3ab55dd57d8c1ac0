"""Compares tensors of a trace with those of the same steps run here, and finds the rows of a cache in samples of them.

Outputs of the caller's runtime should be those of the local one. The order in which a caller fed the rows of its cache
shows in their values: beams are picked and repeated. numpy only.
"""

from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace

import numpy as np

from kvdoctor.addons.traces.recorded import Trace, TraceStep, TraceTensor, same_values
from kvdoctor.contract import CacheContract, PhaseName, Role, with_reading
from kvdoctor.decode.calls import Answer, Array, Call, Encoded, Past, Value, as_array, take_sample
from kvdoctor.decode.experiments import as_probe
from kvdoctor.decode.experiments.cache_entries import growing, same_entries, same_logits
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.parity import compare, judge
from kvdoctor.decode.runs import CALLER_ROUNDS, Cause
from kvdoctor.decode.tolerances import TOLERANCES

CLOSE = 0.2
"""Standard deviations within which a sample is that of a row: float16 rounds by a tenth of that, other rows are off by
more than one."""


def find_row_order(contract: CacheContract, fed: Mapping[str, TraceTensor], past: Past) -> tuple[int, ...] | None:
    """For each row that was fed the row of `past` that it is; None where a row is none of them.

    A row that is where it was counts as that, whatever other rows are equal to it.
    """
    errors: Array | None = None
    for slot in contract.slots:
        tensor = fed.get(slot.past)
        if tensor is None or tensor.sample is None or slot.past not in past or "batch" not in slot.axes:
            continue
        found = _measure_rows(tensor, as_array(past[slot.past]), slot.axes.index("batch"))
        if found is not None and (errors is None or errors.shape == found.shape):
            errors = found if errors is None else np.fmax(errors, found)
    if errors is None:
        return ()
    order = []
    for row, to in enumerate(np.nan_to_num(errors, nan=0.0, posinf=np.inf)):
        best = row if row < len(to) and to[row] <= CLOSE else int(to.argmin())
        if not to[best] <= CLOSE:
            return None
        order.append(best)
    return tuple(order)


def _measure_rows(tensor: TraceTensor, value: Array, axis: int) -> Array | None:
    """How far each fed row is from each row of a value, float[fed rows, rows]; NaN where the sample has none of it."""
    rest = [size for at, size in enumerate(tensor.shape) if at != axis]
    if tensor.sample is None or len(tensor.shape) != value.ndim or 0 in tensor.shape or 0 in value.shape:
        return None
    if rest != [size for at, size in enumerate(value.shape) if at != axis]:
        return None
    places = take_sample(np.arange(np.prod(tensor.shape)).reshape(tensor.shape)).astype(np.int64)
    at = [*np.unravel_index(places, tensor.shape)]
    fed_rows = at[axis]
    width = max(float(value.astype(np.float64).std()), 1e-12)
    errors = np.full((tensor.shape[axis], value.shape[axis]), np.nan)
    for row in range(value.shape[axis]):
        at[axis] = np.full_like(places, row)
        off = np.abs(tensor.sample - value[tuple(at)].astype(np.float64)) / width
        for fed in np.unique(fed_rows):
            errors[fed, row] = off[fed_rows == fed].max()
    return errors


DIFFERS = "caller-runtime-differs"
CORRUPTED = "caller-loop-corrupts"

FILLED = ("grow", "delta", "replace", "constant")
"""Growths whose present has no entry but those of tokens."""

DECIDING: tuple[Role, ...] = ("logits_to_keep", "setting", "block_table", "beam_input")
"""Inputs whose values decide what shapes come back."""


def find_corrupted_present(
    step: TraceStep, phase: PhaseName, answer: Answer, right: Answer, contract: CacheContract
) -> Cause | None:
    """A present that a broken step returns otherwise than a right one: it will harm later, if its logits do not."""
    for name in _filled_presents(phase, contract):
        mine, due = answer.outputs.get(name), right.outputs.get(name)
        if mine is not None and due is not None and not same_values(as_array(mine), as_array(due)):
            return Cause(CORRUPTED, f"{name} of step {step.number} is not that with correct inputs")
    return None


def _filled_presents(phase: PhaseName, contract: CacheContract) -> dict[str, None]:
    """The presents, in order, that a step fills to the end: entries of a buffer after the tokens have any values."""
    filled = (s.filled_by if phase == "prefill" else s.present for s in contract.slots if s.growth in FILLED)
    return dict.fromkeys(name for name in filled if name is not None)


def first_worst(one: Cause | None, other: Cause | None) -> Cause | None:
    """The first cause, but rounding gives way to any other."""
    if one is None or (one.name == CALLER_ROUNDS and other is not None and other.name != CALLER_ROUNDS):
        return other
    return one


def find_different_output(
    step: TraceStep, phase: PhaseName, answer: Answer, exact: bool, builder: FeedBuilder
) -> Cause | None:
    """The first local output with another shape than in the trace, or, from the same feed, with other values."""
    contract, returned = builder.contract, {}
    # Where an input without recorded values decides the shape of outputs, shapes cannot be compared.
    decided = all(
        t.has_values
        for p in contract.graph(phase).inputs
        if p.role in DECIDING and (t := step.fed.get(p.name)) is not None
    )
    whole = {*_filled_presents(phase, contract), answer.logits_name}
    where = f"step {step.number} ({step.place})"
    declared = {port.name: port.dtype for port in contract.graph(phase).outputs}
    # In the order of the graph: the first layer that differs is named.
    for name in answer.outputs if decided else ():
        got, local = step.got.get(name), answer.outputs[name]
        if got is None:
            continue
        if name in declared and got.dtype != declared[name]:
            return Cause(DIFFERS, f"{where}: {name} was returned as {got}, and is declared as {declared[name]}")
        if name == answer.logits_name and len(got.shape) != len(local.shape):
            continue
        if tuple(local.shape) != got.shape:
            return Cause(DIFFERS, f"{where}: {name} was returned as {got}, and locally as {list(local.shape)}")
        if name in whole:
            returned[name] = local
    if not exact:
        return None
    presents = {name: value for name, value in returned.items() if name != answer.logits_name}
    logits = {name: value for name, value in returned.items() if name == answer.logits_name}
    found = _compare_outputs(step, where, presents, builder)
    found = first_worst(found, _compare_outputs(step, where, logits, builder))
    return first_worst(found, _compare_likeliest(step, where, answer, builder))


def _compare_outputs(
    step: TraceStep, where: str, local: "Mapping[str, Value | Array]", builder: FeedBuilder
) -> Cause | None:
    """The first output with other values, all of them or those of the sample; rounding gives way to more than that."""
    found: Cause | None = None
    for name, value in local.items():
        got = step.got[name]
        if got.empty or not got.dtype.startswith("float") or (got.sample is None and not got.has_values):
            continue
        values = got.array() if got.sample is None else got.sample
        mine = as_array(value) if got.sample is None else take_sample(as_array(value))
        rows = values.shape[-1] if values.ndim else 1
        difference = compare(values.reshape(1, -1, rows), mine.reshape(1, -1, rows), builder.tolerance)
        if judge(difference, builder.tolerance) != "pass":
            off = f"off by {difference.relative:.2g} standard deviations" if difference.finite else "not finite"
            rounds = difference.finite and difference.relative <= TOLERANCES["float16"].fails
            cause = Cause(CALLER_ROUNDS if rounds else DIFFERS, f"{where}: {name} is {off}, from the same feed")
            found = first_worst(found, cause)
    return found


def _compare_likeliest(step: TraceStep, where: str, answer: Answer, builder: FeedBuilder) -> Cause | None:
    """A sequence whose likeliest token is another one than the caller found, where no rounding can be the reason."""
    found = step.likeliest
    if not found:
        return None
    if len(found) != len(answer.logits):
        return Cause(DIFFERS, f"{where}: {len(found)} likeliest tokens were found for {len(answer.logits)} sequences")
    for row, (token, logits) in enumerate(zip(found, answer.logits[:, -1].astype(np.float64), strict=True)):
        best = int(logits.argmax())
        given = logits[token] if 0 <= token < logits.size else -np.inf
        if logits[best] - given > 2 * builder.tolerance.fails * max(float(logits.std()), 1e-12):
            return Cause(DIFFERS, f"{where}: sequence {row} has token {token} as the likeliest, and locally {best}")
    return None


def is_fed_equally(source: TraceStep, encoded: Encoded) -> bool:
    """Whether the caller's encoder was fed what the local encoder was."""
    for name, array in encoded.fed.items():
        tensor = source.fed.get(name)
        if tensor is None or tensor.shape != array.shape:
            return False
        known = tensor.array() if tensor.has_values else tensor.sample
        if known is None or not same_values(known, array if tensor.has_values else take_sample(array)):
            return False
    return bool(encoded.fed)


def find_different_encoding(source: TraceStep, builder: FeedBuilder) -> Cause | None:
    """The first output of the encoder that came back with a shape or values that differ from the local ones."""
    outputs = {name: value for name, value in builder.encoded.outputs.items() if name in source.got}
    for name, value in outputs.items():
        if source.got[name].shape != value.shape:
            there = f"was returned as {source.got[name]}, and locally as {list(value.shape)}"
            return Cause(DIFFERS, f"encoder ({source.place}): {name} {there}")
    return _compare_outputs(source, f"encoder ({source.place})", outputs, builder)


COMPARED = 4
"""Steps by which a constant is tried."""


def gave_token(answer: Answer, call: Call, builder: FeedBuilder) -> bool:
    """Whether a step gave the one token that the next call is fed."""
    port = builder.contract.graph(call.phase).port("token_ids")
    fed = as_array(call.feeds[port.name]) if port is not None else np.zeros(0)
    return fed.size == 1 and int(answer.logits[0, -1].argmax()) == int(fed.item())


def clear_constants(
    builder: FeedBuilder, trace: Trace, names: Iterable[str]
) -> "Generator[Call, Answer, frozenset[str]]":
    """The inputs that were fed a constant with which runs with and without the cache agree: a setting, and no error."""
    found = set[str]()
    for name in names:
        contract = _with_constant(trace, builder.contract, name)
        if contract is None:
            continue
        other = replace(builder, contract=contract)
        start, agrees = other.scenario.prompt, True
        answer = yield as_probe(other.prefill(start))
        past = None
        for at in range(start, min(start + COMPARED, other.scenario.total)):
            whole = yield as_probe(other.reference(at + 1))
            agrees = agrees and not answer.failed and not whole.failed
            if not agrees:
                break
            past = other.carry(past, answer, "held")
            answer = yield as_probe(other.decode(at, at + 1, past))
            agrees = not answer.failed and _agree(answer, whole, other)
        found |= {name} if agrees else set()
    return frozenset(found)


def _agree(answer: Answer, whole: Answer, builder: FeedBuilder) -> bool:
    """Whether a step and one call over all tokens give the same logits and caches: these say more than ids."""
    limit = builder.tolerance
    pairs = [
        (slot, answer.outputs.get(slot.present or ""), whole.outputs.get(slot.filled_by or ""))
        for slot in growing(builder.contract)
    ]
    return same_logits(answer.logits[:, -1:], whole.logits[:, -1:], limit) and all(
        one is None or other is None or same_entries(as_array(one), as_array(other), limit) for _, one, other in pairs
    )


def _with_constant(trace: Trace, contract: CacheContract, name: str) -> CacheContract | None:
    """The contract by which an input is the constant that every call fed it; None where it was fed several numbers."""
    found = [step.fed[name].array() for step in trace if name in step.fed and step.fed[name].has_values]
    numbers = {float(value) for one in found for value in np.unique(one)}
    ambiguity = next((one for one in contract.ambiguities if one.subject == name), None)
    if len(numbers) != 1 or ambiguity is None:
        return None
    reading = ambiguity.readings[0]
    port = replace(reading.port, role="setting", value=numbers.pop())
    return with_reading(contract, ambiguity, replace(reading, port=port))
