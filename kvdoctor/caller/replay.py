"""The caller's own steps, run again here: does the failure come back, and do the same numbers? numpy only.

What the trace has values of is fed as it was. The rest is made by the contract, in the shapes that were fed: tokens and
encoder states from the seed, pasts from what came back here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from kvdoctor.caller.holding import broken_at, phase_of, walk
from kvdoctor.caller.moment import Break, Moment
from kvdoctor.caller.recorded import Recorded, Trace, TraceStep, same
from kvdoctor.calls import NUMPY_TYPES, Answer, Array, Call, Encoded, Past, Scenario, Value, as_array
from kvdoctor.contract import CacheContract, PhaseName, Role
from kvdoctor.experiments import Decision, Experiment, always
from kvdoctor.feeds import Deal
from kvdoctor.parity import compare, judge
from kvdoctor.trace import REPLAY, Cause

DIFFERS = "caller-runtime-differs"
SPOILT = "caller-loop-spoils"
MOST_REPLAYED = 64
"""Steps without a fault that are run again: what goes wrong goes wrong early, and a step costs as much as any."""
AFTER = 4
"""Steps behind a broken one that are run again: a mistake may fail later than it is made."""

FREE: tuple[Role, ...] = (
    *("token_ids", "token_and_position", "embeddings", "encoder_states", "encoder_input", "past"),
    *("rotary_cos", "rotary_sin", "scale", "setting"),
)
"""Inputs that the contract leaves to the caller: without their values, other numbers come back."""

FILLED = ("grow", "delta", "replace", "constant")
"""Growths whose present has no entry but those of tokens."""

DECIDING: tuple[Role, ...] = ("logits_to_keep", "setting", "block_table", "beam_input")
"""Inputs whose values decide what shapes come back."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One step to run again: from which token of its sequence on, and how many; `right` until one has `breaks`."""

    step: TraceStep
    phase: PhaseName
    start: int
    new: int
    right: bool
    breaks: tuple[Break, ...]


def replaying(trace: Trace, contract: CacheContract) -> Experiment:
    """Make the experiment that runs a trace again."""
    planned = tuple(_plan(trace, contract))
    encoded = next((step for step in trace if phase_of(step, contract, None) == "encode"), None)
    strange = [
        f"{n} is {t.dtype}" for entry in planned for n, t in entry.step.fed.items() if t.dtype not in NUMPY_TYPES
    ]

    def applies(_: CacheContract) -> str | None:
        if not planned:
            return "the trace has no step of the decoder"
        return f"{strange[0]}, of which no feed can be made" if strange else None

    total = max((entry.start + entry.new for entry in planned), default=1)
    first = planned[0] if planned else None
    batch, states = _sizes(first, contract) if first is not None else (1, None)
    usual = Scenario()
    prompt = first.new if first is not None else usual.prompt
    return Experiment(
        name=REPLAY,
        question="the steps of the trace, run again",
        calls=partial(_replay, planned=planned, source=encoded),
        scenario=Scenario(batch, prompt, max(total - prompt + 1, 2), states or usual.encoder),
        applies=applies if (not planned or strange) else always,
    )


def _plan(trace: Trace, contract: CacheContract) -> Iterator[Planned]:
    """The steps to run: all that keep the contract, the first that breaks it, and some behind it."""
    walked = list(walk(trace, contract, {}))
    at = broken_at(walked)
    stop = MOST_REPLAYED if at is None else at + 1 + AFTER
    for index, (moment, breaks) in enumerate(walked[:stop]):
        begin = moment.before.tokens if moment.before is not None else 0
        if index == at and moment.new > begin:
            begin = 0  # all ids
        yield Planned(moment.step, moment.phase, begin, moment.new, at is None or index < at, breaks)
    if at is None or at + 1 < len(walked):
        return
    last = walked[at][0]
    place = next(i for i, step in enumerate(trace) if step.place == last.step.place)
    begin = (last.before.tokens if last.before is not None else 0) + last.new
    for number, step in enumerate(trace[place + 1 : place + 1 + AFTER], len(walked)):
        phase = phase_of(step, contract, last.before)
        if phase == "encode":
            return
        later = Moment(contract, phase, replace(step, number=number))
        yield Planned(later.step, phase, begin, later.new, False, ())
        begin += later.new


def _sizes(first: Planned, contract: CacheContract) -> tuple[int, int | None]:
    moment = Moment(contract, first.phase, first.step)
    return max(moment.batch, 1), moment.encoder


@dataclass
class _Replay:
    """A replay under way: what the caller's loop has to feed next, by two rules, and what it fed last."""

    deal: Deal
    past: Past | None = None
    plain: Past | None = None
    fed: Past = field(default_factory=Past)
    tokens: int = 0
    exact: bool = True


