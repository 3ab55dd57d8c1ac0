"""The contract of a model as data: its calls, their inputs, the cache, and what a session must have to fit it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import onnxruntime as ort

SCHEMA = "kvdoctor/loop/2"
Dims = tuple[int | str, ...]
"""Sizes of a tensor: numbers, or the names of what an axis counts."""


class ContractError(ValueError):
    """The contract is of another schema or model, or asks for what this program does not do."""


@dataclass(frozen=True)
class Input:
    """An input of a call that is no part of the cache, with the rule by which its value is made.

    A mask has `shown` in the columns that are seen, else `hidden`; they count from the end where `from_right`. A mask
    with `rows_from` has a row for each new token. `made` is the output of another call that the value is.
    """

    name: str
    dtype: str
    dims: Dims
    rule: str
    count: str
    value: float
    shown: float
    hidden: float
    from_right: bool
    rows_from: str | None
    batch_axis: int | None
    made: str | None


@dataclass(frozen=True)
class Fill:
    """An output that goes into the cache, into the slot of this number: as it is, or joined with what is there."""

    slot: int
    output: str
    carry: str


@dataclass(frozen=True)
class EncoderSize:
    """The axis of a tensor that counts encoder states: of the cache, or of what the encoder read or made."""

    place: str
    name: str | None
    axis: int


@dataclass(frozen=True, eq=False)
class Call:
    """A kind of call: the file, its inputs, those of the cache (`pasts`), and the outputs that are used."""

    file: str
    inputs: tuple[Input, ...]
    pasts: tuple[str, ...]
    outputs: tuple[str, ...]
    logits: str | None
    fills: tuple[Fill, ...]
    encoder: EncoderSize | None


@dataclass(frozen=True)
class Slot:
    """A tensor of the cache, fed to the input `past`; `zeros` is the shape of its first value where none is made.

    `rewinds` says how it goes back: "cut", "stays" or "impossible". A sequence has `heads` entries of the batch axis.
    """

    past: str
    dtype: str
    zeros: Dims | None
    carry: str
    batch_axis: int | None
    length_axis: int | None
    rewinds: str
    heads: int


@dataclass(frozen=True)
class Generation:
    """Token ids of the model's configs. `forced` are pairs of a position in the sequence and the id there."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    padding: int | None
    suppress: tuple[int, ...]
    begin_suppress: tuple[int, ...]
    forced: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class File:
    """A file of the model: the type and axes of each input, and the outputs that are used."""

    file: str
    inputs: Mapping[str, Any]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Contract:
    """All that the program knows of a model. The names are those of `contract.json`, which docs/loops.md describes."""

    model: str
    files: tuple[File, ...]
    encode: Call | None
    embed: Call | None
    prefill: Call
    decode: Call
    slots: tuple[Slot, ...]
    source: Input | None
    source_axis: int | None
    vocabulary: int | None
    context_limit: int | None
    one_token: bool
    batch: int | None
    capacity_is_chosen: bool
    pads: bool
    chunks: bool
    rewinds: bool
    reorders: bool
    placeholders: frozenset[int]
    generation: Generation


def read_contract(path: str | Path) -> Contract:
    """Read `contract.json`.

    Raises:
        ContractError: it has another schema, or is damaged.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        if (schema := document.get("schema")) != SCHEMA:
            raise ContractError(f"{path} has schema {schema!r}; this program reads {SCHEMA!r}")
        contract: Contract = _read(Contract, document | document["calls"])
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ContractError(f"{path} is no contract: {type(error).__name__} {error}") from None
    return contract


def _read(kind: Any, value: Any) -> Any:
    """A value of JSON in the type of a field; members that a class does not have are left out."""
    hints = get_type_hints(kind) if is_dataclass(kind) else None
    if hints is not None:
        return kind(**{one.name: _read(hints[one.name], value[one.name]) for one in fields(kind)})
    parts = get_args(kind)
    if NoneType in parts:
        return None if value is None else _read(parts[0], value)
    if get_origin(kind) in (tuple, frozenset):
        return get_origin(kind)(_read(parts[0], one) for one in value)
    return value


def compare(file: File, session: ort.InferenceSession) -> None:
    """Compare the ports of a session with those that the contract has for its file.

    Raises:
        ContractError: the session is of another model.
    """
    found = {port.name: port for port in session.get_inputs()}
    returned = {port.name for port in session.get_outputs()}
    missing = [*file.inputs.keys() - found.keys(), *set(file.outputs) - returned]
    other = [name for name, port in found.items() if not _fits(port, file.inputs.get(name))]
    if missing or other:
        problem = f"no {missing[0]!r}" if missing else f"another input {other[0]!r}"
        raise ContractError(f"contract.json is of another model: {file.file} has {problem}")


def _fits(port: ort.NodeArg, due: Mapping[str, Any] | None) -> bool:
    """Whether an input has the type and the sizes of the contract; a graph may declare no sizes."""
    if due is None or port.type != f"tensor({due['dtype']})" or (port.shape and len(port.shape) != len(due["dims"])):
        return False
    return all(size == dim for size, dim in zip(port.shape, due["dims"], strict=False) if isinstance(size, int))
