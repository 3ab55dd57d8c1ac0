"""Decoders that take embeddings, and the graphs beside them that make these of token ids."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.numpy_helper import from_array, to_array
from support import text_fixtures
from support.loop_programs import calls, written

from kvdoctor.addons.traces.options import TraceChoices
from kvdoctor.analysis.contract_file import read_contract_file
from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import ModelFolder, open_folder
from kvdoctor.contract import CacheContract, Phase
from kvdoctor.decode.embeddings import embedded_inputs, pair_embeddings
from kvdoctor.decode.inputs import synthetic_embeddings
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.errors import UsageError
from kvdoctor.model.view import Declared
from kvdoctor.options import Options
from kvdoctor.records import to_plain
from kvdoctor.report.document import Report

FIXTURES = text_fixtures.load_all()
USUAL = "layout-embed-tokens-healthy"
DECODER, EMBEDDING = "decoder_model_merged.onnx", "embed_tokens.onnx"
Change = Callable[[onnx.ModelProto], object]


def fixture(name: str, folder: Path) -> Path:
    return FIXTURES[name].write(folder)


def contract_of(path: Path) -> tuple[ModelFolder, CacheContract]:
    folder = open_folder(str(path))
    return folder, read_contract(folder.stacks[0], folder.side_cars)


def changed(path: Path, change: Change, to: Path | None = None) -> Path:
    model = onnx.load(path)
    change(model)
    onnx.save(model, to or path)
    return to or path


def notes_of(report: Report) -> str:
    return " ".join(report.notes)


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        (USUAL, {"inputs_embeds": "inputs_embeds"}),
        ("layout-embedding-image-healthy", {"inputs_embeds": "inputs_embeds"}),
        (
            "layout-per-layer-embeddings-healthy",
            {"inputs_embeds": "inputs_embeds", "per_layer_inputs": "per_layer_inputs"},
        ),
    ],
)
def test_the_embedding_graph_is_a_phase_of_the_contract(name: str, pairs: dict[str, str], tmp_path: Path) -> None:
    folder, contract = contract_of(fixture(name, tmp_path))
    assert embedded_inputs(contract, "decode") == embedded_inputs(contract, "prefill") == pairs
    graph = contract.graph("embed")
    assert graph.inputs[0].axes == ("batch", "new")
    assert [port.role for port in graph.inputs] == ["token_ids", "features"][: len(graph.inputs)]
    assert {file.name: file.role for file in folder.files}[graph.file] == "embedding"
    assert contract.missing == ()


@pytest.mark.parametrize(
    ("present", "decoder", "taken"),
    [
        ("embed_tokens embed_tokens_q4 embed_tokens_fp16", "decoder_model_merged_q4", "embed_tokens_q4"),
        ("embed_tokens embed_tokens_fp16", "decoder_model_merged_q4", "embed_tokens"),
        ("embed_tokens embed_tokens_fp16", "decoder_model_merged", "embed_tokens"),
        ("embed_tokens_fp16", "decoder_model_merged_q4", "embed_tokens_fp16"),
        ("embed_tokens_fp16 embed_tokens_uint8", "decoder_model_merged_q4", None),
        ("anything embeddings", "decoder_model_merged", "embeddings"),
        ("anything", "decoder_model_merged", "anything"),
        ("vision_encoder", "decoder_model_merged", None),
    ],
)
def test_the_suffix_decides_between_variants_and_then_the_name(
    present: str, decoder: str, taken: str | None, tmp_path: Path
) -> None:
    fixture(USUAL, tmp_path)
    for number, name in enumerate(present.split(), 2):

        def scale(model: onnx.ModelProto, by: int = number) -> None:
            for tensor in model.graph.initializer:
                tensor.CopyFrom(from_array(to_array(tensor) * by, tensor.name))

        changed(tmp_path / EMBEDDING, scale, tmp_path / f"new-{name}.onnx")
    (tmp_path / EMBEDDING).unlink()
    for path in tmp_path.glob("new-*"):
        path.rename(tmp_path / path.name.removeprefix("new-"))
    (tmp_path / DECODER).rename(tmp_path / f"{decoder}.onnx")
    _, contract = contract_of(tmp_path)
    assert (contract.graph("embed").file if "embed" in contract.phases else None) == (taken and f"{taken}.onnx")


def test_beside_a_single_file_its_embedding_graph_is_found(tmp_path: Path) -> None:
    fixture(USUAL, tmp_path)
    _, contract = contract_of(tmp_path / DECODER)
    assert contract.graph("embed").file == EMBEDDING
    assert not open_folder(str(tmp_path / EMBEDDING)).stacks


def test_genai_config_says_which_file_makes_the_embeddings(tmp_path: Path) -> None:
    fixture("embedding-graph-two", tmp_path)
    parts = {"decoder": {"filename": DECODER}, "embedding": {"filename": "token_embeddings.onnx"}}
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": parts}))
    _, contract = contract_of(tmp_path)
    assert contract.graph("embed").file == "token_embeddings.onnx"


def half(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    table = model.graph.initializer[0]
    table.CopyFrom(from_array(to_array(table).astype(np.float16), table.name))


def one_sequence(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1


def mixing_tokens(model: onnx.ModelProto) -> None:
    """An encoder of text has the interface of an embedding graph, and looks at all tokens for each one."""
    made = model.graph.node[0].output[0]
    model.graph.node[0].output[0] = "before"
    model.graph.node.append(onnx.helper.make_node("Softmax", ["before"], [made], axis=1))


@pytest.mark.parametrize("change", [half, one_sequence, mixing_tokens])
def test_what_cannot_feed_the_decoder_is_not_used(change: Change, tmp_path: Path) -> None:
    fixture(USUAL, tmp_path)
    changed(tmp_path / EMBEDDING, change)
    folder, contract = contract_of(tmp_path)
    assert "embed" not in contract.phases
    assert {file.role for file in folder.files} == {"decoder", "other"}
    assert bool(folder.stacks[0].problems) == (change is not mixing_tokens)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("embedding-graph-width", "do not fit"),
        ("embedding-graph-two", "and differ in content"),
        ("embedding-graph-missing", ""),
    ],
)
def test_without_its_embedding_graph_a_decoder_has_no_loop_and_a_note_says_why(
    name: str, words: str, tmp_path: Path
) -> None:
    path = fixture(name, tmp_path)
    report = step_test(str(path), Options())
    assert report.verdict == ("unhealthy" if name.endswith("width") else "healthy")
    assert words in notes_of(report) + " ".join(finding.cause for finding in report.findings)
    made = written(path)
    assert made.exit_code == 3
    assert "no graph next to it computes them from token ids" in str(made.reason)
    assert words in str(made.reason)


def test_the_decoder_is_run_with_the_embeddings_of_its_graph(tmp_path: Path) -> None:
    """A graph whose embeddings count places from the start of each call is right for a prompt, and wrong in a step."""
    path = fixture(USUAL, tmp_path)
    assert step_test(str(path), Options()).verdict == "healthy"
    onnx.save(text_fixtures.compile_text(COUNTING), path / EMBEDDING)
    report = step_test(str(path), Options())
    assert report.verdict == "unhealthy"
    assert "differs" in {run.outcome for run in report.runs if run.experiment == "plain-loop"}


COUNTING = """<
  ir_version: 8,
  opset_import: ["" : 17]
