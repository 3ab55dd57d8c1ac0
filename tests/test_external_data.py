"""What `examine` says of the files that hold a model's weights."""

import os
import re
import warnings
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper

from kvdoctor.model.external_data import BITS, ExternalFile, examine, external_tensors

many = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def links_work(folder: Path) -> bool:
    try:
        (folder / "probe").symlink_to("target")
    except (OSError, NotImplementedError):
        return False
    (folder / "probe").unlink()
    return True


@pytest.fixture
def link(tmp_path):
    if not links_work(tmp_path):
        pytest.skip("this platform or user cannot make symbolic links")

    def make(at: Path, target: str | Path) -> None:
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to(target)

    return make


def external(location: str | None, name: str = "w", size: int = 1000, **entries: object) -> TensorProto:
    """An 8-bit tensor of `size` elements whose data lie at `location`."""
    tensor = TensorProto(name=name, data_type=TensorProto.UINT8, dims=[size], data_location=TensorProto.EXTERNAL)
    for key, value in ({"location": location} | entries).items():
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))
    return tensor


def model_of(*tensors: TensorProto) -> ModelProto:
    return helper.make_model(helper.make_graph([], "g", [], [], list(tensors)))


def problems(folder: Path, *tensors: TensorProto) -> list[tuple[str, str]]:
    """Kind and detail of what is wrong with the tensors of a model in a folder."""
    return [(problem.kind, problem.detail) for problem in examine(model_of(*tensors), folder / "model.onnx")[1]]


def test_external_tensors_are_found_at_every_depth():
    names = iter(range(100))

    def tensor() -> TensorProto:
        return external("w.bin", name=str(next(names)))

    def sparse(holder):
        holder.values.CopyFrom(tensor())
        holder.indices.CopyFrom(tensor())

    def fill(node: NodeProto) -> None:
        node.attribute.append(AttributeProto(t=tensor(), tensors=[tensor(), TensorProto(name="inline")]))
        node.attribute.append(AttributeProto(name="typed", type=AttributeProto.TENSOR, t=tensor()))
        inner = NodeProto(attribute=[AttributeProto(t=tensor())])
        node.attribute.add().g.node.append(inner)
        node.attribute.add().graphs.add().initializer.append(tensor())
        sparse(node.attribute.add().sparse_tensor)
        sparse(node.attribute.add().sparse_tensors.add())

    model = model_of(tensor(), TensorProto(name="inline"))
    sparse(model.graph.sparse_initializer.add())
    fill(model.graph.node.add())
    function = model.functions.add()
    fill(function.node.add())
    function.attribute_proto.add().t.CopyFrom(tensor())
    model.training_info.add().initialization.initializer.append(tensor())
    model.training_info[0].algorithm.initializer.append(tensor())
    assert sorted(int(found.name) for found in external_tensors(model)) == list(range(next(names)))


def test_a_model_without_external_data_has_no_files_and_no_problems(tmp_path):
    assert examine(model_of(TensorProto(name="inline")), tmp_path / "model.onnx") == ((), ())


def test_a_file_that_holds_all_its_tensors_is_healthy(tmp_path):
    (tmp_path / "w.bin").write_bytes(b"\0" * 5000)
    tensors = [external("w.bin", offset=0, length=1000), external("w.bin", offset=4000, length=1000)]
    files, found = examine(model_of(*tensors, external("w.bin")), tmp_path / "model.onnx")
    assert files == (ExternalFile("w.bin", tmp_path / "w.bin", 5000),)
    assert not found


def test_a_file_in_a_folder_below_is_healthy(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "w.bin").write_bytes(b"\0" * 1000)
    assert not problems(tmp_path, external("data/w.bin"), external("./data/../data/w.bin"))


def test_a_model_named_by_a_relative_path_finds_its_data(tmp_path, monkeypatch):
    (tmp_path / "w.bin").write_bytes(b"\0" * 1000)
    monkeypatch.chdir(tmp_path)
    assert not examine(model_of(external("w.bin")), Path("model.onnx"))[1]


