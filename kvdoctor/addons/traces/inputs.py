"""The right graph or branch is called, and every input of it is fed, in its element type and rank.

The first step is served by the graph or branch without a past, every later one by that with a past. The encoder is
called once: its states and its mask stay what they were, at every step that takes them.
"""

from collections.abc import Iterator

import numpy as np

from kvdoctor.addons.traces.pasts import fed_again, takes_frames
from kvdoctor.addons.traces.recorded import TraceTensor, same_values
from kvdoctor.addons.traces.step import ContractViolation, StepContext, first_length, list_inputs, size_of, tokens
from kvdoctor.contract import DECODING, CacheContract, Port, describe
from kvdoctor.errors import similar_names

CROSS = "cross-attention"
WORDS = {"encoder_states": "the encoder states", "encoder_mask": "the mask of the encoder's input"}


def encoder(moment: StepContext) -> Iterator[ContractViolation]:
    """Encoder states or their mask that are empty, or are not those of the first step."""
    for port, fed in moment.ports("encoder_states", "encoder_mask"):
        word = WORDS[port.role]
        if fed.shape and 0 in fed.shape:
            yield ContractViolation(
                kind="encoder-missing",
                inputs=(port.name,),
                declared=f"{port.name}: {word}, at every step",
                observed=f"{port.name} {fed}",
                cause=f"{word} have no elements" if port.role == "encoder_states" else f"{word} has no elements",
                advice=f"feed {word} as on the first step",
                mild=_need_not_be_read(moment, port),
            )
            continue
        yield from _changed(moment, port, fed)


def _need_not_be_read(moment: StepContext, port: Port) -> bool:
    """Whether the cross-attention cache holds all that a step needs of the encoder states."""
    return moment.before is not None and port.role == "encoder_states" and bool(moment.contract.of_kind(CROSS))


def _changed(moment: StepContext, port: Port, fed: TraceTensor) -> Iterator[ContractViolation]:
    known = _first(moment, port) if not takes_frames(moment) else None
    if known is None:
        return
    first, whose = known
    verb, text = ("change" if port.role == "encoder_states" else "changes"), None
    if first.shape != fed.shape and not (len(first.shape) == len(fed.shape) and first.shape[1:] == fed.shape[1:]):
        text = f"{port.name} {fed}"
    elif first.shape == fed.shape:
        values = moment.values(port.name)
        if values is not None and first.has_values and not same_values(values, first.array()):
            text = f"{port.name} {fed} with other values than {whose}"
    if text is not None:
        yield ContractViolation(
            kind="encoder-changes",
            inputs=(port.name,),
            declared=f"{port.name} {first}, as {whose}",
            observed=text,
            cause=f"{WORDS[port.role]} {verb} within a sequence",
            advice="run the encoder once, and feed what it gave at every step",
            mild=_need_not_be_read(moment, port),
        )


def _first(moment: StepContext, port: Port) -> tuple[TraceTensor, str] | None:
    if moment.before is not None and moment.before.first.fed.get(port.name) is not None:
        return moment.before.first.fed[port.name], f"step {moment.before.first.number} fed it"
    if moment.encoded is not None and port.role == "encoder_states" and "encode" in moment.contract.phases:
        made = moment.contract.graph("encode").port("encoder_states")
        if made is not None and made.name in moment.encoded.got:
            return moment.encoded.got[made.name], f"the encoder gave it ({moment.encoded.place})"
    return None


def branches(moment: StepContext) -> Iterator[ContractViolation]:
    """A cached branch too early or too late, and a cache that is dropped."""
    if moment.contract.first_step == "no-past-branch":
        yield from _switch(moment)
    elif moment.before is None and moment.phase == "decode":
        prefill = moment.contract.graph("prefill").file
        yield ContractViolation(
            kind="cached-too-early",
            inputs=tuple(slot.past for slot, _ in moment.slots),
            declared=f"the first step calls {prefill}, which fills the cache",
            observed=f"the first step of the trace calls {moment.graph.file} with a past",
            cause=f"the first step calls {moment.graph.file}, which continues a cache that nothing has filled",
            advice=f"call {prefill} first, or record the trace from the first call of a sequence on",
        )
    elif moment.before is not None and moment.contract.first_step == "no-past-graph" and moment.phase == "prefill":
        yield _dropped(moment, f"calls {moment.graph.file} again, which knows of no past")


