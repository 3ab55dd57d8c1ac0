"""The values of weights, read in portions: where each lies, its content as numbers, never more than a portion at once.

Weights are the initializers and constants of a file at any depth. The payload of a large one is read from the file that
holds it; nothing is read before it is asked for.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdoctor.errors import UnreadableError
from kvdoctor.model.external_data import examine, read_reference
from kvdoctor.model.operators import has, operator_of, operators_with
from kvdoctor.model.proto import ModelProto, NodeProto, TensorProto
from kvdoctor.model.skeleton import PLAIN_TAGS, SMALL_PAYLOAD, FileWindow, WireError, payload_left_out, read_skeleton
from kvdoctor.model.traverse import constant_tensor
from kvdoctor.model.view import GraphView
from kvdoctor.records import record

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PORTION = 4 << 20
"""Bytes that are read at once."""
SMALL = 1024
"""Elements up to which integers of 32 and 64 bits and booleans are taken for shapes, axes and masks."""
ELEMENTS = 1 << 20
"""Values that are read at once."""
TYPES = {1: "<f4", 2: "u1", 3: "i1", 4: "<u2", 5: "<i2", 6: "<i4", 7: "<i8", 9: "u1", 10: "<f2", 11: "<f8", 16: "<u2"}
"""The element types (TensorProto.DataType) whose values can be read, by the type of numpy; 16 is bfloat16."""
BFLOAT16 = 16
FLOATS = (1, 10, 11, BFLOAT16)
PASSING = operators_with("copy", "permute", "cast", "view")
"""Operators that pass a weight on as it is."""
MOST_PASSED = 4
Reader = tuple[NodeProto, int]

GRAPH, INITIALIZER, NAME = 7 << 3 | 2, 5 << 3 | 2, 8 << 3 | 2
"""Tags of a model's graph, its initializers, and of the name of a tensor."""


@record(slots=False)
class Weight:
    """A weight: its name, element type, sizes, and its bytes: in `path` from `offset` on, or `inline`.

    `reader` is the name of the first node that multiplies it, or else of the first that computes with it, `op` its
    operator, and `input` the number of the input.
    """

    name: str
    data_type: int
    dims: tuple[int, ...]
    length: int
    path: Path | None = None
    offset: int = 0
    inline: bytes = b""
    reader: str = ""
    op: str = ""
    input: int = 0

    @property
    def dtype(self) -> str:
        """Its element type, as `float16`."""
        named = self.data_type in TensorProto.DataType.values()
        name = str(TensorProto.DataType.Name(self.data_type)).lower() if named else "?"
        return {"float": "float32", "double": "float64"}.get(name, name)

    @property
    def is_float(self) -> bool:
        """Whether its elements are floating point numbers of 16 bits or more."""
        return self.data_type in FLOATS

    @property
    def is_multiplied(self) -> bool:
        """Whether it is a factor, not a bias or a table."""
        known = operator_of(self.op)
        multiplies = has(self.op, "product", "convolve")
        return self.is_float and multiplies and self.input in (*known.operands, known.weight)

    @property
    def size(self) -> int:
        """The number of its elements."""
        return prod(self.dims)

    @property
    def has_values(self) -> bool:
        """Whether its values can be read as numbers: not those of packed types, strings and damaged lengths."""
        return self.data_type in TYPES and self.length == self.size * int(TYPES[self.data_type][-1])

    def read(self, portion: int = PORTION) -> Iterator[bytes]:
        """Its bytes in portions of so many bytes.

        Raises:
            OSError: the file cannot be read.
        """
        if self.path is None:
            yield from (self.inline[at : at + portion] for at in range(0, len(self.inline), portion))
            return
        left = self.length
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while left > 0 and (part := file.read(min(portion, left))):
                yield part
                left -= len(part)
        if left:
            raise OSError(f"{self.path.name} ends before the weight {self.name!r}")

    def values(self, portion: int = ELEMENTS) -> "Iterator[NDArray[np.generic]]":
        """Its values in portions of so many, flat; bfloat16 as float32.

        Raises:
            OSError: the file cannot be read.
        """
        import numpy as np

        for part in self.read(portion * int(TYPES[self.data_type][-1])):
            array: Any = np.frombuffer(part, TYPES[self.data_type])
            yield (array.astype(np.uint32) << 16).view(np.float32) if self.data_type == BFLOAT16 else array