# Links


def test_a_snapshot_of_the_hugging_face_cache_is_healthy(tmp_path, link):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0a1b" / "onnx"
    blobs.mkdir()
    (blobs / "aaaa").write_bytes(b"model")
    (blobs / "bbbb").write_bytes(b"\0" * 1000)
    link(snapshot / "model.onnx", "../../../blobs/aaaa")
    link(snapshot / "model.onnx_data", "../../../blobs/bbbb")
    files, found = examine(model_of(external("model.onnx_data")), snapshot / "model.onnx")
    assert files == (ExternalFile("model.onnx_data", snapshot / "model.onnx_data", 1000),)
    assert not found


def test_a_blob_that_was_not_downloaded_is_missing(tmp_path, link):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "aaaa").write_bytes(b"model")
    link(tmp_path / "snapshots" / "model.onnx", "../blobs/aaaa")
    link(tmp_path / "snapshots" / "w.bin", "../blobs/bbbb")
    assert problems(tmp_path / "snapshots", external("w.bin")) == [("missing", "there is no such file; 1 tensor")]


def test_a_link_to_a_file_of_the_same_folder_is_healthy(tmp_path, link):
    (tmp_path / "w.bin").write_bytes(b"\0" * 1000)
    link(tmp_path / "link.bin", "w.bin")
    assert not problems(tmp_path, external("link.bin"))


def test_a_model_folder_that_is_itself_reached_by_a_link_is_healthy(tmp_path, link):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "w.bin").write_bytes(b"\0" * 1000)
    link(tmp_path / "folder", "real")
    assert not problems(tmp_path / "folder", external("w.bin"))


@pytest.mark.parametrize("target", ["../secret", "/etc/hostname", "../absent"])
def test_a_link_out_of_the_folder_escapes(target, tmp_path, link):
    (tmp_path / "secret").write_bytes(b"\0" * 1000)
    link(tmp_path / "model" / "w.bin", target)
    files, found = examine(model_of(external("w.bin")), tmp_path / "model" / "model.onnx")
    assert [problem.kind for problem in found] == ["escapes"]
    assert files[0].bytes is None


def test_a_linked_folder_on_the_way_out_escapes(tmp_path, link):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "w.bin").write_bytes(b"\0" * 1000)
    link(tmp_path / "model" / "sub", "../out")
    assert [kind for kind, _ in problems(tmp_path / "model", external("sub/w.bin"))] == ["escapes"]


def test_a_link_to_itself_is_missing(tmp_path, link):
    link(tmp_path / "w.bin", "w.bin")
    assert [kind for kind, _ in problems(tmp_path, external("w.bin"))] == ["missing"]


# Locations that lead out by their text


@pytest.mark.parametrize(
    "location",
    [
        "/etc/passwd",
        "//server/share/w.bin",
        "../w.bin",
        "data/../../w.bin",
        "./../w.bin",
        "..",
        "C:\\w.bin",
        "C:w.bin",
        "c:/w.bin",
        "\\\\server\\share\\w.bin",
        "\\w.bin",
        "..\\w.bin",
        "data\\..\\..\\w.bin",
        "data/..\\../w.bin",
    ],
)
def test_a_location_that_leads_out_escapes(location, tmp_path):
    (tmp_path / "w.bin").write_bytes(b"\0" * 1000)
    (tmp_path / "model" / "data").mkdir(parents=True)
    files, found = examine(model_of(external(location)), tmp_path / "model" / "model.onnx")
    assert [problem.kind for problem in found] == ["escapes"]
    assert [file.bytes for file in files] == [None]


def test_two_dots_inside_a_name_are_healthy(tmp_path):
    (tmp_path / "..w..bin").write_bytes(b"\0" * 1000)
    assert not problems(tmp_path, external("..w..bin"))


# Data that are not there


@pytest.mark.parametrize("location", [None, ""])
def test_a_tensor_without_a_location_is_missing(location, tmp_path):
    files, found = examine(model_of(external(location)), tmp_path / "model.onnx")
    assert not files
    assert [problem.kind for problem in found] == ["missing"]
    assert "names no file" in found[0].detail