def _switch(moment: StepContext) -> Iterator[ContractViolation]:
    """The switch of a merged decoder, where its value is in the trace."""
    contract = moment.contract
    for port, fed in moment.ports("branch_switch"):
        value = moment.values(port.name)
        by_outputs = _shown_by_outputs(moment) if value is None else None
        if (value is None or not value.size) and by_outputs is None:
            return
        cached = moment.before is None if by_outputs else bool(np.all(value)) == contract.phases["decode"].switch
        early, late = (str(contract.phases[phase].switch).lower() for phase in DECODING)
        promised = (
            f"{port.name} {describe(port.dtype, port.shape)}: {early} on the first step, {late} on every later one"
        )
        observed = f"{port.name} {fed}, {by_outputs or str(bool(np.all(value))).lower()}"
        if moment.before is None and cached:
            yield ContractViolation(
                kind="cached-too-early",
                inputs=(port.name,),
                declared=promised,
                observed=f"{observed} on the first step",
                cause=f"the cached branch is used on the first step ({port.name} is {late})",
                advice=f"feed {port.name} {early} on the first step: only that branch fills the cache",
            )
        elif moment.before is not None and not cached:
            yield ContractViolation(
                kind="cached-too-late",
                inputs=(port.name,),
                declared=promised,
                observed=f"{observed} with {tokens(moment.before.tokens)} in the cache and {tokens(moment.new)} new",
                cause=f"the branch without a past is used after the first step ({port.name} is {early}): it ignores "
                "the cache",
                advice=f"feed {port.name} {late} from the second step on",
            )


def _shown_by_outputs(moment: StepContext) -> str | None:
    """What came back that only the other branch returns, where the value of the switch is not in the trace.

    On the first step a placeholder without elements, later a present of the new tokens alone.
    """
    for slot in moment.contract.slots:
        got = moment.step.got.get(slot.present or "")
        if got is None or slot.filled_by != slot.present:
            continue
        if moment.before is None and slot.emptied and got.empty:
            return f"and {slot.present} came back as {got}, as from the cached branch"
        if slot not in moment.contract.growing or not moment.past or slot.past not in moment.step.fed:
            continue
        fed = size_of(slot.axes, moment.step.fed[slot.past].shape, "past")
        alone = size_of(slot.axes, got.shape, "past") == moment.new
        if moment.before is not None and fed == moment.past and alone:
            return f"and {slot.present} came back as {got}, as from the branch without a past"
    return None


def _dropped(moment: StepContext, text: str) -> ContractViolation:
    assert moment.before is not None  # noqa: S101 - asked of later steps only
    return ContractViolation(
        kind="cache-dropped",
        inputs=tuple(port.name for port, _ in moment.ports("token_ids", "embeddings", "token_and_position")),
        declared=f"{moment.contract.graph('decode').file} with the {tokens(moment.before.tokens)} of the cache",
        observed=list_inputs(moment.step.fed, moment),
        cause=f"the cache is dropped: the step with {tokens(moment.new)} {text}",
        advice=f"call {moment.contract.graph('decode').file} with what the step before returned",
    )


def starts_again(moment: StepContext) -> bool:
    """Whether a step that has no past, or an ignored one, begins another sequence rather than forgets the cache.

    It does where it feeds more tokens than there were (a loop without the cache, or another prompt), another number of
    sequences, the ids of the first step, several tokens; or one token, after a sequence that went on for some steps.
    """
    before = moment.before
    if before is None:
        return True
    if not _looks_first(moment):
        return False
    if moment.new > before.tokens or moment.batch != before.batch:
        return True
    if moment.contract.first_step == "no-past-branch" and first_length(moment) == before.tokens > 1:
        return False
    if moment.new > 1 or before.count > 1:
        return True
    for port, fed in moment.ports("token_ids"):
        first = before.first.fed.get(port.name)
        if first is not None and first.has_values and fed.has_values:
            return same_values(first.array(), fed.array())
    return False


def _looks_first(moment: StepContext) -> bool:
    contract, before = moment.contract, moment.before
    if contract.first_step == "no-past-graph":
        return moment.phase == "prefill"
    if contract.first_step == "no-past-branch":
        for _, fed in moment.ports("branch_switch"):
            if fed.has_values and fed.array().size:
                return bool(np.all(fed.array())) == contract.phases["prefill"].switch
        return False
    if contract.growing and not moment.buffered:
        return before is not None and before.tokens > 0 and first_length(moment) == 0
    # An input says that the cache is empty: a place to write at, a length, positions.
    for _, fed in moment.ports("write_index", "past_length", "cache_position", "position_ids"):
        if fed.has_values and fed.array().size:
            return int(fed.array().min()) == 0
    states = [fed for slot, fed in moment.slots if slot.growth in ("replace", "static") and fed.has_values]
    return bool(states) and all(not fed.array().any() for fed in states)


