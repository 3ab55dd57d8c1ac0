"""Replaces weights with noise of smaller sizes, so that a reproducer contains nothing of a model but its structure.

Values that decide shapes and control flow stay: integers and booleans, and floats of up to `MAX_FLOATS` elements
(an epsilon, a scale, the value of a mask). All other tensors become noise of the same element type, seeded by their
position in the graph. Names stay; doc strings, metadata, strings and unknown fields are removed.

Most failures also occur with a vocabulary of 32 and heads of width 8. A size is replaced wherever its number occurs: in
dims of weights, small integer constants, attributes and declared shapes. That may break the model; a run shows whether
the failure is still the same.
"""

import hashlib
import math
import re
import zlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvdoctor._version import __version__
from kvdoctor.contract import Axis, CacheContract, Dim, Port, Slot
from kvdoctor.model.external_data import BITS, external_tensors, is_external, portions, read_reference
from kvdoctor.model.operators import has, operator_of
from kvdoctor.model.proto import AttributeProto, GraphProto, ModelProto, TensorProto
from kvdoctor.model.skeleton import MAX_WHOLE, payload_left_out
from kvdoctor.model.traverse import all_nodes, bodies_of
from kvdoctor.records import record

VOCABULARY, HEAD_DIM = 32, 8
MIN_SIZE = 16
"""Smaller numbers are counts of heads, axes or flags, and are not replaced."""

MAX_NUMBERS = 64
WIDTHS = {"head_dim", "hidden", "vocabulary", "channels", "state", "fixed"}
"""Axes whose sizes are replaced; batch, tokens and heads keep theirs."""


@dataclass
class SizeMap:
    """The replacement of sizes: those in `exact`, and multiples of `unit` (0: none), which are divided by `factor`."""

    exact: dict[int, int] = field(default_factory=dict)
    unit: int = 0
    factor: int = 1

    def __bool__(self) -> bool:
        return bool(self.exact) or self.factor > 1

    def of(self, number: int) -> int:
        """The new value of a number."""
        if number in self.exact:
            return self.exact[number]
        if self.unit and self.factor > 1 and number >= max(self.unit, MIN_SIZE) and number % self.unit == 0:
            return number // self.factor
        return number

    def dims(self, tensor: TensorProto, table: bool) -> list[int]:
        """The new dims of a weight. The rows of a table are positions and keep their number, except the vocabulary."""
        dims = [self.of(dim) for dim in tensor.dims]
        if table and dims and tensor.dims[0] not in self.exact:
            dims[0] = tensor.dims[0]
        return dims

    def constant(self, tensor: TensorProto) -> None:
        """Replace the numbers in a small integer constant."""
        kinds: dict[int, Any] = {TensorProto.INT64: "<i8", TensorProto.INT32: "<i4"}
        if not self or tensor.data_type not in kinds or math.prod(tensor.dims) > MAX_NUMBERS:
            return
        if tensor.raw_data:
            old = np.frombuffer(tensor.raw_data, kinds[tensor.data_type])
            tensor.raw_data = np.array([self.of(int(n)) for n in old], kinds[tensor.data_type]).tobytes()
        for numbers in (tensor.int64_data, tensor.int32_data):
            numbers[:] = [self.of(n) for n in numbers]

    def contract(self, contract: CacheContract) -> CacheContract:
        """The contract of the model with these sizes."""
        vocabulary = self.of(contract.vocabulary) if contract.vocabulary is not None else None
        smaller = _change_sizes(contract, lambda size, axis: self.of(size) if axis in WIDTHS else size)
        return replace(smaller, vocabulary=vocabulary)


def free_axis(contract: CacheContract, axis: Axis) -> CacheContract:
    """The contract with any size for an axis that the file declares with a fixed one."""
    return _change_sizes(contract, lambda size, of: None if of == axis else size)


def _change_sizes(contract: CacheContract, change: Callable[[int, Axis], Dim]) -> CacheContract:
    """The contract with other numbers in the shapes of ports and slots."""

    def changed(of: Port | Slot) -> Any:
        if of.shape is None or len(of.axes) != len(of.shape):
            return of
        pairs = zip(of.shape, of.axes, strict=True)
        return replace(of, shape=tuple(change(d, axis) if isinstance(d, int) else d for d, axis in pairs))

    return replace(contract.with_ports(changed), slots=tuple(map(changed, contract.slots)))


