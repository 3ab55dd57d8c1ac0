"""The caller's own steps, run again locally: the failure may come back, and the same numbers may.

What the trace has values of is fed as it was. The rest is made by the contract, in the shapes that were fed: tokens and
encoder states from the seed, pasts from the local outputs.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from kvdoctor.addons.traces.check import broken_at, phase_of, walk, without_embedding_calls
from kvdoctor.addons.traces.inputs import find_doubts
from kvdoctor.addons.traces.outputs import (
    clear_constants,
    find_corrupted_present,
    find_different_encoding,
    find_different_output,
    find_row_order,
    first_worst,
    gave_token,
    is_fed_equally,
)
from kvdoctor.addons.traces.recorded import Trace, TraceStep, TraceTensor, same_values
from kvdoctor.addons.traces.runs import trace_of
from kvdoctor.addons.traces.step import ContractViolation, StepContext, size_of
from kvdoctor.contract import CacheContract, PhaseName, Port, Role
from kvdoctor.decode.calls import (
    NUMPY_TYPES,
    Answer,
    Array,
    Call,
    Encoded,
    Past,
    Scenario,
    Value,
    as_array,
    take_sample,
)
from kvdoctor.decode.experiments import Decision, Experiment, always, as_probe
from kvdoctor.decode.experiments.multi_turn import cut
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.errors import UsageError
from kvdoctor.records import record

MOST_REPLAYED = 64
"""Steps without a fault that are run again: what goes wrong goes wrong early, and a step costs as much as any."""
MOST_FED = 1 << 28
"""Elements that the feeds of a step may have together to be run again: a gigabyte of float32."""
AFTER = 4
"""Steps after a broken one that are run again: a mistake may fail later than it is made."""

OTHER_BRANCH = {"cached-too-early", "cached-too-late"}
"""Breaks that show what the switch was fed."""
FREE: tuple[Role, ...] = (
    *("token_ids", "token_and_position", "embeddings", "encoder_states", "encoder_input", "past"),
    *("rotary_cos", "rotary_sin", "scale", "setting"),
)
"""Inputs that the contract leaves to the caller: without their values, other numbers come back."""


@record
class ReplayStep:
    """One step to run again: from which token of its sequence on, and how many; `right` until one has `breaks`.

    `doubts` are what the run decides in a right one.
    """

    step: TraceStep
    phase: PhaseName
    start: int
    new: int
    right: bool
    breaks: tuple[ContractViolation, ...]
    doubts: tuple[ContractViolation, ...] = ()


def make_experiment(contract: CacheContract, data: Mapping[str, str]) -> Experiment:
    """Make the experiment that runs one `run` of the trace in a file again.

    Raises:
        UsageError: the file has changed since it was read.
    """
    try:
        trace = trace_of(data["path"], int(data["run"]), contract)
    except UsageError:
        raise UsageError("the trace was changed while it was read; give it again") from None
    trace = without_embedding_calls(trace, contract)
    planned = tuple(_plan(trace, contract))
    encoded = next((step for step in trace if phase_of(step, contract, None) == "encode"), None)
    fed = [sum(math.prod(tensor.shape) for tensor in entry.step.fed.values()) for entry in planned]
    large = next((count for count in fed if count > MOST_FED), 0)
    given = (pair for entry in planned for pair in entry.step.fed.items())
    strange = next((f"{name} is {tensor.dtype}" for name, tensor in given if tensor.dtype not in NUMPY_TYPES), "")
    reason = f"{strange}, of which no feed can be made" if strange else None
    reason = f"a step of it is fed {large} numbers, more than {MOST_FED}" if large else reason
    reason = reason if planned else "the trace has no step of the decoder"
    total = max((entry.start + entry.new for entry in planned), default=1)
    usual, batch, states = Scenario(), 1, None
    prompt = planned[0].new if planned else usual.prompt
    if planned:
        moment = StepContext(contract, planned[0].phase, planned[0].step)
        batch, states = max(moment.batch, 1), moment.encoder
    for port in contract.graph("encode").inputs if encoded is not None else ():
        if encoded is not None and port.role == "encoder_input" and port.name in encoded.fed:
            states = size_of(port.axes, encoded.fed[port.name].shape, "encoder_input") or states
    return Experiment(
        name=data["name"],
        question="the steps of the trace, run again",
        calls=partial(_replay, planned=planned, source=encoded),
        scenario=Scenario(batch, prompt, max(total - prompt + 1, 2), states or usual.encoder),
        applies=always if reason is None else lambda _: reason,
    )


def _plan(trace: Trace, contract: CacheContract) -> Iterator[ReplayStep]:
    """The steps to run: all that keep the contract, the first that breaks it, and some after it."""
    walked = list(walk(trace, contract, {}))
    at = broken_at(walked)
    stop = MOST_REPLAYED if at is None else at + 1 + AFTER
    for index, (moment, breaks) in enumerate(walked[:stop]):
        begin = moment.before.tokens if moment.before is not None else 0
        if index == at and moment.new > begin:
            begin = 0  # all ids
        right = at is None or index < at
        doubts = tuple(find_doubts(moment)) if right else ()
        yield ReplayStep(moment.step, moment.phase, begin, moment.new, right, breaks, doubts)
    if at is None or at + 1 < len(walked):
        return
    last = walked[at][0]
    place = next(i for i, step in enumerate(trace) if step.place == last.step.place)
    begin = (last.before.tokens if last.before is not None else 0) + last.new
    for number, step in enumerate(trace[place + 1 : place + 1 + AFTER], len(walked)):
        phase = phase_of(step, contract, last.before)
        if phase == "encode":
            return
        later = StepContext(contract, phase, replace(step, number=number))
        yield ReplayStep(later.step, phase, begin, later.new, False, ())
        begin += later.new


@dataclass
class _Replay:
    """A replay under way: what the caller's loop has to feed next, by two rules, and what it fed last.

    `encoded_equally`: the caller's encoder was fed what the local encoder was. `last` is the answer to the step before.
    """

    builder: FeedBuilder
    past: Past | None = None
    plain: Past | None = None
    fed: Past = field(default_factory=Past)
    tokens: int = 0
    exact: bool = True
    encoded_equally: bool = False
    last: Answer | None = None


def _replay(builder: FeedBuilder, planned: tuple[ReplayStep, ...], source: TraceStep | None) -> Decision:
    equal = source is not None and is_fed_equally(source, builder.encoded)
    found = find_different_encoding(source, builder) if source is not None and equal else None
    builder = FeedBuilder(
        builder.contract,
        builder.scenario,
        _read_encoder_outputs(builder, planned[0], source),
        _read_tokens(builder, planned),
        tolerances=builder.tolerances,
        embed=builder.embed,
    )
    state, cause, broken = _Replay(builder, encoded_equally=equal), found, False
    doubted = {one.inputs[0] for entry in planned for one in entry.doubts if one.kind == "setting"}
    cleared = yield from clear_constants(builder, tuple(entry.step for entry in planned), doubted)
    for entry in planned:
        if entry.right and state.past is not None and 0 < entry.start < state.tokens:
            state.past, state.tokens = cut(builder, state.past, entry.start), entry.start
        known = _follow_rows(state, entry)
        call, exact = _call(state, entry)
        exact = exact and known
        logits, sampled = _read_logits(entry, builder.contract)
        expected = logits if exact and entry.right else None
        for other in _without_doubts(state, entry, call, cleared):
            undoubted = yield other
            expected, sampled = (expected, sampled) if undoubted.failed else (undoubted.logits, False)
        if not entry.right and not broken:
            # The result of the same tokens with the right feeds: the broken step is compared with it.
            right = yield as_probe(_correct_call(state, entry))
            expected, broken = None if right.failed else right.logits, True
            answer = yield replace(call, expected=expected)
            cause = cause or find_corrupted_present(entry.step, entry.phase, answer, right, builder.contract)
        else:
            answer = yield replace(call, expected=expected, sampled=sampled)
        if entry.right:
            cause = first_worst(cause, find_different_output(entry.step, entry.phase, answer, exact, builder))
        _carry(state, entry, call, answer)
        state.exact, state.last = exact, answer
    return cause


def _without_doubts(state: _Replay, entry: ReplayStep, call: Call, cleared: frozenset[str]) -> Iterator[Call]:
    """The same step as the contract has it, where it was fed otherwise and no run showed that to be right too."""
    usual = (
        _contract_call(state.builder, entry, state.past if entry.phase == "decode" else None) if entry.doubts else call
    )
    due: dict[str, Value | Array] = {}
    for one in entry.doubts:
        name = one.inputs[0]
        if one.kind == "setting" and name not in cleared:
            due[name] = usual.feeds[name]
        elif (
            one.kind == "state-adopted" and state.last is not None and not gave_token(state.last, usual, state.builder)
        ):
            due |= {name: state.fed[name] for name in one.inputs if name in state.fed}
    if due:
        yield as_probe(replace(call, feeds={**call.feeds, **due}))


def _follow_rows(state: _Replay, entry: ReplayStep) -> bool:
    """Bring the rows of what is due into the order in which they were fed; false where they are others."""
    if entry.phase == "prefill" or state.past is None:
        return True
    order = find_row_order(state.builder.contract, entry.step.fed, state.past)
    if order is None:
        return False
    if order and order != tuple(range(state.builder.scenario.batch)):
        state.past = state.builder.reorder_past(state.past, order)
        state.plain = state.builder.reorder_past(state.plain, order) if state.plain is not None else None
        state.fed = Past()
    return True


def _call(state: _Replay, entry: ReplayStep) -> tuple[Call, bool]:
    """The call as the caller made it, and whether nothing in it is synthetic."""
    builder, contract = state.builder, state.builder.contract
    begins = entry.phase == "prefill" or state.past is None
    usual = _contract_call(builder, entry, None if begins else state.past)
    ports = {port.name: port for port in contract.graph(entry.phase).inputs}
    feeds: dict[str, Value | Array] = {}
    exact = begins or state.exact
    for name, tensor in entry.step.fed.items():
        port, made = ports.get(name), usual.feeds.get(name)
        if tensor.has_values:
            feeds[name] = tensor.array()
        elif port is not None and port.role == "past" and not begins:
            feeds[name], derived = _past(state, name, tensor)
            exact = exact and derived
        elif (
            port is not None
            and port.role == "branch_switch"
            and OTHER_BRANCH.intersection(b.kind for b in entry.breaks)
        ):
            other: PhaseName = "decode" if entry.phase == "prefill" else "prefill"
            feeds[name] = np.full(tensor.shape, contract.phases[other].switch)
        else:
            ignored = begins and port is not None and port.role == "past" and contract.first_step == "no-past-branch"
            known = port is not None and made is not None and _is_made(state, tensor, port, made)
            exact = exact and (ignored or known)
            feeds[name] = _fit_to(None if made is None else as_array(made), tensor)
    return replace(usual, feeds=feeds), exact


def _is_made(state: _Replay, tensor: TraceTensor, port: Port, made: "Value | Array") -> bool:
    """Whether an input without all of its values has those that the contract, or the seed, makes it of."""
    slot = state.builder.slots.get(port.name)
    zeros = port.role == "beam_input" or (slot is not None and slot.first == "zeros")
    if tensor.sample is not None and zeros and not tensor.sample.any():
        return not as_array(made).any()  # a buffer of any length
    if tuple(made.shape) != tensor.shape:
        return False
    if state.encoded_equally and (port.role == "encoder_states" or (slot is not None and slot.filled_in == "encode")):
        return True
    if tensor.sample is not None:
        return same_values(tensor.sample, take_sample(as_array(made)))
    return port.role not in FREE


def _contract_call(builder: FeedBuilder, entry: ReplayStep, past: Past | None) -> Call:
    """The same step as the contract would have it: as long as the tokens that are there."""
    stop = entry.start + entry.new
    if entry.phase == "prefill":
        return builder.prefill(stop)
    return builder.decode(entry.start, stop, builder.first_past(0) if past is None else past)


def _past(state: _Replay, name: str, tensor: TraceTensor) -> "tuple[Value | Array, bool]":
    """A past in the shape that was fed: what came back and is due, what came back, or what was fed before."""
    sources = [source[name] for source in (state.past, state.plain, state.fed) if source and name in source]
    slot = state.builder.slots[name]
    for value in sources:
        if tuple(value.shape) == tensor.shape and tensor.dtype == slot.dtype:
            return value, True
    return _fit_to(as_array(sources[0]) if sources else None, tensor), False


def _correct_call(state: _Replay, entry: ReplayStep) -> Call:
    builder, past = state.builder, state.past
    if past is None:
        return builder.prefill(entry.new)
    # Where all ids were fed again, the new ones are those that the cache has not.
    again = entry.start == 0 and entry.new > state.tokens
    stop = entry.new if again else state.tokens + entry.new
    return builder.decode(state.tokens, stop, past)


def _carry(state: _Replay, entry: ReplayStep, call: Call, answer: Answer) -> None:
    builder, contract = state.builder, state.builder.contract
    begins = entry.phase == "prefill" or state.past is None
    pasts = {slot.past for slot in contract.slots}
    fed = {name: value for name, value in call.feeds.items() if name in pasts}
    usual = builder.first_past(0)
    before = None if begins else Past({**usual, **(state.past or {}), **fed}, answer.past)
    first = Past({**usual, **fed})
    state.past = builder.carry(before, answer, "held", first)
    state.plain = builder.carry(before, answer, "plain", first)
    for slot in contract.slots:
        unfilled = begins and slot.past in fed and (slot.filled_in == "encode" or slot.filled_by is None)
        if unfilled:
            state.past[slot.past] = state.plain[slot.past] = fed[slot.past]
    state.fed, state.tokens = Past(fed), (0 if begins else state.tokens) + entry.new


def _read_encoder_outputs(builder: FeedBuilder, first: ReplayStep, source: TraceStep | None) -> Encoded:
    """The encoder's outputs: of the trace, else synthetic in the sizes of the trace."""
    contract, made = builder.contract, builder.encoded
    ports = [port.name for port in contract.graph(first.phase).inputs if port.role == "encoder_states"]
    states = made.states
    for tensor in (first.step.fed[name] for name in ports if name in first.step.fed):
        states = tensor.array() if tensor.has_values else _fit_to(states, tensor)
    outputs = dict(made.outputs)
    for slot in contract.slots:
        if slot.filled_in != "encode" or slot.filled_by is None or slot.past not in first.step.fed:
            continue
        tensor = first.step.fed[slot.past]
        given = source.got.get(slot.filled_by, tensor) if source is not None else tensor
        best = tensor if tensor.has_values else given
        outputs[slot.filled_by] = best.array() if best.has_values else _fit_to(outputs.get(slot.filled_by), tensor)
    return Encoded(states, outputs)


