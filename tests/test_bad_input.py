"""Whatever lies at the path: the right exit code, a finding or a message that helps, and nothing is harmed."""

import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support import bad_models as bad
from support.bad_models import EXPORTS, GPT2, MARIAN, UNSAFE, as_json, call, copied, saved, snapshot, unchanged
from support.command_line import run, run_process
from support.sampling import sampled
from support.text_fixtures import load_all

from kvdoctor import inspect
from kvdoctor.decode.samples import read_arrays
from kvdoctor.errors import UsageError

COMMANDS = ("inspect", "step-test", "gate")
RUNS = ("step-test", "gate")
LIMITS = ("--timeout", "120", "--max-memory", "3000")

posix = pytest.mark.skipif(os.name != "posix", reason="needs a POSIX system")
GATE = pytest.param("gate", marks=pytest.mark.slow)
"""A step-test with another frame: what holds for that holds for it, and is looked at when there is time."""
every_command = pytest.mark.parametrize("command", [GATE if command == "gate" else command for command in COMMANDS])


def only_report(command: str, path: str | Path, *more: str, **how: object) -> bad.Result:
    """Run a command on one path, as JSON; for `gate` the report inside its document takes its place."""
    result = as_json(command, path, *more, **how)
    if command != "gate" or result.code == 2:
        return result
    (report,) = result.report["reports"]
    return bad.Result(result.code, json.dumps(report), result.err)


# --- the path ---


@every_command
def test_a_path_where_nothing_is(command: str, tmp_path: Path) -> None:
    result = call(command, tmp_path / "nothing")
    assert result.code == 2
    assert "does not exist" in result.err
    assert "nothing" in result.err


@every_command
def test_standard_input_is_refused(command: str) -> None:
    result = call(command, "-")
    assert result.code == 2
    assert "external data" in result.err


def test_re_export_of_nothing(tmp_path: Path) -> None:
    result = call("re-export", tmp_path / "nothing", "-o", tmp_path / "out")
    assert result.code == 2
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize("arguments", [(), ("inspect",), ("no-such-command",), ("inspect", str(GPT2), "--no-such")])
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2 or (not arguments and done.returncode == 0)  # the help, by the version of click
    assert "kvdoctor" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "option",
    [
        ("--output", "json"),
        ("--output", "nonsense=file"),
        ("--output", "json=no/such/folder/report.json"),
        ("--select", "KV999"),
        ("--ignore", "no-such-check"),
        ("--format", "nonsense"),
    ],
    ids=" ".join,
)
def test_a_wrong_option_is_refused_before_anything_is_printed(option: tuple[str, str], tmp_path: Path) -> None:
    result = call("inspect", GPT2, *option, cwd=tmp_path)
    assert result.code == 2
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize("option", [("--timeout", "nan"), ("--timeout", "0"), ("--max-memory", "0"), ("--seed", "-1")])
def test_a_limit_that_limits_nothing_is_refused(option: tuple[str, str]) -> None:
    assert call("step-test", GPT2, *option).code == 2


@every_command
def test_an_empty_folder(command: str, tmp_path: Path) -> None:
    result = only_report(command, tmp_path)
    assert result.code == 3
    assert "no .onnx file" in result.report["not_checked"][0]["reason"]


@every_command
def test_a_folder_that_holds_only_an_encoder(command: str, tmp_path: Path) -> None:
    folder = copied(MARIAN, tmp_path / "model", "encoder_model.onnx", "config.json")
    result = only_report(command, folder)
    assert result.code == 3
    assert result.report["not_checked"][0]["reason"].startswith("this model is an encoder and has no KV cache")
    assert "decoder" in result.report["not_checked"][0]["reason"]


@every_command
def test_a_classifier(command: str, tmp_path: Path) -> None:
    result = only_report(command, saved(bad.classifier(), tmp_path / "model"))
    assert result.code == 3
    assert "decoder" in result.report["not_checked"][0]["reason"]


@every_command
def test_a_decoder_without_cache(command: str, tmp_path: Path) -> None:
    result = only_report(command, saved(bad.decoder_without_cache(), tmp_path / "model"))
    assert result.code == 3
    reason = result.report["not_checked"][0]["reason"]
    assert "has no cache" in reason
    assert "-with-past" in reason


@every_command
@pytest.mark.parametrize(("export", "alone"), [(GPT2, 3), (MARIAN, 1)], ids=["gpt2", "marian"])
def test_a_broken_file_beside_a_model(command: str, export: Path, alone: int, tmp_path: Path) -> None:
    folder = copied(export, tmp_path / "model")
    (folder / "broken.onnx").write_bytes(bad.gpt2_bytes()[:1000])
    with unchanged(folder):
        result = only_report(command, folder)
    assert result.code == alone
    assert result.findings["unreadable"]["file"] == "broken.onnx"
    stacks = {stack["name"] for stack in result.report["stacks"]}
    assert stacks == ({"decoder"} if export is GPT2 else {"merged", "pair"})
    if command != "inspect":
        assert {run["stack"] for run in result.report["runs"]} == stacks


def test_a_broken_file_that_was_not_asked_for(tmp_path: Path) -> None:
    folder = copied(GPT2, tmp_path / "model")
    (folder / "decoder_model.onnx").write_bytes(b"")
    assert as_json("step-test", folder / "model.onnx").code == 0


# --- files that are no model ---