def choose_sizes(contract: CacheContract) -> SizeMap:
    """The smaller sizes for a model, from the width of its heads and its vocabulary."""
    exact = {}
    if contract.vocabulary is not None and contract.vocabulary > VOCABULARY:
        exact[contract.vocabulary] = VOCABULARY
    widths = {slot.size("head_dim") for slot in contract.slots} - {None}
    width = next(iter(widths)) if len(widths) == 1 else None
    if width is None or width <= HEAD_DIM or width % HEAD_DIM:
        return SizeMap(exact)
    factor = width // HEAD_DIM
    return SizeMap(exact, width // 2, factor)


MAX_FLOATS = 8
MAX_INTEGERS = 4096
"""Tensors with more integers are packed weights or tables, and do not decide a shape."""

INTEGERS = frozenset({TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL})
FLOATS: dict[Any, Any] = {
    TensorProto.FLOAT: np.float32,
    TensorProto.FLOAT16: np.float16,
    TensorProto.DOUBLE: np.float64,
}
NARROW: dict[Any, Any] = {TensorProto.INT8: np.int8, TensorProto.UINT8: np.uint8}
PAYLOAD_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "raw_data", "double_data", "uint64_data")
TEXTS = ("doc_string", "producer_name", "producer_version", "domain")

SIZES = ("value_int", "hidden_size", "rotary_embedding_dim")
"""Attributes of one number that is a size."""
DIGEST = re.compile("[0-9a-f]{64}")


@dataclass
class ReplacedWeights:
    """The numbers of replaced and of unchanged tensors."""

    replaced: int = 0
    kept: int = 0


@record(slots=False)
class TensorUses:
    """The names of tensors that are lookup tables, and of those that are scales, at any depth of the graph."""

    tables: frozenset[str]
    scales: frozenset[str]


