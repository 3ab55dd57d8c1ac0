"""The walk over a trace: each step is compared with the contract, up to the first that breaks it.

A loop may take tokens back by cutting the cache: speculative decoding, other continuations of one prompt. A shorter
past is also what many mistakes feed. It is taken for a cut only where something else in the step agrees with it: masks,
positions and counters of the shorter length, or values that are the first ones of what was returned. A past as long as
that of the step before is never taken for one: a cache that is not renewed looks the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

import numpy as np

from kvdoctor.addons.traces.inputs import branches, encoder, find_doubts, ports, starts_again
from kvdoctor.addons.traces.lengths import all_ids, batch, capacity, compare_with_length, lengths, values
from kvdoctor.addons.traces.pasts import pasts
from kvdoctor.addons.traces.recorded import Trace, TraceStep, TraceTensor
from kvdoctor.addons.traces.step import (
    ContractViolation,
    ExpectedPast,
    SequenceState,
    StepContext,
    expect_past,
    first_length,
    holds_values_of,
    misfits,
    size_of,
)
from kvdoctor.contract import DECODING, CacheContract, Dim, Graph, PhaseName, Slot, describe
from kvdoctor.decode.calls import Array
from kvdoctor.errors import UsageError
from kvdoctor.records import record


def cut_back(moment: StepContext) -> SequenceState | None:
    """The state of a sequence whose cache was cut before the step; None where no cut is recognized."""
    before, length = moment.before, first_length(moment)
    if before is None or moment.buffered or not 0 < length < before.tokens or length == before.tokens - before.new:
        return None
    cut = [(slot, fed) for slot, fed in moment.slots if slot.carry != "hold"]
    for slot, fed in cut:  # each keeps an entry for each token, and was fed the first ones
        grows = (
            (slot.growth, slot.carry) in (("grow", "feed-back"), ("delta", "append"))
            and slot.window is None
            and not slot.prepended
        )
        if not grows or size_of(slot.axes, fed.shape, "past") != length:
            return None
    agree = [*_compare_values(moment, cut, length), *compare_with_length(moment, length)]
    return _shorten(before, moment, length) if cut and agree and all(agree) else None


def _compare_values(moment: StepContext, cut: list[tuple[Slot, TraceTensor]], length: int) -> Iterator[bool]:
    """Whether each past with known values holds the first entries of what is due."""
    for slot, fed in cut:
        due = expect_past(slot, moment).value
        if due is not None and due.has_values and fed.has_values:
            first = _first_entries(due, slot, length)
            yield holds_values_of(slot, fed, ExpectedPast(first.shape, first, ""), moment)


def _shorten(before: SequenceState, moment: StepContext, length: int) -> SequenceState:
    """The state after the steps so far, without the tokens after `length`."""
    contract = moment.contract
    slots = {s.filled_by if before.phase == "prefill" else s.present: s for s in contract.slots if s.carry != "hold"}
    coupled = {port.name for port in contract.graph(before.phase).inputs if port.role != "past"}
    fed = {name: tensor for name, tensor in before.last.fed.items() if name not in coupled}
    got = dict(before.last.got)
    for name, slot in slots.items():
        if name not in got:
            continue
        had = 0
        if slot.carry == "append" and slot.past in fed:
            # The next past is the past before with what the present adds to it.
            fed[slot.past] = _first_entries(fed[slot.past], slot, length)
            had = size_of(slot.axes, fed[slot.past].shape, "past") or 0
        got[name] = _first_entries(got[name], slot, length - had)
    ids = before.ids[..., :length] if before.ids is not None else None
    return replace(before, last=replace(before.last, fed=fed, got=got), tokens=length, ids=ids)


def _first_entries(value: TraceTensor, slot: Slot, length: int) -> TraceTensor:
    at = slot.length_axis
    if at is None or at >= len(value.shape) or value.shape[at] <= length:
        return value
    shape = tuple(length if axis == at else size for axis, size in enumerate(value.shape))
    taken = (lambda: np.take(value.array(), range(length), axis=at)) if value.has_values else None
    return TraceTensor(value.dtype, shape, taken)


@record
class UnexpectedOutput:
    """An output that came back in another type or shape than promised, in a step whose feed was right."""

    step: int
    output: str
    declared: str
    observed: str


def find_unexpected_output(moment: StepContext) -> UnexpectedOutput | None:
    """Find the first such output of a step."""
    filled = {slot.filled_by if moment.phase == "prefill" else slot.present: slot for slot in moment.contract.slots}
    known = moment.sizes if moment.contract.codebooks == 1 else {}
    for port in moment.graph.outputs:
        got = moment.step.got.get(port.name)
        if got is None:
            continue
        slot, due = filled.get(port.name), None
        if slot is not None:
            due = _expect_present_shape(slot, moment)
        elif port.shape is not None and len(port.axes) == len(port.shape):
            due = tuple(
                size if isinstance(size, int) else known.get(axis) if axis in ("batch", "new") else None
                for axis, size in zip(port.axes, port.shape, strict=True)
            )
        if got.dtype != port.dtype or (due is not None and misfits(due, got)):
            return UnexpectedOutput(moment.step.number, port.name, describe(port.dtype, due or port.shape), str(got))
    return None


def _expect_present_shape(slot: Slot, moment: StepContext) -> tuple[Dim, ...]:
    """The shape of a present: the past's, and its length by the growth rule."""
    fed = moment.step.fed.get(slot.past)
    past, new, sizes = moment.past, moment.new, moment.sizes
    length: int | None = None
    if slot in moment.contract.growing and not moment.buffered:
        length = None if slot.growth == "delta" else past + new
    elif slot.growth in ("static", "shared") and slot.carry == "feed-back" and fed is not None and slot.length_axis:
        length = fed.shape[slot.length_axis] if len(fed.shape) == len(slot.axes) else None
    shape: list[Dim] = []
    for axis, declared in zip(slot.axes, slot.shape, strict=True):
        if axis in ("past", "capacity"):
            shape.append(length)
        elif axis in ("batch", "batch_heads", "encoder"):
            shape.append(declared if isinstance(declared, int) else sizes.get(axis))
        else:
            shape.append(declared)
    return tuple(shape)


