"""The contract of a model as data: its calls, their inputs, the cache, and what a session must have to fit it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import zip_longest
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import onnxruntime as ort

SCHEMA = "kvdoctor/loop/4"
Dims = tuple[int | str, ...]
"""Sizes of a tensor: numbers, or the names of what an axis counts."""
Terms = Mapping[str, float]
"""A sum: each named number times its factor."""


class ContractError(ValueError):
    """The contract is of another schema or model."""


@dataclass(frozen=True)
class Made:
    """An input that is made for a call, row by row along its last axis.

    A row has `inside` from the column `begin` to before `end`, plus `step` for each column, and `outside` elsewhere.
    What `copy` names is written over it: "tokens" or "mask". `batch_axis` is that of the sequences.
    """

    name: str
    dtype: str
    dims: Dims
    batch_axis: int | None
    copy: str | None
    begin: Terms
    end: Terms
    inside: Terms
    outside: float
    step: int


@dataclass(frozen=True)
class Take:
    """An output that becomes a value: by `carry`, with what is there along the axis."""

    output: str
    value: str
    carry: str
    axis: int | None


@dataclass(frozen=True)
class Axis:
    """An axis of a value. A sequence has `each` entries of it."""

    value: str
    axis: int
    each: int


@dataclass(frozen=True)
class Zeros:
    """The value before the first call."""

    value: str
    dtype: str
    dims: Dims


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a file. `values` names what is fed to an input; `sizes` are those that only values have."""

    file: str
    values: Mapping[str, str]
    made: tuple[Made, ...]
    outputs: tuple[str, ...]
    logits: str | None
    takes: tuple[Take, ...]
    sizes: Mapping[str, Axis]


@dataclass(frozen=True)
class Source:
    """What the caller gives before the prompts. `masked`: with a mask, where it is padded on the right."""

    dtype: str
    dims: Dims
    batch_axis: int | None
    length_axis: int
    masked: bool


@dataclass(frozen=True)
class Generation:
    """Token ids of the model's configs. `forced` are pairs of a position in the sequence and the id there."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    suppress: tuple[int, ...]
    begin_suppress: tuple[int, ...]
    forced: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class File:
    """A file of the model: the type and shape of each input (-1 is any size), and the outputs that are used."""

    file: str
    inputs: Mapping[str, Any]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Contract:
    """All that the program knows of a model, by the names of `contract.json`, which docs/loops.md describes.

    `calls` are those of each phase (encode, prefill, decode) in order. A rewind cuts `cut`, a reorder changes `rows`.
    """

    model: str
    files: tuple[File, ...]
    calls: Mapping[str, tuple[Call, ...]]
    zeros: tuple[Zeros, ...]
    cut: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    heads: int
    source: Source | None
    vocabulary: int
    context_limit: int
    longest: int
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
        contract: Contract = _read(Contract, document)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ContractError(f"{path} is no contract: {type(error).__name__} {error}") from None
    return contract


def _read(kind: Any, value: Any) -> Any:
    """A value of JSON in the type of a field; members that a class does not have are left out."""
    hints = get_type_hints(kind) if is_dataclass(kind) else None
    if hints is not None:
        return kind(**{one.name: _read(hints[one.name], value[one.name]) for one in fields(kind) if one.name in value})
    parts = get_args(kind)
    if NoneType in parts:
        return None if value is None else _read(parts[0], value)
    if get_origin(kind) in (tuple, frozenset):
        return get_origin(kind)(_read(parts[0], one) for one in value)
    if get_origin(kind) is Mapping:
        return {name: _read(parts[1], one) for name, one in value.items()}
    return value


def compare(file: File, session: ort.InferenceSession) -> None:
    """Compare the ports of a session with those that the contract has for its file.

    Raises:
        ContractError: the session is of another model.
    """
    inputs = {port.name: port for port in session.get_inputs()}
    wrong = inputs.keys() ^ file.inputs.keys() | set(file.outputs) - {port.name for port in session.get_outputs()}
    wrong = wrong or {name for name, due in file.inputs.items() if not _fits(inputs[name], due)}
    if wrong:
        raise ContractError(f"contract.json is of another model: {file.file} differs in {min(wrong)!r}")


def _fits(port: ort.NodeArg, due: Mapping[str, Any]) -> bool:
    """Whether an input has the type and the sizes of the contract; a graph may declare no sizes."""
    sizes = zip_longest(port.shape or due["shape"], due["shape"], fillvalue=-1)
    fits = all(size == wanted for size, wanted in sizes if isinstance(size, int))
    return fits and port.type == f"tensor({due['dtype']})"
