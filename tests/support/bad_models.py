"""Makes the inputs of the bad-input tests, and runs the real command line on them."""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from support.command_line import Done, run

EXPORTS = Path(__file__).parents[2] / "fixtures" / "exports"
GPT2, MARIAN = EXPORTS / "gpt2", EXPORTS / "marian-4.57.6"

# What a terminal or a reader could take for a command: control characters (C0, DEL, C1), and those that turn the
# direction of text, end a line or are not seen.
UNSAFE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\u061c\ufeff\ufff9-\ufffb]")

Nodes = list[onnx.NodeProto]


@dataclass(frozen=True)
class Result:
    """What one call of the command line gave."""

    code: int
    out: str
    err: str

    @cached_property
    def report(self) -> dict[str, Any]:
        """The JSON document on standard output, which must hold nothing else."""
        document = json.loads(self.out, parse_constant=_refuse)
        assert document["schema"] in ("kvdoctor/report/1", "kvdoctor/gate/1")
        return document

    @property
    def findings(self) -> dict[str, dict[str, Any]]:
        """The findings by name; each must say what was seen and what to do next, and stand there once."""
        faults = [(f["name"], f["stack"], f["where"], f["subject"]) for f in self.report["findings"]]
        assert all(faults.count(fault) == 1 for fault in faults), faults
        for finding in self.report["findings"]:
            assert finding["observed"], finding
            assert finding["repair"]["text"], finding
        return {finding["name"]: finding for finding in self.report["findings"]}

    def outcome(self, experiment: str) -> str:
        """How an experiment ended."""
        return next(run["outcome"] for run in self.report["runs"] if run["experiment"] == experiment)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def call(*arguments: str | Path, how: Callable[..., Done] = run, **more: Any) -> Result:
    """Run kvdoctor, and hold its answer against what is promised for every call."""
    done = how(*arguments, **more)
    result = Result(done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in result.out + result.err, result.err
    assert result.code in (0, 1, 2, 3), result
    assert not UNSAFE.search(result.out), repr(UNSAFE.search(result.out))
    assert not UNSAFE.search(result.err), repr(UNSAFE.search(result.err))
    if result.code == 2:
        assert not result.out, "wrong usage says so on standard error, and nothing else"
        assert result.err.strip()
    return result


def as_json(command: str, *arguments: str | Path, **more: Any) -> Result:
    """Run a command with `--format json`; unless the call was refused, the document must be whole."""
    result = call(command, *arguments, "--format", "json", **more)
    if result.code != 2:
        assert result.report["tool"]["name"] == "kvdoctor" if command != "gate" else result.report["reports"]
    return result


def snapshot(folder: Path) -> dict[str, tuple[str, int]]:
    """Every path below a folder with its content (for a link: where it leads) and the time it was changed."""
    seen = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        if path.is_symlink():
            content = f"link to {path.readlink()}"
        else:
            content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        seen[path.relative_to(folder).as_posix()] = (content, status.st_mtime_ns)
    return seen


@contextlib.contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Nothing below a folder is changed, made or taken away."""
    before = snapshot(folder)
    yield
    assert snapshot(folder) == before


def copied(source: Path, folder: Path, *names: str) -> Path:
    """Copy an export, or some files of it, into a folder that is made."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if not names or path.name in names:
            shutil.copyfile(path, folder / path.name)
    return folder


def saved(model: onnx.ModelProto | bytes, folder: Path, name: str = "model.onnx") -> Path:
    """Write a model into a folder, and give the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    return folder


# --- files that are no model, or no longer ---


@cache
def gpt2_bytes() -> bytes:
    return (GPT2 / "model.onnx").read_bytes()


LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 222444\n"
)


def ort_bytes(folder: Path) -> bytes:
    """The model in ONNX Runtime's own format, made by the runtime itself."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "made.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    ort.InferenceSession(GPT2 / "model.onnx", options, providers=["CPUExecutionProvider"])
    return (folder / "made.ort").read_bytes()


# --- external data ---


def with_external_data(folder: Path) -> Path:
    """A copy of gpt2 with all weights in `weights.bin` beside the graph."""
    folder.mkdir(parents=True)
    model = onnx.load(GPT2 / "model.onnx")
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    shutil.copyfile(GPT2 / "config.json", folder / "config.json")
    return folder


def relocated(folder: Path, location: str) -> None:
    """Let the graph in a folder name another place for its weights."""
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    saved(model, folder)


def hub_cache(source: Path, root: Path) -> Path:
    """The snapshot of a hub cache: each file of an export is a link into `blobs`."""
    folder = root / "models--org--name" / "snapshots" / "0123abcd"
    blobs = root / "models--org--name" / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    for path in source.iterdir():
        blob = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copyfile(path, blobs / blob)
        (folder / path.name).symlink_to(Path("..", "..", "blobs", blob))
    return folder


# --- models ---

VOCABULARY, WIDTH = 16, 4
CACHE_SHAPE = ["batch_size", 1, "past_sequence_length", WIDTH]
GROWN_SHAPE = ["batch_size", 1, "past_sequence_length + sequence_length", WIDTH]


def decoder(*extra: onnx.NodeProto, kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """The smallest healthy decoder with a cache: logits are a map of the sum of all embeddings so far.

    `extra` nodes may use `past_length` (int64[1]) and must make `nudge`, a scalar that is added to the logits.
    """
    rng = np.random.default_rng(0)
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    weights = {
        "embedding.key": rng.standard_normal((VOCABULARY, WIDTH)).astype(dtype),
        "embedding.value": rng.standard_normal((VOCABULARY, WIDTH)).astype(dtype),
        "head": rng.standard_normal((WIDTH, VOCABULARY)).astype(dtype),
        "one": np.array([1], np.int64),
        "two": np.array(2, np.int64),
        "three": np.array([3], np.int64),
        "far": np.array([2**62], np.int64),
        "zero": np.array(0, dtype),
    }
    node = helper.make_node
    nodes = [node("Shape", ["past_key_values.0.key"], ["past_length"], name="past_length", start=2, end=3)]
    for part in ("key", "value"):
        nodes += [
            node("Gather", [f"embedding.{part}", "input_ids"], [f"{part}.embedded"], name=f"{part}.embed"),
            node("Unsqueeze", [f"{part}.embedded", "one"], [f"{part}.new"], name=f"{part}.unsqueeze"),
            node(
                "Concat",
                [f"past_key_values.0.{part}", f"{part}.new"],
                [f"present.0.{part}"],
                name=f"{part}.append",
                axis=2,
            ),
            node("CumSum", [f"present.0.{part}", "two"], [f"{part}.sums"], name=f"{part}.sum"),
            node("Slice", [f"{part}.sums", "past_length", "far", "two.axes"], [f"{part}.mine"], name=f"{part}.slice"),
        ]
    weights["two.axes"] = np.array([2], np.int64)
    nodes += [
        node("Add", ["key.mine", "value.mine"], ["both"], name="both"),
        node("Squeeze", ["both", "one"], ["hidden"], name="hidden"),
        node("MatMul", ["hidden", "head"], ["raw_logits"], name="head"),
        *(extra or (node("Identity", ["zero"], ["nudge"], name="nudge"),)),
        node("Add", ["raw_logits", "nudge"], ["logits"], name="logits"),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "decoder",
        [
            value("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"]),
            value("past_key_values.0.key", kind, CACHE_SHAPE),
            value("past_key_values.0.value", kind, CACHE_SHAPE),
        ],
        [
            value("logits", kind, ["batch_size", "sequence_length", VOCABULARY]),
            value("present.0.key", kind, GROWN_SHAPE),
            value("present.0.value", kind, GROWN_SHAPE),
        ],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return _model(graph)


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="tests")


# Nodes that do their harm as soon as the past holds more than three tokens: from decode step 2 on, but neither in the
# reference run nor in the first steps. Each makes `nudge`, which is 0 before.


def dividing_out_of_range() -> Nodes:
    """The lowest int64 by -1: the quotient does not fit, which x86 answers with a signal."""
    node = helper.make_node
    lowest, minus = (numpy_helper.from_array(np.array([number], np.int64)) for number in (-(2**63), -1))
    return [
        node("Greater", ["past_length", "three"], ["long"], name="long"),
        node("Constant", [], ["lowest"], name="lowest", value=lowest),
        node("Constant", [], ["minus"], name="minus", value=minus),
        node("Where", ["long", "lowest", "one"], ["dividend"], name="dividend"),
        node("Where", ["long", "minus", "one"], ["divisor"], name="divisor"),
        node("Div", ["dividend", "divisor"], ["quotient"], name="the_division"),
        *_as_nudge("quotient"),
    ]


def looping_for_ever() -> Nodes:
    node = helper.make_node
    scalar = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            node("Identity", ["condition"], ["condition_out"], name="go_on"),
            node("Add", ["count", "one"], ["count_out"], name="count"),
        ],
        "body",
        [
            scalar("iteration", TensorProto.INT64, []),
            scalar("condition", TensorProto.BOOL, []),
            scalar("count", TensorProto.INT64, [1]),
        ],
        [scalar("condition_out", TensorProto.BOOL, []), scalar("count_out", TensorProto.INT64, [1])],
    )
    return [
        node("Greater", ["past_length", "three"], ["long"], name="long"),
        node("Where", ["long", "far", "one"], ["trips"], name="trips"),
        node("Sub", ["one", "one"], ["start"], name="start"),
        node("Loop", ["trips", "", "start"], ["counted"], name="the_loop", body=body),
        *_as_nudge("counted"),
    ]


