"""A graph written out flat, with its weights left where they are, computes what the file computes."""

import platform
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto
from onnx.external_data_helper import load_external_data_for_model
from onnx.numpy_helper import to_array

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.decode.calls import Encoded, Scenario, as_array, load_call, save_call
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.inputs import synthetic_cross_caches, synthetic_encoder_states
from kvdoctor.decode.messages import CompareJob, TrialJob, TrialModel, ValuePair
from kvdoctor.diagnose.locate.first_divergence import chunks, match_entries
from kvdoctor.diagnose.locate.runnable import flatten, read_located, write_variant
from kvdoctor.errors import CannotCheck, WorkerDied
from kvdoctor.runtime.client import Runtime
from kvdoctor.runtime.process import Limits
from kvdoctor.runtime.worker.trial import run_trial

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "fixtures" / "exports").glob("*/*.onnx"))


def shown(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_located_weights_are_those_of_the_file(path: Path) -> None:
    model, whole = read_located(path), onnx.load(path)
    pointing = [t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    assert pointing
    assert len(model.SerializeToString()) < path.stat().st_size
    load_external_data_for_model(model, str(path.parent))
    expected = {tensor.name: to_array(tensor) for tensor in whole.graph.initializer}
    for tensor in model.graph.initializer:
        assert np.array_equal(to_array(tensor), expected[tensor.name])


def feeds_for(path: Path, cached: bool) -> dict[str, np.ndarray]:
    """The feeds of a first step of 3 tokens, or of one token on a past of 4."""
    folder = open_folder(str(path))
    contract = read_contract(folder.stacks[0], folder.side_cars)
    scenario = Scenario(encoder=4)  # as long as the placeholder of a past
    caches = synthetic_cross_caches(contract, scenario)
    builder = FeedBuilder(contract, scenario, Encoded(synthetic_encoder_states(contract, scenario), caches))
    call = builder.decode(4, 5, builder.first_past(4)) if cached else builder.prefill(3)
    return {name: as_array(value) for name, value in call.feeds.items()}


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "first"])
@pytest.mark.parametrize("path", [p for p in FILES if p.stem.startswith(("model", "decoder_model_merged"))], ids=shown)
def test_a_flat_export_gives_the_same_outputs(path: Path, cached: bool, tmp_path: Path) -> None:
    model = read_located(path)
    chosen = [node for node in model.graph.node if node.op_type == "If"]
    flat = flatten(model, {chosen[0].output[0]: cached} if chosen else {}, path)
    assert not any(node.op == "If" for node in flat.nodes)
    names = [name for name, value in flat.results.items() if value in flat.producers]
    values = [flat.results[name] for name in names]
    variant = write_variant(flat, tmp_path / "variant.onnx", values=values)
    feeds = feeds_for(path, cached)
    save_call(tmp_path / "feeds.npz", feeds)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    wanted = dict(zip(names, session.run(names, feeds), strict=True))
    whole = TrialModel(path, None, tmp_path / "feeds.npz")
    part = TrialModel(variant.path, variant.root, tmp_path / "feeds.npz")
    pairs = [ValuePair(variant.outputs[flat.results[name]], name, (None,) * wanted[name].ndim) for name in names]
    done = run_trial(CompareJob(part, whole, tuple(pairs), threads=1))
    assert len(done.differences) == len(names)
    # Weights that are not packed: other kernels.
    assert max(found.relative for found in done.differences if found is not None) < 1e-5
    assert None not in done.differences


