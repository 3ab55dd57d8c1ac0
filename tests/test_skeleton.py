"""What `read_skeleton` keeps, what it leaves out, and what it refuses."""

import os
import sys
from pathlib import Path

import hypothesis.strategies as st
import onnx
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, given, settings
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, helper

from kvdoctor.errors import UnreadableError
from kvdoctor.model import skeleton
from kvdoctor.model.skeleton import SMALL_PAYLOAD, payload_left_out, read_skeleton

VALUES = ("float_data", "int32_data", "string_data", "int64_data", "raw_data", "double_data", "uint64_data")
many = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def raw_tensor(name: str, size: int) -> TensorProto:
    return TensorProto(name=name, data_type=TensorProto.UINT8, dims=[size], raw_data=b"\xa5" * size)


def constant(name: str, size: int) -> NodeProto:
    return helper.make_node("Constant", [], [name], value=raw_tensor(name, size))


def model_of(graph: GraphProto) -> ModelProto:
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def deep_model(size: int) -> ModelProto:
    """A model with one payload of `size` bytes at each place where ONNX allows a tensor."""

    def sparse(name: str) -> SparseTensorProto:
        indices = TensorProto(name="i", data_type=TensorProto.INT64, dims=[size], int64_data=[1] * size)
        return SparseTensorProto(values=raw_tensor(name, size), indices=indices)

    branch = helper.make_graph([constant("inner", size)], "branch", [], [], [raw_tensor("branch_weight", size)])
    attributes = [
        AttributeProto(name="t", type=AttributeProto.TENSOR, t=raw_tensor("t", size)),
        AttributeProto(name="ts", type=AttributeProto.TENSORS, tensors=[raw_tensor("ts0", size), raw_tensor("ts1", 3)]),
        AttributeProto(name="g", type=AttributeProto.GRAPH, g=branch),
        AttributeProto(name="gs", type=AttributeProto.GRAPHS, graphs=[branch, branch]),
        AttributeProto(name="s", type=AttributeProto.SPARSE_TENSOR, sparse_tensor=sparse("s")),
        AttributeProto(name="ss", type=AttributeProto.SPARSE_TENSORS, sparse_tensors=[sparse("ss")]),
    ]
    node = NodeProto(op_type="Deep", output=["y"], attribute=attributes)
    model = model_of(helper.make_graph([node], "deep", [], [], [raw_tensor("weight", size)]))
    model.graph.sparse_initializer.append(sparse("sparse"))
    model.functions.add(name="f", domain="local", node=[node], attribute_proto=attributes)
    model.training_info.add(initialization=branch, algorithm=branch)
    return model


def cleared(message: Message) -> int:
    """Clear the large payloads of a parsed message, found by reflection; return how many tensors had one."""
    if isinstance(message, TensorProto):
        payload = TensorProto()
        payload.CopyFrom(message)
        for field, _ in message.ListFields():
            if field.name not in VALUES:
                payload.ClearField(field.name)
        if payload.ByteSize() <= SMALL_PAYLOAD:
            return 0
        for name in VALUES:
            message.ClearField(name)
        return 1
    count = 0
    for field, value in message.ListFields():
        if field.message_type is not None:
            count += sum(cleared(item) for item in ([value] if isinstance(value, Message) else value))
    return count


def tensors_in(message: Message) -> list[TensorProto]:
    if isinstance(message, TensorProto):
        return [message]
    found = []
    for field, value in message.ListFields():
        if field.message_type is not None:
            found += [t for item in ([value] if isinstance(value, Message) else value) for t in tensors_in(item)]
    return found


def written(folder: Path, content: bytes) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(content)
    return path


def refusal(folder: Path, content: bytes) -> UnreadableError:
    with pytest.raises(UnreadableError) as caught:
        read_skeleton(written(folder, content))
    assert caught.value.reason
    assert caught.value.advice
    return caught.value


def varint(number: int) -> bytes:
    encoded = b""
    while number > 0x7F:
        encoded += bytes([number & 0x7F | 0x80])
        number >>= 7
    return encoded + bytes([number])


