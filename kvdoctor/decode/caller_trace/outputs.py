"""Outputs of the caller's runtime beside those of the same steps run here: the outputs that differ. numpy only."""

from collections.abc import Mapping

import numpy as np

from kvdoctor.contract import CacheContract, PhaseName, Role
from kvdoctor.decode.caller_trace.recorded import TraceStep, TraceTensor, same_values
from kvdoctor.decode.calls import Answer, Array, Encoded, Value, as_array, take_sample
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.parity import compare, judge
from kvdoctor.decode.runs import CALLER_ROUNDS, Cause
from kvdoctor.decode.tolerances import TOLERANCES

DIFFERS = "caller-runtime-differs"
SPOILT = "caller-loop-spoils"

FILLED = ("grow", "delta", "replace", "constant")
"""Growths whose present has no entry but those of tokens."""

DECIDING: tuple[Role, ...] = ("logits_to_keep", "setting", "block_table", "beam_input")
"""Inputs whose values decide what shapes come back."""


def find_spoilt_present(
    step: TraceStep, phase: PhaseName, answer: Answer, right: Answer, contract: CacheContract
) -> Cause | None:
    """A present that a broken step returns otherwise than a right one: it will harm later, if its logits do not."""
    for name in _filled_presents(phase, contract):
        mine, due = answer.outputs.get(name), right.outputs.get(name)
        if mine is not None and due is not None and not same_values(as_array(mine), as_array(due)):
            return Cause(SPOILT, f"{name} of step {step.number} is not that of a right feed")
    return None


def _filled_presents(phase: PhaseName, contract: CacheContract) -> set[str]:
    """The presents that a step fills to the end: behind the tokens, a buffer may come back with anything."""
    filled = (s.filled_by if phase == "prefill" else s.present for s in contract.slots if s.growth in FILLED)
    return {name for name in filled if name is not None}


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


def is_fed_alike(source: TraceStep, encoded: Encoded) -> bool:
    """Whether the caller's encoder was fed what the local encoder was."""
    return bool(encoded.fed) and all(
        name in source.fed and _is_tensor(source.fed[name], array) for name, array in encoded.fed.items()
    )


def _is_tensor(tensor: TraceTensor, array: Array) -> bool:
    if tensor.shape != array.shape:
        return False
    if tensor.has_values:
        return same_values(tensor.array(), array)
    return tensor.sample is not None and same_values(tensor.sample, take_sample(array))


def find_different_encoding(source: TraceStep, builder: FeedBuilder) -> Cause | None:
    """The first output of the encoder that came back with a shape or values that differ from the local ones."""
    outputs = {name: value for name, value in builder.encoded.outputs.items() if name in source.got}
    for name, value in outputs.items():
        if source.got[name].shape != value.shape:
            there = f"was returned as {source.got[name]}, and locally as {list(value.shape)}"
            return Cause(DIFFERS, f"encoder ({source.place}): {name} {there}")
    return _compare_outputs(source, f"encoder ({source.place})", outputs, builder)