NO_MODEL: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "text": (lambda _: b"just some words\nand more of them\n" * 50, "text"),
    "html": (lambda _: b"<!DOCTYPE html>\n<html><body>Sign in</body></html>", "HTML"),
    "json": (lambda _: b'{"error": "Repository not found"}', "JSON"),
    "empty": (lambda _: b"", "empty"),
    "lfs-pointer": (lambda _: bad.LFS_POINTER, "LFS"),
    "lfs-pointer-crlf": (lambda _: bad.LFS_POINTER.replace(b"\n", b"\r\n"), "LFS"),
    "ort-format": (bad.ort_bytes, ".ort"),
    "zip": (lambda _: b"PK\x03\x04" + bytes(range(256)), "zip"),
    "zeros": (lambda _: bytes(100_000), "zeros"),
    "random": (lambda _: np.random.default_rng(0).bytes(5000), ""),
    "one-byte": (lambda _: b"\x08", ""),
    "truncated-head": (lambda _: bad.gpt2_bytes()[:20], "truncated"),
    "truncated-third": (lambda _: bad.gpt2_bytes()[: len(bad.gpt2_bytes()) // 3], "truncated"),
    "truncated-end": (lambda _: bad.gpt2_bytes()[:-1], "truncated"),
}


@every_command
@pytest.mark.parametrize("what", sampled(NO_MODEL, 2))
def test_a_file_that_is_no_model(command: str, what: str, tmp_path: Path) -> None:
    make, word = NO_MODEL[what]
    folder = tmp_path / "model"
    saved(make(tmp_path), folder)
    with unchanged(folder):
        result = only_report(command, folder)
    assert result.code == 3
    assert result.report["verdict"] == "incomplete"
    (finding,) = result.report["findings"]
    assert finding["name"] == "unreadable"
    assert word in finding["observed"]
    assert result.findings


def test_an_ort_file_by_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "model.ort").write_bytes(bad.ort_bytes(tmp_path))
    result = as_json("inspect", tmp_path / "model.ort")
    assert result.code == 3
    assert ".ort" in result.findings["unreadable"]["observed"]


@posix
@pytest.mark.parametrize("what", ["fifo", "folder", "no-permission", "link-to-itself", "link-to-nothing"])
def test_a_name_with_no_plain_file_behind_it(what: str, tmp_path: Path) -> None:
    path = tmp_path / "model" / "model.onnx"
    path.parent.mkdir()
    match what:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "no-permission":
            if bad.is_root():
                pytest.skip("root may read everything")
            path.write_bytes(bad.gpt2_bytes())
            path.chmod(0)
        case "link-to-itself":
            path.symlink_to("model.onnx")
        case "link-to-nothing":
            path.symlink_to("nothing")
    result = as_json("inspect", path.parent)
    assert result.code == 3
    assert "unreadable" in result.findings


# --- side-car files ---

CONFIGS = {
    "text": b"not json",
    "list": b"[]",
    "empty": b"",
    "not-utf-8": b'{"model_type": "\xff"}',
    "deep": b"[" * 100_000,
    "not-a-number": b'{"max_position_embeddings": NaN, "n_positions": Infinity}',
    "words-for-numbers": b'{"max_position_embeddings": "many", "vocab_size": [1], "decoder": 5, "text_config": null}',
    "negative": b'{"max_position_embeddings": -5, "vocab_size": -1}',
    "true": b'{"max_position_embeddings": true, "n_positions": true, "vocab_size": true}',
    "huge": b'{"max_position_embeddings": 1%s, "vocab_size": 1%s}' % (b"0" * 400, b"0" * 400),
    "more-digits-than-python-reads": b'{"max_position_embeddings": 1%s}' % (b"0" * 5000),
}


@pytest.mark.parametrize("command", ["inspect", pytest.param("step-test", marks=pytest.mark.slow)])
@pytest.mark.parametrize("config", sampled(CONFIGS, 2))
def test_a_config_that_makes_no_sense(command: str, config: str, tmp_path: Path) -> None:
    """The config says how long the context is, and no more: without it the model is diagnosed all the same."""
    folder = copied(GPT2, tmp_path / "model", "model.onnx")
    (folder / "config.json").write_bytes(CONFIGS[config])
    assert call(command, folder).code == 0
    assert as_json(command, folder).code == 0


# --- external data ---


@every_command
def test_external_data_that_is_whole(command: str, tmp_path: Path) -> None:
    folder = bad.with_external_data(tmp_path / "model")
    with unchanged(folder):
        assert only_report(command, folder).code == 0


@every_command
def test_a_hub_cache_is_as_healthy_as_the_original(command: str, tmp_path: Path) -> None:
    """Model and data are links into one folder of blobs."""
    folder = bad.hub_cache(bad.with_external_data(tmp_path / "model"), tmp_path / "hub")
    with unchanged(tmp_path):
        result = only_report(command, folder)
    assert result.code == 0
    assert not result.findings
    original = only_report(command, tmp_path / "model").report
    assert result.report["stacks"] == original["stacks"]
    assert result.report["verdict"] == original["verdict"]


@every_command
@pytest.mark.parametrize("what", ["missing", "truncated", "empty", "folder", "lfs-pointer"])
def test_external_data_that_is_not_there(command: str, what: str, tmp_path: Path) -> None:
    folder = bad.with_external_data(tmp_path / "model")
    data = folder / "weights.bin"
    content = data.read_bytes()
    data.unlink()
    match what:
        case "truncated":
            data.write_bytes(content[:-100])
        case "empty":
            data.write_bytes(b"")
        case "folder":
            data.mkdir()
        case "lfs-pointer":
            data.write_bytes(bad.LFS_POINTER)
    with unchanged(folder):
        result = only_report(command, folder)
    assert result.code == 3
    finding = result.findings["external-data-missing"]
    assert "weights.bin" in finding["where"] + finding["observed"] + finding["repair"]["text"]
    assert result.report["verdict"] == "incomplete"


@every_command
@pytest.mark.parametrize("what", sampled(["parent", "absolute", "link", "parent-by-backslash", "drive"], 2))
def test_external_data_outside_of_the_folder(command: str, what: str, tmp_path: Path) -> None:
    folder = bad.with_external_data(tmp_path / "model")
    outside = tmp_path / "outside.bin"
    shutil.move(folder / "weights.bin", outside)
    locations = {"parent": "../outside.bin", "absolute": str(outside), "parent-by-backslash": "..\\outside.bin"}
    if what == "link":
        (folder / "weights.bin").symlink_to(outside)
    else:
        bad.relocated(folder, locations.get(what, "C:\\outside.bin"))
    with unchanged(tmp_path):
        result = only_report(command, folder)
    assert result.code == 3
    assert "external-data-escapes" in result.findings


