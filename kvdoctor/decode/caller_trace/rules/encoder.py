"""The encoder is asked once: its states and its mask stay what they were, at every step that takes them."""

from collections.abc import Iterator

from kvdoctor.contract import Port
from kvdoctor.decode.caller_trace.recorded import TraceTensor, same_values
from kvdoctor.decode.caller_trace.step import ContractViolation, StepContext

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
    known = _first(moment, port)
    if known is None:
        return
    first, whose = known
    verb, text = ("change" if port.role == "encoder_states" else "changes"), None
    if first.shape != fed.shape and not _repeated(first.shape, fed.shape):
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
    """What the first step fed, or, on the first step, what the encoder gave."""
    if moment.before is not None and moment.before.first.fed.get(port.name) is not None:
        return moment.before.first.fed[port.name], f"step {moment.before.first.number} fed it"
    if moment.encoded is not None and port.role == "encoder_states" and "encode" in moment.contract.phases:
        made = moment.contract.graph("encode").port("encoder_states")
        if made is not None and made.name in moment.encoded.got:
            return moment.encoded.got[made.name], f"the encoder gave it ({moment.encoded.place})"
    return None


def _repeated(first: tuple[int, ...], fed: tuple[int, ...]) -> bool:
    """Another batch of the same sentences: beams."""
    return len(first) == len(fed) and first[1:] == fed[1:]