def _replay(deal: Deal, planned: tuple[Planned, ...], source: TraceStep | None) -> Decision:
    """Run the steps; decide for the first output that came back otherwise than in the trace."""
    deal = Deal(deal.contract, deal.scenario, _encoded(deal, planned[0], source), _tokens(deal, planned))
    state, cause, broken = _Replay(deal), None, False
    for entry in planned:
        call, exact = _call(state, entry)
        expected = _logits(entry, deal.contract) if exact and entry.right else None
        if not entry.right and not broken:
            # What the same tokens give when they are fed rightly: the broken step is held against it.
            right = yield replace(_right(state, entry), kind="probe")
            expected, broken = None if right.failed else right.logits, True
            answer = yield replace(call, expected=expected)
            cause = cause or _spoilt(entry, answer, right, deal.contract)
        else:
            answer = yield replace(call, expected=expected)
        if entry.right:
            cause = cause or _otherwise(entry, answer, exact, deal.contract)
        _carry(state, entry, call, answer)
        state.exact = exact
    return cause


def _call(state: _Replay, entry: Planned) -> tuple[Call, bool]:
    """The call as the caller made it, and whether nothing in it had to be made up."""
    deal, contract = state.deal, state.deal.contract
    begins = entry.phase == "prefill" or state.past is None
    usual = _usual(deal, entry, None if begins else state.past)
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
        elif port is not None and port.role == "branch_switch" and _by_other_branch(entry):
            other: PhaseName = "decode" if entry.phase == "prefill" else "prefill"
            feeds[name] = np.full(tensor.shape, contract.phases[other].switch)
        else:
            ignored = begins and port is not None and port.role == "past" and contract.first_step == "no-past-branch"
            alike = made is not None and tuple(made.shape) == tensor.shape
            exact = exact and (ignored or (alike and port is not None and port.role not in FREE))
            feeds[name] = _fitted(None if made is None else as_array(made), tensor)
    return replace(usual, feeds=feeds), exact


def _by_other_branch(entry: Planned) -> bool:
    """Whether what came back tells that the switch was fed wrongly."""
    return any(one.kind in ("cached-too-early", "cached-too-late") for one in entry.breaks)


def _usual(deal: Deal, entry: Planned, past: Past | None) -> Call:
    """The same step as the contract would have it: as long as the tokens that are there."""
    stop = entry.start + entry.new
    if entry.phase == "prefill":
        return deal.prefill(stop)
    return deal.decode(entry.start, stop, deal.first_past(0) if past is None else past)


def _past(state: _Replay, name: str, tensor: Recorded) -> "tuple[Value | Array, bool]":
    """A past in the shape that was fed: what came back and is due, what came back, or what was fed before."""
    sources = [source[name] for source in (state.past, state.plain, state.fed) if source and name in source]
    slot = state.deal.slots[name]
    for value in sources:
        if tuple(value.shape) == tensor.shape and tensor.dtype == slot.dtype:
            return value, True
    return _fitted(as_array(sources[0]) if sources else None, tensor), False


def _right(state: _Replay, entry: Planned) -> Call:
    """The call that a right loop would make in the place of a broken one."""
    deal, past = state.deal, state.past
    if past is None:
        return deal.prefill(entry.new)
    # Where all ids were fed again, the new ones are those that the cache has not.
    again = entry.start == 0 and entry.new > state.tokens
    stop = entry.new if again else state.tokens + entry.new
    return deal.decode(state.tokens, stop, past)


def _carry(state: _Replay, entry: Planned, call: Call, answer: Answer) -> None:
    """What came back and what was fed, for the next step."""
    deal, contract = state.deal, state.deal.contract
    begins = entry.phase == "prefill" or state.past is None
    pasts = {slot.past for slot in contract.slots}
    fed = {name: value for name, value in call.feeds.items() if name in pasts}
    usual = deal.first_past(0)
    before = None if begins else Past({**usual, **(state.past or {}), **fed}, answer.past)
    state.past, state.plain = deal.carry(before, answer, "held"), deal.carry(before, answer, "plain")
    for slot in contract.slots:
        unfilled = begins and slot.past in fed and (slot.filled_in == "encode" or slot.filled_by is None)
        if unfilled:
            state.past[slot.past] = state.plain[slot.past] = fed[slot.past]
    state.fed, state.tokens = Past(fed), (0 if begins else state.tokens) + entry.new