@dataclass
class WeightReplacer:
    """Replaces weights with noise of a `seed`, by a factor of `strength` in matrices.

    `folder` has the external data of small constants. `origins` has for the digest of each weight the position that
    seeds its noise: a weight with several names, or in several files, must get the same noise everywhere, since
    otherwise two graphs that agree would differ.
    """

    folder: Path
    seed: int
    sizes: SizeMap
    strength: float = 1.0
    tally: ReplacedWeights = field(default_factory=ReplacedWeights)
    origins: dict[str, str] = field(default_factory=dict)

    def clean(self, model: ModelProto) -> ModelProto:
        """A copy of a skeleton with noise for weights."""
        copy = deepcopy(model)
        copy.DiscardUnknownFields()
        _clear(copy, *TEXTS, "metadata_props", "training_info")
        copy.producer_name, copy.producer_version = "kvdoctor repro", __version__
        uses = find_uses(copy)
        self._graph(copy.graph, uses, "")
        for function in copy.functions:
            _clear(function, "doc_string", "metadata_props", "value_info")
            self._nodes(function.node, uses, f"{function.name}/")
        return copy

    def _graph(self, graph: GraphProto, uses: TensorUses, position: str) -> None:
        _clear(graph, "doc_string", "metadata_props", "value_info", "quantization_annotation")
        for value in (*graph.input, *graph.output):
            _clear(value, "doc_string", "metadata_props")
            for dim in value.type.tensor_type.shape.dim:
                if dim.HasField("dim_value"):
                    dim.dim_value = self.sizes.of(dim.dim_value)
        for tensor in graph.initializer:
            self._tensor(tensor, tensor.name, uses, position + tensor.name)
        for sparse in graph.sparse_initializer:
            self._tensor(sparse.values, sparse.values.name, uses, position + sparse.values.name)
        self._nodes(graph.node, uses, position)

    def _nodes(self, nodes: Any, uses: TensorUses, position: str) -> None:
        for index, node in enumerate(nodes):
            _clear(node, "doc_string", "metadata_props")
            output = node.output[0] if has(node.op_type, "constant") and node.output else ""
            for attribute in node.attribute:
                attribute.ClearField("doc_string")
                self._attribute(attribute, uses, output, f"{position}{index}/")

    def _attribute(self, attribute: AttributeProto, uses: TensorUses, output: str, position: str) -> None:
        for tensor in (*((attribute.t,) if attribute.HasField("t") else ()), *attribute.tensors):
            self._tensor(tensor, output, uses, position)
        attribute.ints[:] = [self.sizes.of(n) for n in attribute.ints]
        if attribute.HasField("i") and attribute.name in SIZES:
            attribute.i = self.sizes.of(attribute.i)
        for body in bodies_of(attribute):
            self._graph(body, uses, f"{position}{attribute.name}/")
        if len(attribute.floats) > MAX_FLOATS:
            attribute.floats[:] = self._noise((len(attribute.floats),), position, 1.0).tolist()
        if len(attribute.strings) > MAX_FLOATS:
            attribute.strings[:] = [b""] * len(attribute.strings)

    def _tensor(self, tensor: TensorProto, name: str, uses: TensorUses, position: str) -> None:
        digest = tensor.doc_string
        _clear(tensor, "doc_string", "metadata_props")
        self._fetch(tensor)
        count = math.prod(tensor.dims)
        most = MAX_INTEGERS if tensor.data_type in INTEGERS else MAX_FLOATS
        present = not (payload_left_out(tensor) or is_external(tensor))
        if present and (count <= most or tensor.data_type == TensorProto.BOOL):
            self.tally.kept += 1
            self.sizes.constant(tensor)
            if count == 0:
                tensor.dims[:] = self.sizes.dims(tensor, False)
            return
        position = self.origins.setdefault(weight_digest(tensor, digest, position), position)
        tensor.dims[:] = self.sizes.dims(tensor, name in uses.tables)
        content = self._content(tensor, name, uses, position)
        _clear(tensor, *PAYLOAD_FIELDS, "external_data", "data_location")
        if tensor.data_type == TensorProto.STRING:
            tensor.string_data[:] = [b""] * count
        else:
            tensor.raw_data = content
        self.tally.replaced += 1

    def _fetch(self, tensor: TensorProto) -> None:
        bits, count = BITS.get(tensor.data_type, 0), math.prod(tensor.dims)
        wanted = tensor.data_type in INTEGERS or count <= MAX_FLOATS
        reference = read_reference(tensor)
        if reference is None or not wanted or bits * count > MAX_WHOLE * 8:
            return
        tensor.raw_data = b"".join(portions(self.folder / reference.location, reference))
        _clear(tensor, "external_data", "data_location")

    def _content(self, tensor: TensorProto, name: str, uses: TensorUses, position: str) -> bytes:
        """Noise with the shape and element type of a tensor, little-endian as in the format."""
        shape, kind = tuple(tensor.dims), tensor.data_type
        scale = 0.02 if name in uses.scales else 1.0
        if kind in FLOATS or kind == TensorProto.BFLOAT16:
            noise = self._noise(shape, position, scale, table=name in uses.tables)
            if kind == TensorProto.BFLOAT16:
                return bytes((noise.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes())
            return bytes(noise.astype(np.dtype(FLOATS[kind]).newbyteorder("<")).tobytes())
        rng, size = self._rng(position), -(-BITS.get(kind, 8) * math.prod(shape) // 8)
        if kind in INTEGERS:
            return bytes(size)
        if kind in NARROW:
            info = np.iinfo(NARROW[kind])
            return bytes(rng.integers(info.min, info.max + 1, size, NARROW[kind]).tobytes())
        # Packed or narrow floats: no pattern with all exponent bits set, which would be NaN or infinity.
        return bytes((rng.integers(0, 256, size, np.uint8) & 0xBB).tobytes())

    def _noise(
        self, shape: tuple[int, ...], position: str, scale: float, table: bool = False
    ) -> "np.ndarray[Any, Any]":
        """Noise that keeps activations in range: 1 in tables, less in wide matrices, vectors positive."""
        rng = self._rng(position)
        if len(shape) < 2:
            return rng.uniform(0.1, 1.0, shape) * scale
        fan = 1 if table else max(math.prod(shape) / max(*shape, 1), 1)
        noise: np.ndarray[Any, Any] = rng.standard_normal(shape, np.float32)
        noise *= np.float32(scale * self.strength / math.sqrt(fan))
        return noise

    def _rng(self, position: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(position.encode("utf-8", "replace"))])


def _clear(message: Any, *fields: str) -> None:
    for name in fields:
        message.ClearField(name)


def weight_digest(tensor: TensorProto, known: str, position: str) -> str:
    """The identity of a weight: its digest in the skeleton, otherwise the digest of its content."""
    if DIGEST.fullmatch(known):
        return f"{list(tensor.dims)} {known}"
    content = deepcopy(tensor)
    content.ClearField("name")
    # The content is unknown if the skeleton leaves it out: then it equals no other weight.
    unknown = payload_left_out(tensor) or is_external(tensor)
    return position if unknown else hashlib.sha256(content.SerializeToString()).hexdigest()


def store_digests(model: ModelProto, folder: Path) -> None:
    """Store digests of external weights in their doc strings, as `read_skeleton` does for weights inside the file."""
    for tensor in external_tensors(model):
        reference = read_reference(tensor)
        digest = hashlib.sha256()
        for part in portions(folder / reference.location, reference) if reference is not None else ():
            digest.update(part)
        tensor.doc_string = digest.hexdigest()


def find_uses(model: ModelProto) -> TensorUses:
    """Find the tables and scales of a model."""
    tables, scales = set(), set()
    for node in all_nodes(model):
        if has(node.op_type, "embed") and node.input:
            tables.add(node.input[0])
        at = operator_of(node.op_type).scale  # its noise must be small
        if at is not None and len(node.input) > at:
            scales.add(node.input[at])
    return TensorUses(frozenset(tables), frozenset(scales))