def framed(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def wire_type(field: object) -> int:
    if field.type in (field.TYPE_DOUBLE, field.TYPE_FIXED64):
        return skeleton.I64
    if field.type in (field.TYPE_FLOAT, field.TYPE_FIXED32):
        return skeleton.I32
    return skeleton.LEN if field.type in (field.TYPE_STRING, field.TYPE_BYTES, field.TYPE_MESSAGE) else skeleton.VARINT


@st.composite
def tensors(draw: st.DrawFn) -> TensorProto:
    tensor = TensorProto(name=draw(st.sampled_from(["w", "", "é" * 700])), data_type=draw(st.integers(0, 26)))
    tensor.dims.extend(draw(st.lists(st.integers(0, 2**40), max_size=3)))
    for _ in range(draw(st.integers(0, 2))):
        count = draw(st.sampled_from([0, 1, 100, 255, 256, 1000, 1021, 1024, 3000]))
        kind = draw(st.sampled_from(VALUES))
        if kind == "raw_data":
            tensor.raw_data = b"\x08" * count
        else:
            getattr(tensor, kind).extend([b"ab" if kind == "string_data" else draw(st.integers(0, 2**30))] * count)
    if draw(st.booleans()):
        tensor.doc_string = "d" * draw(st.sampled_from([1, 2000]))
    return tensor


@st.composite
def graphs(draw: st.DrawFn, depth: int = 2) -> GraphProto:
    graph = GraphProto(name="g", initializer=draw(st.lists(tensors(), max_size=2)))
    for _ in range(draw(st.integers(0, 2))):
        node = graph.node.add(op_type="Op", input=["a"], output=["b"])
        node.doc_string = "n" * draw(st.sampled_from([0, 1500]))
        attribute = node.attribute.add(name="a", ints=[3] * draw(st.sampled_from([0, 2000])))
        attribute.tensors.extend(draw(st.lists(tensors(), max_size=1)))
        if draw(st.booleans()):
            attribute.sparse_tensor.values.CopyFrom(draw(tensors()))
        if depth and draw(st.booleans()):
            attribute.g.CopyFrom(draw(graphs(depth - 1)))
    return graph


@st.composite
def models(draw: st.DrawFn) -> ModelProto:
    model = model_of(draw(graphs()))
    for graph in draw(st.lists(graphs(1), max_size=1)):
        model.functions.add(name="f", node=graph.node)
        model.training_info.add(algorithm=graph)
    model.metadata_props.add(key="k", value="v" * draw(st.sampled_from([0, 3000])))
    return model


# What is kept


@given(model=models())
@many
def test_skeleton_is_the_model_with_its_large_payloads_cleared(model, tmp_path):
    read = read_skeleton(written(tmp_path, model.SerializeToString()))
    expected = ModelProto()
    expected.CopyFrom(model)
    left_out = cleared(expected)
    assert read.model == expected
    assert read.left_out == left_out


def test_payloads_at_every_depth_are_left_out(tmp_path):
    model = deep_model(5000)
    path = written(tmp_path, model.SerializeToString())
    read = read_skeleton(path)
    large = [tensor for tensor in tensors_in(model) if tensor.dims[0] == 5000]
    assert read.left_out == len(large)
    assert read.inline_bytes == 5000 * len(large)
    assert read.bytes_on_disk == path.stat().st_size
    assert len(read.model.SerializeToString()) < 10_000
    assert [payload_left_out(t) for t in tensors_in(read.model)] == [t.dims[0] == 5000 for t in tensors_in(model)]


def test_small_payloads_at_every_depth_are_kept(tmp_path):
    model = deep_model(100)
    read = read_skeleton(written(tmp_path, model.SerializeToString()))
    assert read.model == model
    assert (read.left_out, read.inline_bytes) == (0, 0)
    assert not any(payload_left_out(tensor) for tensor in tensors_in(read.model))


def test_a_small_constant_beside_a_large_tensor_is_kept(tmp_path):
    shape = helper.make_tensor("shape", TensorProto.INT64, [4], [1, 8, -1, 64])
    model = model_of(helper.make_graph([], "g", [], [], [raw_tensor("w", 50_000), shape, raw_tensor("v", 50_000)]))
    read = read_skeleton(written(tmp_path, model.SerializeToString()))
    assert [payload_left_out(tensor) for tensor in read.model.graph.initializer] == [True, False, True]
    assert read.model.graph.initializer[1] == shape


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("packed", [True, False])
def test_each_payload_field_is_left_out(kind, packed, tmp_path):
    field = TensorProto.DESCRIPTOR.fields_by_name[kind]
    wire = wire_type(field)
    value = {skeleton.I32: b"\1" * 4, skeleton.I64: b"\1" * 8, skeleton.VARINT: b"\1"}.get(wire, b"text")
    if packed:
        payload = framed(field.number, value * 2000)
    elif wire == skeleton.LEN:
        payload = framed(field.number, value) * 2000
    else:
        payload = (varint(field.number << 3 | wire) + value) * 2000
    head = TensorProto(name="w", dims=[2000], data_type=1).SerializeToString()
    model = model_of(GraphProto(name="g")).SerializeToString()
    read = read_skeleton(written(tmp_path, model + framed(7, framed(5, head + payload))))
    (tensor,) = read.model.graph.initializer
    assert tensor.SerializeToString() == head
    assert read.inline_bytes == 2000 * len(value)


def test_unknown_fields_are_kept(tmp_path):
    tensor = raw_tensor("w", 5000).SerializeToString() + framed(900, b"tensor")
    content = model_of(GraphProto(name="g")).SerializeToString()
    content += framed(7, framed(5, tensor) + framed(901, b"graph" * 1000)) + framed(902, b"model")
    model = read_skeleton(written(tmp_path, content)).model
    kept = model.SerializeToString()
    assert all(framed(n, text) in kept for n, text in ((900, b"tensor"), (901, b"graph" * 1000), (902, b"model")))


def test_a_tensor_with_external_data_has_nothing_left_out():
    assert not payload_left_out(TensorProto(dims=[4], data_type=1, data_location=TensorProto.EXTERNAL))


def test_a_tensor_without_elements_has_nothing_left_out():
    assert not payload_left_out(TensorProto(dims=[4, 0], data_type=1))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts the bytes a process reads")
def test_payloads_are_not_read(tmp_path):
    tensor = TensorProto(name="w", dims=[10**9], data_type=2).SerializeToString() + varint(9 << 3 | 2) + varint(10**9)
    head = model_of(GraphProto()).SerializeToString() + b"\x3a" + varint(len(tensor) + 10**9 + 6) + b"\x2a"
    path = written(tmp_path, head + varint(len(tensor) + 10**9) + tensor)
    with path.open("ab") as file:
        file.truncate(path.stat().st_size + 10**9)

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = bytes_read()
    assert read_skeleton(path).inline_bytes == 10**9
    assert bytes_read() - before < 10**6


# The field numbers


def test_the_ways_to_tensors_are_those_of_onnx_proto():
    messages, left = {"ModelProto": ModelProto.DESCRIPTOR}, [ModelProto.DESCRIPTOR]
    while left:
        found = {field.message_type for field in left.pop().fields if field.message_type}
        left += [kind for kind in found if kind.name not in messages]
        messages |= {kind.name: kind for kind in found}
    ways: dict[str, dict[int, str]] = {}
    for _ in messages:
        leading = {"TensorProto", *ways}
        for name, message in messages.items():
            fields = {f.number: f.message_type.name for f in message.fields if f.message_type}
            if fields := {number: kind for number, kind in fields.items() if kind in leading}:
                ways[name] = fields
    assert ways == skeleton.NESTED


def test_the_payload_fields_are_those_of_onnx_proto():
    fields = [TensorProto.DESCRIPTOR.fields_by_name[name] for name in VALUES]
    assert {field.number: wire_type(field) for field in fields} == skeleton.PAYLOAD
    names = {field.name for field in TensorProto.DESCRIPTOR.fields if field.name.endswith("_data")}
    assert names - {"external_data"} == set(VALUES)


def test_the_fields_of_a_model_are_those_of_onnx_proto():
    fields = {field.number: wire_type(field) for field in ModelProto.DESCRIPTOR.fields}
    assert fields.items() <= skeleton.MODEL_FIELDS.items()


# What is refused

ZERO_TENSOR = framed(7, framed(5, b"\0" * 2000))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 123456789\n", "file of 123,456,789 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (b"\x20\0\0\0ORTM" + b"\0" * 50, ".ort"),
        (b"PK\x03\x04" + b"\0" * 50, "zip"),
        (b"\x1f\x8b\x08" + b"\0" * 50, "gzip"),
        (b"\x80\x02}q\0.", "pickle"),
        (b"GGUF\x03\0\0\0" + b"\0" * 50, "GGUF"),
        (b'\x40\0\0\0\0\0\0\0{"__metadata__":{}}', "safetensors"),
        (b"\x89HDF\r\n\x1a\n" + b"\0" * 50, "HDF5"),
        (b"\0" * 5000, "file of zeros"),
        (b"\n  <!DOCTYPE html><html>\x01", "HTML page"),
        (b'{"error": "not found"}', "JSON"),
        (b"[\n" + "ü".encode() * 600, "JSON"),
        (b"dear model,\r\n" * 500, "a text file"),
        (b"\x08\x0a\x12\x04onnx", "has no graph"),
        (framed(7, b""), "neither ir_version nor opset_import"),
        (b"\xff" * 50, "not an ONNX model"),
        (b"\x0b\x01\x02", "not an ONNX model"),
        (b"\x08\x0a" + framed(99, b"x" * 50)[:-9], "not an ONNX model"),
        (b"\x08\x0a\x00", "damaged at byte 2: an invalid field number"),
        (b"\x08\x0a\x1b", "damaged at byte 2: an invalid wire type, 3"),
        (b"\x08" + b"\x80" * 20, "damaged at byte 1: a number of more than 10 bytes"),
        (b"\x08\x0a" + ZERO_TENSOR, "damaged at byte 8: an invalid field number"),
        (b"\x08\x0a" + framed(7, b"\x0a" + varint(9000) + b"x" * 3000), "damaged at byte 5: a field runs past the end"),
        (b"\x08\x0a" + framed(7, b"\x0a\x05\x0b"), "damaged"),
        (b"\x08\x0a\x3a" + varint(2**40), "damaged at byte 2"),
        (b"\x08\x0a\x3a\x64" + b"\x0a" * 30, "truncated: the field at byte 2 needs at least 70 bytes more"),
        (b"\x08\x0a\xa2", "truncated: the field at byte 2 needs at least 1 bytes more"),
        (b"\x08\x0a" + framed(7, framed(2, b"\xff\xfe")), "UTF-8"),
    ],
)
def test_refusals_name_the_damage(content, reason, tmp_path):
    assert reason in refusal(tmp_path, content).reason


