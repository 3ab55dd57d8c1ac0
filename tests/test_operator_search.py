"""Operators with the whole loop: the decoder inside is run, and what the operator finds is compared with our search."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from support.text_fixtures import load_all

from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.analysis.search_operators import read_search
from kvdoctor.decode.search import LOWEST, Ended, SearchPlan, SearchRules, choose
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.report.document import Report

FIXTURES = load_all()


def rules(**more: object) -> SearchRules:
    plan = SearchPlan("BeamSearch", {}, {}, False, 3, 0, -1, False, int(more.pop("ngram", 0)), "sequences", None)  # type: ignore[call-overload]
    return SearchRules(plan, **{"beams": 2, "returned": 2, "max_length": 8, "min_length": 0, **more})  # type: ignore[arg-type]


def test_rules_forbid_and_penalize_tokens() -> None:
    scores = np.array([-1.0, -2.0, 0.5, -0.1])
    assert rules(min_length=3).adjust(scores, [1, 2])[3] == LOWEST
    assert rules(min_length=2).adjust(scores, [1, 2])[3] == scores[3]
    assert rules(repetition_penalty=2.0).adjust(scores, [1, 2]).tolist() == [-1.0, -4.0, 0.25, -0.1]
    assert rules(ngram=2).adjust(scores, [1, 2, 0, 1])[2] == LOWEST
    assert rules(ngram=2).adjust(scores, [1, 2, 0])[2] == scores[2]


def test_a_search_ends_where_no_beam_can_be_better() -> None:
    ended = Ended(rules())
    best = choose(np.array([[-1.0, -3.0, -4.0, -0.5], [-9.0, -9.0, -9.0, -9.0]]), ended.rules)
    assert best[:2] == [(-0.5, 0, 3), (-1.0, 0, 0)]
    kept = ended.take(best, [(5, 6), (5, 6)])
    assert [token for _, _, token in kept] == [0, 1]
    assert ended.found == [(-0.25, (5, 6))]
    ended.add((5, 6, 0), -0.3)
    assert not ended.take(choose(np.full((2, 4), -9.0), ended.rules), [(5, 6, 0), (5, 6, 1)])


def written(name: str, folder: Path) -> Path:
    FIXTURES[name].write(folder)
    return next(folder.glob("*.onnx"))


def find_node(model: onnx.ModelProto) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.domain == "com.microsoft")


def outcome(report: Report) -> tuple[str, str]:
    run = next(run for run in report.runs if run.experiment == "operator-search")
    return run.outcome, run.reason or ""


GREEDY = {
    "a penalty": {"repetition_penalty": 1.5},
    "an early end": {"min_length": 1},
    "both": {"repetition_penalty": 0.7, "min_length": 1, "max_length": 20},
}


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_search_adjusts_logits_and_does_not_clear_what_follows_the_end(name: str, tmp_path: Path) -> None:
    path = written("layout-greedy-search-healthy", tmp_path)
    model = onnx.load(path)
    for key, number in GREEDY[name].items():
        kind = onnx.TensorProto.FLOAT if isinstance(number, float) else onnx.TensorProto.INT32
        model.graph.initializer.append(helper.make_tensor(key, kind, [1], [number]))
        model.graph.input.remove(next(value for value in model.graph.input if value.name == key))
    onnx.save(model, path)
    report = step_test(str(tmp_path))
    assert (outcome(report)[0], report.verdict) == ("passed", "healthy"), report.findings


def test_declared_sizes_of_a_prompt_are_kept(tmp_path: Path) -> None:
    path = written("layout-greedy-search-healthy", tmp_path)
    model = onnx.load(path)
    prompt = next(value for value in model.graph.input if value.name == "input_ids").type.tensor_type.shape
    prompt.dim[1].dim_value = 8
    onnx.save(model, path)
    assert outcome(step_test(str(tmp_path)))[0] == "passed"
    prompt.dim[0].dim_value = 2
    onnx.save(model, path)
    report = step_test(str(tmp_path))
    assert report.verdict == "incomplete"
    assert "the graph takes input_ids of the sizes [2, 8] only" in outcome(report)[1]


def test_logits_that_are_wider_than_the_vocabulary_are_not_compared(tmp_path: Path) -> None:
    path = written("layout-greedy-search-healthy", tmp_path)
    model = onnx.load(path)
    find_node(model).attribute.append(helper.make_attribute("vocab_size", 8))
    onnx.save(model, path)
    report = step_test(str(tmp_path))
    assert "vocab_size of the operator is 8, and the logits are 16 wide" in outcome(report)[1]
    assert report.verdict == "incomplete"


def test_settings_in_the_file_are_part_of_the_search(tmp_path: Path) -> None:
    """Penalties, a fixed number of beams and an end of sequences: computed, not fed."""
    path = written("layout-beam-search-healthy", tmp_path)
    model = onnx.load(path)
    node = find_node(model)
    constants = {"min_length": 1, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 1.5}
    constants |= {"repetition_penalty": 1.3, "max_length": 11}
    for name, number in constants.items():
        kind = onnx.TensorProto.FLOAT if isinstance(number, float) else onnx.TensorProto.INT32
        model.graph.initializer.append(helper.make_tensor(name, kind, [1], [number]))
        model.graph.input.remove(next(value for value in model.graph.input if value.name == name))
    next(a for a in node.attribute if a.name == "no_repeat_ngram_size").i = 2
    onnx.save(model, path)
    assert read_search(open_folder(str(path)).files[0]).fixed == pytest.approx(constants)
    report = step_test(str(tmp_path))
    assert (outcome(report)[0], report.verdict) == ("passed", "healthy"), report.findings


def test_what_is_drawn_at_random_is_not_compared(tmp_path: Path) -> None:
    path = written("layout-greedy-search-healthy", tmp_path)
    model = onnx.load(path)
    find_node(model).op_type = "Sampling"
    onnx.save(model, path)
    report = step_test(str(tmp_path))
    assert outcome(report) == (
        "skipped",
        "the search cannot be computed by its definition: it draws its tokens at random",
    )
    assert report.verdict == "incomplete"
    assert next(run for run in report.runs if run.experiment == "plain-loop").outcome == "passed"


def test_weights_in_another_file_are_found(tmp_path: Path) -> None:
    path = written("layout-greedy-search-healthy", tmp_path)
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    report = step_test(str(tmp_path))
    assert (outcome(report)[0], report.verdict) == ("passed", "healthy"), report.not_checked
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([path.name, "weights.bin"])


def test_a_subgraph_that_reads_the_graph_around_it_is_said_to(tmp_path: Path) -> None:
    path = written("layout-greedy-search-healthy", tmp_path)
    model = onnx.load(path)
    body = next(a.g for a in find_node(model).attribute if a.name == "decoder")
    body.node[-1].output[0] = "raw_logits"
    body.node.append(helper.make_node("Mul", ["raw_logits", "repetition_penalty"], ["logits"]))
    onnx.save(model, path)
    report = step_test(str(tmp_path))
    assert report.verdict == "incomplete"
    assert "it reads 'repetition_penalty' of the graph around it" in report.not_checked[0].reason