MEANINGS = {
    "attention_mask": "one entry for each token of the past and each new one",
    "position_ids": "the positions of the new tokens, counted on from the past",
    "cache_position": "the positions of the new tokens, counted on from the past",
    "encoder_states": "what the encoder gave, at every step",
    "encoder_mask": "the mask of the encoder's input, at every step",
    "token_ids": "the new tokens",
}


def ports(moment: StepContext) -> Iterator[ContractViolation]:
    """Missing and unknown inputs, element types and ranks."""
    file, fed = moment.graph.file, moment.step.fed
    known = {port.name: port for port in moment.graph.inputs}
    missing = [port for name, port in known.items() if name not in fed]
    unknown = [name for name in fed if name not in known]
    if missing:
        yield _report_missing(missing, unknown, file, moment.contract)
    elif unknown:
        near = similar_names(unknown[0], known)
        yield ContractViolation(
            kind="input-unknown",
            inputs=tuple(unknown),
            declared=f"{file} has no such input" + (f"; near is {near[0]}" if near else ""),
            observed=list_inputs(unknown, moment),
            cause=f"{_list_names(unknown)} is fed, which {file} does not take",
            advice="leave it out of the feed of this graph",
        )
    both = [(port, fed[name]) for name, port in known.items() if name in fed]
    wrong = [(port, given) for port, given in both if given.dtype != port.dtype]
    ranks = [(port, given) for port, given in both if port.shape is not None and len(port.shape) != len(given.shape)]
    if found := wrong or ranks:
        (port, given), names = found[0], [one.name for one, _ in found]
        due, axes = describe(port.dtype, port.shape), f"with {len(given.shape)} axes, not {len(port.shape or ())}"
        yield ContractViolation(
            kind="wrong-type" if wrong else "wrong-rank",
            inputs=tuple(names),
            declared=f"{port.name} {due}",
            observed=list_inputs(names, moment),
            cause=f"{_list_names(names)} is fed {f'as {given.dtype}, not {port.dtype}' if wrong else axes}",
            advice=f"feed {port.name} as {due}",
        )


def switched(contract: CacheContract) -> str:
    """The values of a branch switch as text."""
    first, later = (str(contract.phases[phase].switch).lower() for phase in DECODING)
    return f"{first} on the first step, {later} on every later step"


def _report_missing(missing: list[Port], unknown: list[str], file: str, contract: CacheContract) -> ContractViolation:
    names, first = [port.name for port in missing], missing[0]
    near = similar_names(first.name, unknown, cutoff=0.8)
    meaning = switched(contract) if first.role == "branch_switch" else MEANINGS.get(first.role)
    return ContractViolation(
        kind="input-missing",
        inputs=tuple(names),
        declared=f"{first.name} {describe(first.dtype, first.shape)}" + (f": {meaning}" if meaning else ""),
        observed="not fed" + (f"; {near[0]} is, which {file} does not have" if near else ""),
        cause=f"{_list_names(names)} is missing, an input of {file}",
        advice="feed every input of the graph at every step" + (f": {first.name} is {meaning}" if meaning else ""),
    )


def _list_names(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def find_doubts(moment: StepContext) -> Iterator[ContractViolation]:
    """What a run decides, in a step that breaks no rule: it is run as it was fed, and as the contract has it.

    An input whose reading runs have settled (a switch, a constant) may take other values as well, a table may have more
    rows than there are logits, and a transducer may put its state back or go on with it: no rule of shapes decides.
    """
    yield from _settled(moment)
    yield from _unknown_tokens(moment)
    before = moment.before
    if before is None or not takes_frames(moment) or not fed_again(moment):
        return
    if any(before.last.fed[s.past].equals(fed) is False for s, fed in moment.slots if s.past in before.last.fed):
        yield ContractViolation(
            kind="state-adopted",
            inputs=tuple(slot.past for slot, _ in moment.slots),
            declared=f"the states that step {before.last.number} was fed, since it fed the same token as this one",
            observed="the states that it returned, which have taken that token in already",
            cause=f"the states are taken over after step {before.last.number}, which gave no token (a blank)",
            advice="where a step gives the blank, feed its states and its token again with the next frame; replace "
            "the states only after a step that gave a token",
        )


def _settled(moment: StepContext) -> Iterator[ContractViolation]:
    """Inputs that runs gave a reading, and that were fed another number."""
    known = {one.subject for one in moment.contract.ambiguities if one.settled and one.unknown}
    for port, fed in moment.ports("setting", "first_call", "has_past"):
        values = moment.values(port.name) if port.name in known else None
        due = port.value or 0.0
        if port.role != "setting":
            due = float((moment.past == 0) == (port.role == "first_call"))
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
    """Ids that no token has."""
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
