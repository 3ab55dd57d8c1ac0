"""Models with a fault that are converted in one call: repaired, proved, and then compared with the repaired copy."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from support.proofs import claims, failed, repair_of
from test_conversions import contents, faulty, write

from kvdoctor import api
from kvdoctor.addons.conversions import api as conversions
from kvdoctor.addons.conversions import pipeline
from kvdoctor.addons.conversions.options import ConvertChoices
from kvdoctor.addons.conversions.pipeline import ConvertRequest
from kvdoctor.errors import UsageError
from kvdoctor.options import Options
from kvdoctor.repair import session
from kvdoctor.repair.repairs.registry import load
from kvdoctor.repair.workspace import RepairContext
from kvdoctor.report import formats
from kvdoctor.report.document import exit_code
from kvdoctor.report.repair_record import Change

SLOW = pytest.mark.slow
COUNTED, SWAPPED, EXCHANGED = "positions-not-offset-counted", "layers-swapped", "key-value-swapped"
TWINS = {COUNTED: "decoder-only-counted-positions-healthy", SWAPPED: "decoder-only-healthy"}
FOUND = {COUNTED: "KV310 positions-not-offset", SWAPPED: "KV307 layers-swapped", EXCHANGED: "KV306 key-value-swapped"}
"""Faults that make the logits of every step wrong, and that a repair of the graph is known for."""
SIZES = ("batch=1", "new=1", "past=6")
TOKENS = [3, 7, 5, 9, 4]


def decode(path: Path, tokens: list[int]) -> np.ndarray:
    """The logits of the last token, fed one by one behind a first call with two."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [port.name for port in session.get_inputs()]
    pasts = [name for name in names if name.startswith("past")]
    past: dict[str, Any] = {name: np.zeros((1, 2, 0, 4), np.float32) for name in pasts}
    logits, done = np.zeros(0), 0
    for new in (2, *(1,) * (len(tokens) - 2)):
        row = np.arange(done, done + new)[None]
        given = {"input_ids": np.array([tokens[done : done + new]]), "position_ids": row}
        given["attention_mask"] = np.ones((1, done + new), np.int64)
        fed = {name: array for name, array in given.items() if name in names}
        returned = ["logits", *(name.replace("past_key_values", "present") for name in pasts)]
        logits, *presents = session.run(returned, {**fed, **past})
        past, done = dict(zip(pasts, presents, strict=True)), done + new
    return np.asarray(logits)[:, -1]


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        (COUNTED, {"cache": "static=12"}),
        (SWAPPED, {"cache_type": "int8"}),
        (EXCHANGED, {"logits": "last", "cache": "static=12", "cache_type": "int8"}),
        pytest.param(COUNTED, {"cache_type": "int4"}, marks=SLOW),
        pytest.param(COUNTED, {"logits": "selectable"}, marks=SLOW),
        pytest.param(COUNTED, {"logits": "last", "layout": "pair"}, marks=SLOW),
        pytest.param(SWAPPED, {"cache": "static=12"}, marks=SLOW),
        pytest.param(SWAPPED, {"sizes": SIZES}, marks=SLOW),
        pytest.param(SWAPPED, {"logits": "last", "layout": "pair"}, marks=SLOW),
        pytest.param(EXCHANGED, {"sizes": SIZES, "logits": "last"}, marks=SLOW),
    ],
)
def test_one_call_repairs_and_converts(name: str, choices: dict[str, Any], tmp_path: Path) -> None:
    """The repair has the proof that it has alone, and the conversion that of any model, against the repaired copy."""
    source, out = write(tmp_path / "model", name), tmp_path / "out"
    before = contents(source)
    report = conversions.convert(source, out, **choices)
    assert not failed(report)
    assert (exit_code(report, "error"), report.verdict) == (0, "healthy")
    assert contents(source) == before
    gone = f"{FOUND[name].partition(' ')[2]} is gone"
    assert {gone, "logits of the first step equal to the original's, bit for bit"} <= claims(report).keys()
    compared = [claim for claim in claims(report) if "those of the repaired copy" in claim]
    assert len(compared) == 1
    assert "caches" in compared[0]
    (base,) = repair_of(report).bases
    assert base.endswith(f"not with {source}, which has {FOUND[name]}")
    assert sorted(path.name for path in out.rglob("*") if path.is_file()) == sorted(report_contents(out))
    assert exit_code(api.step_test(out), "error") == 0


def report_contents(out: Path) -> tuple[str, ...]:
    """The files that the fix report says were written."""
    listed: list[str] = json.loads((out / "kvdoctor-report.json").read_text(encoding="utf-8"))["repair"]["contents"]
    return tuple(listed)