def test_messages_nested_without_end_are_refused(tmp_path):
    inner = b"x" * 2000
    for _ in range(60):
        inner = framed(1, framed(5, framed(6, inner)))
    assert "nested deeper than 100" in refusal(tmp_path, b"\x08\x0a" + framed(7, inner)).reason


def test_small_messages_nested_without_end_are_refused(tmp_path):
    inner = b""
    for _ in range(60):
        inner = framed(1, framed(5, framed(6, inner)))
    assert "damaged" in refusal(tmp_path, b"\x08\x0a" + framed(7, inner)).reason


def test_a_download_that_stopped_is_refused_with_the_bytes_missing(tmp_path):
    content = deep_model(5000).SerializeToString()
    graph = content.index(b"\x3a")
    cut = content[: graph + 2000]
    with pytest.raises(UnreadableError, match=f"truncated: the field at byte {graph} needs at least"):
        read_skeleton(written(tmp_path, cut))


@pytest.mark.skipif(sys.platform == "win32", reason="a file with a hole takes its full size there")
@pytest.mark.parametrize(
    ("head", "size", "reason"),
    [
        (b"\x08\x0a\x32" + varint(600 * 2**20), 600 * 2**20, "more than 512 MiB besides"),
        (
            b"\x08\x0a\x3a" + varint(2**31) + b"\x2a" + varint(2**31 - 6) + b"\x4a" + varint(2**31 - 12),
            2**31 - 12,
            "2 GiB",
        ),
    ],
)
def test_what_protobuf_cannot_hold_is_refused(head, size, reason, tmp_path):
    path = written(tmp_path, head)
    with path.open("ab") as file:
        file.truncate(len(head) + size)
    with pytest.raises(UnreadableError, match=reason):
        read_skeleton(path)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(UnreadableError, match="folder"):
        read_skeleton(tmp_path)