def allocating(elements: int = 2**30) -> Nodes:
    """Four bytes an element."""
    node = helper.make_node
    many = numpy_helper.from_array(np.array([elements], np.int64))
    ones = numpy_helper.from_array(np.array([1], np.float32))
    return [
        node("Constant", [], ["many"], name="many", value=many),
        node("Greater", ["past_length", "three"], ["long"], name="long"),
        node("Where", ["long", "many", "one"], ["size"], name="size"),
        node("ConstantOfShape", ["size"], ["filled"], name="the_allocation", value=ones),
        node("ReduceMax", ["filled"], ["highest"], name="highest", keepdims=0),
        *_as_nudge("highest"),
    ]


def opening_for_minutes(elements: int = 1 << 24, nodes: int = 600) -> Nodes:
    """Constants that the runtime computes while it opens the file, a tenth of a second each; in the end they are 0."""
    node = helper.make_node
    ones = numpy_helper.from_array(np.array([1], np.float32))
    return [
        node("Constant", [], ["many"], name="many", value=numpy_helper.from_array(np.array([elements], np.int64))),
        node("ConstantOfShape", ["many"], ["folded.0"], name="filled", value=ones),
        *(node("Sin", [f"folded.{n}"], [f"folded.{n + 1}"], name=f"fold.{n}") for n in range(nodes)),
        node("ReduceMax", [f"folded.{nodes}"], ["highest"], name="highest", keepdims=0),
        node("Mul", ["highest", "zero"], ["nudge"], name="nudge"),
    ]