@pytest.mark.parametrize("name", TWINS)
def test_the_copy_decodes_as_the_healthy_twin(name: str, tmp_path: Path) -> None:
    """Fault and twin have the same weights."""
    source, twin = write(tmp_path / "model", name), write(tmp_path / "twin", TWINS[name])
    conversions.convert(source, tmp_path / "out", logits="last")
    want = decode(twin / "model.onnx", TOKENS)
    assert np.abs(decode(source / "model.onnx", TOKENS) - want).max() > 0.01
    np.testing.assert_allclose(decode(tmp_path / "out" / "model.onnx", TOKENS), want, atol=1e-5)


def test_a_healthy_model_is_compared_with_itself_as_it_is(tmp_path: Path) -> None:
    report = conversions.convert(write(tmp_path / "model", TWINS[COUNTED]), tmp_path / "out", cache="static=12")
    assert "logits and caches of every call are those of the original" in claims(report)
    assert not repair_of(report).bases


@pytest.mark.slow
def test_the_cost_of_a_type_is_that_of_the_repaired_loop(tmp_path: Path) -> None:
    """A dry run of a faulty model shows the figures of its healthy twin."""
    found = {}
    for name in (SWAPPED, TWINS[SWAPPED]):
        report = conversions.convert(write(tmp_path / name, name), cache_type="int8")
        found[name] = repair_of(report)
    assert not list(tmp_path.glob("out*"))
    (mine,), (theirs,) = (record.cache_costs for record in found.values())
    for one, other in zip(mine.costs, theirs.costs, strict=True):
        assert (one.keys, one.values, one.layer) == (other.keys, other.values, other.layer)
        assert one.divergence == pytest.approx(other.divergence, rel=1e-2)
        assert one.largest == pytest.approx(other.largest, rel=1e-2)
    assert "with the repaired copy and its cost measured on it, not with" in found[SWAPPED].bases[0]


def test_every_form_of_the_report_says_what_was_compared(tmp_path: Path) -> None:
    report = conversions.convert(write(tmp_path / "model", COUNTED), logits="last")
    for name in ("text", "markdown", "html", "json"):
        text = formats.render(report, name).replace("\\", "")
        assert "the conversion is compared with the repaired copy" in text, name


def test_only_the_faulty_decoder_of_a_folder_is_compared_with_its_repaired_copy(tmp_path: Path) -> None:
    source = write(tmp_path / "model", COUNTED)
    shutil.copy(write(tmp_path / "twin", TWINS[COUNTED]) / "model.onnx", source / "model_right.onnx")
    report = conversions.convert(source, tmp_path / "out", logits="last")
    assert not failed(report)
    compared = {
        e.stack: e.claim.rpartition("those of ")[2] for e in repair_of(report).proof if "those of the" in e.claim
    }
    assert sorted(compared.values()) == ["the original", "the repaired copy"]
    (base,) = repair_of(report).bases
    assert compared[base.partition(":")[0]] == "the repaired copy"


@SLOW
@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("key-value-swapped-pair", {"logits": "last"}),
        ("key-value-swapped-pair", {"cache_type": "int8"}),
        ("cross-cache-emptied", {"cache_type": "int8"}),
    ],
)
def test_pairs_and_merged_decoders(name: str, choices: dict[str, str], tmp_path: Path) -> None:
    report = conversions.convert(write(tmp_path / "model", name), tmp_path / "out", **choices)
    assert not failed(report)
    assert any("caches of every call are those of the repaired copy" in claim for claim in claims(report))
    assert len(repair_of(report).bases) == 1
    assert exit_code(api.step_test(tmp_path / "out"), "error") == 0


@pytest.mark.parametrize("choices", [{"cache": "static=12"}, {"cache_type": "int8"}])
def test_a_fault_that_cannot_be_repaired_comes_first(choices: dict[str, str], tmp_path: Path) -> None:
    """The loop is wrong, so nothing could be compared with it: its cost is not measured either."""
    source, out = write(tmp_path / "model", "positions-not-offset"), tmp_path / "out"
    report = conversions.convert(source, out, **choices)
    assert not out.exists()
    assert exit_code(report, "error") == 1
    assert not repair_of(report).cache_costs
    text = formats.render(report, "text")
    reason = "a conversion is compared with the model as it is, and its plain-loop does not pass"
    assert text.index("KV310") < text.index("cannot be converted") < text.index(reason)


