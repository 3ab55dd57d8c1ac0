"""Weights out, noise in: what a file holds besides its structure does not leave the house.

Kept are the values that decide shapes and control flow: integers and booleans, and floats of up to `FEW` elements (an
epsilon, a scale, the value of a mask). All other tensors become noise of the same shape and element type, seeded by
their place. Names stay; doc strings, metadata, strings, and whatever the schema does not know, are dropped.
"""

import hashlib
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvdoctor import __version__
from kvdoctor.external_data import BITS, external_tensors
from kvdoctor.graph import bodies_of
from kvdoctor.onnx_schema import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto
from kvdoctor.repro.sizes import Sizes
from kvdoctor.skeleton import MAX_WHOLE, PORTION, payload_left_out

FEW = 8
MOST_INTEGERS = 4096
"""Integers in a tensor that still may decide a shape; more are packed weights or tables."""

INTEGERS = frozenset({TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL})
FLOATS: dict[Any, Any] = {
    TensorProto.FLOAT: np.float32,
    TensorProto.FLOAT16: np.float16,
    TensorProto.DOUBLE: np.float64,
}
NARROW: dict[Any, Any] = {TensorProto.INT8: np.int8, TensorProto.UINT8: np.uint8}
PAYLOAD_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "raw_data", "double_data", "uint64_data")
TEXTS = ("doc_string", "producer_name", "producer_version", "domain")

DIGEST = re.compile("[0-9a-f]{64}")

SCALES = {"DequantizeLinear": 1, "MatMulNBits": 2, "QuantizeLinear": 1}
"""Operators that take a scale, and at which input: noise there must stay small."""


@dataclass
class Tally:
    """What became of the tensors: how many were replaced, their bytes, and how many were kept."""

    replaced: int = 0
    replaced_bytes: int = 0
    kept: int = 0


@dataclass(frozen=True)
class Uses:
    """How the graph uses its tensors, by name at any depth."""

    tables: frozenset[str]
    scales: frozenset[str]