@pytest.mark.parametrize("name", ["absent.onnx", "nul\0.onnx", "long" * 2000])
def test_a_path_that_leads_nowhere_is_refused(name, tmp_path):
    with pytest.raises(UnreadableError, match="cannot be read"):
        read_skeleton(tmp_path / name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the platform has no FIFOs")
def test_a_fifo_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "model.onnx")
    with pytest.raises(UnreadableError, match="not a regular file"):
        read_skeleton(tmp_path / "model.onnx")


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="this user may read every file")
def test_a_file_without_permission_is_refused(tmp_path):
    path = written(tmp_path, deep_model(1).SerializeToString())
    path.chmod(0)
    with pytest.raises(UnreadableError, match="permission"):
        read_skeleton(path)


# Whatever the bytes, there is an answer


def answers(path: Path) -> None:
    """Read a file; the only error allowed is UnreadableError, and no string comes out as bytes."""
    try:
        model = read_skeleton(path).model
    except UnreadableError:
        return
    assert all(isinstance(node.op_type, str) for node in model.graph.node)
    assert ModelProto.FromString(model.SerializeToString()) == model


@given(content=st.binary(max_size=300) | st.binary(max_size=300).map(lambda tail: b"\x08\x0a\x3a" + tail))
@many
def test_random_bytes_are_answered(content, tmp_path):
    answers(written(tmp_path, content))