def _read_tokens(builder: FeedBuilder, planned: tuple[ReplayStep, ...]) -> Array:
    """The ids of the trace where it has them, at the places they were fed for; else those of the seed."""
    total = max(entry.start + entry.new for entry in planned) + AFTER
    scenario = replace(builder.scenario, steps=total - builder.scenario.prompt + 1)
    tokens: Array = FeedBuilder(builder.contract, scenario, builder.encoded).tokens.copy()
    embedding = builder.contract.graph("embed").inputs if "embed" in builder.contract.phases else ()
    for entry in planned:
        fed = {**entry.step.fed, **entry.step.embedded}
        for port in (*builder.contract.graph(entry.phase).inputs, *embedding):
            tensor = fed.get(port.name)
            if port.role == "token_ids" and tensor is not None and tensor.has_values and not tensor.empty:
                ids = tensor.array().reshape(-1, tensor.shape[-1] if tensor.shape else 1)
                if ids.shape == (len(tokens), entry.new):
                    tokens[:, entry.start : entry.start + entry.new] = ids
    return tokens


def _fit_to(made: Array | None, tensor: TraceTensor) -> Array:
    """Values in the shape and type that was fed: repeated where it is longer, zeros where nothing is known."""
    kind, shape = NUMPY_TYPES[tensor.dtype], tensor.shape
    if made is None or made.size == 0 or made.ndim != len(shape):
        return np.zeros(shape, kind)
    for axis, size in enumerate(shape):
        made = np.take(made, np.arange(size) % made.shape[axis], axis=axis)
    fitted: Array = np.array(made, dtype=kind, order="C")
    return fitted


def _read_logits(entry: ReplayStep, contract: CacheContract) -> tuple[Array | None, bool]:
    """The logits of the trace, float[batch, new, vocabulary], or a sample, float[1, 1, 64]; and which of both."""
    port = contract.graph(entry.phase).port("logits")
    got = entry.step.got.get(port.name) if port is not None else None
    if got is None or port is None:
        return None, False
    sampled = got.sample is not None
    if got.dtype != port.dtype or got.empty or not got.shape:
        return None, sampled
    if got.sample is not None:
        return got.sample.reshape(1, 1, -1), True
    logits = Answer({port.name: got}, port.name).logits if got.has_values else np.zeros(0)
    return logits if logits.ndim == 3 else None, False
