"""The walk over a trace: each step held against the contract, up to the first that breaks it. numpy only."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

import numpy as np

from kvdoctor.caller.moment import Before, Break, Moment, size_of
from kvdoctor.caller.reading import read_trace
from kvdoctor.caller.recorded import Recorded, Trace, TraceStep
from kvdoctor.caller.returned import Untrue, first_untrue
from kvdoctor.caller.rules import first_breaks
from kvdoctor.caller.rules.branches import starts_again
from kvdoctor.calls import Array
from kvdoctor.contract import CacheContract, Graph, PhaseName
from kvdoctor.errors import UsageError

PHASES: tuple[PhaseName, ...] = ("encode", "prefill", "decode")
LOOKED_AT = 8
"""Steps by which it is told which stack a trace belongs to."""


@dataclass(frozen=True, slots=True)
class Held:
    """What holding a trace against a contract brought.

    `steps` were held, the broken one included. `breaks` are those of the first step that breaks the contract, `step`.
    `untrue` is the first output that came back in another shape than the graph promises, with right feeds. `blind` are
    the inputs whose values would decide more. `failed` is the first step that the caller's runtime failed in. `also`
    names other stacks with the same inputs, which may be the ones that were called.
    """

    steps: int
    sequences: int
    breaks: tuple[Break, ...] = ()
    step: TraceStep | None = None
    untrue: Untrue | None = None
    blind: tuple[str, ...] = ()
    failed: TraceStep | None = None
    cached: bool = False
    also: tuple[str, ...] = ()


def hold(trace: Trace, contract: CacheContract) -> Held:
    """Hold each step of a trace against a contract.

    Raises:
        UsageError: values of the trace cannot be read.
    """
    blind: dict[str, None] = {}
    walked = list(walk(trace, contract, blind))
    moments = [moment for moment, _ in walked]
    at = broken_at(walked)
    right = moments[:at] if at is not None else moments
    last = moments[-1].step if moments else None
    return Held(
        steps=len(walked),
        sequences=sum(moment.before is None for moment in moments),
        breaks=walked[at][1] if at is not None else (),
        step=moments[at].step if at is not None else None,
        untrue=next(filter(None, map(first_untrue, right)), None),
        blind=tuple(blind),
        failed=last if at is None and last is not None and last.error is not None else None,
        cached=any(moment.before is not None for moment in right),
    )


Walked = tuple[Moment, tuple[Break, ...]]
"""A step and what it breaks."""


def broken_at(walked: Sequence[Walked]) -> int | None:
    """The index of the step that breaks the contract: the last one of a walk, else the first with a mild break."""
    broken = [index for index, (_, breaks) in enumerate(walked) if breaks]
    hard = [index for index in broken if not all(one.mild for one in walked[index][1])]
    return next(iter(hard or broken), None)


def walk(trace: Trace, contract: CacheContract, blind: dict[str, None]) -> Iterator[Walked]:
    """Each step of the decoder with what it breaks, up to the first that breaks something or failed."""
    before: Before | None = None
    encoded: TraceStep | None = None
    number = 0
    for index, recorded in enumerate(trace):
        phase = phase_of(recorded, contract, before)
        if phase == "encode":
            encoded, before = recorded, None
            continue
        step, number = replace(recorded, number=number), number + 1
        moment = Moment(contract, phase, step, before, encoded, next(iter(trace[index + 1 :]), None), blind)
        if before is None or starts_again(moment):
            moment = replace(moment, before=None, phase=_first_phase(phase, contract))
        breaks = first_breaks(moment)
        yield moment, breaks
        if not all(one.mild for one in breaks) or step.error is not None:
            return
        before = _after(moment)


def phase_of(step: TraceStep, contract: CacheContract, before: Before | None) -> PhaseName:
    """Say which graph a step called: by its file where the trace tells, else by the inputs it fed."""
    graphs = {phase: contract.graph(phase) for phase in PHASES if phase in contract.phases}
    if step.file is not None:
        name = PurePath(step.file.replace("\\", "/")).name
        graphs = {p: g for p, g in graphs.items() if PurePath(g.file).name == name} or graphs
    usual: PhaseName = "prefill" if before is None else "decode"
    # Where one graph serves several phases, or two fit as well, it is the one whose turn it is.
    phase = min(graphs, key=lambda p: (misfit(step, graphs[p]), p != usual, p == "encode"))
    one_graph = contract.phases["prefill"].graph == contract.phases["decode"].graph
    return usual if one_graph and phase != "encode" else phase


def _first_phase(phase: PhaseName, contract: CacheContract) -> PhaseName:
    """A sequence begins with the prefill, unless the graph that was called has no part in it."""
    return phase if contract.first_step == "no-past-graph" else "prefill"


def misfit(step: TraceStep, graph: Graph) -> int:
    """How far a feed is from the inputs of a graph: inputs missing, unknown, of another type or rank."""
    known = {port.name: port for port in graph.inputs}
    both = [(port, step.fed[name]) for name, port in known.items() if name in step.fed]
    unlike = sum(p.dtype != fed.dtype or (p.shape is not None and len(p.shape) != len(fed.shape)) for p, fed in both)
    return len(known) + len(step.fed) - 2 * len(both) + unlike


def fitting(trace: Trace, contracts: Mapping[str, CacheContract], path: str) -> tuple[str, ...]:
    """Name the stack whose inputs a trace fed, and behind it others that fit as well.

    Raises:
        UsageError: no stack has any of them.
    """
    scores: dict[str, tuple[int, int]] = {}
    looked_at = trace[:LOOKED_AT]
    for name, contract in contracts.items():
        graphs = {contract.graph(phase).file: contract.graph(phase) for phase in PHASES if phase in contract.phases}
        files = {PurePath(file).name for file in graphs}
        named = [PurePath(step.file.replace("\\", "/")).name for step in looked_at if step.file is not None]
        strange = sum(file not in files for file in named)
        apart = sum(min(misfit(step, graph) for graph in graphs.values()) for step in looked_at)
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


def hold_fitting(path: str, contracts: Mapping[str, CacheContract]) -> dict[str, Held]:
    """Read a trace and hold it against the contract of the stack that it called, by the stack's name.

    Raises:
        UsageError: the trace cannot be read, or belongs to none of the stacks.
    """
    trace = read_trace(path)
    name, *also = fitting(trace, contracts, path)
    return {name: replace(hold(trace, contracts[name]), also=tuple(also))}


def _after(moment: Moment) -> Before:
    """What a step leaves to the next."""
    before, step = moment.before, moment.step
    new, past = moment.new, moment.past
    return Before(
        first=before.first if before is not None else step,
        last=step,
        phase=moment.phase,
        tokens=past + new,
        new=new,
        batch=moment.batch,
        count=before.count + 1 if before is not None else 1,
        encoder=moment.encoder or _returned_encoder(moment),
        filled=_filled(moment),
        ids=_ids(moment),
        buffered=moment.buffered,
    )


def _filled(moment: Moment) -> dict[str, Recorded]:
    """The right value of what is held: what first filled it, as far as the trace tells."""
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


def _returned_encoder(moment: Moment) -> int | None:
    """Encoder states by the cache that was made of them."""
    for slot in moment.contract.slots:
        got = moment.step.got.get(slot.filled_by or "")
        size = size_of(slot.axes, got.shape, "encoder") if got is not None else None
        if size and moment.before is None:
            return size
    return None


def _ids(moment: Moment) -> Array | None:
    """All token ids so far."""
    for port, fed in moment.ports("token_ids"):
        if not fed.has_values:
            return None
        if moment.before is None:
            return fed.array()
        earlier = moment.before.ids
        if earlier is not None and earlier.shape[:-1] == fed.shape[:-1] and port.axes[-1:] == ("new",):
            return np.concatenate([earlier, fed.array()], axis=-1)
    return None
