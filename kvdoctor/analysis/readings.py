"""The readings of ports that neither a name nor the dataflow decides: what a loop may feed them, best first.

An input without a known role has readings by its type and the names of its axes. A mask may count what is hidden
instead of what is seen, whatever its name; logits may have their axes in another order. Runs settle which one holds
(`decode/settle.py`).
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from kvdoctor.analysis.completeness import NO_LOGITS
from kvdoctor.analysis.dialects.dialect import looks_like_cache, parse_axes
from kvdoctor.analysis.port_roles import INTEGERS
from kvdoctor.analysis.stacks import FLOATS
from kvdoctor.contract import Ambiguity, Axis, Basis, CacheContract, Dim, Graph, Port, Reading, Role, with_reading
from kvdoctor.errors import UsageError, did_you_mean
from kvdoctor.model.view import GraphView
from kvdoctor.records import record

MASKS: tuple[Role, ...] = ("attention_mask", "additive_mask", "padding_mask")
TOKENS: tuple[Role, ...] = ("token_ids", "embeddings")

TEXTS: Mapping[Role, str] = {
    "attention_mask": "1 for each entry that may be seen, 0 for those that may not",
    "padding_mask": "1 for each entry that is hidden, 0 for the others",
    "additive_mask": "0 for each entry that may be seen, a large negative number for those that may not",
    "past_length": "the number of tokens in the cache",
    "total_length": "past + new tokens",
    "new_length": "the number of new tokens",
    "last_index": "the position of the last token",
    "last_new_index": "the number of new tokens less one",
    "batch_size": "the number of sequences",
    "row_index": "the number of each row: no row continues another",
    "has_past": "whether there is a past",
    "first_call": "whether there is no past yet",
    "position_ids": "the positions of the new tokens",
    "cache_position": "the positions of the new tokens",
    "token_states": "a row for each new token, as another model returns them",
    "encoder_states": "the states of an encoder",
    "condition": "the same values for the whole sequence",
    "adapter": "a matrix of an adapter, zeros without one",
}
"""What a loop feeds under a reading."""

HINTS: tuple[tuple[str, tuple[Role, ...]], ...] = (
    ("past prev previous cached history offset start", ("past_length",)),
    ("total kv all full", ("total_length", "last_index")),
    ("new query cur current", ("new_length",)),
    ("batch bsz rows", ("batch_size",)),
    ("beam beams reorder parent ancestor", ("row_index",)),
    ("last", ("last_index", "last_new_index")),
    ("pos position seqlens", ("past_length", "last_index", "total_length")),
    ("len length lens lengths num count size seqlen", ("past_length", "total_length", "new_length")),
)
"""Parts of names that put a reading first. A name decides nothing: runs do."""
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")

MOST_NAMES = 8
MOST_UNKNOWN = 12
"""Inputs without a role in one graph: runs cannot decide more of them."""

COUNTS: tuple[Role, ...] = ("past_length", "total_length", "new_length", "last_index", "last_new_index", "batch_size")
FLAGS: tuple[Role, ...] = ("has_past", "first_call")
COUNTED = (*COUNTS, "write_index")
"""Roles that the dataflow gives to an input which may count something else."""


@record
class AxisNames:
    """What declared names of axes count, by the ports of one graph whose roles are known."""

    known: Mapping[str, Axis]

    @classmethod
    def of(cls, graph: Graph, contract: CacheContract, view: GraphView) -> "AxisNames":
        """The names that tokens, masks, pasts and presents give their axes; those with two meanings say nothing."""
        found: dict[str, set[Axis]] = {}

        def add(shape: Iterable[Dim], axes: Iterable[Axis]) -> None:
            for size, axis in zip(shape, axes, strict=False):
                if isinstance(size, str) and axis in ("batch", "new", "past", "total", "encoder"):
                    found.setdefault(size, set()).add(axis)

        for port in graph.inputs:
            if port.role in (*TOKENS, "past", "position_ids"):
                add(port.shape or (), port.axes)
        for slot in contract.growing:
            present = view.outputs.get(slot.present or "")
            if present is not None and present.shape is not None and len(present.shape) == len(slot.axes):
                add(present.shape, ("total" if axis == "past" else axis for axis in slot.axes))
        return cls({name: next(iter(axes)) for name, axes in found.items() if len(axes) == 1})

    def read(self, shape: Iterable[Dim]) -> tuple[Axis | None, ...]:
        """What each axis counts: `fixed` for a number, None for a name that nothing explains."""
        return tuple(
            self.known.get(size) if isinstance(size, str) else "fixed" if size is not None else None for size in shape
        )


def find_readings(
    contract: CacheContract, views: Mapping[str, GraphView], unknown: set[str], guessed: set[str]
) -> CacheContract:
    """The contract under the first reading of each port.

    `unknown` are inputs for which nothing gives a role, `guessed` those that have theirs by the dataflow alone. The
    inputs of a paged cache are those of a serving engine.
    """
    found = []
    if any(slot.growth == "paged" for slot in contract.slots):
        return contract
    unknown = unknown if len(unknown) <= MOST_UNKNOWN else set()
    for name, graph in contract.graphs.items():
        if (view := views.get(graph.file)) is None or name not in {
            contract.phases[p].graph for p in ("prefill", "decode")
        }:
            continue
        axes = AxisNames.of(graph, contract, view)
        for port in graph.inputs:
            readings = tuple(_read_input(port, axes, port.name in unknown, port.name in guessed))
            if readings:
                found.append(Ambiguity(port.name, name, readings, unknown=port.name in unknown))
        logits = graph.port("logits")
        if logits is not None and (readings := tuple(_read_logits(logits, graph, axes))):
            found.append(Ambiguity(logits.name, name, readings))
    for ambiguity in found:
        contract = with_reading(contract, ambiguity, ambiguity.readings[0])
    return replace(contract, ambiguities=tuple(one for one in found if len(one.readings) > 1 or one.unknown))


def _read_input(port: Port, names: AxisNames, unknown: bool, guessed: bool) -> Iterator[Reading]:
    """The readings of an input: its own, and all that its type allows where no name gives its role."""
    first: tuple[Reading, ...] = (Reading(port, TEXTS.get(port.role, port.role), "dataflow" if guessed else "name"),)
    if (
        (unknown or (guessed and port.role not in (*MASKS, "encoder_states")))
        and port.shape is not None
        and port.dtype
        and not looks_like_cache(port.name, port.shape)
    ):
        found = _read_unknown(port, names)
        if guessed:  # the dataflow shows that the input counts, if not what: no constant fits
            found = (*first, *(one for one in found if one.port.role != "setting" and port.role in COUNTED))
        distinct: dict[Port, Reading] = {}
        for reading in found:
            distinct.setdefault(reading.port, reading)
        yield from distinct.values()
    elif port.role in MASKS:
        others = (_reading(port, role, port.axes, "type") for role in _list_masks(port) if role != port.role)
        yield from (*first, *others)
    elif port.role == "encoder_states" and len(port.axes) == 3:
        rows: Axis = "fixed" if (port.shape or (0,))[0] == 1 and "batch" in names.known.values() else "batch"
        draft = _reading(port, "token_states", (rows, "new", "hidden"), "declared")
        # Where the axis has the name of the tokens', the file says what it counts.
        declared = names.read(port.shape or ())[1] == "new" and "enc" not in port.name.lower()
        # Embeddings that are added to tokens are projected to keys as the states of an encoder are: runs decide.
        yield from ((draft, *first) if guessed else (draft,)) if declared else (*first, draft)


def _list_masks(port: Port) -> tuple[Role, ...]:
    """The roles of masks that an element type allows."""
    return MASKS if port.dtype in FLOATS else ("attention_mask", "padding_mask")


def _read_unknown(port: Port, names: AxisNames) -> Iterable[Reading]:
    axes = names.read(shape := port.shape or ())
    if "past" in axes:
        return  # a past that no output was found for
    if all(size == 1 for size in shape):
        yield from _read_number(port, tuple("fixed" for _ in shape), "type")
        return
    basis: Basis = "declared" if None not in axes else "type"
    named = "new" in names.known.values() and all(isinstance(size, str) for size in shape)
    for meant in _fill_open(axes, named):
        yield from _read_axes(port, meant, basis)


def _read_axes(port: Port, axes: tuple[Axis, ...], basis: Basis) -> Iterator[Reading]:
    """The readings of an input by what its axes count."""
    kinds, shape = set(axes), port.shape or ()
    if kinds <= {"batch", "fixed"} and "batch" in kinds and all(d == 1 for d in shape if isinstance(d, int)):
        yield from _read_number(port, axes, basis)
    elif "total" in kinds:
        yield from (_reading(port, role, axes, basis) for role in _list_masks(port))
    elif "new" in kinds and (port.dtype not in FLOATS or len(shape) < 3):
        if "int" in port.dtype:
            yield _reading(port, "position_ids" if "batch" in kinds else "cache_position", axes, basis)
        yield from _constants(port, axes, basis, (1.0, 0.0) if "int" not in port.dtype else (0.0, 1.0))
    elif kinds & {"new", "batch"}:
        yield _reading(port, "token_states" if "new" in kinds else "condition", axes, basis)
    elif port.dtype in FLOATS and len(shape) == 2:
        yield _reading(port, "adapter", axes, basis)
    else:
        yield from _constants(port, axes, basis, (0.0, 1.0))


def _fill_open(axes: tuple[Axis | None, ...], named: bool) -> Iterator[tuple[Axis, ...]]:
    """What axes without a known name may count: the first the batch, one after it the new tokens or all tokens.

    Where the tokens have `named` their axes, another name stands for something else.
    """
    if None not in axes:
        yield tuple(axis for axis in axes if axis is not None)
        return
    first: tuple[Axis, ...] = () if "batch" in axes else ("batch",)
    lengths: tuple[Axis, ...] = ("encoder", "new", "total") if named else ("new", "total", "encoder")
    for length in lengths:
        if length in axes:
            continue
        left = [*first, length]
        yield tuple(axis or (left.pop(0) if left else "fixed") for axis in axes)
        if len([axis for axis in axes if axis is None]) <= len(first):
            return


def _read_number(port: Port, axes: tuple[Axis, ...], basis: Basis) -> Iterator[Reading]:
    """A number, one for all sequences or one for each."""
    if port.dtype == "bool":
        yield from _constants(port, axes, basis, (0.0, 1.0))
        yield from (_reading(port, role, axes, basis) for role in FLAGS)
    else:
        words = {word.lower() for word in WORD.findall(port.name)}
        hinted = [role for known, roles in HINTS if words.intersection(known.split()) for role in roles]
        small = FLAGS if port.dtype in ("int8", "uint8") else ()
        counts = [*hinted, *small, *COUNTS] if "batch" not in axes else [*hinted, "row_index", *COUNTS[:-1]]
        fitting = [role for role in dict.fromkeys(counts) if role != "row_index" or "batch" in axes]
        ordered = [_reading(port, role, axes, "name" if role in hinted else basis) for role in fitting]
        likely, other = _constants(port, axes, basis, (1.0, 0.0) if port.dtype in FLOATS else (0.0, 1.0))
        at = len([role for role in fitting if role in hinted])
        yield from (*ordered[:at], likely, *ordered[at:], other)


def _constants(port: Port, axes: tuple[Axis, ...], basis: Basis, values: tuple[float, ...]) -> Iterator[Reading]:
    for value in values:
        shown = bool(value) if port.dtype == "bool" else f"{value:g}"
        setting = replace(port, role="setting", axes=axes, value=value)
        yield Reading(setting, f"the constant {str(shown).lower()}", basis)


def _reading(port: Port, role: Role, axes: tuple[Axis, ...], basis: Basis) -> Reading:
    return Reading(replace(port, role=role, axes=axes), TEXTS[role], basis)


def _read_logits(port: Port, graph: Graph, names: AxisNames) -> Iterator[Reading]:
    """The orders of the axes of logits that the declared names and sizes allow."""
    tokens = graph.port("token_ids")
    books = tokens.size("codebooks") if tokens is not None else None
    shape, axes = port.shape or (), names.read(port.shape or ())
    known = tuple(
        axis if axis in ("batch", "new") else "codebooks" if size == books and books else None
        for size, axis in zip(shape, axes, strict=True)
    )
    invented = isinstance(shape[0], str) and shape[0].startswith(port.name) if shape else True
    unknown = names.read(shape)[:1] == (None,)
    flats = ("BV",) if not unknown else ("BV", "bV") if invented else ("bV", "BV")
    by_rank = {2: flats, 3: ("BQV", "BVQ", "QBV"), 4: ("BcQV", "BQcV", "BQ1V", "B1QV")}
    orders = {1: ("B",), 2: ("B1",) if shape[-1:] == (1,) else ("BQ",)} if port.dtype in INTEGERS else by_rank
    for letters in orders.get(len(shape), ()):
        order = parse_axes(letters)
        if len(shape) == 4 and ("codebooks" in order) != bool(books):
            continue
        fits = all(a is None or a == o for a, o in zip(known, order, strict=True))
        if fits and all(size != 1 for size, axis in zip(shape, order, strict=True) if axis == "vocabulary"):
            basis: Basis = "declared" if None not in known[:-1] else "type"
            yield Reading(replace(port, axes=order), f"logits [{', '.join(order)}]", basis)


GIVEN = "given by the caller"


def with_given(
    contracts: Mapping[str, CacheContract], feed: Mapping[str, float], logits: str | None, arrays: Collection[str] = ()
) -> dict[str, CacheContract]:
    """The contracts with constants for inputs by name, and with the output that a caller names as that of the logits.

    `arrays` are inputs of which the caller gives the whole value, the same in every call.

    Raises:
        UsageError: no graph has an input or an output of that name, or it has a part in the cache.
    """
    graphs = [graph for contract in contracts.values() for graph in contract.graphs.values()]
    fed = {port.name: port for graph in graphs for port in graph.inputs}
    returned = {port.name: port for graph in graphs for port in graph.outputs}
    for name, value in feed.items():
        port = _demand(name, fed, "--feed", "input")
        bits = {"bool": 1, "int8": 7, "uint8": 8, "int32": 31, "int64": 63}.get(port.dtype)
        if bits is not None and (value != int(value) or not -(2**bits) <= value < 2**bits or (bits == 1 and value < 0)):
            raise UsageError(f"--feed {port.name}={value:g}: the input takes {port.dtype}")
    if logits is not None:
        _demand(logits, returned, "--logits-output", "output")
    return {name: _give(contract, feed, logits, arrays) for name, contract in contracts.items()}


def _demand(name: str, ports: Mapping[str, Port], option: str, kind: str) -> Port:
    port = ports.get(name)
    if port is not None and port.role not in ("past", "present", "token_ids"):
        return port
    free = [one.name for one in ports.values() if one.role not in ("past", "present", "token_ids")]
    listed = f"{kind}s that may be given: {', '.join(free[:MOST_NAMES])}" if free else ""
    hint = " ".join(filter(None, (did_you_mean(name, free), listed)))
    known = "carries the cache" if port is not None and port.role != "token_ids" else "takes the tokens"
    raise UsageError(f"{option} {name}: it {f'is no {kind} of the model' if port is None else known}; {hint}")


def _give(
    contract: CacheContract, feed: Mapping[str, float], logits: str | None, arrays: Collection[str]
) -> CacheContract:
    given = [one for name, graph in contract.graphs.items() for one in _list_given(name, graph, feed, logits)]
    for name, graph in contract.graphs.items():
        whole = (_as_condition(port) for port in graph.inputs if port.name in arrays)
        given += [Ambiguity(one.port.name, name, (one,), unknown=True, settled=GIVEN) for one in whole]
    decided = {(one.graph, one.subject) for one in given}
    found = (*(one for one in contract.ambiguities if (one.graph, one.subject) not in decided), *given)
    for name, graph in contract.graphs.items():
        if any((name, port.name) in decided for port in graph.outputs):
            outputs = (replace(one, role="auxiliary") if one.role == "logits" else one for one in graph.outputs)
            graphs = {**contract.graphs, name: replace(graph, outputs=tuple(outputs))}
            contract = replace(contract, graphs=graphs)
    for ambiguity in given:
        contract = with_reading(contract, ambiguity, ambiguity.readings[0])
    known = {*feed, *arrays, *([NO_LOGITS] if logits else [])}
    missing = tuple(one for one in contract.missing if not known & {one.subject, one.reason})
    return replace(contract, ambiguities=found, missing=missing)


def _as_condition(port: Port) -> Reading:
    """An input as what the caller has for a whole sequence, by its declared sizes."""
    axes: list[Axis] = ["batch" if isinstance(size, str) else "fixed" for size in port.shape or ()]
    known = port.axes if "batch" in port.axes else tuple(axes)
    return Reading(replace(port, role="condition", axes=known, value=None), TEXTS["condition"], "given")


def _list_given(name: str, graph: Graph, feed: Mapping[str, float], logits: str | None) -> Iterator[Ambiguity]:
    """The ports of one graph of which the caller says how to read them."""
    for port in graph.inputs:
        if port.name in feed and port.role != "past":
            reading = next(_constants(port, port.axes, "given", (feed[port.name],)))
            yield Ambiguity(port.name, name, (reading,), unknown=True, settled=GIVEN)
    for port in graph.outputs:
        if port.name != logits or port.role == "present":
            continue
        readings = tuple(_read_logits(replace(port, role="logits"), graph, AxisNames({})))
        if port.dtype in INTEGERS and len(port.shape or ()) in (1, 2):
            axes: tuple[Axis, ...] = ("batch", "new") if len(port.shape or ()) == 2 else ("batch",)
            readings = (Reading(replace(port, role="logits", axes=axes), "token ids", "given"),)
        if not readings or port.dtype == "bool":
            rank = len(port.shape or ())
            raise UsageError(f"--logits-output {port.name}: logits have 2 to 4 axes, and it has {rank}")
        yield Ambiguity(port.name, name, readings, settled=GIVEN if len(readings) == 1 else "")
