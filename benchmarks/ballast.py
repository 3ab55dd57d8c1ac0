"""Makes a large merged decoder that runs quickly: `python benchmarks/ballast.py inside|beside FOLDER BYTES`.

The merged T5 of the fixtures, whose cached branch returns an emptied cache, with an additional table of so many bytes:
one row is looked up for each token, multiplied by zero and added. The table is in the file or beside it.
"""

import sys
from pathlib import Path

import onnx
from onnx import StringStringEntryProto, TensorProto, helper

FIXTURE = Path(__file__).parent.parent / "fixtures" / "exports" / "t5"
NAME, DATA = "decoder_model_merged.onnx", "decoder_model_merged.onnx_data"
PORTION = 1 << 24
TABLE = "ballast"
GRAPH_FIELD, INITIALIZER_FIELD, RAW_DATA_FIELD, LEN = 7, 5, 9, 2


def add_table(size: int) -> tuple[onnx.ModelProto, TensorProto]:
    """The fixture with a table in the graph around its branches, and that table, still without values."""
    model = onnx.load(FIXTURE / NAME)
    branches = next(node for node in model.graph.node if node.op_type == "If")
    width = 1024
    table = TensorProto(name=TABLE, data_type=TensorProto.FLOAT, dims=[size // 4 // width, width])
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


def write_beside(folder: Path, size: int) -> None:
    """Write the table as external data."""
    model, table = add_table(size)
    table.data_location = TensorProto.EXTERNAL
    for key, value in {"location": DATA, "offset": "0", "length": str(_size(table))}.items():
        table.external_data.append(StringStringEntryProto(key=key, value=value))
    model.graph.initializer.append(table)
    (folder / NAME).write_bytes(model.SerializeToString())
    _pour(folder / DATA, b"", _size(table))


def write_inside(folder: Path, size: int) -> None:
    """Write the table into the file: fields appended to a protobuf message are merged into it."""
    model, table = add_table(size)
    head = table.SerializeToString() + _tag(RAW_DATA_FIELD) + _varint(_size(table))
    head = _tag(INITIALIZER_FIELD) + _varint(len(head) + _size(table)) + head
    head = _tag(GRAPH_FIELD) + _varint(len(head) + _size(table)) + head
    _pour(folder / NAME, model.SerializeToString() + head, _size(table))


def _pour(file: Path, head: bytes, size: int) -> None:
    """Write a head, then a pattern without zeros, so that no file system stores it as a hole."""
    with file.open("wb") as out:
        out.write(head)
        part = bytes(range(1, 61)) * (PORTION // 60)
        while size:
            out.write(part[: min(len(part), size)])
            size -= min(len(part), size)


def _size(table: TensorProto) -> int:
    return 4 * int(table.dims[0]) * int(table.dims[1])


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
    {"inside": write_inside, "beside": write_beside}[sys.argv[1]](target, int(sys.argv[3]))
