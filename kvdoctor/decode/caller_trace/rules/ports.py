"""Every input of the graph is fed, none that it has not, and each in its element type and rank."""

from collections.abc import Iterator

from kvdoctor.contract import CacheContract, Port, describe
from kvdoctor.decode.caller_trace.step import ContractViolation, StepContext, list_inputs
from kvdoctor.errors import similar_names

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
    wrong = [port for name, port in known.items() if name in fed and fed[name].dtype != port.dtype]
    if wrong:
        yield _report_mismatch(
            wrong, moment, "wrong-type", f"is fed as {fed[wrong[0].name].dtype}, not {wrong[0].dtype}"
        )
    ranks = [p for name, p in known.items() if name in fed and p.shape is not None and _rank(p) != _fed_rank(moment, p)]
    if ranks and not wrong:
        text = f"is fed with {_fed_rank(moment, ranks[0])} axes, not {_rank(ranks[0])}"
        yield _report_mismatch(ranks, moment, "wrong-rank", text)


def switched(contract: CacheContract) -> str:
    """The values of a branch switch, in words."""
    first, later = (str(contract.phases[phase].switch).lower() for phase in ("prefill", "decode"))
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


def _report_mismatch(wrong: list[Port], moment: StepContext, kind: str, text: str) -> ContractViolation:
    first = wrong[0]
    return ContractViolation(
        kind="wrong-type" if kind == "wrong-type" else "wrong-rank",
        inputs=tuple(port.name for port in wrong),
        declared=f"{first.name} {describe(first.dtype, first.shape)}",
        observed=list_inputs([port.name for port in wrong], moment),
        cause=f"{_list_names([port.name for port in wrong])} {text}",
        advice=f"feed {first.name} as {describe(first.dtype, first.shape)}",
    )


def _rank(port: Port) -> int:
    return len(port.shape or ())


def _fed_rank(moment: StepContext, port: Port) -> int:
    return len(moment.step.fed[port.name].shape)


def _list_names(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
