"""Makes a merged decoder of 1.8 GB that is quick to run: `python benchmarks/ballast.py inside|beside FOLDER`.

The merged T5 of the fixtures, whose cached branch returns an emptied cache, and a table as wide as its embeddings with
millions of rows: looked up for each token, and added times zero. Its bytes lie in the file, or beside it.
"""

import sys
from pathlib import Path

import onnx
from onnx import StringStringEntryProto, TensorProto, helper

FIXTURE = Path(__file__).parent.parent / "fixtures" / "exports" / "t5"
NAME, DATA = "decoder_model_merged.onnx", "decoder_model_merged.onnx_data"
TARGET = 1_800_000_000
"""Bytes of the table."""
PORTION = 1 << 24
TABLE = "ballast"
GRAPH_FIELD, INITIALIZER_FIELD, RAW_DATA_FIELD, LEN = 7, 5, 9, 2


def weighed_down() -> tuple[onnx.ModelProto, TensorProto]:
    """The fixture with a table of its own in the graph around its branches, and that table, still without values."""
    model = onnx.load(FIXTURE / NAME)
    branches = next(node for node in model.graph.node if node.op_type == "If")
    width = 1024
    table = TensorProto(name=TABLE, data_type=TensorProto.FLOAT, dims=[TARGET // 4 // width, width])
    for branch in branches.attribute:
        logits = branch.g.output[0].name
        maker = next(node for node in branch.g.node if logits in node.output)
        maker.output[list(maker.output).index(logits)] = "light"
        zero = helper.make_tensor("nought", TensorProto.FLOAT, [1], [0.0])
        axes = helper.make_tensor("last", TensorProto.INT64, [1], [2])
        branch.g.initializer.extend([zero, axes])
        branch.g.node.extend(
            [
                helper.make_node("Gather", [TABLE, "input_ids"], ["heavy_rows"], name="heavy_rows"),
                helper.make_node("ReduceSum", ["heavy_rows", "last"], ["heavy_sum"], name="heavy_sum", keepdims=1),
                helper.make_node("Mul", ["heavy_sum", "nought"], ["weightless"], name="weightless"),
                helper.make_node("Add", ["light", "weightless"], [logits], name="together"),
            ]
        )
    return model, table


def beside(folder: Path) -> None:
    """The table as external data."""
    model, table = weighed_down()
    table.data_location = TensorProto.EXTERNAL
    for key, value in {"location": DATA, "offset": "0", "length": str(_size(table))}.items():
        table.external_data.append(StringStringEntryProto(key=key, value=value))
    model.graph.initializer.append(table)
    (folder / NAME).write_bytes(model.SerializeToString())
    _pour(folder / DATA, b"", _size(table))


def inside(folder: Path) -> None:
    """The table in the file itself: what is appended to a message is added to it (protobuf, last field wins)."""
    model, table = weighed_down()
    head = table.SerializeToString() + _tag(RAW_DATA_FIELD) + _varint(_size(table))
    head = _tag(INITIALIZER_FIELD) + _varint(len(head) + _size(table)) + head
    head = _tag(GRAPH_FIELD) + _varint(len(head) + _size(table)) + head
    _pour(folder / NAME, model.SerializeToString() + head, _size(table))


def _pour(file: Path, head: bytes, size: int) -> None:
    """Write a head and then a pattern that no file system can leave out."""
    with file.open("wb") as out:
        out.write(head)
        part = bytes(range(1, 61)) * (PORTION // 60)
        while size:
            out.write(part[: min(len(part), size)])
            size -= min(len(part), size)


def _size(table: TensorProto) -> int:
    return 4 * table.dims[0] * table.dims[1]


def _tag(number: int) -> bytes:
    return _varint(number << 3 | LEN)


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*found, number))


if __name__ == "__main__":
    target = Path(sys.argv[2])
    for name in ("encoder_model.onnx", "config.json"):
        (target / name).write_bytes((FIXTURE / name).read_bytes())
    {"inside": inside, "beside": beside}[sys.argv[1]](target)