# --- the graph ---


Graph = onnx.GraphProto


def _cyclic(graph: Graph) -> None:
    graph.node.append(helper.make_node("Identity", ["a"], ["b"], name="to"))
    graph.node.append(helper.make_node("Identity", ["b"], ["a"], name="fro"))
    graph.node[-3].input[1] = "a"


def _cyclic_condition(graph: Graph) -> None:
    """An If whose condition comes out of a circle of nodes that pass a flag on."""
    graph.node.append(helper.make_node("Not", ["a"], ["b"], name="to"))
    graph.node.append(helper.make_node("Not", ["b"], ["a"], name="fro"))
    inner = helper.make_graph([helper.make_node("Identity", ["zero"], ["r"])], "inner", [], [graph.output[0]])
    inner.output[0].name = "r"
    graph.node.append(helper.make_node("If", ["a"], ["c"], name="if", then_branch=inner, else_branch=inner))


def _reversed(graph: Graph) -> None:
    nodes = list(graph.node)
    del graph.node[:]
    graph.node.extend(reversed(nodes))


def _of_unknown_operators(graph: Graph) -> None:
    graph.node[-1].op_type = "NoSuchOperator"


def _cleared(field: str, *messages: Any) -> None:
    for message in messages:
        message.ClearField(field)


def _ports(graph: Graph) -> list[Any]:
    return [value.type.tensor_type for value in (*graph.input, *graph.output)]


def _with_pasts(layers: Iterable[object], name: str = "past_key_values.{}.key") -> Callable[[Graph], None]:
    port = helper.make_tensor_value_info
    return lambda graph: graph.input.extend(port(name.format(layer), 1, bad.CACHE_SHAPE) for layer in layers)


def _sized(size: int, axis: int, at: Callable[[Graph], Any] = lambda graph: graph.input[1:]) -> Callable[[Graph], None]:
    def change(graph: Graph) -> None:
        for value in at(graph):
            value.type.tensor_type.shape.dim[axis].dim_value = size

    return change


def _of_element_type(number: int) -> Callable[[Graph], None]:
    def change(graph: Graph) -> None:
        for port in _ports(graph):
            port.elem_type = number

    return change


GRAPHS: dict[str, tuple[Callable[[Graph], object], set[int]]] = {
    "no-nodes": (lambda graph: _cleared("node", graph), {1}),
    "no-types-of-outputs": (lambda graph: _cleared("type", *graph.output), {0, 1}),
    "no-types": (lambda graph: _cleared("type", *graph.input, *graph.output), {1, 3}),
    "no-shapes": (lambda graph: _cleared("shape", *_ports(graph)), {1}),
    "no-names": (lambda graph: _cleared("name", graph, *graph.node), {0}),
    "cyclic": (_cyclic, {1}),
    "cyclic-condition": (_cyclic_condition, {1}),
    "reversed": (_reversed, {0, 1}),
    "one-name-for-two-tensors": (lambda graph: graph.initializer.append(graph.initializer[0]), {0, 1}),
    "unknown-operator": (_of_unknown_operators, {1}),
    "3000-inputs": (_with_pasts(range(3000), "extra.{}"), {1, 3}),
    "3000-layers": (_with_pasts(range(1, 3000)), {1}),
    "heads-negative": (_sized(-1, 1), {0}),
    "heads-huge": (_sized(2**62, 1), {1, 3}),
    "heads-zero": (_sized(0, 1), {1, 3}),
    "width-large": (_sized(2**34, 3), {1, 3}),
    "vocabulary-huge": (_sized(2**62, 2, lambda graph: graph.output[:1]), {0, 1, 3}),
    "vocabulary-negative": (_sized(-7, 2, lambda graph: graph.output[:1]), {0, 1, 3}),
    "element-type-unknown": (_of_element_type(9999), {1, 3}),
    "element-type-string": (_of_element_type(TensorProto.STRING), {1, 3}),
    "element-type-none": (_of_element_type(0), {1, 3}),
    "layer-of-5000-digits": (_with_pasts(["9" * 5000]), {1, 3}),
    "layer-of-12-digits": (_with_pasts(["9" * 12]), {1, 3}),
    "layer-in-arabic-digits": (_with_pasts(["\u0663"]), {1, 3}),
}


@pytest.mark.parametrize("what", sampled(GRAPHS, 8))
def test_a_graph_that_makes_no_sense(what: str, tmp_path: Path) -> None:
    change, codes = GRAPHS[what]
    folder = saved(bad.changed(change), tmp_path / "model")
    assert call("inspect", folder).code in (0, 1, 3)
    result = as_json("step-test", folder, *LIMITS)
    assert result.code in codes
    assert result.code == 0 or result.findings or result.report["not_checked"]
    for entry in result.report["not_checked"]:
        assert "crashed" not in entry["reason"]
    assert call("step-test", folder, *LIMITS).code == result.code


@pytest.mark.parametrize(("depth", "codes"), [(20, {0}), (60, {1, 3}), (2000, {1, 3})])
def test_ifs_within_ifs(depth: int, codes: set[int], tmp_path: Path) -> None:
    folder = saved(bad.nested(depth), tmp_path / "model")
    result = as_json("step-test", folder)
    assert result.code in codes
    assert result.code == 0 or result.findings


def test_logits_near_the_largest_double(tmp_path: Path) -> None:
    """Differences of such numbers are infinite, and JSON has no word for that."""
    model = bad.decoder(kind=TensorProto.DOUBLE)
    head = next(tensor for tensor in model.graph.initializer if tensor.name == "head")
    head.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(head) * 1e307, "head"))
    assert as_json("step-test", saved(model, tmp_path / "model")).code in (0, 1, 3)


# --- hostile names ---