def _encoded(deal: Deal, first: Planned, source: TraceStep | None) -> Encoded:
    """What the encoder gave: by the trace, else made up in the sizes of the trace."""
    contract, made = deal.contract, deal.encoded
    ports = [port.name for port in contract.graph(first.phase).inputs if port.role == "encoder_states"]
    states = made.states
    for tensor in (first.step.fed[name] for name in ports if name in first.step.fed):
        states = tensor.array() if tensor.has_values else _fitted(states, tensor)
    outputs = dict(made.outputs)
    for slot in contract.slots:
        if slot.filled_in != "encode" or slot.filled_by is None or slot.past not in first.step.fed:
            continue
        tensor = first.step.fed[slot.past]
        given = source.got.get(slot.filled_by, tensor) if source is not None else tensor
        best = tensor if tensor.has_values else given
        outputs[slot.filled_by] = best.array() if best.has_values else _fitted(outputs.get(slot.filled_by), tensor)
    return Encoded(states, outputs)


def _tokens(deal: Deal, planned: tuple[Planned, ...]) -> Array:
    """The ids of the trace where it has them, at the places they were fed for; else those of the seed."""
    total = max(entry.start + entry.new for entry in planned) + AFTER
    scenario = replace(deal.scenario, steps=total - deal.scenario.prompt + 1)
    tokens: Array = Deal(deal.contract, scenario, deal.encoded).tokens.copy()
    for entry in planned:
        for port in deal.contract.graph(entry.phase).inputs:
            tensor = entry.step.fed.get(port.name)
            if port.role == "token_ids" and tensor is not None and tensor.has_values and not tensor.empty:
                ids = tensor.array().reshape(-1, tensor.shape[-1] if tensor.shape else 1)
                if ids.shape == (len(tokens), entry.new):
                    tokens[:, entry.start : entry.start + entry.new] = ids
    return tokens


def _fitted(made: Array | None, tensor: Recorded) -> Array:
    """Values in the shape and type that was fed: repeated where it is longer, zeros where nothing is known."""
    kind, shape = NUMPY_TYPES[tensor.dtype], tensor.shape
    if made is None or made.size == 0 or made.ndim != len(shape):
        nothing: Array = np.zeros(shape, kind)
        return nothing
    for axis, size in enumerate(shape):
        made = np.take(made, np.arange(size) % made.shape[axis], axis=axis)
    fitted: Array = np.array(made, dtype=kind, order="C")
    return fitted


def _logits(entry: Planned, contract: CacheContract) -> Array | None:
    """The logits of the trace, float[batch, new, vocabulary]."""
    port = contract.graph(entry.phase).port("logits")
    got = entry.step.got.get(port.name) if port is not None else None
    if port is None or got is None or not got.has_values or got.dtype != port.dtype or got.empty or not got.shape:
        return None
    logits = Answer({port.name: got}, port.name).logits
    return logits if logits.ndim == 3 else None


def _spoilt(entry: Planned, answer: Answer, right: Answer, contract: CacheContract) -> Cause | None:
    """A present that a broken step returns otherwise than a right one: it will harm later, if its logits do not."""
    for name in _whole(entry, contract):
        mine, due = answer.outputs.get(name), right.outputs.get(name)
        if mine is not None and due is not None and not same(as_array(mine), as_array(due)):
            return Cause(SPOILT, f"{name} of step {entry.step.number} is not that of a right feed")
    return None


def _whole(entry: Planned, contract: CacheContract) -> set[str]:
    """The presents that a step fills to the end: behind the tokens, a buffer may come back with anything."""
    filled = (s.filled_by if entry.phase == "prefill" else s.present for s in contract.slots if s.growth in FILLED)
    return {name for name in filled if name is not None}


def _otherwise(entry: Planned, answer: Answer, exact: bool, contract: CacheContract) -> Cause | None:
    """The first output that came back here in another shape than in the trace, or, from the same feed, otherwise."""
    # Where an input that was not told decides what is returned, shapes cannot be compared.
    told = all(
        t.has_values
        for p in contract.graph(entry.phase).inputs
        if p.role in DECIDING and (t := entry.step.fed.get(p.name)) is not None
    )
    whole = _whole(entry, contract)
    for name, got in entry.step.got.items() if told else ():
        here = answer.outputs.get(name)
        if here is None or (name == answer.logits_name and len(got.shape) != len(here.shape)):
            continue
        where = f"step {entry.step.number} ({entry.step.place}): {name}"
        if tuple(here.shape) != got.shape:
            return Cause(DIFFERS, f"{where} came back as {got}, and here as {list(here.shape)}")
        if exact and name in whole and got.has_values and got.dtype.startswith("float") and not got.empty:
            values, mine = got.array(), as_array(here)
            rows = values.shape[-1] if values.ndim else 1
            difference = compare(values.reshape(1, -1, rows), mine.reshape(1, -1, rows), contract.exactness)
            if judge(difference, contract.exactness) == "fail":
                return Cause(DIFFERS, f"{where} is off by {difference.relative:.2g} of its spread, from the same feed")
    return None
