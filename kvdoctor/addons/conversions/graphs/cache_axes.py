"""The sizes and integers of all values of a decoder without a cache, by abstract runs at two lengths and two batches.

An axis of the tokens has another size in each run, so that no name of an axis is needed to find it.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from kvdoctor.analysis.abstract_run.graph_run import AbstractGraph, Budget
from kvdoctor.analysis.abstract_run.tables import read_tables
from kvdoctor.analysis.abstract_run.values import UNKNOWN, Abstract, CannotRun, TooMuchWork, exactly, unknown
from kvdoctor.analysis.axes import as_number
from kvdoctor.analysis.dialects import inputs
from kvdoctor.analysis.port_roles import INTEGERS, InputFlow, match_rule
from kvdoctor.analysis.stacks import OnnxFile
from kvdoctor.contract import Role
from kvdoctor.decode.calls import Array
from kvdoctor.model.proto import ModelProto
from kvdoctor.model.view import Declared, GraphView
from kvdoctor.records import record
from kvdoctor.repair.workspace import CannotRepair

LENGTHS = ((23, 29), (11, 13), (5, 7))
"""Tokens of the two runs, the first pair that the tables of the model allow: prime, so that few widths are equal."""
BATCHES = (3, 2)
STATES = 17
"""Encoder states, and any other open size."""
NODES = 1_000_000
TOKENS: tuple[Role, ...] = ("token_ids", "embeddings", "position_ids")
"""Inputs with a row for each token: of the new tokens from now on."""
MASKS: tuple[Role, ...] = ("attention_mask", "padding_mask")
"""Inputs with an entry for each token of the whole sequence."""
KNOWN: tuple[Role, ...] = (*TOKENS, *MASKS, "encoder_mask", "encoder_states")
ENCODER = re.compile(r"encoder", re.ASCII)


@record(slots=False)
class Inputs:
    """The inputs of a decoder without a cache: their token axes by name.

    `ids` is the input of the tokens themselves; `batch` and `length` are the declared names of its axes.
    """

    ids: str
    new: Mapping[str, int]
    masks: Mapping[str, int]
    batch: str
    length: str


@record(slots=False)
class Sizes:
    """All values of a graph at two lengths, and with another batch where that is open."""

    lengths: tuple[int, int]
    short: Mapping[str, Abstract]
    long: Mapping[str, Abstract]
    other: Mapping[str, Abstract] | None

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The sizes of a value in the shorter run; None where they are unknown."""
        return self.short.get(name, UNKNOWN).shape

    def longer(self, name: str) -> tuple[int, ...] | None:
        """Its sizes in the longer run."""
        return self.long.get(name, UNKNOWN).shape

    def numbers(self, name: str) -> tuple[Array | None, Array | None]:
        """The exact numbers of a value in both runs, None where they are unknown."""
        return self.short.get(name, UNKNOWN).numbers, self.long.get(name, UNKNOWN).numbers

    def integers(self, name: str) -> tuple[int, ...] | None:
        """The integers of a value in the shorter run."""
        found = self.numbers(name)[0]
        return None if found is None else tuple(int(one) for one in found.ravel())

    def varies(self, name: str) -> bool:
        """Whether the shape of a value is another one in the longer run, or is unknown."""
        return self.shape(name) is None or self.shape(name) != self.longer(name)

    def counts_tokens(self, name: str, axis: int) -> bool:
        """Whether an axis has as many entries as the sequence has tokens."""
        short, long = self.shape(name), self.longer(name)
        if short is None or long is None or len(short) != len(long):
            return False
        return (short[axis], long[axis]) == self.lengths

    def batch_axis(self, name: str) -> int | None:
        """The axis that counts the batch alone; None where there is none, or where no run tells."""
        short, other = self.shape(name), (self.other or {}).get(name, UNKNOWN).shape
        if short is None or other is None or len(short) != len(other):
            return None
        return next((at for at, pair in enumerate(zip(short, other, strict=True)) if pair == BATCHES), None)