@given(content=st.binary(max_size=60), field=st.sampled_from([7, 20, 25]), inner=st.sampled_from([1, 2, 5, 7, 11, 15]))
@many
def test_random_bytes_inside_large_messages_are_answered(content, field, inner, tmp_path):
    filler = framed(15, b"f" * 1500)
    answers(written(tmp_path, b"\x08\x0a" + framed(field, framed(inner, filler + content))))


REAL = deep_model(1200).SerializeToString()


@given(flips=st.lists(st.tuples(st.integers(0, len(REAL) - 1), st.integers(0, 255)), min_size=1, max_size=5))
@many
def test_a_model_with_changed_bytes_is_answered(flips, tmp_path):
    content = bytearray(REAL)
    for place, value in flips:
        content[place] = value
    answers(written(tmp_path, bytes(content)))


HEADERS = [place for place, byte in enumerate(REAL) if byte not in (0xA5, 1)]


@given(places=st.lists(st.sampled_from(HEADERS), min_size=1, max_size=3), bit=st.integers(0, 7))
@many
def test_a_model_with_flipped_bits_in_its_framing_is_answered(places, bit, tmp_path):
    content = bytearray(REAL)
    for place in places:
        content[place] ^= 1 << bit
    answers(written(tmp_path, bytes(content)))


@given(end=st.integers(0, len(REAL)))
@many
def test_a_model_cut_short_is_answered(end, tmp_path):
    answers(written(tmp_path, REAL[:end]))


@given(cuts=st.lists(st.integers(0, len(REAL)), min_size=4, max_size=4), junk=st.binary(max_size=20))
@many
def test_a_model_spliced_with_itself_is_answered(cuts, junk, tmp_path):
    a, b, c, d = cuts
    answers(written(tmp_path, REAL[:a] + REAL[min(b, c) : max(b, c)] + junk + REAL[d:]))


@given(content=st.binary(min_size=1, max_size=40))
@many
def test_what_is_read_is_what_the_parser_of_protobuf_reads(content, tmp_path):
    """Small files have nothing to leave out: a skeleton then equals the model that onnx itself parses."""
    try:
        read = read_skeleton(written(tmp_path, b"\x08\x0a" + framed(7, content)))
    except UnreadableError:
        return
    try:
        assert read.model == onnx.ModelProto.FromString(b"\x08\x0a" + framed(7, content))
    except DecodeError:
        pytest.fail("onnx refuses what was read")
