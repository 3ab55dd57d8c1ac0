"""Replaces weights with noise, so that a reproducer contains nothing of a model but its structure.

Values that decide shapes and control flow are kept: integers and booleans, and floats of up to `MAX_FLOATS` elements
(an epsilon, a scale, the value of a mask). All other tensors become noise of the same shape and element type, seeded by
their position in the graph. Names are kept; doc strings, metadata, strings and unknown fields are removed.
"""

import hashlib
import math
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvdoctor._version import __version__
from kvdoctor.model.external_data import BITS, external_tensors, is_external, read_reference
from kvdoctor.model.proto import AttributeProto, GraphProto, ModelProto, TensorProto
from kvdoctor.model.skeleton import MAX_WHOLE, PORTION, payload_left_out
from kvdoctor.model.traverse import all_nodes, bodies_of
from kvdoctor.records import record
from kvdoctor.reproducer.sizes import SizeMap

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

DIGEST = re.compile("[0-9a-f]{64}")

SCALES = {"DequantizeLinear": 1, "MatMulNBits": 2, "QuantizeLinear": 1}
"""Operators with a scale, and the index of that input: its noise must be small."""


@dataclass
class ReplacedWeights:
    """The numbers of replaced and of kept tensors."""

    replaced: int = 0
    kept: int = 0


@record(slots=False)
class TensorUses:
    """The names of tensors that are lookup tables, and of those that are scales, at any depth of the graph."""

    tables: frozenset[str]
    scales: frozenset[str]


@dataclass
class WeightReplacer:
    """Replaces weights with noise.

    Attributes:
        folder: the folder with the external data of small constants.
        seed: the seed of the noise.
        sizes: the smaller sizes.
        strength: the factor of the noise in matrices.
        tally: the numbers of tensors replaced and kept.
        origins: the digest of each weight with the position that seeds its noise. A weight with several names, or in
            several files, must get the same noise everywhere: otherwise two graphs that agree would differ.
    """

    folder: Path
    seed: int
    sizes: SizeMap
    strength: float = 1.0
    tally: ReplacedWeights = field(default_factory=ReplacedWeights)
    origins: dict[str, str] = field(default_factory=dict)

    def clean(self, model: ModelProto) -> ModelProto:
        """A copy of a skeleton with noise for weights."""
        copy = ModelProto()
        copy.CopyFrom(model)
        copy.DiscardUnknownFields()
        for name in TEXTS:
            copy.ClearField(name)
        copy.producer_name, copy.producer_version = "kvdoctor repro", __version__
        for lists in ("metadata_props", "training_info"):
            copy.ClearField(lists)
        uses = find_uses(copy)
        self._graph(copy.graph, uses, "")
        for function in copy.functions:
            function.ClearField("doc_string")
            function.ClearField("metadata_props")
            function.ClearField("value_info")
            self._nodes(function.node, uses, f"{function.name}/")
        self.sizes.declare(copy)
        return copy

    def _graph(self, graph: GraphProto, uses: TensorUses, position: str) -> None:
        for name in ("doc_string", "metadata_props", "value_info", "quantization_annotation"):
            graph.ClearField(name)
        for value in (*graph.input, *graph.output):
            value.ClearField("doc_string")
            value.ClearField("metadata_props")
        for tensor in graph.initializer:
            self._tensor(tensor, tensor.name, uses, position + tensor.name)
        for sparse in graph.sparse_initializer:
            self._tensor(sparse.values, sparse.values.name, uses, position + sparse.values.name)
        self._nodes(graph.node, uses, position)

    def _nodes(self, nodes: Any, uses: TensorUses, position: str) -> None:
        for index, node in enumerate(nodes):
            node.ClearField("doc_string")
            node.ClearField("metadata_props")
            output = node.output[0] if node.op_type == "Constant" and node.output else ""
            for attribute in node.attribute:
                attribute.ClearField("doc_string")
                self._attribute(attribute, uses, output, f"{position}{index}/")

    def _attribute(self, attribute: AttributeProto, uses: TensorUses, output: str, position: str) -> None:
        for tensor in (*((attribute.t,) if attribute.HasField("t") else ()), *attribute.tensors):
            self._tensor(tensor, output, uses, position)
        for body in bodies_of(attribute):
            self._graph(body, uses, f"{position}{attribute.name}/")
        if len(attribute.floats) > MAX_FLOATS:
            attribute.floats[:] = self._noise((len(attribute.floats),), position, 1.0).tolist()
        if len(attribute.strings) > MAX_FLOATS:
            attribute.strings[:] = [b""] * len(attribute.strings)

    def _tensor(self, tensor: TensorProto, name: str, uses: TensorUses, position: str) -> None:
        digest = tensor.doc_string
        for text in ("doc_string", "metadata_props"):
            tensor.ClearField(text)
        self._fetch(tensor)
        count = math.prod(tensor.dims)
        absent = payload_left_out(tensor) or is_external(tensor)
        if tensor.data_type in INTEGERS:
            keep = not absent and (count <= MAX_INTEGERS or tensor.data_type == TensorProto.BOOL)
        else:
            keep = not absent and count <= MAX_FLOATS
        if keep:
            self.tally.kept += 1
            self.sizes.constant(tensor)
            if count == 0:
                tensor.dims[:] = self.sizes.dims(tensor, False)
            return
        position = self.origins.setdefault(weight_digest(tensor, digest, position), position)
        tensor.dims[:] = self.sizes.dims(tensor, name in uses.tables)
        content = self._content(tensor, name, uses, position)
        for payload in (*PAYLOAD_FIELDS, "external_data", "data_location"):
            tensor.ClearField(payload)
        if tensor.data_type == TensorProto.STRING:
            tensor.string_data[:] = [b""] * count
        else:
            tensor.raw_data = content
        self.tally.replaced += 1

    def _fetch(self, tensor: TensorProto) -> None:
        """Read a small constant from an external file."""
        bits, count = BITS.get(tensor.data_type, 0), math.prod(tensor.dims)
        wanted = tensor.data_type in INTEGERS or count <= MAX_FLOATS
        reference = read_reference(tensor)
        if reference is None or not wanted or bits * count > MAX_WHOLE * 8:
            return
        with (self.folder / reference.location).open("rb") as file:
            file.seek(reference.offset)
            tensor.raw_data = file.read(reference.length)
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")

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


