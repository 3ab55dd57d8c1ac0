"""The place of a fault: which node, what came into it, where that came from, and whom it is laid to."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.numpy_helper import from_array
from support import text_fixtures
from support.command_line import kvdoctor
from support.famous_error import EMPTY_BATCH_FAILS, FIRST_TO_FAIL
from support.graph_faults import (
    EXPORTS,
    Surgery,
    baked_reshape,
    broken,
    mask_from_the_start,
    node,
    other_scale,
    positions_from_zero,
)
from support.sampling import sampled
from support.text_fixtures import load_all

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.decode.messages import ExperimentJob
from kvdoctor.decode.runs import FaultLocation
from kvdoctor.decode.tolerances import TOLERANCES
from kvdoctor.diagnose.locate.difference import PASSES, find_pass
from kvdoctor.diagnose.locate.search import LocateContext, locate_fault
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.errors import CannotCheck
from kvdoctor.report.document import Report
from kvdoctor.runtime.client import Runtime

FIXTURES = load_all()


@dataclass(frozen=True)
class Expected:
    """What is demanded of a place; `text` are parts of its words and its provenance."""

    op: str
    node: str
    layer: int | None
    text: tuple[str, ...]
    scope: str = ""
    frozen: str | None = None
    source: str = "graph"


def place_of(report: Report) -> FaultLocation:
    """The one place that was looked for."""
    found = [run for run in report.runs if run.location is not None or run.no_location is not None]
    assert [run.no_location for run in found] == [None]
    place = found[0].location
    assert place is not None
    return place


def demand(expected: Expected, place: FaultLocation) -> None:
    assert place.node is not None
    assert (place.node.op, place.node.name) == (expected.op, expected.node)
    assert (place.layer, place.source, place.frozen_by) == (expected.layer, expected.source, expected.frozen)
    assert expected.scope in place.scope
    text = "\n".join((place.words, *place.provenance))
    for part in expected.text:
        assert part in text, text


FAILING = {
    "step-fails": Expected(
        "Reshape",
        "/decoder/layers.0/self_attn/Reshape",
        0,
        (
            "the target [-1, 2, 3, 4] needs a multiple of 24 elements, the input has 32",
            "axis 2 of past_key_values.0.decoder.key is 4 as fed, as step 1 returned it as present.0.decoder.key",
        ),
        frozen="sample [-1, 2, 3, 4]",
    ),
    "step-fails-expand": Expected(
        "Expand",
        "/decoder/layers.0/self_attn/Expand",
        0,
        ("4 and 3 cannot be broadcast", "number 2 of sample is 3 in the graph"),
        frozen="sample [1, 1, 3, 1]",
    ),
    "step-fails-if": Expected(
        "MatMul",
        "/decoder/layers.0/self_attn/MatMul",
        0,
        (
            "4 columns do not fit 3 rows",
            "axis 3 of c_shares is 4 because past_key_values.0.decoder.key was fed length 3 and input_ids was fed "
            "length 1, through",
        ),
        scope='If "optimum::if", then_branch',
    ),
    "step-fails-function": Expected(
        "MatMul", "/self_attn/MatMul", 0, ("10 columns do not fit 0 rows",), scope='function attention called by "x1"'
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_step_that_fails(name: str, tmp_path: Path, runtime: Runtime) -> None:
    report = step_test(str(FIXTURES[name].write(tmp_path)), runtime=runtime)
    place = place_of(report)
    demand(FAILING[name], place)
    assert all(seen.dtype in ("float", "int64") for seen in place.shapes.values())
    finding = next(finding for finding in report.findings if finding.name == "step-fails")
    assert finding.evidence[0].endswith(place.words)
    assert len(finding.evidence) <= 3


DIFFERING = {
    "mask-not-offset-layer": Expected(
        "Add",
        "/decoder/layers.1/self_attn/Add",
        1,
        ("replacing causal1 by its value without a cache repairs the logits", "scaled1 is right"),
    ),
    "positions-not-offset": Expected(
        "Add",
        "x0",
        None,
        ("restarted is [0], and [3] in the run without a cache: with that value the logits are right",),
    ),
    "positions-not-offset-layer": Expected(
        "Add", "/decoder/layers.1/Add", 1, ("restarted is [0], and [3] in the run without a cache",)
    ),
    "layers-swapped": Expected(
        "Concat",
        "present.1.key",
        0,
        ("past_key_values.0.key does not hold the expected entries, past_key_values.1.key does",),
    ),
    "key-value-swapped": Expected(
        "Concat",
        "present.0.value",
        0,
        ("past_key_values.0.key does not hold the expected entries, past_key_values.0.value does",),
    ),
    "present-rewrites-past": Expected("Concat", "kept0", 0, ("repairs the logits",)),
    "cache-misread": Expected(
        "Mul",
        "c_scaled",
        None,
        ("its input c_scores is right", "24 of 26 intermediate tensors"),
        scope='If "optimum::if", then_branch',
    ),
    "branches-disagree": Expected("Einsum", "out", None, ("repairs the logits", "mixed is right")),
}


@pytest.mark.parametrize("name", DIFFERING)
def test_a_step_that_differs(name: str, tmp_path: Path, runtime: Runtime) -> None:
    demand(DIFFERING[name], place_of(step_test(str(FIXTURES[name].write(tmp_path)), runtime=runtime)))


MERGED = "decoder_model_merged.onnx"
EXPORTED: dict[str, tuple[str, str, Surgery, Expected]] = {
    "gpt2-mask": (
        "gpt2",
        "model.onnx",
        mask_from_the_start("/transformer/h.1/attn/Add", "/transformer/h.1/attn/Add_hidden"),
        Expected("Add", "/transformer/h.1/attn/Add_hidden", 1, ("repairs the logits",)),
    ),
    "gpt2-reshape": (
        "gpt2",
        "model.onnx",
        baked_reshape("/transformer/h.1/attn", "past_key_values.1.value", [-1, 4, 3, 8]),
        Expected(
            "MatMul",
            "/transformer/h.1/attn/MatMul_1",
            1,
            ("axis 2 of present.1.value is 13", "the constant sample_sizes [-1, 4, 3, 8] has 3"),
            frozen="sample_sizes [-1, 4, 3, 8]",
        ),
    ),
    "llama-mask": (
        "llama-gqa",
        "model.onnx",
        mask_from_the_start("/model/layers.1/self_attn/Add_2", "/model/layers.1/self_attn/Add_hidden"),
        Expected("Add", "/model/layers.1/self_attn/Add_hidden", 1, ("repairs the logits",)),
    ),
    "llama-positions": (
        "llama-gqa",
        "model.onnx",
        positions_from_zero,
        Expected("Mul", "/model/layers.0/self_attn/Mul", 0, ("restarted is [0], and [3] in the run without a cache",)),
    ),
    "marian-reshape": (
        "marian-4.57.6",
        MERGED,
        baked_reshape("/model/decoder/layers.1/self_attn", "past_key_values.1.decoder.key", [-1, 4, 3, 8]),
        Expected(
            "Reshape",
            "/model/decoder/layers.1/self_attn/Reshape_baked",
            1,
            ("axis 2 of past_key_values.1.decoder.key is 4 as fed, as step 1 returned it",),
            scope='If "optimum::if", then_branch',
            frozen="sample_sizes [-1, 4, 3, 8]",
        ),
    ),
    "marian-scale": (
        "marian-4.57.6",
        MERGED,
        other_scale("/model/decoder/layers.1/self_attn/Mul"),
        Expected(
            "Mul",
            "/model/decoder/layers.1/self_attn/Mul",
            1,
            ("repairs the logits", "/model/decoder/layers.1/self_attn/Transpose_output_0 is right"),
            scope='If "optimum::if", then_branch',
        ),
    ),
}


@pytest.mark.parametrize("name", sampled(EXPORTED, 2))
def test_one_layer_of_a_real_export(name: str, tmp_path: Path, runtime: Runtime) -> None:
    source, file, surgery, expected = EXPORTED[name]
    folder = broken(source, file, surgery, tmp_path / name)
    before = _digests(folder)
    report = step_test(str(folder), runtime=runtime)
    places = [run.location for run in report.runs if run.location is not None and run.stack in ("merged", "decoder")]
    assert len(places) == 1, [(run.experiment, run.no_location) for run in report.runs]
    demand(expected, places[0])
    assert _digests(folder) == before


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("name", ["decoder-only-healthy", "merged-healthy", "layout-function-decoder-healthy"])
def test_nothing_is_looked_for_in_a_healthy_model(name: str, tmp_path: Path, runtime: Runtime) -> None:
    report = step_test(str(FIXTURES[name].write(tmp_path)), runtime=runtime)
    assert {(run.location, run.no_location) for run in report.runs} == {(None, None)}


@pytest.mark.parametrize("linked", [False, True], ids=["beside", "in a hub cache"])
def test_weights_in_another_file(linked: bool, tmp_path: Path, runtime: Runtime) -> None:
    source, file, surgery, expected = EXPORTED["gpt2-mask"]
    folder = broken(source, file, surgery, tmp_path / "whole")
    model = onnx.load(folder / file)
    onnx.save_model(model, folder / file, save_as_external_data=True, location="model.onnx_data", size_threshold=0)
    if linked:
        (tmp_path / "blobs").mkdir()
        (tmp_path / "snapshot").mkdir()
        for path in folder.iterdir():
            path.rename(tmp_path / "blobs" / f"blob-{path.name}")
            (tmp_path / "snapshot" / path.name).symlink_to(f"../blobs/blob-{path.name}")
        model = onnx.load(tmp_path / "blobs" / "blob-model.onnx", load_external_data=False)
        folder = tmp_path / "snapshot"
    demand(expected, place_of(step_test(str(folder), runtime=runtime)))


def test_a_search_that_fails_leaves_the_finding(tmp_path: Path, runtime: Runtime) -> None:
    folder = FIXTURES["step-fails"].write(tmp_path)
    model = onnx.load(folder / "decoder_with_past_model.onnx")
    values, indices = from_array(np.ones(1, np.float32), "sparse"), from_array(np.zeros(1, np.int64), "places")
    model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, indices, [4]))
    onnx.save(model, folder / "decoder_with_past_model.onnx")
    report = step_test(str(folder), runtime=runtime)
    judged = next(run for run in report.runs if run.experiment == "plain-loop")
    assert (judged.location, judged.no_location) == (None, "the graph holds sparse initializers")
    finding = next(finding for finding in report.findings if finding.name == "step-fails")
    assert finding.evidence == ()
    assert "Reshape" in finding.where


def test_names_are_data(tmp_path: Path) -> None:
    folder = FIXTURES["step-fails"].write(tmp_path)
    model = onnx.load(folder / "decoder_with_past_model.onnx")
    node(model.graph, "/decoder/layers.0/self_attn/Reshape").name = "\x1b[31mred\n::error::obeyed'"
    for one in model.graph.node:
        one.input[:] = ["\x1b[2J\u202e" if name == "past" else name for name in one.input]
        one.output[:] = ["\x1b[2J\u202e" if name == "past" else name for name in one.output]
    onnx.save(model, folder / "decoder_with_past_model.onnx")
    for options in (("-v",), ("--format", "markdown"), ("--format", "json")):
        code, text = kvdoctor("step-test", str(folder), *options)
        assert code == 1
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert not any(line.startswith("::") for line in text.splitlines())


def test_the_text_says_it_in_plain_lines(tmp_path: Path) -> None:
    _, text = kvdoctor("step-test", str(FIXTURES["step-fails"].write(tmp_path)), "-v")
    lines = [" ".join(line.split()) for line in text.splitlines() if line.startswith("  evidence")]
    assert lines[0] == (
        "evidence inputs past_key_values.0.decoder.key float[1, 2, 4, 4], sample int64[4]: the target "
        "[-1, 2, 3, 4] needs a multiple of 24 elements, the input has 32: the graph holds sample [-1, 2, 3, 4]"
    )
    assert len(set(lines)) == 3


FAMOUS = {
    "marian-4.46.3": "the target [1, 4, 1, 0]",
    "marian-4.57.6": "an input has an axis of length 0" if EMPTY_BATCH_FAILS else "0 columns do not fit 32 rows",
    "t5": "an input has an axis of length 0" if EMPTY_BATCH_FAILS else "4 and 5 cannot be broadcast",
    "whisper": "an input has an axis of length 0" if EMPTY_BATCH_FAILS else "0 columns do not fit 32 rows",
}


@pytest.mark.parametrize("name", FAMOUS)
def test_the_famous_failure(name: str, tmp_path: Path, runtime: Runtime) -> None:
    """The check of the emptied cache explains this one; the search by itself lays it to the empty past as well."""
    folder = open_folder(str(EXPORTS / name))
    stack = next(stack for stack in folder.stacks if stack.name == "merged")
    contract = read_contract(stack, folder.side_cars)
    job = ExperimentJob(stack.name, folder.root.absolute(), contract, ("plain-loop",), keep_calls=tmp_path)
    run = locate_fault(
        runtime.examine(job).runs[0],
        LocateContext(stack, contract, runtime, job.provider, tmp_path, TOLERANCES[contract.exactness]),
    )
    place = run.location
    assert place is not None, run.no_location
    assert place.node is not None
    assert (place.node.op, place.node.name) == FIRST_TO_FAIL[name]
    assert place.scope == 'If "optimum::if", then_branch'
    assert place.source == "feed"
    assert place.words.startswith(FAMOUS[name])
    width = 12 if name == "t5" else 8
    fed = f"past_key_values.0.encoder.key was fed as [0, 4, 1, {width}], step 1 returned it as present.0.encoder.key"
    assert place.words.endswith(fed)


@pytest.mark.parametrize("culprit", [PASSES[0], PASSES[1], PASSES[len(PASSES) // 2], PASSES[-1]])
def test_any_pass_is_found_in_few_runs(culprit: str) -> None:
    asked: list[tuple[str, ...]] = []

    def is_right(disabled: tuple[str, ...]) -> bool:
        asked.append(disabled)
        return culprit in disabled

    assert find_pass(is_right) == culprit
    assert len(asked) <= 10


def test_what_no_single_pass_mends_has_no_pass() -> None:
    assert find_pass(lambda _: False) is None
    both = {PASSES[0], PASSES[-1]}
    assert find_pass(lambda disabled: both <= {*disabled}) is None


def test_a_search_that_is_cut_short_finds_none() -> None:
    def too_late(_: tuple[str, ...]) -> bool:
        raise CannotCheck("time is up")

    assert find_pass(too_late) is None


def test_names_are_written_once() -> None:
    assert len({*PASSES}) == len(PASSES)


def test_a_pass_of_the_runtime_is_named(tmp_path: Path) -> None:
    """Folding the constant in half precision makes it infinite; unfolded, the runtime computes it in float32."""
    text_fixtures.read(text_fixtures.FOLDER / "non-finite-half-mask.onnxtxt").write(tmp_path)
    (finding,) = [one for one in step_test(str(tmp_path)).findings if one.name == "non-finite"]
    assert "right with the pass ConstantFolding disabled" in finding.evidence[0]