NAMES = {
    "clear-screen": "\x1b[2J\x1b[31m",
    "c1-escape": "\x9b2J\x84",
    "title": "\x1b]0;owned\x07",
    "newlines": "one\ntwo\r\nthree\u2028four\x0bfive",
    "nul-and-bell": "a\x00b\x07c\x7f",
    "script": "<script>alert(1)</script>",
    "html-in-markdown": "`</code>`<img src=x onerror=alert(1)>|a|",
    "workflow-command": "\n::error::owned",
    "workflow-command-old": "##[error]owned",
    "right-to-left": "\u202eevil\u2066\u200f\u061c",
    "unseen": "a\u200b\ufeff\u2060b",
    "markup": "[bold red]x[/] :smile: [link=file:///]",
    "format": "{0} %s %n {x!r} ${HOME} $(id) `id`",
    "megabyte": "x" * 2**20,
    "wide": "\u4e2d\U0001f600e\u0301",
}
BIG = 200_000  # bytes, of text for people


def is_harmless(text: str) -> bool:
    """No control characters, no markup, no commands to the runner of a workflow."""
    lines = text.splitlines()
    return not UNSAFE.search(text) and not any(line.lstrip().startswith(("::", "##[")) for line in lines)


def hostile(where: str, name: str) -> onnx.ModelProto:
    """A decoder with a hostile name in one place, which a finding or a table then shows."""
    model = bad.with_failing_node(name) if where == "node" else bad.decoder()
    graph = model.graph
    match where:
        case "input":
            bad.with_input(model, name)
        case "output":
            graph.output.append(helper.make_tensor_value_info("present." + name, TensorProto.FLOAT, ["n"]))
            graph.node.append(helper.make_node("Shape", ["input_ids"], ["present." + name]))
        case "axis":
            for value in (*graph.input, *graph.output):
                value.type.tensor_type.shape.dim[0].dim_param = name
        case "producer":
            model.producer_name = name
        case "domain":
            model.opset_import.append(helper.make_opsetid(name, 1))
        case "location":
            weight = graph.initializer[0]
            weight.ClearField("raw_data")
            weight.data_location = TensorProto.EXTERNAL
            weight.external_data.add(key="location", value=name)
    return model


WHERE = ["input", "output", "node", "axis", "producer", "domain", "location"]


@pytest.mark.parametrize(("name", "where"), sampled([(name, where) for name in NAMES for where in WHERE], 17))
def test_hostile_names(name: str, where: str, tmp_path: Path) -> None:
    folder = saved(hostile(where, NAMES[name]), tmp_path / "model")
    command = "inspect" if where in ("axis", "producer", "domain") else "step-test"
    files = [tmp_path / "report.md", tmp_path / "report.json"]
    result = call(command, folder, "-v", "--output", f"markdown={files[0]}", "--output", f"json={files[1]}")
    codes = {"input": {0, 1, 3}, "output": {1}, "node": {1}, "location": {3}, "domain": {0, 1}}
    assert result.code in codes.get(where, {0})
    assert is_harmless(result.out)
    assert len(result.out) < BIG
    json.loads(files[1].read_text("ascii"))
    page = files[0].read_text("utf-8")
    assert is_harmless(page)
    assert not any(tag in _outside_of_code(page) for tag in ("<script", "<img", "</code>"))
    assert len(page) < BIG


