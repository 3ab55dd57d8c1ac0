"""The contract of a model as data: its calls, their inputs, the cache, and what a session must have to fit it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import onnxruntime as ort

SCHEMA = "kvdoctor/loop/2"
RULES = {
    *("tokens", "token-and-position", "embeddings", "attention-mask", "padding-mask", "window-mask", "causal-mask"),
    *("positions", "rows", "number", "encoder-input", "encoder-mask", "encoder-states"),
}
COUNTS = {
    *("constant", "past", "total", "last", "new", "last-new", "batch", "cached", "first", "encoder_input"),
}
CARRIES = {"feed-back", "hold", "append", "write", "shift", "drop-oldest"}
Dims = tuple[int | str, ...]
"""Sizes of a tensor: numbers, or the names of what an axis counts."""


class ContractError(ValueError):
    """The contract is of another schema or model, or asks for what this program does not do."""


@dataclass(frozen=True)
class Input:
    """An input of a call that is no part of the cache, with the rule by which its value is made.

    `shown` and `hidden` are the values of a causal mask, whose columns count from the end of the cache where
    `from_right`; `made` is the output of the embed call that embeddings come from.
    """

    name: str
    dtype: str
    dims: Dims
    rule: str
    count: str = "constant"
    value: float = 0
    shown: float = 0
    hidden: float = 0
    from_right: bool = False
    made: str | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """A kind of call: the file, its inputs, those of the cache (`pasts`), and the outputs that are used."""

    file: str
    inputs: tuple[Input, ...]
    pasts: tuple[str, ...]
    outputs: tuple[str, ...]
    logits: str | None = None
    states: str | None = None

    def has(self, *rules: str) -> bool:
        """Whether an input follows one of the rules."""
        return any(one.rule in rules for one in self.inputs)


@dataclass(frozen=True)
class Slot:
    """A tensor of the cache: the input `past`, the output `made` that first fills it, `present` of each later call.

    `carry` says what becomes of the present, and `rewinds` how the slot goes back: "cut", "stays" or "impossible".
    """

    past: str
    present: str | None
    made: str | None
    by_encoder: bool
    dtype: str
    dims: Dims
    carry: str
    batch_axis: int | None
    length_axis: int | None
    counts_states: bool
    rewinds: str
    first_length: int
    heads: int

    @property
    def is_copied(self) -> bool:
        """Whether the next past is made of the past and the present; else it is the present itself."""
        return self.carry not in ("feed-back", "hold") and self.length_axis is not None and self.present is not None


@dataclass(frozen=True)
class Generation:
    """Token ids of the model's configs. `forced` are pairs of a position in the sequence and the id there."""

    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    padding: int | None = None
    suppress: tuple[int, ...] = ()
    begin_suppress: tuple[int, ...] = ()
    forced: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Contract:
    """All that the program knows of a model. The names are those of `contract.json`, which docs/loops.md describes."""

    model: str
    files: tuple[Mapping[str, Any], ...]
    encode: Call | None
    embed: Call | None
    prefill: Call
    decode: Call
    slots: tuple[Slot, ...]
    source: Input | None
    vocabulary: int | None
    context_limit: int | None
    one_token: bool
    batch: int | None
    capacity_is_chosen: bool
    pads: bool
    chunks: bool
    rewinds: bool
    reorders: bool
    placeholders: frozenset[int] = frozenset()
    generation: Generation = field(default_factory=Generation)


Part = TypeVar("Part", Call, Generation, Input, Slot)


def read_contract(path: str | Path) -> Contract:
    """Read `contract.json`.

    Raises:
        ContractError: it has another schema, is damaged, or has a rule that this program does not follow.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        if (schema := document.get("schema")) != SCHEMA:
            raise ContractError(f"{path} has schema {schema!r}; this program reads {SCHEMA!r}")
        contract = _make_contract(document)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ContractError(f"{path} is no contract: {type(error).__name__} {error}") from None
    _refuse_unknown(contract)
    return contract


def _make_contract(document: Mapping[str, Any]) -> Contract:
    names = ("model", "vocabulary", "context_limit", "one_token", "batch", "capacity_is_chosen", "pads", "chunks")
    lists = {
        name: tuple(tuple(one) if isinstance(one, list) else one for one in value) if isinstance(value, list) else value
        for name, value in document["generation"].items()
    }
    calls = document["calls"]
    return Contract(
        files=tuple(document["files"]),
        encode=_make_call(calls["encode"]) if calls["encode"] else None,
        embed=_make_call(calls["embed"]) if calls["embed"] else None,
        prefill=_make_call(calls["prefill"]),
        decode=_make_call(calls["decode"]),
        slots=tuple(_pick(Slot, one) for one in document["slots"]),
        source=_pick(Input, document["source"]) if document["source"] else None,
        placeholders=frozenset(document.get("placeholders", ())),
        generation=_pick(Generation, lists),
        **{name: document[name] for name in (*names, "rewinds", "reorders")},
    )


def _make_call(document: Mapping[str, Any]) -> Call:
    return _pick(Call, {**document, "inputs": tuple(_pick(Input, one) for one in document["inputs"])})


def _pick(kind: type[Part], document: Mapping[str, Any]) -> Part:
    """An instance from the fields that its class has; lists become tuples."""
    known = {name: value for name, value in document.items() if name in {one.name for one in fields(kind)}}
    given: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in known.items()}
    return kind(**given)


def _refuse_unknown(contract: Contract) -> None:
    for call in (contract.encode, contract.embed, contract.prefill, contract.decode):
        for one in call.inputs if call else ():
            if one.rule not in RULES or one.count not in COUNTS:
                rule = one.rule if one.rule not in RULES else f"count {one.count}"
                raise ContractError(f"input {one.name!r} follows the rule {rule!r}, which this program does not know")
    for slot in contract.slots:
        if slot.carry not in CARRIES:
            raise ContractError(f"the cache {slot.past!r} has carry {slot.carry!r}, which this program does not know")


def compare(file: Mapping[str, Any], session: ort.InferenceSession) -> None:
    """Compare the ports of a session with those that the contract has for its file.

    Raises:
        ContractError: the session is of another model.
    """
    found = {port.name: port for port in session.get_inputs()}
    problems = [f"no input {name!r}" for name in file["inputs"] if name not in found]
    problems += [f"another input {name!r}" for name in found if name not in file["inputs"]]
    returned = {port.name for port in session.get_outputs()}
    problems += [f"no output {name!r}" for name in file["outputs"] if name not in returned]
    for name, due in file["inputs"].items():
        if name in found:
            problems += _differences(name, due, found[name].type, found[name].shape)
    if problems:
        raise ContractError(f"contract.json is of another model: {file['file']} has {problems[0]}")


def _differences(name: str, due: Mapping[str, Any], kind: str, shape: Sequence[int | str | None]) -> list[str]:
    if kind != f"tensor({due['dtype']})":
        return [f"{kind} for input {name!r} in place of tensor({due['dtype']})"]
    if shape and len(shape) != len(due["dims"]):
        return [f"{len(shape)} axes of input {name!r} in place of {len(due['dims'])}"]
    return [
        f"size {size} of input {name!r} in place of {dim}"
        for size, dim in zip(shape, due["dims"], strict=False)
        if isinstance(size, int) and size != dim
    ]