>
embedding (int64[batch_size, sequence_length] input_ids) => (float[batch_size, sequence_length, 8] inputs_embeds)
<float[16, 8] w_tokens, float[128, 8] w_places, int64 zero = {0}, int64 step = {1}>
{
  length = Shape <start = 1> (input_ids)
  new = Squeeze (length)
  places = Range (zero, new, step)
  placed = Gather (w_places, places)
  tokens = Gather (w_tokens, input_ids)
  inputs_embeds = Add (tokens, placed)
}
"""


def test_an_embedding_graph_that_cannot_be_run_is_replaced_and_named(tmp_path: Path) -> None:
    path = fixture(USUAL, tmp_path)

    def short_table(model: onnx.ModelProto) -> None:
        table = model.graph.initializer[0]
        table.CopyFrom(from_array(to_array(table)[:2], table.name))

    changed(path / EMBEDDING, short_table)
    report = step_test(str(path), Options())
    assert report.verdict == "healthy"
    reasons = " ".join(entry.reason for entry in report.not_checked)
    assert "the embedding file could not be run" in reasons


def test_a_contract_from_a_file_decides_between_two_graphs(tmp_path: Path) -> None:
    path = fixture("embedding-graph-two", tmp_path / "model")
    _, usual = contract_of(fixture(USUAL, tmp_path / "usual"))
    folder, contract = contract_of(path)
    plain = to_plain(contract)
    graph = to_plain(usual.graphs["embedding"]) | {"file": "text_embeddings.onnx"}
    plain["graphs"]["embedding"], plain["phases"]["embed"] = graph, to_plain(Phase("embedding"))
    file = tmp_path / "contract.json"
    file.write_text(json.dumps({"schema": "kvdoctor/contract/1", "stacks": {"decoder": plain}}))
    ((stack, given),) = read_contract_file(str(file), folder)
    assert (stack.files["embedding"].name, given.graph("embed").file) == ("text_embeddings.onnx",) * 2
    assert step_test(str(path), Options(contract=str(file))).verdict == "healthy"
    graph["outputs"][0]["name"] = graph["outputs"][0]["role"] = "auxiliary"
    file.write_text(json.dumps({"schema": "kvdoctor/contract/1", "stacks": {"decoder": plain}}))
    with pytest.raises(UsageError, match="has no output 'auxiliary'"):
        read_contract_file(str(file), folder)


def test_a_size_that_is_no_number_fits_by_the_name_alone() -> None:
    def port(name: str, *widths: int | str) -> Declared:
        return Declared(name, "float", ("batch", "new", *widths))

    assert pair_embeddings([port("a", 8)], [port("a", "width")]) == {"a": "a"}
    assert pair_embeddings([port("a", 8)], [port("b", "width")]) is None
    assert pair_embeddings([port("a", 8)], [port("b", 8)]) == {"a": "b"}
    assert pair_embeddings([port("a", 8)], [port("b", 8), port("c", 8)]) is None
    assert pair_embeddings([port("a", 8), port("b", 8)], [port("c", 8)]) is None
    assert pair_embeddings([port("a", 8), port("b", 2, 6)], [port("y", 2, 6), port("x", 8)]) == {"a": "x", "b": "y"}


def test_a_loop_runs_the_embedding_graph(tmp_path: Path) -> None:
    made = written(fixture(USUAL, tmp_path))
    assert (made.reason, [result.problem for result in made.results if result.problem]) == (None, [])
    assert made.results


def test_a_trace_with_the_calls_of_the_embedding_graph_is_checked(tmp_path: Path) -> None:
    import subprocess
    import sys

    path, out, trace = fixture(USUAL, tmp_path / "model"), tmp_path / "out", tmp_path / "loop.jsonl"
    written(path, out=out)
    words = (*calls([5, 6, 7], most=5), "--record", str(trace))
    command = [sys.executable, "main.py", "--model", str(path), *words]
    subprocess.run(command, cwd=out, check=True, capture_output=True)
    assert [json.loads(line)["file"] for line in trace.read_text().splitlines()][:2] == [EMBEDDING, DECODER]
    report = step_test(str(path), Options(added=(TraceChoices(str(trace)),)))
    assert report.verdict == "healthy"
    assert "5 steps of decoder compared with the contract, none breaks it" in notes_of(report)
    assert "5 of 5 steps give the logits of the trace" in notes_of(report)


def test_synthetic_embeddings_are_rows_of_their_tokens() -> None:
    """Without an embedding graph a token has one row, whatever the call, and the rows of two tokens differ."""
    ids = np.array([[7, 250_000, 7], [8, 3, 2**40]])
    made = synthetic_embeddings(ids, (2, 3, 64))
    assert made.shape == (2, 3, 64)
    assert np.array_equal(made[0, 0], made[0, 2])
    assert len(np.unique(made.reshape(6, 64), axis=0)) == 5
    assert np.array_equal(synthetic_embeddings(ids[1:, 1:], (1, 2, 64)), made[1:, 1:])
    assert synthetic_embeddings(ids, (2, 3, 4, 16)).shape == (2, 3, 4, 16)
    assert synthetic_embeddings(ids[:, :0], (2, 0, 64)).shape == (2, 0, 64)
    assert np.isfinite(synthetic_embeddings(np.array([[-1]]), (1, 1, 64))).all()
    many = synthetic_embeddings(np.arange(1000)[None], (1, 1000, 64))
    assert abs(many.mean()) < 0.02
    assert abs(many.std() - 1) < 0.02
    assert np.abs(np.corrcoef(many[0, :50]) - np.eye(50)).max() < 0.6