def _as_nudge(name: str) -> Nodes:
    node = helper.make_node
    one = numpy_helper.from_array(np.array(1, np.float32))
    return [
        node("Cast", [name], ["as_float"], name="as_float", to=TensorProto.FLOAT),
        node("Constant", [], ["float_one"], name="float_one", value=one),
        node("Sub", ["as_float", "float_one"], ["nudge"], name="nudge"),
    ]


def classifier() -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("GlobalAveragePool", ["pixel_values"], ["pooled"], name="pool"),
        helper.make_node("Flatten", ["pooled"], ["scores"], name="flatten"),
    ]
    inputs = [value("pixel_values", TensorProto.FLOAT, ["batch", 3, 8, 8])]
    return _model(helper.make_graph(nodes, "classifier", inputs, [value("scores", TensorProto.FLOAT, ["batch", 3])]))


def decoder_without_cache() -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    table = numpy_helper.from_array(np.ones((VOCABULARY, VOCABULARY), np.float32), "table")
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["logits"], name="gather")]
    inputs = [value("input_ids", TensorProto.INT64, ["batch", "sequence"])]
    outputs = [value("logits", TensorProto.FLOAT, ["batch", "sequence", VOCABULARY])]
    return _model(helper.make_graph(nodes, "no cache", inputs, outputs, [table]))


