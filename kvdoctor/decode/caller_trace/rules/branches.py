"""The first step is served by the graph or branch without a past, every later one by that with a past."""

from collections.abc import Iterator

import numpy as np

from kvdoctor.contract import CacheContract, PhaseName, describe
from kvdoctor.decode.caller_trace.recorded import same_values
from kvdoctor.decode.caller_trace.step import ContractViolation, StepContext, first_length, list_inputs, size_of, tokens


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
        promised = f"{port.name} {describe(port.dtype, port.shape)}: {_word(contract, 'prefill')} on the first step, "
        promised += f"{_word(contract, 'decode')} on every later one"
        observed = f"{port.name} {fed}, {by_outputs or str(bool(np.all(value))).lower()}"
        if moment.before is None and cached:
            yield ContractViolation(
                kind="cached-too-early",
                inputs=(port.name,),
                declared=promised,
                observed=f"{observed} on the first step",
                cause=f"the cached branch is used on the first step ({port.name} is {_word(contract, 'decode')})",
                advice=f"feed {port.name} {_word(contract, 'prefill')} on the first step: only that branch fills the "
                "cache",
            )
        elif moment.before is not None and not cached:
            yield ContractViolation(
                kind="cached-too-late",
                inputs=(port.name,),
                declared=promised,
                observed=f"{observed} with {tokens(moment.before.tokens)} in the cache and {tokens(moment.new)} new",
                cause=f"the branch without a past is used after the first step ({port.name} is "
                f"{_word(contract, 'prefill')}): it ignores the cache",
                advice=f"feed {port.name} {_word(contract, 'decode')} from the second step on",
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


def _word(contract: CacheContract, phase: PhaseName) -> str:
    return str(contract.phases[phase].switch).lower()


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
    return moment.new > 1 or before.count > 1 or _same_ids(moment)


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
    return _counts_from_zero(moment)


def _counts_from_zero(moment: StepContext) -> bool:
    """Whether an input says that the cache is empty: a place to write at, a length, positions."""
    for _, fed in moment.ports("write_index", "past_length", "cache_position", "position_ids"):
        if fed.has_values and fed.array().size:
            return int(fed.array().min()) == 0
    states = [fed for slot, fed in moment.slots if slot.growth in ("replace", "static") and fed.has_values]
    return bool(states) and all(not fed.array().any() for fed in states)


def _same_ids(moment: StepContext) -> bool:
    assert moment.before is not None  # noqa: S101 - asked of later steps only
    for port, fed in moment.ports("token_ids"):
        first = moment.before.first.fed.get(port.name)
        if first is not None and first.has_values and fed.has_values:
            return same_values(first.array(), fed.array())
    return False