@pytest.mark.parametrize("location", ["absent.bin", "no/such/folder/w.bin", "nul\0byte", "long" * 5000, "a/" * 5000])
def test_a_location_without_a_file_is_missing(location, tmp_path):
    assert [kind for kind, _ in problems(tmp_path, external(location))] == ["missing"]


def test_a_location_that_is_not_utf8_is_missing(tmp_path):
    content = model_of(external("abcdef")).SerializeToString().replace(b"abcdef", b"ab\xff\xfeef")
    files, found = examine(ModelProto.FromString(content), tmp_path / "model.onnx")
    assert [type(file.location) for file in files] == [str]
    assert [problem.kind for problem in found] == ["missing"]


def test_an_empty_file_is_missing(tmp_path):
    (tmp_path / "w.bin").touch()
    assert problems(tmp_path, external("w.bin")) == [("missing", "the file is empty; 1 tensor")]


def test_an_empty_file_for_tensors_without_elements_is_healthy(tmp_path):
    (tmp_path / "w.bin").touch()
    assert not problems(tmp_path, external("w.bin", size=0, offset=0, length=0))


def test_a_folder_in_the_place_of_data_is_missing(tmp_path):
    (tmp_path / "w.bin").mkdir()
    assert problems(tmp_path, external("w.bin")) == [("missing", "there is a folder in its place; 1 tensor")]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the platform has no FIFOs")
def test_a_fifo_in_the_place_of_data_is_missing(tmp_path):
    os.mkfifo(tmp_path / "w.bin")
    assert "not a regular file" in problems(tmp_path, external("w.bin"))[0][1]


@pytest.mark.parametrize("size", [1, 123_456_789, 9_999_999_999])
def test_a_git_lfs_pointer_in_the_place_of_data_is_missing(size, tmp_path):
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0a' * 32}\nsize {size}\n"
    (tmp_path / "w.bin").write_bytes(pointer.encode())
    ((kind, detail),) = problems(tmp_path, external("w.bin"))
    assert kind == "missing"
    assert "git lfs pull" in detail


# Data that cannot be what the model promises


@pytest.mark.parametrize(
    ("entries", "detail"),
    [
        ({"offset": 4001, "length": 1000}, "data end at byte 5,001 of a file of 5,000 bytes"),
        ({"offset": 4001}, "data end at byte 5,001"),
        ({"offset": 10**18}, "data end at byte"),
        ({"length": 999}, "length is 999 bytes, dims and type need 1,000"),
        ({"offset": -1}, "offset is negative"),
        ({"length": "-1000"}, "length is negative"),
        ({"offset": "0x10"}, "offset is not a number"),
        ({"offset": ""}, "offset is not a number"),
        ({"offset": "٣"}, "offset is not a number"),
        ({"length": "9" * 5000}, "length is larger than any file"),
    ],
)
def test_numbers_that_cannot_be_right_are_truncated(entries, detail, tmp_path):
    (tmp_path / "w.bin").write_bytes(b"\0" * 5000)
    ((kind, said),) = problems(tmp_path, external("w.bin", **entries))
    assert kind == "truncated"
    assert detail in said


def test_a_length_of_zero_is_read_as_not_given(tmp_path):
    (tmp_path / "w.bin").write_bytes(b"\0" * 1000)
    assert not problems(tmp_path, external("w.bin", length=0))


@pytest.mark.parametrize(
    ("data_type", "elements", "size"),
    [("FLOAT", 3, 12), ("BFLOAT16", 3, 6), ("BOOL", 3, 3), ("INT64", 3, 24), ("COMPLEX128", 3, 48), ("UINT4", 3, 2)],
)
def test_the_length_follows_from_dims_and_type(data_type, elements, size, tmp_path):
    (tmp_path / "w.bin").write_bytes(b"\0" * 100)
    tensor = external("w.bin", size=elements, length=size)
    tensor.data_type = TensorProto.DataType.Value(data_type)
    assert not problems(tmp_path, tensor)
    tensor.external_data[1].value = str(size + 1)
    assert "length disagrees with dims" in problems(tmp_path, tensor)[0][1]


