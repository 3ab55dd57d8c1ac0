"""Every language writes a program that decodes what the model means; a skip says which tools are missing."""

import filecmp
import json
import shutil
from pathlib import Path

import make_loops
import onnx
import pytest
from onnx import TensorProto, helper
from support import embedding_models, text_fixtures
from support.isolated import EXPORTS
from support.loop_programs import assert_decodes
from support.probed_programs import assert_a_trace_is_accepted, built
from support.sampling import spread

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.loops.language import languages
from kvdoctor.loops.make_plan import make_plan
from kvdoctor.loops.vectors import Vector, differences
from kvdoctor.model.output_folder import LOOP_MARK

COMPILED = [name for name in languages() if name != "python"]
LAYOUTS = (
    "layout-delta-appended-healthy",
    "layout-delta-healthy",
    "layout-scatter-static-pair-healthy",
    "layout-ort-t5-init-healthy",
    "layout-rwkv-healthy",
    "layout-aihub-whisper-healthy",
)
"""Layouts whose loops differ: appended and written rows, buffers, an encoder within the first call, states."""


# The tests of each language build loops for three of the exports.
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("model", make_loops.COMMITTED)
@pytest.mark.parametrize("language", COMPILED)
def test_an_export_is_decoded(language: str, model: str) -> None:
    assert_decodes(language, EXPORTS / model)


@pytest.mark.slow
@pytest.mark.parametrize(("language", "layout"), spread(COMPILED, LAYOUTS, 6))
def test_a_layout_is_decoded(language: str, layout: str, tmp_path: Path) -> None:
    assert_decodes(language, text_fixtures.load_all()[layout].write(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("language", "layout"), spread(COMPILED, embedding_models.LAYOUTS, 5))
def test_an_embedding_graph_is_run_before_each_call(language: str, layout: str, tmp_path: Path) -> None:
    model = text_fixtures.load_all()[layout].write(tmp_path / "model")
    program = built(language, model, tmp_path / "loop")
    vectors = json.loads((program.folder / LOOP_MARK).read_text("utf-8"))["vectors"]
    assert len(vectors) == 3
    for one in vectors:
        done = program.run(*one["arguments"])
        assert done.returncode == 0, done.stderr
        assert not list(differences(Vector(one["name"], (), tuple(map(tuple, one["expected"]))), done.stdout))

    trace = tmp_path / "loop.jsonl"
    done = program.run("--prompt", "5,6,7", "--most", "5", KVDOCTOR_TRACE=str(trace))
    assert done.returncode == 0, done.stderr
    folder = open_folder(model)
    plan = make_plan(read_contract(folder.stacks[0], folder.side_cars), layout)
    assert plan.embed is not None
    files = [json.loads(line)["file"] for line in trace.read_text("utf-8").splitlines()]
    assert files == [plan.embed.file, plan.decode.file] * 5
    assert_a_trace_is_accepted(model, trace, steps=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "language",
    [
        pytest.param(name, marks=() if name in ("javascript", "go", "cpp") else pytest.mark.exhaustive)
        for name in COMPILED
    ],
)
def test_padding_is_counted_in_no_row_of_positions(language: str, tmp_path: Path) -> None:
    """Qwen2-VL takes `position_ids` int64[3, batch, new]: the sequences are not its first axis."""
    folder = shutil.copytree(EXPORTS / "gpt2", tmp_path / "model")
    model = onnx.load(folder / "model.onnx")
    for node in model.graph.node:
        node.input[:] = ["first_row" if name == "position_ids" else name for name in node.input]
    (port,) = (port for port in model.graph.input if port.name == "position_ids")
    sizes = [size.dim_param for size in port.type.tensor_type.shape.dim]
    port.CopyFrom(helper.make_tensor_value_info(port.name, TensorProto.INT64, [3, *sizes]))
    model.graph.initializer.append(helper.make_tensor("first", TensorProto.INT64, [], [0]))
    model.graph.node.insert(0, helper.make_node("Gather", ["position_ids", "first"], ["first_row"], axis=0))
    onnx.save(model, folder / "model.onnx")
    assert_decodes(language, folder)


@pytest.mark.parametrize(("language", "model"), make_loops.examples())
def test_an_example_is_what_is_written_today(language: str, model: str, tmp_path: Path) -> None:
    made, kept = tmp_path / "made", make_loops.EXAMPLES / f"{language}-{model}"
    make_loops.write_example(language, model, made)
    names = sorted(path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(kept).as_posix() for path in kept.rglob("*") if path.is_file())
    _, differing, failed = filecmp.cmpfiles(made, kept, names, shallow=False)
    assert not [name for name in (*differing, *failed) if name != "kvdoctor-loop.json"], "python docs/make_loops.py"
    written_today, as_kept = (json.loads((folder / "kvdoctor-loop.json").read_text()) for folder in (made, kept))
    assert written_today["vectors"] == as_kept["vectors"]