Rule = Callable[[StepContext], Iterator[ContractViolation]]
RULES: tuple[Rule, ...] = (ports, branches, all_ids, batch, capacity, encoder, pasts, lengths, values)
"""Rules that a step must keep, in this order; each yields the violations of a step.

Only the first that finds a violation is reported: a past of the wrong length causes a mask of the wrong length too.
"""
REMEMBERED = 4
"""Steps before the last that a stale past is looked for in."""
PHASES: tuple[PhaseName, ...] = ("encode", "embed", *DECODING)
MATCHED_STEPS = 8
"""Steps that decide which stack a trace belongs to."""


@record
class TraceCheck:
    """The comparison of a trace with a contract.

    `steps` were compared, the broken one included. `breaks` are those of `step`, the first that breaks the contract.
    `doubts` are steps before it with what a run decides. `untrue` is the first output that came back in another shape
    than the graph promises, with right feeds. `blind` are the inputs whose values would decide more. `failed` is the
    first step that the caller's runtime failed in. `also` names other stacks with the same inputs, which may be the
    ones that were called.
    """

    steps: int
    sequences: int
    breaks: tuple[ContractViolation, ...] = ()
    step: TraceStep | None = None
    untrue: UnexpectedOutput | None = None
    blind: tuple[str, ...] = ()
    failed: TraceStep | None = None
    cached: bool = False
    also: tuple[str, ...] = ()
    doubts: tuple[tuple[TraceStep, ContractViolation], ...] = ()