@pytest.mark.parametrize("name", [SWAPPED, "positions-not-offset"])
def test_a_form_that_a_faulty_model_cannot_have_comes_after_its_fault(name: str, tmp_path: Path) -> None:
    report = conversions.convert(write(tmp_path / "model", name), tmp_path / "out", cache="growing")
    assert not (tmp_path / "out").exists()
    assert exit_code(report, "error") == 1
    text = formats.render(report, "text")
    assert text.index("error[KV3") < text.index("it has no static buffer")
    assert ("joined-presents repairs the model, but then" in text) == (name == SWAPPED)


@pytest.mark.parametrize("name", [TWINS[SWAPPED], "mask-not-offset", "layout-canary-healthy"])
def test_a_form_that_a_working_model_cannot_have_is_wrong_usage(name: str, tmp_path: Path) -> None:
    """A warning is no reason to call it unhealthy, nor is a repair of it that fails."""
    with pytest.raises(UsageError, match="cannot be converted"):
        conversions.convert(write(tmp_path / "model", name), tmp_path / "out", cache="growing")
    assert not (tmp_path / "out").exists()


def spoil_repair(name: str, spoil: Callable[[onnx.GraphProto], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a repair make a mistake."""

    def make(context: RepairContext, right: Callable[[RepairContext], tuple[Change, ...]]) -> tuple[Change, ...]:
        changes = right(context)
        spoil(context.model("model.onnx").graph)
        return changes

    def spoilt() -> tuple[Any, ...]:
        return tuple(
            replace(one, apply=lambda context, right=one.apply: make(context, right)) if one.name == name else one
            for one in load()
        )

    monkeypatch.setattr(session, "load", spoilt)


def one_too_far(graph: onnx.GraphProto) -> None:
    """Positions are offset by the past and one more, where there is a past."""
    node = next(node for node in graph.node if node.op_type == "Range")
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(1, np.int64), "more"))
    at = list(graph.node).index(node)
    name = node.output[0]
    node.output[0] = "counted"
    graph.node.insert(at + 1, onnx.helper.make_node("Min", ["offset", "more"], ["extra"]))
    graph.node.insert(at + 2, onnx.helper.make_node("Add", ["counted", "extra"], [name]))


@pytest.mark.parametrize("choices", [{"cache": "static=12"}, {"logits": "last"}])
def test_a_wrong_repair_is_not_proved_by_the_conversion_of_itself(
    choices: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converted and repaired copy would agree in every call: it is the run without a cache that shows the mistake."""
    spoil_repair("offset-positions", one_too_far, monkeypatch)
    report = conversions.convert(write(tmp_path / "model", COUNTED), tmp_path / "out", **choices)
    assert not (tmp_path / "out").exists()
    assert exit_code(report, "error") == 1
    assert any("plain-loop passes" in text for text in failed(report)), failed(report)
    assert not any("the repaired copy" in claim for claim in claims(report))
    assert any("nothing was converted" in note for note in report.notes)


def other_scores(graph: onnx.GraphProto) -> None:
    """A first step that is no longer that of the original: the scores of a layer are scaled otherwise."""
    node = next(node for node in graph.node if "scaled1" in node.output)
    node.input[1] = "one"


def test_a_repair_that_changes_the_first_step_is_not_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a copy is right by its own measure: its steps agree with its run without a cache."""
    spoil_repair("offset-positions", other_scores, monkeypatch)
    report = conversions.convert(write(tmp_path / "model", COUNTED), tmp_path / "out", logits="last")
    assert not (tmp_path / "out").exists()
    assert [text.partition(":")[0] for text in failed(report)] == [
        "logits of the first step equal to the original's, bit for bit"
    ]
    assert exit_code(report, "error") == 1


def keys_scaled(graph: onnx.GraphProto) -> None:
    """The keys of the first layer are returned a hundredth larger than they are attended to."""
    output = next(value.name for value in graph.output if value.name == "present.0.key")
    maker = next(node for node in graph.node if output in node.output)
    maker.output[list(maker.output).index(output)] = "attended"
    for node in graph.node:
        node.input[:] = ["attended" if name == output else name for name in node.input]
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(1.01, np.float32), "larger"))
    graph.node.append(onnx.helper.make_node("Mul", ["attended", "larger"], [output]))


def test_a_wrong_conversion_of_a_repaired_copy_is_not_proved(tmp_path: Path) -> None:
    source, out = write(tmp_path / "model", COUNTED), tmp_path / "out"
    asked = faulty(keys_scaled, "model.onnx", logits="last")
    report = pipeline.convert(ConvertRequest(str(source), str(out), ConvertChoices(), (asked,)), Options())
    assert any("those of the repaired copy: first difference: batch 1" in text for text in failed(report))
    assert any("present.0.key differs" in text for text in failed(report)), failed(report)
    assert not out.exists()
    assert exit_code(report, "error") == 1