def read_inputs(file: OnnxFile) -> Inputs:
    """The inputs of the tokens and of everything that is as long.

    Raises:
        CannotRepair: there are no tokens, or an input has no known meaning.
    """
    view, flow = file.graph, file.dataflow
    roles = {name: _role_of(port) for name, port in view.inputs.items()}
    ids = [name for name, role in roles.items() if role == "token_ids"]
    by_use = InputFlow(flow, view.inputs) if flow is not None else None
    if not ids and by_use is not None:
        ids = by_use.find_token_ids(
            name for name, port in view.inputs.items() if port.dtype in INTEGERS and not ENCODER.search(name)
        )
        roles.update(dict.fromkeys(ids, "token_ids"))
    for name in [name for name, role in roles.items() if role is None and by_use is not None]:
        found = by_use.find_role(name, set()) if by_use is not None else None
        roles[name] = found[0] if found is not None and found[0] in KNOWN else None
    ids = ids or [name for name, role in roles.items() if role == "embeddings"]
    if len(ids) != 1:
        raise CannotRepair(f"which input has the tokens is not known (inputs: {', '.join(roles)})")
    shape = view.inputs[ids[0]].shape or ()
    if len(shape) < 2 or isinstance(length := as_number(shape[1]), int):
        raise CannotRepair(f"the input {ids[0]!r} takes a fixed number of tokens: {list(shape)}")
    for name, role in roles.items():
        if role is None or (role in (*TOKENS, *MASKS) and len(view.inputs[name].shape or ()) < 2):
            raise CannotRepair(f"what the input {name!r} means is not known")
    new = {name: 1 for name, role in roles.items() if role in TOKENS}
    masks = {name: 1 for name, role in roles.items() if role in MASKS}
    batch = as_number(shape[0])
    return Inputs(ids[0], new, masks, batch if isinstance(batch, str) else "", length or "sequence_length")


def _role_of(port: Declared) -> Role | None:
    """The role of an input by its name, that of an encoder among them."""
    if ENCODER.search(port.name):
        return "encoder_mask" if "mask" in port.name else "encoder_states"
    found = match_rule(port, inputs.INPUTS)
    return found.role if found is not None and found.role in KNOWN else None


def read_sizes(model: ModelProto, path: Path, given: Inputs) -> Sizes:
    """Run a graph abstractly at the first pair of lengths that it allows.

    Raises:
        CannotRepair: it cannot be run at any of them.
    """
    view, reason = GraphView(model), ""
    tables = read_tables(view, path)
    for lengths in LENGTHS:
        batches = BATCHES if given.batch else (as_number((view.inputs[given.ids].shape or (1,))[0]),) * 2
        calls = [(lengths[0], batches[0]), (lengths[1], batches[0]), (lengths[0], batches[1])]
        try:
            runs = []
            for length, batch in calls:
                graph = AbstractGraph(view, frozenset(), Budget(NODES), tables=tables)
                runs.append(graph.run_all(dict(_feed(view, given, length, int(batch or 1)))))
            return Sizes(lengths, runs[0], runs[1], runs[2] if given.batch else None)
        except (CannotRun, TooMuchWork) as error:
            reason = str(error)
    raise CannotRepair(f"it has no sizes at other lengths than those of its export: {reason or 'it is too large'}")


def _feed(view: GraphView, given: Inputs, length: int, batch: int) -> Iterator[tuple[str, Abstract]]:
    """Ones for a mask, and nothing but sizes for all else."""
    for name, port in view.inputs.items():
        sizes = [as_number(size) for size in port.shape or ()]
        found = [size if isinstance(size, int) else STATES for size in sizes]
        for axis in (at for known in (given.new, given.masks) if name in known for at in (known[name],)):
            found[axis] = length
        if found and not isinstance(sizes[0], int):
            found[0] = batch
        masked = name in given.masks or (ENCODER.search(name) and "int" in port.dtype)
        yield name, exactly(np.ones(found, np.int64)) if masked else unknown(found)