def compare_trace(trace: Trace, contract: CacheContract) -> TraceCheck:
    """Compare each step of a trace with a contract.

    Raises:
        UsageError: values of the trace cannot be read.
    """
    blind: dict[str, None] = {}
    walked = list(walk(trace, contract, blind))
    moments = [moment for moment, _ in walked]
    at = broken_at(walked)
    right = moments[:at] if at is not None else moments
    last = moments[-1].step if moments else None
    return TraceCheck(
        steps=len(walked),
        sequences=sum(moment.before is None for moment in moments),
        breaks=walked[at][1] if at is not None else (),
        step=moments[at].step if at is not None else None,
        untrue=next(filter(None, map(find_unexpected_output, right)), None),
        blind=tuple(blind),
        failed=last if at is None and last is not None and last.error is not None else None,
        cached=any(moment.before is not None for moment in right),
        doubts=tuple((moment.step, one) for moment in right for one in find_doubts(moment)),
    )


Walked = tuple[StepContext, tuple[ContractViolation, ...]]
"""A step and what it breaks."""


def broken_at(walked: Sequence[Walked]) -> int | None:
    """The index of the step that breaks the contract: the last one of a walk, else the first with a mild break."""
    broken = [index for index, (_, breaks) in enumerate(walked) if breaks]
    hard = [index for index in broken if not all(one.mild for one in walked[index][1])]
    return next(iter(hard or broken), None)


def walk(trace: Trace, contract: CacheContract, blind: dict[str, None]) -> Iterator[Walked]:
    """Each step of the decoder with what it breaks, up to the first that breaks something or failed."""
    before: SequenceState | None = None
    encoded: TraceStep | None = None
    number = 0
    trace = without_embedding_calls(trace, contract)
    for index, recorded in enumerate(trace):
        phase = phase_of(recorded, contract, before)
        if phase == "encode":
            encoded, before = recorded, None
            continue
        step, number = replace(recorded, number=number), number + 1
        moment = StepContext(contract, phase, step, before, encoded, next(iter(trace[index + 1 :]), None), blind)
        if before is None or starts_again(moment):
            # A sequence begins with the prefill, unless the graph that was called has no part in it.
            moment = replace(moment, before=None, phase=phase if contract.first_step == "no-past-graph" else "prefill")
        elif (shorter := cut_back(moment)) is not None:
            moment = replace(moment, before=shorter)
        breaks = first_breaks(moment)
        yield moment, breaks
        if not all(one.mild for one in breaks) or step.error is not None:
            return
        before = _next_state(moment)


def phase_of(step: TraceStep, contract: CacheContract, before: SequenceState | None) -> PhaseName:
    """Say which graph a step called: by its file where the trace tells, else by the inputs it fed."""
    graphs = {phase: contract.graph(phase) for phase in PHASES if phase in contract.phases}
    if step.file is not None:
        name = PurePath(step.file.replace("\\", "/")).name
        graphs = {p: g for p, g in graphs.items() if PurePath(g.file).name == name} or graphs
    usual: PhaseName = "prefill" if before is None else "decode"
    # Where one graph serves several phases, or two fit as well, it is the one whose turn it is.
    phase = min(graphs, key=lambda p: (count_misfits(step, graphs[p]), p != usual, p not in DECODING))
    one_graph = contract.phases["prefill"].graph == contract.phases["decode"].graph
    return usual if one_graph and phase in DECODING else phase


def first_breaks(moment: StepContext) -> tuple[ContractViolation, ...]:
    """What the first broken rule says; nothing for a step that breaks the contract in no visible way."""
    mild: tuple[ContractViolation, ...] = ()
    for rule in RULES:
        found = tuple(rule(moment))
        if any(not one.mild for one in found):
            return found
        mild = mild or found
    return mild


def without_embedding_calls(trace: Trace, contract: CacheContract) -> Trace:
    """The calls of a trace but those of an embedding graph, which are part of the next one."""
    if "embed" not in contract.phases:
        return trace
    steps: list[TraceStep] = []
    embedded: Mapping[str, TraceTensor] = {}
    for step in trace:
        if phase_of(step, contract, None) == "embed":
            embedded = step.fed
        else:
            steps.append(replace(step, embedded=embedded) if embedded else step)
            embedded = {}
    return tuple(steps)