@dataclass
class Cleaner:
    """Puts noise in the place of weights. `folder` is where the external data of small constants lie.

    `twins` are the digests of weights seen so far, with the place that seeds their noise: what is one weight, under
    whatever names and in whatever file, must stay one, or two graphs that agree would disagree.
    """

    folder: Path
    seed: int
    sizes: Sizes
    strength: float = 1.0
    tally: Tally = field(default_factory=Tally)
    twins: dict[str, str] = field(default_factory=dict)

    def clean(self, model: ModelProto) -> ModelProto:
        """A weight-free copy of a skeleton."""
        copy = ModelProto()
        copy.CopyFrom(model)
        copy.DiscardUnknownFields()
        for name in TEXTS:
            copy.ClearField(name)
        copy.producer_name, copy.producer_version = "kvdoctor repro", __version__
        for lists in ("metadata_props", "training_info"):
            copy.ClearField(lists)
        uses = uses_of(copy)
        self._graph(copy.graph, uses, "")
        for function in copy.functions:
            function.ClearField("doc_string")
            function.ClearField("metadata_props")
            function.ClearField("value_info")
            self._nodes(function.node, uses, f"{function.name}/")
        self.sizes.declare(copy)
        return copy

    def _graph(self, graph: GraphProto, uses: Uses, place: str) -> None:
        for name in ("doc_string", "metadata_props", "value_info", "quantization_annotation"):
            graph.ClearField(name)
        for value in (*graph.input, *graph.output):
            value.ClearField("doc_string")
            value.ClearField("metadata_props")
        for tensor in graph.initializer:
            self._tensor(tensor, tensor.name, uses, place + tensor.name)
        for sparse in graph.sparse_initializer:
            self._tensor(sparse.values, sparse.values.name, uses, place + sparse.values.name)
        self._nodes(graph.node, uses, place)

    def _nodes(self, nodes: Any, uses: Uses, place: str) -> None:
        for index, node in enumerate(nodes):
            node.ClearField("doc_string")
            node.ClearField("metadata_props")
            made = node.output[0] if node.op_type == "Constant" and node.output else ""
            for attribute in node.attribute:
                attribute.ClearField("doc_string")
                self._attribute(attribute, uses, made, f"{place}{index}/")

    def _attribute(self, attribute: AttributeProto, uses: Uses, made: str, place: str) -> None:
        for tensor in (*((attribute.t,) if attribute.HasField("t") else ()), *attribute.tensors):
            self._tensor(tensor, made, uses, place)
        for body in bodies_of(attribute):
            self._graph(body, uses, f"{place}{attribute.name}/")
        if len(attribute.floats) > FEW:
            attribute.floats[:] = self._noise((len(attribute.floats),), place, 1.0).tolist()
        if len(attribute.strings) > FEW:
            attribute.strings[:] = [b""] * len(attribute.strings)

    def _tensor(self, tensor: TensorProto, name: str, uses: Uses, place: str) -> None:
        digest = tensor.doc_string
        for text in ("doc_string", "metadata_props"):
            tensor.ClearField(text)
        self._fetch(tensor)
        count = math.prod(tensor.dims)
        absent = payload_left_out(tensor) or tensor.data_location == TensorProto.EXTERNAL
        if tensor.data_type in INTEGERS:
            keep = not absent and (count <= MOST_INTEGERS or tensor.data_type == TensorProto.BOOL)
        else:
            keep = not absent and count <= FEW
        if keep:
            self.tally.kept += 1
            self.sizes.constant(tensor)
            if count == 0:
                tensor.dims[:] = self.sizes.dims(tensor, False)
            return
        place = self.twins.setdefault(digest_of(tensor, digest, place), place)
        tensor.dims[:] = self.sizes.dims(tensor, name in uses.tables)
        content = self._content(tensor, name, uses, place)
        for payload in (*PAYLOAD_FIELDS, "external_data", "data_location"):
            tensor.ClearField(payload)
        if tensor.data_type == TensorProto.STRING:
            tensor.string_data[:] = [b""] * count
        else:
            tensor.raw_data = content
        self.tally.replaced += 1
        self.tally.replaced_bytes += len(content)

    def _fetch(self, tensor: TensorProto) -> None:
        """Read a small constant that lies in another file."""
        bits, count = BITS.get(tensor.data_type, 0), math.prod(tensor.dims)
        wanted = tensor.data_type in INTEGERS or count <= FEW
        if tensor.data_location != TensorProto.EXTERNAL or not wanted or bits * count > MAX_WHOLE * 8:
            return
        entries = {entry.key: entry.value for entry in tensor.external_data}
        with (self.folder / entries["location"]).open("rb") as file:
            file.seek(int(entries.get("offset", 0)))
            tensor.raw_data = file.read(-(-bits * count // 8))
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")

    def _content(self, tensor: TensorProto, name: str, uses: Uses, place: str) -> bytes:
        """Noise of the shape and element type of a tensor, little-endian as the format wants it."""
        shape, kind = tuple(tensor.dims), tensor.data_type
        spread = 0.02 if name in uses.scales else 1.0
        if kind in FLOATS or kind == TensorProto.BFLOAT16:
            noise = self._noise(shape, place, spread, table=name in uses.tables)
            if kind == TensorProto.BFLOAT16:
                return bytes((noise.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes())
            return bytes(noise.astype(np.dtype(FLOATS[kind]).newbyteorder("<")).tobytes())
        rng, size = self._rng(place), -(-BITS.get(kind, 8) * math.prod(shape) // 8)
        if kind in INTEGERS:
            return bytes(size)
        if kind in NARROW:
            info = np.iinfo(NARROW[kind])
            return bytes(rng.integers(info.min, info.max + 1, size, NARROW[kind]).tobytes())
        # Packed or narrow floats: no pattern with all exponent bits set, which would be no number.
        return bytes((rng.integers(0, 256, size, np.uint8) & 0xBB).tobytes())

    def _noise(self, shape: tuple[int, ...], place: str, spread: float, table: bool = False) -> "np.ndarray[Any, Any]":
        """Noise that keeps activations in range: tables spread 1, matrices by what they sum up, vectors above 0."""
        rng = self._rng(place)
        if len(shape) < 2:
            return rng.uniform(0.1, 1.0, shape) * spread
        fan = 1 if table else max(math.prod(shape) / max(*shape, 1), 1)
        noise: np.ndarray[Any, Any] = rng.standard_normal(shape, np.float32)
        noise *= np.float32(spread * self.strength / math.sqrt(fan))
        return noise

    def _rng(self, place: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(place.encode("utf-8", "replace"))])


def digest_of(tensor: TensorProto, known: str, place: str) -> str:
    """What tells one weight from another: the digest that a skeleton has for it, else that of what it holds here."""
    if DIGEST.fullmatch(known):
        return f"{list(tensor.dims)} {known}"
    held = TensorProto()
    held.CopyFrom(tensor)
    held.ClearField("name")
    # Nothing is known of a weight that was left out: it is like no other.
    lacks = payload_left_out(tensor) or tensor.data_location == TensorProto.EXTERNAL
    return place if lacks else hashlib.sha256(held.SerializeToString()).hexdigest()


def note_digests(model: ModelProto, folder: Path) -> None:
    """Give weights in other files the digest of their bytes for a doc string, as `read_skeleton` does for the rest."""
    for tensor in external_tensors(model):
        entries = {entry.key: entry.value for entry in tensor.external_data}
        length = int(entries.get("length", 0)) or -(-BITS.get(tensor.data_type, 0) * math.prod(tensor.dims) // 8)
        digest = hashlib.sha256()
        with (folder / entries["location"]).open("rb") as file:
            file.seek(int(entries.get("offset", 0)))
            while length > 0 and (part := file.read(min(length, PORTION))):
                digest.update(part)
                length -= len(part)
        tensor.doc_string = digest.hexdigest()


def uses_of(model: ModelProto) -> Uses:
    """Find out how the nodes of a model use its tensors."""
    tables, scales = set(), set()
    for node in _all_nodes(model):
        if node.op_type in ("Gather", "GatherBlockQuantized") and node.input:
            tables.add(node.input[0])
        at = SCALES.get(node.op_type)
        if at is not None and len(node.input) > at:
            scales.add(node.input[at])
    return Uses(frozenset(tables), frozenset(scales))


def _all_nodes(model: ModelProto) -> Iterator[NodeProto]:
    bodies: list[Any] = [model.graph, *model.functions]
    while bodies:
        body = bodies.pop()
        for node in body.node:
            yield node
            for attribute in node.attribute:
                bodies += bodies_of(attribute)