def test_the_sizes_of_types_are_those_of_onnx():
    for value in TensorProto.DataType.DESCRIPTOR.values:
        if value.name in ("UNDEFINED", "STRING"):
            assert value.number not in BITS
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bits = helper.tensor_dtype_to_np_dtype(value.number).itemsize * 8
        # A type that numpy lacks has a stand-in, which may be wider.
        lacking = "BFLOAT" in value.name or re.search(r"[A-Z][2468](E\d|$)", value.name)
        assert BITS[value.number] == bits or (lacking and BITS[value.number] < bits), value.name


@pytest.mark.parametrize("dims", [[-1], [2**62] * 1000, [2**40, 2**40, 0]])
def test_dims_beyond_reason_do_not_matter_where_length_says_enough(dims, tmp_path):
    (tmp_path / "w.bin").write_bytes(b"\0" * 1000)
    tensor = external("w.bin")
    tensor.dims[:] = dims
    assert not problems(tmp_path, tensor)


# How problems are told


def test_one_problem_per_location_and_kind_names_the_first_tensors(tmp_path):
    tensors = [external("absent.bin", name=f"w{i}") for i in range(300)] + [external("other.bin", name="v")]
    found = examine(model_of(*tensors), tmp_path / "model.onnx")[1]
    assert [(p.location, p.tensor, p.detail) for p in found] == [
        ("absent.bin", "w0, w1, w2 and 297 more", "there is no such file; 300 tensors"),
        ("other.bin", "v", "there is no such file; 1 tensor"),
    ]


def test_only_the_tensors_that_do_not_fit_are_named(tmp_path):
    (tmp_path / "w.bin").write_bytes(b"\0" * 2500)
    tensors = [external("w.bin", name=f"w{i}", offset=1000 * i, length=1000) for i in range(5)]
    (problem,) = examine(model_of(*tensors, external("w.bin", name="v", offset="x")), tmp_path / "model.onnx")[1]
    assert problem.tensor == "w2, w3, w4 and 1 more"
    assert "data end beyond the file (3), offset is not a number (1)" in problem.detail


@given(
    location=st.text(max_size=30), offset=st.text(max_size=10), length=st.integers(), dims=st.lists(st.integers(-5, 9))
)
@many
def test_whatever_the_model_says_there_is_an_answer(location, offset, length, dims, tmp_path):
    tensor = external(location, offset=offset, length=length)
    tensor.dims[:] = dims
    for problem in examine(model_of(tensor), tmp_path / "model.onnx")[1]:
        assert problem.kind in ("missing", "truncated", "escapes")


@pytest.mark.parametrize(
    ("location", "entries", "wrong", "words"),
    [
        ("/dev/zero", {}, "place", "the location is absolute"),
        ("../w.bin", {}, "place", "by `..`"),
        (None, {}, "entry", "no location"),
        ("", {}, "entry", "no location, or an empty one"),
        ("a\0b", {}, "entry", "NUL character"),
        ("n" * 3000, {}, "entry", "too long"),
        ("w.bin", {"offset": "abc"}, "entry", "offset is not a number"),
        ("w.bin", {"offset": -5}, "entry", "offset is negative"),
        ("w.bin", {"length": 10**40}, "entry", "length is larger than any file"),
        ("w.bin", {"length": 4}, "entry", "length disagrees with dims"),
        ("w.bin", {"offset": 600}, "file", "data end beyond the file"),
        ("missing.bin", {}, "file", "no such file"),
    ],
)
def test_what_must_be_changed_is_told(location, entries, wrong, words, tmp_path):
    (tmp_path / "w.bin").write_bytes(b"\0" * 1000)
    (problem,) = examine(model_of(external(location, **entries)), tmp_path / "model.onnx")[1]
    assert problem.wrong == wrong
    assert words in problem.detail