def weight_digest(tensor: TensorProto, known: str, position: str) -> str:
    """The identity of a weight: its digest in the skeleton, otherwise the digest of its content."""
    if DIGEST.fullmatch(known):
        return f"{list(tensor.dims)} {known}"
    content = TensorProto()
    content.CopyFrom(tensor)
    content.ClearField("name")
    # The content is unknown if the skeleton leaves it out: then it equals no other weight.
    unknown = payload_left_out(tensor) or is_external(tensor)
    return position if unknown else hashlib.sha256(content.SerializeToString()).hexdigest()


def store_digests(model: ModelProto, folder: Path) -> None:
    """Store digests of external weights in their doc strings, as `read_skeleton` does for weights inside the file."""
    for tensor in external_tensors(model):
        reference = read_reference(tensor)
        if reference is None:
            continue
        length, digest = reference.length, hashlib.sha256()
        with (folder / reference.location).open("rb") as file:
            file.seek(reference.offset)
            while length > 0 and (part := file.read(min(length, PORTION))):
                digest.update(part)
                length -= len(part)
        tensor.doc_string = digest.hexdigest()


def find_uses(model: ModelProto) -> TensorUses:
    """Find the tables and scales of a model."""
    tables, scales = set(), set()
    for node in all_nodes(model):
        if node.op_type in ("Gather", "GatherBlockQuantized") and node.input:
            tables.add(node.input[0])
        at = SCALES.get(node.op_type)
        if at is not None and len(node.input) > at:
            scales.add(node.input[at])
    return TensorUses(frozenset(tables), frozenset(scales))
