"""Feeds that a run decides: a step is run as it was fed and as the contract has it; where both agree, all is right.

An input whose reading runs have settled (a switch, a constant) may take other values as well, and a transducer may put
its state back or go on with it: no rule of shapes says which is wrong.
"""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace

import numpy as np

from kvdoctor.addons.traces.recorded import Trace, same_values
from kvdoctor.addons.traces.step import ContractViolation, StepContext
from kvdoctor.contract import CacheContract, Port, with_reading
from kvdoctor.decode.calls import Answer, Call, as_array
from kvdoctor.decode.experiments import as_probe
from kvdoctor.decode.experiments.cache_entries import growing, same_entries, same_logits
from kvdoctor.decode.feeds import FeedBuilder

COMPARED = 4
"""Steps by which a constant is tried."""


def find_doubts(moment: StepContext) -> Iterator[ContractViolation]:
    """What a run of the step decides, in a step that breaks no rule."""
    yield from _settled(moment)
    yield from _unknown_tokens(moment)
    if takes_frames(moment) and _state_adopted(moment):
        before = moment.before
        assert before is not None  # noqa: S101 - a state is adopted from a step before
        names = tuple(slot.past for slot, _ in moment.slots)
        yield ContractViolation(
            kind="state-adopted",
            inputs=names,
            declared=f"the states that step {before.last.number} was fed, since it fed the same token as this one",
            observed="the states that it returned, which have taken that token in already",
            cause=f"the states are taken over after step {before.last.number}, which gave no token (a blank)",
            advice="where a step gives the blank, feed its states and its token again with the next frame; take the "
            "states over with each token alone",
        )


def _settled(moment: StepContext) -> Iterator[ContractViolation]:
    """Inputs that runs gave a reading, and that were fed another number."""
    known = {one.subject for one in moment.contract.ambiguities if one.settled and one.unknown}
    for port, fed in moment.ports("setting", "first_call", "has_past"):
        values = moment.values(port.name) if port.name in known else None
        due = _due(port, moment)
        if values is None or not values.size or bool((values == due).all()):
            continue
        yield ContractViolation(
            kind="setting",
            inputs=(port.name,),
            declared=f"{port.name} {fed}: {due:g}, by runs with and without the cache",
            observed=f"{port.name} {values.reshape(-1)[0]:g}",
            cause=f"{port.name} is fed {values.reshape(-1)[0]:g}, where {due:g} is right",
            advice=f"feed {port.name} {due:g} {'on the first step' if moment.before is None else 'at this step'}",
        )


def _unknown_tokens(moment: StepContext) -> Iterator[ContractViolation]:
    """Ids that no token has; a table may have more rows than there are logits, so that the run decides."""
    size = moment.contract.vocabulary
    for port, fed in moment.ports("token_ids"):
        ids = fed.array() if size is not None and fed.has_values else np.zeros(0)
        if (outside := ids[(ids < 0) | (ids >= (size or 0))]).size:
            yield ContractViolation(
                kind="token-unknown",
                inputs=(port.name,),
                declared=f"{port.name} {fed}: ids from 0 to {(size or 0) - 1}",
                observed=f"{port.name} has the id {outside[0]}",
                cause=f"{port.name} is fed the id {outside[0]}, and the vocabulary has {size} tokens",
                advice="feed the ids of this model's own tokenizer; they count from 0",
            )


def _due(port: Port, moment: StepContext) -> float:
    if port.role == "setting":
        return port.value or 0.0
    return float((moment.past == 0) == (port.role == "first_call"))


def takes_frames(moment: StepContext) -> bool:
    """Whether a step takes one frame of the encoder, and has states alone: a transducer, whose frames change.

    Its prediction network takes in the last token; where that is fed again, the state goes with it.
    """
    states = [fed for _, fed in moment.ports("encoder_states", "condition")]
    slots = moment.contract.slots
    return (
        bool(states and slots)
        and all(1 in fed.shape[1:] for fed in states)
        and all(slot.growth == "replace" for slot in slots)
    )


def fed_again(moment: StepContext) -> bool:
    """Whether a step feeds the one token of the step before again."""
    before = moment.before
    for port, fed in moment.ports("token_ids"):
        earlier = before.last.fed.get(port.name) if before is not None else None
        if earlier is not None and earlier.has_values and fed.has_values and fed.array().size == 1:
            return same_values(fed.array(), earlier.array())
    return False


def _state_adopted(moment: StepContext) -> bool:
    """Whether the states are new ones although the token is the one of the step before."""
    before = moment.before
    if before is None or not fed_again(moment):
        return False
    earlier = before.last.fed
    return any(slot.past in earlier and fed.equals(earlier[slot.past]) is False for slot, fed in moment.slots)


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
