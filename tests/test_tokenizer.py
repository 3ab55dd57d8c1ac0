"""The tokenizer beside a graph: ids beyond its logits or its table count where generation would use them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support import text_fixtures

from kvdoctor import inspect
from kvdoctor.report.document import Report

WORDS = {f"w{number}": number for number in range(16)}
"""As many as the fixture has tokens."""


def added(number: int, content: str) -> dict[str, Any]:
    return {"id": number, "content": content, "special": True}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return text_fixtures.read(text_fixtures.FOLDER / "decoder-only-healthy.onnxtxt").write(tmp_path / "model")


def report_of(model: Path, tokenizer: Any = None, config: Any = None) -> Report:
    for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (model / name).write_text(text, encoding="utf-8")
    return inspect(str(model))


def subjects(report: Report) -> tuple[str, ...]:
    for one in report.findings:
        file = "tokenizer.json" if one.subject == ("model.vocab",) else "tokenizer_config.json"
        assert (one.code, one.severity, one.file) == ("KV020", "warning", file)
    return tuple(key for one in report.findings for key in one.subject)


@pytest.mark.parametrize(
    ("words", "extra", "config", "expected"),
    [
        (WORDS, [], {"eos_token": "w2", "bos_token": "w1", "pad_token": {"content": "w0"}}, ()),
        (dict(list(WORDS.items())[:9]), [], {}, ()),
        (WORDS, [added(16, "<image>")], {"eos_token": "w2"}, ()),
        (WORDS, [added(16, "[PAD]")], {"pad_token": "[PAD]"}, ("pad_token",)),
        (WORDS, [added(16, "</s>")], {"eos_token": {"content": "</s>"}}, ("eos_token",)),
        (WORDS, [added(15, "</s>")], {"eos_token": "</s>"}, ()),
        (WORDS, [added(16, "<s>")], {"bos_token": "<s>"}, ("bos_token",)),
        (WORDS | {"w16": 16}, [], {}, ("model.vocab",)),
        (WORDS | {"<image>": 16}, [added(16, "<image>")], {}, ()),
        ([["w", -1.0]] * 16, [], {}, ()),
        ([["w", -1.0]] * 17, [], {}, ("model.vocab",)),
        ([["w", -1.0]] * 17, [added(16, "<image>")], {}, ()),
    ],
)
def test_ids_that_generation_uses_are_in_range(
    words: Any, extra: list[Any], config: dict[str, Any], expected: tuple[str, ...], model: Path
) -> None:
    assert subjects(report_of(model, {"added_tokens": extra, "model": {"vocab": words}}, config)) == expected


def test_the_config_alone_names_added_tokens(model: Path) -> None:
    config = {"pad_token": "[PAD]", "added_tokens_decoder": {"16": {"content": "[PAD]"}}}
    report = report_of(model, config=config)
    assert subjects(report) == ("pad_token",)
    (finding,) = report.findings
    assert finding.declared == 'pad_token "[PAD]" = 16'
    assert finding.effects == ("a padded batch looks up a row that the table does not have",)


def test_one_id_in_two_files_is_one_fault(model: Path) -> None:
    (model / "generation_config.json").write_text('{"eos_token_id": 16}', encoding="utf-8")
    report = report_of(model, {"added_tokens": [added(16, "</s>")]}, {"eos_token": "</s>"})
    assert [one.file for one in report.findings] == ["generation_config.json"]
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 16]}', encoding="utf-8")
    assert [one.file for one in inspect(str(model)).findings] == ["generation_config.json"]


def test_a_table_in_two_halves_takes_ids_beyond_each(model: Path) -> None:
    """Ids below 8 are looked up in one table, the others, less 8, in a second one."""
    path = model / "model.onnx"
    graph = (loaded := onnx.load(path)).graph
    (tokens,) = (node for node in graph.node if node.op_type == "Gather" and node.input[1] == "input_ids")
    table = next(tensor for tensor in graph.initializer if tensor.name == tokens.input[0])
    rows, at = numpy_helper.to_array(table), list(graph.node).index(tokens)
    parts = {"low_rows": rows[:8], "high_rows": rows[8:], "half": np.array(8), "none": np.array(0)}
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in parts.items())
    made = [
        ("Less", ["input_ids", "half"], "is_low"),
        ("Sub", ["input_ids", "half"], "less"),
        ("Where", ["is_low", "input_ids", "none"], "low_ids"),
        ("Where", ["is_low", "none", "less"], "high_ids"),
        ("Gather", ["low_rows", "low_ids"], "low"),
        ("Gather", ["high_rows", "high_ids"], "high"),
        ("Unsqueeze", ["is_low", "last_axis"], "is_low_row"),
        ("Where", ["is_low_row", "low", "high"], tokens.output[0]),
    ]
    graph.initializer.append(numpy_helper.from_array(np.array([-1]), "last_axis"))
    graph.node.remove(tokens)
    for number, (kind, inputs, output) in enumerate(made):
        graph.node.insert(at + number, onnx.helper.make_node(kind, inputs, [output]))
    onnx.save(loaded, path)
    assert report_of(model, {"model": {"vocab": WORDS}}, {"bos_token": "w9"}).findings == ()


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, '"x"'])
def test_a_tokenizer_that_cannot_be_read_is_not_checked(content: str, model: Path) -> None:
    report = report_of(model, content)
    assert not report.findings
    assert any("tokenizer.json" in entry.reason for entry in report.not_checked)


@pytest.mark.parametrize(
    "content",
    [
        {"added_tokens": 7, "model": {"vocab": {"a": "b", "c": None, "d": True, "e": 1 << 80, "f": -4}}},
        {"added_tokens": [None, {"id": "x", "content": 3}], "model": []},
        {"model": {"vocab": "text"}},
    ],
)
def test_a_tokenizer_may_hold_anything(content: Any, model: Path) -> None:
    config = {
        "eos_token": 7,
        "pad_token": {"content": []},
        "added_tokens_decoder": {"\u0663": {}, "9" * 99: {"content": "z"}},
    }
    report = report_of(model, content, config)
    assert not report.findings
    assert not report.not_checked


def test_a_table_that_is_tied_to_the_logits_is_read_the_right_way_round(model: Path) -> None:
    """onnxruntime-genai stores them for Gemma as the logits need them, and transposes them for the tokens."""
    (file,) = model.glob("*.onnx")
    loaded = onnx.load(file)
    (table,) = [one for one in loaded.graph.initializer if one.name == "w_tokens"]
    values = numpy_helper.to_array(table)
    table.CopyFrom(numpy_helper.from_array(values.T.copy(), "w_tokens"))
    (lookup,) = [node for node in loaded.graph.node if "w_tokens" in node.input]
    lookup.input[0] = "turned"
    loaded.graph.node.insert(0, onnx.helper.make_node("Transpose", ["w_tokens"], ["turned"], perm=[1, 0]))
    onnx.save(loaded, file)
    assert subjects(report_of(model, {"model": {"vocab": WORDS}})) == ()
    assert subjects(report_of(model, {"model": {"vocab": WORDS | {"w16": 16}}})) == ("model.vocab",)
