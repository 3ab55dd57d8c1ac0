"""All that is read of the arithmetic of one decoder; each part once, when it is asked for."""

from functools import cached_property
from pathlib import Path
from weakref import WeakKeyDictionary

from kvdoctor.analysis.arithmetic.blocks import Blocks, Embedding, Head
from kvdoctor.analysis.arithmetic.numbers import MOST_NUMBERS, WIDTHS, Numbers, decode_numbers, read_numbers
from kvdoctor.analysis.arithmetic.rotary import Frequencies, find_frequencies
from kvdoctor.analysis.arithmetic.scores import Attention, Scores
from kvdoctor.analysis.stacks import OnnxFile
from kvdoctor.errors import UnreadableError
from kvdoctor.model.external_data import read_reference
from kvdoctor.model.flow import Flow
from kvdoctor.model.proto import TensorProto
from kvdoctor.model.view import GraphView
from kvdoctor.model.weights import find_payloads, find_weights

SAMPLES = 8
"""Columns of two weights that are compared, at two rows each."""
SAME = 2e-2
"""Products of two elements are equal up to this part of the larger one: one weight may be in half precision."""


class Arithmetic(Blocks):
    """The constants that a decoder computes with.

    `file` is its file, of which a few elements of large tables are read; None where it is not one file. `head_dim` is
    the width of a head, where the graph shows it.
    """

    def __init__(self, flow: Flow, file: OnnxFile | None, head_dim: int | None) -> None:
        super().__init__(flow, head_dim)
        self.path = file.path if file is not None else None
        self.external = file.external if file is not None else ()
        self._embeddings: dict[frozenset[str], Embedding | None] = {}
        self._payloads: dict[str, tuple[int, int]] | None = None
        self._places: dict[int, tuple[Path, int, int] | None] = {}

    @cached_property
    def attentions(self) -> list[Attention]:
        """The attentions in the order of the graph."""
        return Scores(self.flow, self.fixed, self.bends).list_attentions()

    @cached_property
    def frequencies(self) -> tuple[list[Frequencies], bool]:
        """The rotations, and whether all of them could be read."""
        return find_frequencies(self.flow, self.fixed, self._row)

    def embedding(self, tokens: frozenset[str]) -> Embedding | None:
        """The table of the tokens, given the inputs that take them."""
        if tokens not in self._embeddings:
            self._embeddings[tokens] = self.find_embedding(tokens)
        return self._embeddings[tokens]

    def are_tied(self, embedding: Embedding, head: Head) -> bool | None:
        """Whether table and head are one weight, or hold equal elements at a few places; None where not known.

        A factor for each column is no difference: the weights of the last norm may be in the head.
        """
        one, other = embedding.table, head.weight
        if one is other or (one.name and one.name == other.name):
            return True
        if sorted(one.dims) != sorted(other.dims):
            return None
        rows, columns = reversed(one.dims) if embedding.is_transposed else one.dims
        ratios = []
        for at in range(SAMPLES):
            column, pair = (at * 7 + 3) % columns, []
            for row in ((at + 1) * rows // (SAMPLES + 2), (at + 2) * rows // (SAMPLES + 2)):
                x = self._element(one, (column, row) if embedding.is_transposed else (row, column))
                y = self._element(other, (column, row) if head.is_transposed else (row, column))
                if x is None or y is None:
                    return None
                pair.append((x, y))
            ratios.append(pair)
        products = [(x * v, y * u) for (x, y), (u, v) in ratios]
        return all(abs(x - y) <= SAME * max(abs(x), abs(y)) for x, y in products)

    def _element(self, tensor: TensorProto, place: tuple[int, int]) -> float | None:
        numbers = self._read(tensor, place[0] * int(tensor.dims[1]) + place[1], 1)
        return numbers[0] if numbers else None

    def _row(self, table: TensorProto, row: int) -> Numbers | None:
        """A row of a table; None where there is none."""
        if len(table.dims) != 2 or table.dims[0] <= row or table.dims[1] > MOST_NUMBERS:
            return None
        return self._read(table, row * int(table.dims[1]), int(table.dims[1]))

    def _read(self, tensor: TensorProto, start: int, count: int) -> Numbers | None:
        """Some elements of a tensor, in the graph or in the file of its weights."""
        held = read_numbers(tensor)
        if held is not None:
            return held[start : start + count] if start + count <= len(held) else None
        try:
            if id(tensor) not in self._places:
                self._places[id(tensor)] = self._locate(tensor)
            place, width = self._places[id(tensor)], WIDTHS.get(tensor.data_type)
            if place is None or width is None or (start + count) * width > place[2]:
                return None
            with place[0].open("rb") as file:
                file.seek(place[1] + start * width)
                return decode_numbers(file.read(count * width), tensor.data_type, count)
        except (OSError, ValueError):  # a file that is gone, a reference that is damaged
            return None

    def _locate(self, tensor: TensorProto) -> tuple[Path, int, int] | None:
        """The file that holds the values of a tensor, the first byte and the length; None where it is not known."""
        if self.path is None:
            return None
        reference = read_reference(tensor)
        if reference is not None:
            paths = [one.path for one in self.external if one.location == reference.location and one.bytes]
            return (paths[0], reference.offset, reference.length) if paths else None
        if not tensor.name:
            return self._locate_constant(tensor)
        if self._payloads is None:
            self._payloads = find_payloads(self.path)
        payload = self._payloads.get(str(tensor.name))
        return (self.path, *payload) if payload is not None else None

    def _locate_constant(self, tensor: TensorProto) -> tuple[Path, int, int] | None:
        """The same for a Constant, which has the name of its value; in a branch, the flat graph adds a number."""
        name = next((name for name, one in self.flow.constants.items() if one is tensor), "").rpartition(":")[2]
        try:
            weight = find_weights(self.path, [name]).get(name) if self.path is not None and name else None
        except (UnreadableError, OSError):
            return None
        return (weight.path, weight.offset, weight.length) if weight is not None and weight.path is not None else None


_READ: WeakKeyDictionary[GraphView, Arithmetic] = WeakKeyDictionary()


def read_arithmetic(file: OnnxFile, head_dim: int | None, *, alone: bool) -> Arithmetic | None:
    """The arithmetic of a decoder, read once; None where its graph cannot be followed.

    `alone` says that it is one file, whose weights can be looked up.
    """
    dataflow = file.dataflow
    if dataflow is None or file.view is None:
        return None
    if file.view not in _READ:
        _READ[file.view] = Arithmetic(dataflow.flow, file if alone else None, head_dim)
    return _READ[file.view]