def count_misfits(step: TraceStep, graph: Graph) -> int:
    """How far a feed is from the inputs of a graph: inputs missing, unknown, of another type or rank."""
    known = {port.name: port for port in graph.inputs}
    both = [(port, step.fed[name]) for name, port in known.items() if name in step.fed]
    unlike = sum(p.dtype != fed.dtype or (p.shape is not None and len(p.shape) != len(fed.shape)) for p, fed in both)
    return len(known) + len(step.fed) - 2 * len(both) + unlike


def find_stacks(trace: Trace, contracts: Mapping[str, CacheContract], path: str) -> tuple[str, ...]:
    """Name the stack whose inputs a trace fed, followed by others that fit as well.

    Raises:
        UsageError: no stack has any of them.
    """
    scores: dict[str, tuple[int, int]] = {}
    looked_at = trace[:MATCHED_STEPS]
    for name, contract in contracts.items():
        graphs = {contract.graph(phase).file: contract.graph(phase) for phase in PHASES if phase in contract.phases}
        files = {PurePath(file).name for file in graphs}
        named = [PurePath(step.file.replace("\\", "/")).name for step in looked_at if step.file is not None]
        strange = sum(file not in files for file in named)
        apart = sum(min(count_misfits(step, graph) for graph in graphs.values()) for step in looked_at)
        scores[name] = (strange, apart)
    known = {p.name for c in contracts.values() for g in c.graphs.values() for p in g.inputs}
    fed = [name for step in looked_at for name in step.fed]
    if not known.intersection(fed):
        raise UsageError(
            f"the trace {path!r} feeds {fed[0][:200]!r} and other inputs that this model does not have; "
            f"give the trace of a program that calls this model"
        )
    best = min(scores.values())
    return tuple(name for name, score in scores.items() if score == best)


def _next_state(moment: StepContext) -> SequenceState:
    before, step = moment.before, moment.step
    made = (
        size_of(slot.axes, got.shape, "encoder")
        for slot in moment.contract.slots
        if before is None and (got := step.got.get(slot.filled_by or "")) is not None
    )
    return SequenceState(
        first=before.first if before is not None else step,
        last=step,
        phase=moment.phase,
        tokens=moment.past + moment.new,
        new=moment.new,
        batch=moment.batch,
        count=before.count + 1 if before is not None else 1,
        encoder=moment.encoder or next(filter(None, made), None),  # by the cache that was made of its states
        filled=_fill_kept_slots(moment),
        ids=_collect_ids(moment),
        buffered=moment.buffered,
        earlier=(before.last, *before.earlier)[:REMEMBERED] if before is not None else (),
    )


def _fill_kept_slots(moment: StepContext) -> dict[str, TraceTensor]:
    """The right value of what is held: what first filled it, where the trace contains that."""
    filled = dict(moment.before.filled) if moment.before is not None else {}
    for slot in moment.contract.slots:
        if (slot.carry != "hold" and slot.present is not None) or slot.past in filled:
            continue
        made = moment.step.got.get(slot.filled_by or "") if slot.filled_in == "prefill" else None
        fed = moment.step.fed.get(slot.past)
        ignored = moment.before is None and slot.filled_in == "prefill" and slot.filled_by is not None
        value = made if made is not None and moment.before is None else fed
        if value is not None and not (value is fed and ignored):
            filled[slot.past] = value
    return filled


def _collect_ids(moment: StepContext) -> Array | None:
    for port, fed in moment.ports("token_ids"):
        if not fed.has_values:
            return None
        if moment.before is None:
            return fed.array()
        earlier = moment.before.ids
        if earlier is not None and earlier.shape[:-1] == fed.shape[:-1] and port.axes[-1:] == ("new",):
            return np.concatenate([earlier, fed.array()], axis=-1)
    return None