def test_bodies_functions_and_attributes_of_the_call(tmp_path: Path) -> None:
    """A function with an attribute, within it an If with an unknown condition that reads from around, called twice."""
    text = """
    <ir_version: 8, opset_import: ["" : 17, "f" : 1]>
    g (float[n] x, bool yes) => (float[n] y) {
      half = f.scaled <by = 0.5> (x, yes)
      y = f.scaled <by = 3.0> (half, yes)
    }
    <domain: "f", opset_import: ["" : 17]>
    scaled <by> (a, c) => (b) {
      factor = Constant <value_float: float = @by> ()
      t = Mul (a, factor)
      b = If (c) <
        then_branch = yes () => (p) { p = Add (t, a) },
        else_branch = no () => (q) { q = Identity (t) }
      >
    }
    """
    model = onnx.parser.parse_model(text)
    source = tmp_path / "model.onnx"
    onnx.save(model, source)
    x = np.arange(4, dtype=np.float32)
    deep = {n.makes[0]: True for n in flatten(model, {}, source).nodes if n.op == "If"}
    assert len(deep) == 2
    for known in ({}, deep):
        flat = flatten(read_located(source), known, source)
        assert any(node.op == "If" for node in flat.nodes) == (not known)
        variant = write_variant(flat, tmp_path / "variant.onnx", values=["y"], shapes=["half"])
        session = ort.InferenceSession(variant.path, providers=["CPUExecutionProvider"])
        feeds = {"x": x} if known else {"x": x, "yes": np.array(True)}
        half, y = session.run([variant.outputs["half"], variant.outputs["y"]], feeds)
        assert half.tolist() == [4]
        assert np.allclose(y, x * 1.5 * 4)


def test_a_circle_is_refused() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[n] x) => (float[n] y) { y = Add (x, z)\n z = Neg (y) }'
    )
    with pytest.raises(CannotCheck, match="depends on itself"):
        flatten(model, {}, Path())


def test_what_corresponds_in_calls_of_two_lengths() -> None:
    assert match_entries((1, 2, 1, 4), (1, 2, 4, 4), 1, 4, 1) == [None, None, [1, 3, 1], None]
    assert match_entries((1, 2, 1, 4), (1, 2, 4, 4), 1, 4, 2) == [None, None, [1, 3, 1], None]
    assert match_entries((2, 8), (8, 8), 1, 4, 2) == [[2, 3, 1], None]
    assert match_entries((1, 4), (4, 1, 4), 1, 4, 1) is None
    assert match_entries((1, 3), (1, 5), 1, 4, 1) is None


def test_portions() -> None:
    assert chunks([(0, 5), (1, 5), (2, 1), (3, 20)], 10, 9) == [[0, 1], [2], [3]]
    assert chunks([(0, 1), (1, 1), (2, 1)], 10, 2) == [[0, 1], [2]]


def test_feeds_keep_their_names(tmp_path: Path) -> None:
    feeds = {"file": np.zeros((1, 0), np.float16), "a/b\n": np.array([True]), "args": np.arange(3)}
    save_call(tmp_path / "call.npz", feeds)
    again = load_call(tmp_path / "call.npz")
    assert list(again) == list(feeds)
    assert all(again[name].dtype == feeds[name].dtype and again[name].shape == feeds[name].shape for name in feeds)


def test_a_worker_that_dies_in_a_trial_is_replaced(tmp_path: Path) -> None:
    """The smallest int64 over -1 ends the process; the next trial has a fresh one."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (int64[n] x, int64[n] y) => (int64[n] z) { z = Div (x, y) }'
    )
    onnx.save(model, tmp_path / "model.onnx")
    deadly = {"x": np.array([np.iinfo(np.int64).min]), "y": np.array([-1])}
    save_call(tmp_path / "deadly.npz", deadly)
    save_call(tmp_path / "sound.npz", {**deadly, "y": np.array([2])})
    with Runtime(Limits()) as runtime:
        if platform.machine() in ("x86_64", "AMD64"):
            with pytest.raises(WorkerDied):
                runtime.trial(TrialJob(TrialModel(tmp_path / "model.onnx", None, tmp_path / "deadly.npz")))
        done = runtime.trial(TrialJob(TrialModel(tmp_path / "model.onnx", None, tmp_path / "sound.npz")))
    assert done.outputs["z"].values == (np.iinfo(np.int64).min // 2,)
