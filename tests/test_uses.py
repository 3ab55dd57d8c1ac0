"""Uses of a cache beyond one sequence: required ones, thorough ones, and what the user gives to begin with."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from support import command_line
from support.bad_contracts import edited
from support.bad_models import saved
from support.isolated import EXPORTS
from support.sampling import sampled
from support.text_fixtures import load_all

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.choices import REQUIRED
from kvdoctor.decode.experiments import load, uses
from kvdoctor.decode.experiments.multi_turn import find_uncut
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.options import Options

FIXTURES = load_all()


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = command_line.run("step-test", *arguments, "--format", "json")
    return done.returncode, json.loads(done.stdout) if done.stdout else {"error": done.stderr}


def written(name: str, folder: Path) -> str:
    return str(FIXTURES[name].write(folder))


def test_every_use_is_an_experiment() -> None:
    names = {experiment.name for experiment in load()}
    assert set(uses()) <= names
    assert {name for use in uses().values() for name in use.after} <= names
    assert {use.required for use in uses().values() if use.required} == set(REQUIRED)


@pytest.mark.parametrize(
    ("fixture", "use", "finding"),
    sampled(
        [
            ("padding-changes-logits", "left-padding", "padding-changes-logits"),
            ("mask-not-offset", "chunked-prefill", "mask-not-offset"),
            ("chunk-fails", "chunked-prefill", "chunk-fails"),
            ("batch-rows-interact", "batch", "batch-rows-interact"),
            ("batch-rows-interact-steps", "batch", "batch-rows-interact"),
            ("batch-axis-frozen", "batch", "batch-axis-frozen"),
            ("context-limit-fails", "full-context", "context-limit-fails"),
            ("chunk-fails", "speculation", "chunk-fails"),
            ("use-impossible-logits", "speculation", "use-impossible"),
            ("cached-differs-behind", "speculation", "cached-differs"),
            ("batch-axis-frozen", "prefix-sharing", "batch-axis-frozen"),
            ("batch-rows-interact-steps", "prefix-sharing", "batch-rows-interact"),
        ],
        2,
    ),
)
def test_a_required_use_that_fails_is_an_error(fixture: str, use: str, finding: str, tmp_path: Path) -> None:
    code, report = run(written(fixture, tmp_path), "--require", use)
    assert code == 1
    assert [f["severity"] for f in report["findings"] if f["name"] == finding] == ["error"], report["findings"]


def test_a_required_use_that_works_is_none(tmp_path: Path) -> None:
    code, report = run(written("context-limit-healthy", tmp_path), "--require", ",".join(REQUIRED))
    assert (code, report["verdict"], report["not_checked"]) == (0, "healthy", [])
    assert report["arguments"]["require"] == list(REQUIRED)
    outcomes = {r["experiment"]: r["outcome"] for r in report["runs"]}
    assert {outcomes[name] for name in ("full-context", "speculation", "prefix-sharing")} == {"passed"}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_a_long_context_is_filled_in_chunks(wrong: bool, tmp_path: Path) -> None:
    """The faulty one is off where a single token is fed on more than 4,150."""
    shutil.copytree(EXPORTS / "llama-gqa", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4200}))
    model = onnx.load(tmp_path / "model" / "model.onnx")
    if wrong:
        for node in model.graph.node:
            node.output[:] = ["right_logits" if name == "logits" else name for name in node.output]
        numbers = {"at_two": 2, "at_one": 1, "long": 4150, "one": 1}
        model.graph.initializer.extend(numpy_helper.from_array(np.array([n]), name) for name, n in numbers.items())
        model.graph.node.extend(
            helper.make_node(kind, inputs, [output])
            for kind, inputs, output in [
                ("Shape", ["past_key_values.0.key"], "past_shape"),
                ("Gather", ["past_shape", "at_two"], "past_here"),
                ("Shape", ["input_ids"], "ids_shape"),
                ("Gather", ["ids_shape", "at_one"], "new_here"),
                ("Greater", ["past_here", "long"], "is_long"),
                ("Equal", ["new_here", "one"], "is_single"),
                ("And", ["is_long", "is_single"], "is_wrong"),
                ("Where", ["is_wrong", "minus", "plus"], "sign"),
                ("Mul", ["right_logits", "sign"], "logits"),
            ]
        )
        for name, number in (("minus", -1), ("plus", 1)):
            model.graph.initializer.append(numpy_helper.from_array(np.array([number], np.float32), name))
    onnx.save(model, tmp_path / "model" / "model.onnx")
    code, report = run(str(tmp_path / "model"), "--require", "full-context")
    (loop,) = [r for r in report["runs"] if r["experiment"] == "full-context"]
    assert (code, loop["outcome"]) == ((1, "differs") if wrong else (0, "passed")), loop


def test_a_required_use_that_cannot_be_tried_is_not_healthy() -> None:
    code, report = run(str(EXPORTS / "marian-4.57.6"), "--consumer", "held", "--require", "left-padding")
    assert (code, report["verdict"]) == (3, "incomplete")
    assert "required use left-padding: decoder_model_merged.onnx takes no attention_mask" in str(report["not_checked"])


def test_an_unknown_use_is_refused() -> None:
    code, report = run(str(EXPORTS / "gpt2"), "--require", "batches")
    assert code == 2
    assert "Invalid value for '--require': it takes chunked-prefill, batch" in report["error"]


@pytest.mark.parametrize("name", sampled(["t5", "gpt2", "llama-gqa", "whisper"], 4))
def test_healthy_exports_stay_healthy_when_all_is_tried(name: str) -> None:
    code, report = run(str(EXPORTS / name), "--consumer", "held", "--thorough")
    assert code == 0, report["findings"]
    assert {f["severity"] for f in report["findings"]} <= {"note"}
    thorough = {e.name for e in load() if e.thorough}
    assert {r["experiment"] for r in report["runs"] if r["outcome"] == "passed"} & thorough


LEFT_ALONE = """hidden_count = ReduceSum <keepdims = 1> (attention_mask, last_axis)
  all_columns = Shape <start = 1> (attention_mask)
  first_shown = Sub (all_columns, hidden_count)
  none = Constant <value_int = 0> ()
  single = Constant <value_int = 1> ()
  end_of = Squeeze (all_columns)
  columns = Range (none, end_of, single)
  shown = GreaterOrEqual (columns, first_shown)
  real = Cast <to = 1> (shown)"""


@pytest.mark.parametrize("counts", [False, True])
def test_padding_between_prompt_and_tokens_is_tried_with_thorough(counts: bool, tmp_path: Path) -> None:
    """A graph that takes its mask for a number of entries on the left hides others: one row shows it by itself."""
    axis = ("float one = {1}", "int64[1] last_axis = {1}, float one = {1}")
    edits = (axis, ("real = Cast <to = 1> (attention_mask)", LEFT_ALONE)) if counts else ()
    model = saved(edited("decoder-only-healthy", *edits), tmp_path / "model")
    report = step_test(str(model), Options(thorough=True))
    outcomes = {run.experiment: run.outcome for run in report.runs if run.experiment.endswith("t-padding")}
    assert outcomes == {"left-padding": "passed", "right-padding": "skipped" if counts else "passed"}


def test_the_prompt_that_was_given_is_decoded() -> None:
    code, report = run(str(EXPORTS / "gpt2"), "--prompt-ids", "5,6,7,8,9")
    assert code == 0
    loop = next(r for r in report["runs"] if r["experiment"] == "plain-loop")
    assert [step["new_tokens"] for step in loop["steps"]][:2] == [5, 1]
    assert report["arguments"]["prompt_ids"] == [5, 6, 7, 8, 9]


def test_inputs_of_the_encoder_set_its_length(tmp_path: Path) -> None:
    file = tmp_path / "inputs.npz"
    np.savez(file, encoder_hidden_states=np.random.default_rng(3).standard_normal((1, 13, 32)).astype(np.float32))
    model = tmp_path / "decoder"
    shutil.copytree(EXPORTS / "t5", model, ignore=shutil.ignore_patterns("encoder_model.onnx"))
    code, report = run(str(model), "--consumer", "held", "--inputs", str(file))
    assert code == 0, report
    loop = next(r for r in report["runs"] if r["experiment"] == "held-loop")
    assert loop["steps"][0]["fed"]["encoder_hidden_states"]["shape"] == [1, 13, 32]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--prompt-ids", "1,x"), "Invalid value for '--prompt-ids': it takes whole numbers"),
        (("--prompt-ids", "1,128"), "token id 128 is not in the vocabulary, which has 128 tokens"),
        (("--prompt-ids", "-1"), "token id -1 is not in the vocabulary"),
        (("--inputs", "nothing.npz"), "--inputs nothing.npz: "),
    ],
)
def test_what_fits_no_input_is_refused(given: tuple[str, ...], words: str) -> None:
    code, report = run(str(EXPORTS / "gpt2"), *given)
    assert code == 2
    assert words in " ".join(report["error"].split())


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"attention_mask": np.ones((1, 4), np.int64)}, "is not an input that can be given; give input_ids"),
        ({"input_ids": np.ones((1, 4), np.float32)}, "holds float32, the model takes int64"),
        ({"input_ids": np.ones(4, np.int64)}, "is int64[4], the model takes int64[batch_size"),
        ({"input_ids": np.array([["a"]])}, "is not an array of numbers"),
        ({"input_ids": np.array([[{}]], object)}, "pickle"),
    ],
)
def test_arrays_that_fit_no_input_are_refused(arrays: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = tmp_path / "inputs.npz"
    np.savez(file, **arrays)
    code, report = run(str(EXPORTS / "gpt2"), "--inputs", str(file))
    assert code == 2
    assert words.lower() in " ".join(report["error"].split()).lower()


def test_a_control_without_effect_is_named_once(tmp_path: Path) -> None:
    """Padding is tried around each length that the graph compares with, each time with the same control."""
    decoder = FIXTURES["wrong-at-lengths"]
    unread = ("MatMul (x2, w_logits)", "MatMul (tokens, w_logits)")
    files = {name: text.replace(*unread) for name, text in decoder.files.items()}
    report = step_test(str(replace(decoder, files=files).write(tmp_path)))
    (run,) = (run for run in report.runs if run.experiment == "left-padding")
    assert [control.visible for control in run.controls] == [False, False]
    assert run.reason == "control failed: a mask without the padding does not change the logits more than their noise"


def test_slots_that_cannot_be_cut_are_grouped_by_the_reason() -> None:
    folder = open_folder(str(EXPORTS / "gpt2"))
    contract = read_contract(folder.stacks[0], folder.side_cars)
    assert [*find_uncut(contract)] == []
    one, *rest = contract.slots
    mixed = replace(contract, slots=(replace(one, kind="conv-state"), replace(rest[0], growth="ring"), *rest[1:]))
    names = [obstacle.names for obstacle in find_uncut(mixed)]
    assert names == [(one.past,), (rest[0].past,)]
