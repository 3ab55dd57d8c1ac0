"""One entry on which a config and the graph disagree, as text, and tensors as configs declare them."""

from collections.abc import Iterable
from json import dumps
from typing import Any

from kvdoctor.analysis.configs import is_count
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.model.view import ELEMENT_TYPES, Declared
from kvdoctor.records import record

LONGEST_NAME = 80
MOST_SHOWN = 8
NOT_FOUND = "the runtime does not find an input or output of that name"
ONNX_TYPES = {
    "float32": "float",
    "fp32": "float",
    "float64": "double",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float8_e4m3fn": "float8e4m3fn",
    "float8_e5m2": "float8e5m2",
}
"""Element types that configs name differently from ONNX."""


@record
class Disagreement:
    """A key of a config, its value there, what the graph shows, the right value, and `so`, the consequence.

    `by_graph` says that the other side is right; otherwise the graph may have lost what the config says. `node` is the
    name of the node that shows it, `against` the other side.
    """

    key: str
    declared: str
    observed: str
    right: str
    so: str = ""
    by_graph: bool = True
    node: str = ""
    against: str = "the graph"


def quoted(name: str) -> str:
    """A name in quotes, in ASCII and of limited length: it is data."""
    return dumps(name[:LONGEST_NAME])


def plain(name: str) -> str:
    """The same without the quotes."""
    return quoted(name)[1:-1]


def either(sizes: Iterable[int]) -> str:
    """`2 or 4`."""
    return " or ".join(map(str, sorted(sizes)))


def span(layers: set[int]) -> str:
    """`0 to 5`, or the numbers where some are left out."""
    numbers = sorted(layers)
    whole = len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if whole else ", ".join(map(str, numbers[:MOST_SHOWN]))


def on_disk(context: ContractContext, name: str) -> bool:
    """Whether a file is there, in the folder or the one around it. What cannot be looked up counts as there."""
    root = context.folder.root
    try:
        return any((folder / name).exists() for folder in (root, root / "onnx", root.parent))
    except (OSError, ValueError):
        return True


def fits_port(declared: dict[str, Any], port: Declared) -> bool:
    """Whether a port takes a tensor that a config declares. A name stands for any size, and what is unknown fits."""
    dtype, shape = declared.get("dtype"), port.shape
    word = ONNX_TYPES.get(dtype, dtype) if isinstance(dtype, str) else ""
    if word in ELEMENT_TYPES.values() and port.dtype and word != port.dtype:
        return False
    sizes = _read_shape(declared)
    rank = len(sizes) if sizes is not None else declared.get("rank")
    if shape is None or not is_count(rank):
        return True
    pairs = zip(shape, sizes or shape, strict=False)
    numbers = ((dim, size) for dim, size in pairs if isinstance(dim, int) and isinstance(size, int))
    return rank == len(shape) and all(dim == size for dim, size in numbers)


def describe_tensor(declared: dict[str, Any]) -> str:
    """`float32 [batch, 2, past, 8]`, or `float32 of rank 4`."""
    dtype, sizes = declared.get("dtype"), _read_shape(declared)
    word = plain(dtype) if isinstance(dtype, str) else "a tensor"
    if sizes is None:
        return f"{word} of rank {declared.get('rank')!r:.20}"
    more = ", ..." if len(sizes) > MOST_SHOWN else ""
    return f"{word} [{', '.join(plain(str(size)) for size in sizes[:MOST_SHOWN])}{more}]"


def _read_shape(declared: dict[str, Any]) -> list[int | str] | None:
    """The sizes, numbers and names; None where there are none, or anything else is among them."""
    shape = declared.get("shape")
    known = isinstance(shape, list) and all(is_count(size) or isinstance(size, str) for size in shape)
    return shape if known else None