def _outside_of_code(page: str) -> str:
    """A Markdown page without its code spans and escaped characters, in which HTML has no effect."""
    return re.sub(r"\\[!-/:-@[-`{-~]", "", re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", page))


@posix
@pytest.mark.parametrize(
    "name", sampled(["newlines", "clear-screen", "script", "workflow-command", "right-to-left", "wide"], 3)
)
@pytest.mark.parametrize("broken", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["broken", "whole"])
def test_hostile_names_of_files(name: str, broken: bool, tmp_path: Path) -> None:
    title = NAMES[name].replace("/", "_")
    folder = tmp_path / f"{title}folder"
    saved(b"" if broken else bad.decoder(), folder, f"{title}.onnx")
    for more in ((), ("-v",), ("--format", "markdown")):
        result = call("step-test", folder, *more)
        assert result.code == (3 if broken else 0)
        assert is_harmless(result.out)
        assert "markdown" not in more or "<script" not in _outside_of_code(result.out)
    assert as_json("step-test", folder).code == (3 if broken else 0)
    assert call("inspect", folder).code == (3 if broken else 0)


@posix
@pytest.mark.parametrize("name", sampled(["::error::owned", "##[error]owned", "::stop-commands::x"], 3))
def test_a_file_named_like_a_workflow_command(name: str, tmp_path: Path) -> None:
    """Runners of workflows obey lines that begin so, indented or not."""
    saved(bad.decoder(), tmp_path / name, f"{name}.onnx")
    for command in COMMANDS:
        assert is_harmless(call(command, name, "-v", cwd=tmp_path).out)


@posix
@pytest.mark.skipif(sys.platform != "linux", reason="file names need not be text on Linux only")
def test_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    """The runtime opens no path that is not UTF-8: the folder gets a second name for it, with all that lies in it."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    bad.with_external_data(tmp_path / "text")
    (tmp_path / "text").rename(folder)
    assert call("inspect", folder).code == 0
    for command in RUNS:
        result = only_report(command, folder)
        assert (result.code, result.report["verdict"]) == (0, "healthy")
    assert call("step-test", folder, "--format", "markdown").code == 0


# --- where the answer goes ---


@pytest.mark.parametrize("encoding", sampled(["ascii", "cp1252", "utf-16"], 3))
@pytest.mark.parametrize("format_", sampled(["text", "markdown", "json"], 3))
def test_an_output_that_cannot_hold_every_character(encoding: str, format_: str, tmp_path: Path) -> None:
    copied(MARIAN, tmp_path / "model", "decoder_model_merged.onnx", "encoder_model.onnx")
    saved(bad.with_input(bad.decoder(), "\u4e2d"), tmp_path / "model", "other.onnx")
    command = "step-test", "-v", "--format", format_, tmp_path / "model"
    done = run_process(*command, text=False, env={**os.environ, "PYTHONIOENCODING": encoding})
    assert b"Traceback" not in done.stderr
    assert done.returncode == 1
    done.stdout.decode(encoding if format_ == "text" else "utf-8")  # a document is the same on every terminal


@posix
@pytest.mark.parametrize("format_", ["json", *(pytest.param(f, marks=pytest.mark.slow) for f in ("text", "markdown"))])
@pytest.mark.parametrize("command", ["inspect", "step-test", GATE, "explain", "env", "--help"])
def test_a_reader_that_goes_away(command: str, format_: str) -> None:
    arguments = [command]
    if command in COMMANDS:
        arguments += [str(MARIAN), "-v", "--format", format_]
    elif format_ != "text":
        pytest.skip("this command has one format")
    words = " ".join([sys.executable, "-m", "kvdoctor", *arguments])
    piped = ["bash", "-c", f"set -o pipefail; {words} | head -c 1"]
    done = subprocess.run(piped, capture_output=True, text=True, check=False)
    assert len(done.stdout) == 1
    assert done.stderr == ""
    assert done.returncode == (1 if command in COMMANDS else 0), "the verdict, not the pipe"


@posix
@pytest.mark.parametrize(
    "where", sampled([">&-", ">/dev/full", "2>&-", "<&-", ">&- 2>&-", ">/dev/full 2>/dev/full"], 3)
)
@pytest.mark.parametrize("format_", ["text", pytest.param("json", marks=pytest.mark.slow)])
def test_an_output_that_takes_nothing(where: str, format_: str) -> None:
    if "/dev/full" in where and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    words = " ".join([sys.executable, "-m", "kvdoctor", "step-test", str(GPT2), "--format", format_, where])
    done = subprocess.run(["/bin/sh", "-c", words], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "Error in sys.excepthook" not in done.stderr
    lost = where.startswith(">")
    assert done.returncode == 0 if not lost else done.returncode in (0, 1, 2)
    if lost and "2>" not in where and "full" in where:
        assert done.returncode != 0, "a report that could not be written must not look like a healthy model"
        assert done.stderr.strip()


@posix
def test_an_output_file_that_is_no_plain_file(tmp_path: Path) -> None:
    """A pipe or a device must not be replaced by a file of the same name."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    call("inspect", saved(bad.decoder(), tmp_path / "model"), "--output", f"json={pipe}")
    os.close(reader)
    assert pipe.is_fifo()


@posix
def test_an_output_file_that_is_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to("real.json")
    result = call("inspect", saved(bad.decoder(), tmp_path / "model"), "--output", f"json={tmp_path / 'link.json'}")
    assert result.code == 0
    assert (tmp_path / "link.json").is_symlink()
    json.loads((tmp_path / "real.json").read_text("ascii"))


@pytest.mark.parametrize("command", sampled(["gate", "step-test", "inspect", "re-export"], 4))
def test_twice_the_same_document(command: str, tmp_path: Path) -> None:
    """All that may differ between two runs stands under `measured`."""

    def without_measured(text: str) -> str:
        document = json.loads(text)
        for report in document.get("reports", [document]):
            assert report.pop("measured") is not None
        return json.dumps(document)

    def document() -> str:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        more = ("-o", "out") if command == "re-export" else ()
        return without_measured(as_json(command, MARIAN, *more, cwd=tmp_path).out)

    assert document() == document()


# --- gate ---


def test_gate_over_several_models(tmp_path: Path) -> None:
    saved(b"", tmp_path / "empty")
    result = as_json("gate", GPT2, MARIAN, tmp_path / "empty")
    assert result.code == 1
    assert result.report["schema"] == "kvdoctor/gate/1"
    assert result.report["verdict"] == "unhealthy"
    assert [report["verdict"] for report in result.report["reports"]] == ["healthy", "unhealthy", "incomplete"]
    assert as_json("gate", GPT2, tmp_path / "empty").code == 3
    assert as_json("gate", GPT2, EXPORTS / "llama-gqa").code == 0
    assert call("gate", GPT2, tmp_path / "nothing").code == 2
    assert call("gate").code == 2


def test_a_provider_that_is_not_there_is_not_called_healthy() -> None:
    """The runtime falls back to the CPU without a word."""
    for provider in ("CUDAExecutionProvider", "NoSuchProvider"):
        assert call("step-test", GPT2, "--provider", provider).code in (1, 2, 3)


@pytest.mark.parametrize("option", sampled(["--ignore KV001,KV002,KV010,KV011,KV301", "--select KV203"], 2))
@pytest.mark.parametrize("what", sampled(["truncated", "no-data", "refused", "died"], 3))
@every_command
def test_a_selection_does_not_make_healthy_what_was_not_run(
    command: str, what: str, option: str, tmp_path: Path
) -> None:
    """Who asks for one check only must still hear that nothing was checked."""
    folder = tmp_path / "model"
    match what:
        case "truncated":
            saved(bad.gpt2_bytes()[:1000], folder)
        case "no-data":
            (bad.with_external_data(folder) / "weights.bin").unlink()
        case "refused":
            saved(bad.changed(_of_unknown_operators), folder)
        case "died":
            saved(bad.decoder(*bad.looping_for_ever()), folder)
    more = ("--timeout", "1") if command != "inspect" else ()
    result = only_report(command, folder, *option.split(), *more)
    if command != "inspect" or what == "truncated":
        assert result.code in (1, 3)
    assert result.report["verdict"] != "healthy"


@pytest.mark.parametrize(
    ("fixture", "option", "code"),
    [
        ("positions-not-offset", "--select=KV301", 3),
        ("positions-not-offset", "--select=KV310", 1),
        ("positions-not-offset", "--ignore=KV310", 0),
        ("positions-not-offset", "--select=KV402", 3),
        ("non-finite", "--select=KV301", 3),
        ("decoder-only-healthy", "--select=KV301", 0),
        ("decoder-only-healthy", "--select=KV402", 3),
        ("decoder-only-healthy", "--select=reference-differs", 3),
    ],
)
def test_a_selection_does_not_make_healthy_what_another_check_names(
    fixture: str, option: str, code: int, tmp_path: Path
) -> None:
    """Parity alone is asked for, and another check names why it is lost; or nothing that was asked for can be asked."""
    result = only_report("step-test", load_all()[fixture].write(tmp_path / "model"), option)
    assert (result.code, result.report["verdict"] == "healthy") == (code, code == 0)


# --- models that harm the runtime ---

HARM = {
    "signal": (bad.dividing_out_of_range, (), "SIGFPE"),
    "time": (bad.looping_for_ever, ("--timeout", "2"), "2 s"),
    "memory": (bad.allocating, ("--max-memory", "600"), "600 MiB"),
}


@pytest.mark.parametrize("command", sampled(RUNS, 2))
@pytest.mark.parametrize("harm", ["signal", "memory", pytest.param("time", marks=pytest.mark.slow)])
def test_a_model_that_takes_the_runtime_with_it(command: str, harm: str, tmp_path: Path) -> None:
    if harm == "signal" and platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip("only x86 answers such a division with a signal")
    make, options, word = HARM[harm]
    folder = saved(bad.decoder(*make()), tmp_path / "model")
    with unchanged(folder):
        result = only_report(command, folder, *options)
    assert result.code == 3
    finding = result.findings["worker-died"]
    assert word in finding["observed"]
    assert finding["observed"].endswith(" during step 2")
    died = next(run for run in result.report["runs"] if run["experiment"] == "plain-loop")
    assert (died["outcome"], died["failed_step"]) == ("died", 2)
    assert result.outcome("empty-past") == "passed"
    assert result.outcome("same-cache") == "differs"


def test_a_file_that_is_never_open_is_opened_once(tmp_path: Path) -> None:
    folder = saved(bad.decoder(*bad.opening_for_minutes()), tmp_path / "model")
    result = only_report("step-test", folder, "--timeout", "6")
    died = [run["experiment"] for run in result.report["runs"] if run["outcome"] == "died"]
    assert (result.code, died) == (3, ["plain-loop"])
    assert result.findings["worker-died"]["observed"].endswith(" while it opened model.onnx")
    again = [run["reason"] for run in result.report["runs"] if "not opened again" in (run["reason"] or "")]
    assert len(again) > 3


def test_a_file_that_is_open_is_not_blamed_for_the_first_call(tmp_path: Path) -> None:
    """The same work in a step: each experiment has a worker of its own for it."""
    result = only_report("step-test", saved(bad.decoder(*bad.looping_for_ever()), tmp_path / "model"), "--timeout", "2")
    died = [run for run in result.report["runs"] if run["outcome"] == "died"]
    assert died
    assert not any("opened" in run["reason"] for run in result.report["runs"] if run["reason"])


@pytest.mark.slow
def test_a_worker_that_died_does_not_stop_the_next_model(tmp_path: Path) -> None:
    folder = saved(bad.decoder(*bad.looping_for_ever()), tmp_path / "model")
    result = as_json("gate", folder, GPT2, MARIAN, "--timeout", "2")
    assert result.code == 1
    assert [report["verdict"] for report in result.report["reports"]] == ["incomplete", "healthy", "unhealthy"]


@pytest.mark.parametrize("options", [("--max-memory", "1"), ("--timeout", "0.001")], ids=" ".join)
def test_limits_that_no_runtime_can_keep(options: tuple[str, str]) -> None:
    result = as_json("step-test", GPT2, *options)
    assert result.code == 3
    assert "worker-died" in result.findings


# --- re-export: where it may write ---


@pytest.fixture
def marian(tmp_path: Path) -> Path:
    return copied(MARIAN, tmp_path / "marian")


def refused(path: Path, out: Path, *more: str, watched: Path) -> bad.Result:
    """A call of `re-export` that must be refused, and leave no trace."""
    with unchanged(watched):
        result = call("re-export", path, "-o", out, *more)
    assert result.code == 2
    assert "OUT" in result.err or str(out.parent) in result.err or out.name in result.err
    return result


@pytest.mark.parametrize("what", sampled(["folder", "file", "empty-folder", "link", "dangling-link"], 3))
@pytest.mark.parametrize("force", [(), ("--force",)], ids=["", "force"])
def test_out_that_exists(what: str, force: tuple[str, ...], marian: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    match what:
        case "folder":
            saved(b"something else", out, "notes.txt")
        case "empty-folder":
            out.mkdir()
        case "file":
            out.write_text("something else")
        case "link":
            (tmp_path / "elsewhere").mkdir()
            out.symlink_to("elsewhere")
        case "dangling-link":
            out.symlink_to("nowhere")
    refused(marian, out, *force, watched=tmp_path)


@pytest.mark.slow
def test_out_that_kvdoctor_wrote_is_replaced_when_forced(marian: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert call("re-export", marian, "-o", out).code == 0
    (out / "mine.txt").write_text("put beside it since")
    refused(marian, out, watched=tmp_path)
    refused(marian, out, "--force", watched=tmp_path)
    (out / "mine.txt").unlink()
    (out / "config.json").write_text("{}")
    with unchanged(marian):
        assert call("re-export", marian, "-o", out, "--force").code == 0
    assert (out / "config.json").read_text() != "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["marian", "out"]


def test_the_report_alone_does_not_make_a_folder_kvdoctor_s(marian: Path, tmp_path: Path) -> None:
    """`--force` needs more than a file of that name: someone may keep reports beside other things."""
    out = saved(b"{}", tmp_path / "out", "kvdoctor-report.json")
    (out / "thesis.tex").write_text("years of work")
    refused(marian, out, "--force", watched=tmp_path)


@pytest.mark.parametrize("force", [pytest.param((), marks=pytest.mark.slow), ("--force",)], ids=["", "force"])
@pytest.mark.parametrize("what", ["same", "inside", "deep-inside", "parent", "grandparent", "same-by-link", "dots"])
def test_out_and_the_model_overlap(what: str, force: tuple[str, ...], tmp_path: Path) -> None:
    model = copied(MARIAN, tmp_path / "a" / "b" / "marian")
    (model / "sub").mkdir()
    (tmp_path / "link").symlink_to(model)
    out = {
        "same": model,
        "inside": model / "out",
        "deep-inside": model / "sub" / "out",
        "parent": model.parent,
        "grandparent": tmp_path / "a",
        "same-by-link": tmp_path / "link" / "out",
        "dots": model / "sub" / ".." / "out",
    }[what]
    refused(model, out, *force, watched=tmp_path)


@pytest.mark.parametrize("what", ["missing", "file", "link-to-nothing"])
def test_out_whose_parent_is_no_folder(what: str, marian: Path, tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    if what == "file":
        parent.write_text("a file")
    elif what == "link-to-nothing":
        parent.symlink_to("nowhere")
    refused(marian, parent / "out", watched=tmp_path)


@posix
@pytest.mark.slow
def test_out_in_a_folder_that_takes_no_files(marian: Path, tmp_path: Path) -> None:
    parent = tmp_path / "read-only"
    parent.mkdir(mode=0o555)
    if bad.is_root():
        parent = Path("/proc")
        if not parent.is_dir():
            pytest.skip("root may write everywhere, and there is no /proc here")
    result = call("re-export", marian, "-o", parent / "out")
    assert result.code == 2
    assert str(parent) in result.err


@pytest.mark.slow
def test_a_name_that_is_too_long_for_the_file_system(marian: Path, tmp_path: Path) -> None:
    for length in (250, 300):
        refused(marian, tmp_path / ("x" * length), watched=tmp_path)


@pytest.mark.slow
def test_to_look_writes_nothing(marian: Path, tmp_path: Path) -> None:
    with unchanged(tmp_path), tempfile.TemporaryDirectory() as scratch:
        for more in ((), ("-o", str(tmp_path / "out"))):
            result = call("re-export", marian, "--dry-run", *more, env={**os.environ, "TMPDIR": scratch})
            assert result.code == 1
            assert "Identity(past_key_values.0.encoder.key)" in result.out
        assert not list(Path(scratch).glob("kvdoctor*"))


@pytest.mark.slow
def test_to_look_may_be_done_with_an_out_that_exists(marian: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert call("re-export", marian, "--dry-run", "-o", tmp_path / "out").code == 1


def test_nothing_to_repair(tmp_path: Path) -> None:
    model = copied(GPT2, tmp_path / "gpt2")
    with unchanged(tmp_path):
        result = as_json("re-export", model, "-o", tmp_path / "out")
    assert result.code == 0
    assert result.report["verdict"] == "healthy"
    assert any("nothing to repair" in note for note in result.report["notes"])


def test_nothing_that_can_be_repaired(tmp_path: Path) -> None:
    saved(bad.with_failing_node("gather"), tmp_path / "model")
    with unchanged(tmp_path):
        result = as_json("re-export", tmp_path / "model", "-o", tmp_path / "out")
    assert result.code == 1


@pytest.mark.parametrize("what", ["empty", "truncated", "classifier"])
def test_nothing_that_can_be_read(what: str, tmp_path: Path) -> None:
    model = {"empty": b"", "truncated": bad.gpt2_bytes()[:999], "classifier": bad.classifier()}[what]
    saved(model, tmp_path / "model")
    with unchanged(tmp_path):
        assert as_json("re-export", tmp_path / "model", "-o", tmp_path / "out").code == 3


# --- re-export: what it writes ---


def assert_repaired(source: Path, out: Path, *, changed: str = "decoder_model_merged.onnx") -> None:
    """OUT is whole and stands alone: plain files, of which only the repaired one and the reports are new."""
    new = {changed, "kvdoctor-report.json", "kvdoctor-report.md", "kvdoctor-report.html"}
    for path in out.rglob("*"):
        assert not path.is_symlink()
        if path.is_file():
            assert path.stat().st_nlink == 1
            if path.name not in new:
                assert path.read_bytes() == (source / path.relative_to(out)).read_bytes()
    assert {path.name for path in out.rglob("*")} >= new
    report = json.loads((out / "kvdoctor-report.json").read_text("ascii"))
    assert report["verdict"] == "healthy"
    assert all(entry["holds"] for entry in report["repair"]["proof"])
    assert call("step-test", out).code == 0


def test_a_repaired_folder(marian: Path, tmp_path: Path) -> None:
    (marian / "sub").mkdir()
    (marian / "sub" / "notes.txt").write_text("kept")
    out = tmp_path / "out"
    with unchanged(marian):
        assert call("re-export", marian, "-o", out).code == 0
    assert_repaired(marian, out)
    assert (out / "sub" / "notes.txt").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["marian", "out"]


@pytest.mark.slow
def test_a_repaired_file(marian: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with unchanged(marian):
        result = as_json("re-export", marian / "decoder_model_merged.onnx", "-o", out)
    assert result.code == 0
    assert_repaired(marian, out)


@posix
@pytest.mark.slow
@pytest.mark.parametrize("what", ["hub", "folder", "file", "hub-file"])
def test_a_repaired_model_behind_links(what: str, marian: Path, tmp_path: Path) -> None:
    paths = {
        "folder": tmp_path / "link",
        "file": tmp_path / "link" / "decoder_model_merged.onnx",
        "hub": tmp_path / "link",
        "hub-file": tmp_path / "link" / "decoder_model_merged.onnx",
    }
    (tmp_path / "link").symlink_to(bad.hub_cache(marian, tmp_path / "hub") if "hub" in what else marian)
    with unchanged(marian):
        assert call("re-export", paths[what], "-o", tmp_path / "out").code == 0
    assert_repaired(marian, tmp_path / "out")


@posix
def test_out_inside_a_snapshot_of_links(marian: Path, tmp_path: Path) -> None:
    """The folder of the model is the one that was given, wherever the links in it lead."""
    folder = bad.hub_cache(marian, tmp_path / "hub")
    refused(folder, folder / "out", watched=tmp_path)
    refused(folder / "decoder_model_merged.onnx", folder / "out", watched=tmp_path)


@posix
@pytest.mark.slow
def test_hard_links_are_not_shared(marian: Path, tmp_path: Path) -> None:
    os.link(marian / "config.json", tmp_path / "config.json")
    assert call("re-export", marian, "-o", tmp_path / "out").code == 0
    assert (tmp_path / "out" / "config.json").stat().st_nlink == 1


@pytest.mark.slow
def test_repaired_with_external_data(marian: Path, tmp_path: Path) -> None:
    name = "decoder_model_merged.onnx"
    model = onnx.load(marian / name)
    onnx.save(model, marian / name, save_as_external_data=True, location="weights.bin", size_threshold=0)
    for path in (marian, marian / name):
        out = tmp_path / f"out-{path.name}"
        with unchanged(marian):
            assert call("re-export", path, "-o", out).code == 0
        assert_repaired(marian, out)


@pytest.mark.slow
def test_out_relative_to_where_one_is(marian: Path, tmp_path: Path) -> None:
    assert call("re-export", "marian", "-o", "out/", cwd=tmp_path).code == 0
    assert_repaired(marian, tmp_path / "out")


@pytest.mark.slow
def test_pattern_characters_in_out(marian: Path, tmp_path: Path) -> None:
    for name in ("[ab]", "*", "?", "out.partial"):
        assert call("re-export", marian, "-o", tmp_path / name).code == 0
        assert (tmp_path / name / "kvdoctor-report.json").is_file()


# --- re-export: the disk ---


@pytest.mark.skipif(sys.platform != "linux", reason="limits on the size of files are tried on Linux only")
@pytest.mark.parametrize("most", sampled([100_000, 1_000, 220_000], 3))
def test_a_disk_that_takes_no_more(most: int, marian: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: the write fails in the middle."""
    with unchanged(tmp_path):
        result = call("re-export", marian, "-o", tmp_path / "out", how=run_process, **bad.files_up_to(most))
    assert result.code == 2
    assert "out" in result.err


@pytest.mark.skipif(sys.platform != "linux", reason="mounting a small disk is tried on Linux only")
@pytest.mark.slow
@pytest.mark.parametrize("size", ["700k", "64k", "1100k"])
def test_a_disk_that_is_full(size: str, marian: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        with unchanged(marian):
            result = call("re-export", marian, "-o", disk / "out")
        assert result.code == 2
        assert "space" in result.err
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="limits on the size of files are tried on Linux only")
def test_an_output_file_on_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    with unchanged(tmp_path):
        written = f"json={tmp_path / 'report.json'}"
        done = run_process("inspect", MARIAN, "--output", written, **bad.files_up_to(1000))
    assert done.returncode == 2
    assert "report.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_one_file_that_two_graphs_lack_is_one_finding(tmp_path: Path) -> None:
    folder = bad.with_external_data(tmp_path / "model")
    graph = next(folder.glob("*.onnx"))
    shutil.copy(graph, folder / "second.onnx")
    (folder / "weights.bin").unlink()
    found = [one for one in inspect(str(folder)).findings if one.name == "external-data-missing"]
    assert len(found) == 1
    assert graph.name in found[0].where
    assert "second.onnx" in found[0].where
    assert "second.onnx" in found[0].subject


SIDE_FILES = {
    "inputs": ("step-test", "--inputs", "FILE", GPT2),
    "trace": ("step-test", "--trace", "FILE", GPT2),
    "against": ("step-test", "--against", "FILE", GPT2),
    "contract": ("step-test", "--contract", "FILE", GPT2),
    "earlier": ("speed", "--against", "FILE", GPT2),
    "baseline": ("gate", "--baseline", "FILE", GPT2),
    "policy": ("gate", "--config", "FILE", GPT2),
}


@posix
@pytest.mark.parametrize("option", sampled(SIDE_FILES, 3))
@pytest.mark.parametrize("what", ["pipe", "/dev/zero"])
def test_a_side_file_without_an_end_is_refused(what: str, option: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    os.mkfifo(file) if what == "pipe" else file.symlink_to(what)
    result = call(*(file if word == "FILE" else word for word in SIDE_FILES[option]))
    assert result.code == 2
    assert "no file" in result.err or "not a regular file" in result.err


@posix
@pytest.mark.parametrize("what", ["pipe", "/dev/zero"])
def test_a_config_without_an_end_is_named(what: str, tmp_path: Path) -> None:
    folder = copied(GPT2, tmp_path / "model")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json") if what == "pipe" else (folder / "config.json").symlink_to(what)
    assert "config.json was not read: it is not a regular file" in call("inspect", folder).out


def _with_header(shape: tuple[int, ...]) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return header.getvalue() + bytes(16)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (np.zeros(4096).tobytes(), "larger than 0 MiB"),
        (_with_header((1 << 40,)), "its header says otherwise"),
        (_with_header((-4,)), "its header says otherwise"),
        (_with_header((4,))[:-1], "its header says otherwise"),
        (b"nothing", "magic string"),
    ],
)
def test_an_archive_that_takes_more_memory_than_its_bytes(content: bytes, reason: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", content)
    with pytest.raises(UsageError, match=reason):
        read_arrays(tmp_path / "a.npz", 1 << 12)
    damaged = (tmp_path / "a.npz").read_bytes()[:-9]
    result = call("step-test", GPT2, "--inputs", saved(damaged, tmp_path, "b.npz") / "b.npz")
    assert result.code == 2


@pytest.mark.parametrize("axes", [64, 65, 20_000])
def test_a_tensor_of_many_axes(axes: int, tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("many", TensorProto.FLOAT, [f"axis{n}" for n in range(axes)])
    model = bad.changed(lambda graph: graph.input.append(value))
    result = only_report("inspect", saved(model, tmp_path / "model"))
    if axes > 64:
        assert result.findings["unreadable"]["observed"] == f"it has a tensor of {axes:,} axes, 'many'"
    assert (result.code, "unreadable" in result.findings) == ((3, True) if axes > 64 else (0, False))