def renamed(model: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    """Give values and nodes of the main graph other names."""
    graph = model.graph
    for thing in (*graph.input, *graph.output, *graph.initializer, *graph.node):
        thing.name = names.get(thing.name, thing.name)
    for node in graph.node:
        for side in (node.input, node.output):
            side[:] = [names.get(name, name) for name in side]
    return model


def with_input(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """Add an input that a node takes, and that plays no part."""
    model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]))
    model.graph.node.append(helper.make_node("Identity", [name], ["taken/for/nothing"]))
    return model


def with_failing_node(name: str) -> onnx.ModelProto:
    """A decoder in which a node of that name fails as soon as the past holds more than three tokens."""
    node = helper.make_node
    return decoder(
        node("Constant", [], ["table"], name="table", value=numpy_helper.from_array(np.zeros(4, np.float32))),
        node("Gather", ["table", "past_length"], ["nudge"], name=name),
    )


def nested(depth: int) -> bytes:
    """A decoder that adds the result of `depth` Ifs, one within the other. In bytes: protobuf itself makes 32."""
    node, out = helper.make_node, helper.make_tensor_value_info
    always = numpy_helper.from_array(np.array(True))
    model = decoder(node("Constant", [], ["always"], name="always", value=always), node("If", ["always"], ["nudge"]))
    inner = node("Identity", ["zero"], ["result"], name="innermost").SerializeToString()
    for level in range(depth):
        head = onnx.GraphProto(name=f"branch.{level}", output=[out("result", TensorProto.FLOAT, [])])
        body = _field(1, inner) + head.SerializeToString()
        branches = b"".join(
            _field(5, onnx.AttributeProto(name=name, type="GRAPH").SerializeToString() + _field(6, body))
            for name in (["then_branch", "else_branch"] if level == 0 else ["then_branch"])
        )
        if level > 0:
            plain = node("Identity", ["zero"], ["result"], name=f"else.{level}")
            other = onnx.GraphProto(name=f"else.{level}", node=[plain], output=[out("result", TensorProto.FLOAT, [])])
            branches += _field(5, onnx.AttributeProto(name="else_branch", type="GRAPH", g=other).SerializeToString())
        name = "nudge" if level == depth - 1 else "result"
        inner = node("If", ["always"], [name], name=f"if.{level}").SerializeToString() + branches
    *before, _, last = list(model.graph.node)
    del model.graph.node[:]
    nodes = [*(each.SerializeToString() for each in before), inner, last.SerializeToString()]
    graph = b"".join(_field(1, each) for each in nodes) + model.graph.SerializeToString()
    model.ClearField("graph")
    return model.SerializeToString() + _field(7, graph)


def _field(number: int, content: bytes) -> bytes:
    """One field of a protobuf message that holds bytes."""
    size, length = len(content), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes((number << 3 | 2, *length, size)) + content


def changed(change: Callable[[onnx.GraphProto], object]) -> onnx.ModelProto:
    """The small decoder after a change to its graph."""
    model = decoder()
    change(model.graph)
    return model


def is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def files_up_to(most: int) -> dict[str, Any]:
    """How to start a process of which no file grows beyond so many bytes; its bytecode must not be cut off either."""
    import resource

    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (most, most))
    return {"preexec_fn": limit, "env": {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}}