def list_weights(path: Path) -> list[Weight]:
    """The weights of a file; shapes, axes and the like are none, nor is a single integer.

    Raises:
        UnreadableError: the file, or what it refers to, cannot be read.
    """
    model, places = _open_located(path)
    readers: dict[str, list[Reader]] = {}
    view = GraphView(model)
    for scope in view.scopes():
        for node in scope.graph.node:
            for index, name in enumerate(node.input):
                readers.setdefault(str(name), []).append((node, index))
    located = (_locate(name, tensor, places) for name, tensor in list_tensors(view))
    # One integer is a zero point or an axis, and integers for shapes and masks are few.
    least = dict.fromkeys(FLOATS, 0) | dict.fromkeys((6, 7, 9, 12, 13), SMALL)
    weights = [weight for weight in located if weight is not None and weight.size > least.get(weight.data_type, 1)]
    return [_with_reader(weight, _follow(weight.name, readers, MOST_PASSED)) for weight in weights]


def find_weights(path: Path, names: Collection[str]) -> dict[str, Weight]:
    """The weights of these names, without their readers.

    Raises:
        UnreadableError: the file, or what it refers to, cannot be read.
    """
    model, places = _open_located(path)
    named = ((name, tensor) for name, tensor in list_tensors(GraphView(model)) if name in names)
    located = ((name, _locate(name, tensor, places)) for name, tensor in named)
    return {name: weight for name, weight in located if weight is not None}


def find_payloads(path: Path) -> dict[str, tuple[int, int]]:
    """Where the values of the initializers of the main graph lie in the file: first byte and length by name.

    Only the framing of the file is read. What is broken, small, or stored another way, is left out.
    """
    found: dict[str, tuple[int, int]] = {}
    try:
        with path.open("rb") as file:
            window = FileWindow(file)
            graphs = [part[2:] for part in window.fields(0, window.size) if part[0] == GRAPH]
            for tag, _, start, end in window.fields(*graphs[0]) if graphs else ():
                large = tag == INITIALIZER and end - start > SMALL_PAYLOAD
                parts = {one[0]: one[2:] for one in window.fields(start, end)} if large else {}
                name = window.read(*parts[NAME]).decode("utf-8", "replace") if NAME in parts else ""
                payload = next((parts[one] for one in parts if one in PLAIN_TAGS), None)
                if payload is not None:
                    found[name] = payload[0], payload[1] - payload[0]
    except (OSError, WireError, UnreadableError):
        pass
    return found


def list_tensors(view: GraphView) -> Iterator[tuple[str, TensorProto]]:
    """The initializers and constants of a graph at any depth, each with the name of its value."""
    for scope in view.scopes():
        yield from ((str(tensor.name), tensor) for tensor in scope.graph.initializer)
        for node in scope.graph.node:
            constant = constant_tensor(node) if has(node.op_type, "constant") else None
            if constant is not None and node.output:
                yield str(node.output[0]), constant


def _open_located(path: Path) -> tuple[ModelProto, dict[str, Path]]:
    """A model whose large tensors point to their bytes, and the files that they point to.

    Raises:
        UnreadableError: the file, or what it refers to, cannot be read.
    """
    model = read_skeleton(path, located=True).model
    files, problems = examine(model, path)
    if problems:
        raise UnreadableError(f"its weights cannot be read: {problems[0].detail}", "put their files next to it")
    return model, {one.location: one.path for one in files if one.bytes is not None}


def _with_reader(weight: Weight, readers: Iterable[Reader]) -> Weight:
    """The weight with a node that computes with it, after those that only pass it on; a tied one has several."""
    found = [(node, str(node.op_type), index) for node, index in readers if node.op_type]
    named = [replace(weight, reader=str(node.name or op), op=op, input=index) for node, op, index in found]
    return next((one for one in named if one.is_multiplied), next(iter(named), weight))


def _follow(name: str, readers: dict[str, list[Reader]], left: int) -> Iterator[Reader]:
    for node, index in readers.get(name, ()):
        passes_on = node.op_type in PASSING and node.output and left
        further = list(_follow(str(node.output[0]), readers, left - 1)) if passes_on else []
        yield from further or [(node, index)]


def _locate(name: str, tensor: TensorProto, places: dict[str, Path]) -> Weight | None:
    dims = tuple(int(size) for size in tensor.dims)
    if (reference := read_reference(tensor)) is not None:
        path = places.get(reference.location)
        if path is None:
            return None
        return Weight(name, tensor.data_type, dims, reference.length, path, reference.offset)
    if payload_left_out(tensor):
        return None
    body = bytes(tensor.raw_data) if tensor.HasField("raw_data") else _numbers(tensor)
    return Weight(name, tensor.data_type, dims, len(body), inline=body)


def _numbers(tensor: TensorProto) -> bytes:
    from onnx.numpy_helper import to_array

    try:
        return to_array(tensor).tobytes() if tensor.data_type in TYPES else b""
    except (ValueError, TypeError):
        return b""
