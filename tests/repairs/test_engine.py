"""What holds of re-export whatever the repair: which are taken, what is written, what is said, what is left alone."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from support.command_line import run
from support.proofs import repair_of
from support.repaired import REPOSITORY, re_export
from support.sampling import sampled
from support.text_fixtures import compile_text, load_all

from kvdoctor.api import inspect, step_test
from kvdoctor.errors import UsageError
from kvdoctor.findings import all_checks
from kvdoctor.options import Options
from kvdoctor.repair import pipeline
from kvdoctor.repair.repairs.registry import STAGES, load, load_for_check
from kvdoctor.repair.session import RepairRequest

EXPORTS = REPOSITORY / "fixtures" / "exports"
MERGED = "decoder_model_merged.onnx"


def call(*arguments: str | Path) -> tuple[int, str, str]:
    done = run("re-export", *arguments, cwd=REPOSITORY)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def copy_merged(folder: Path) -> Path:
    """The merged decoder of T5 with its encoder in a folder; gives the decoder."""
    folder.mkdir()
    for name in (MERGED, "encoder_model.onnx", "config.json"):
        (folder / name).write_bytes((EXPORTS / "t5" / name).read_bytes())
    return folder / MERGED


def change(path: Path, operate: Callable[[onnx.GraphProto], Any]) -> Path:
    """Change the graph of a file in place; gives its folder."""
    model = onnx.load(path)
    operate(model.graph)
    path.write_bytes(model.SerializeToString())
    return path.parent


def renamed(nodes: Iterable[onnx.NodeProto], names: dict[str, str]) -> None:
    for node in nodes:
        for ends in (node.input, node.output):
            ends[:] = [names.get(name, name) for name in ends]


def branches(graph: onnx.GraphProto, name: str = "then_branch") -> list[onnx.GraphProto]:
    return [a.g for node in graph.node for a in node.attribute if a.name == name]


@pytest.fixture
def twice_sick(tmp_path: Path) -> Path:
    """A merged T5 whose cross cache is emptied, as it was exported, and whose layers are swapped."""
    trade = {f"present.{a}.decoder.key": f"present.{b}.decoder.key" for a, b in ((0, 1), (1, 0))}
    return change(copy_merged(tmp_path / "twice"), lambda graph: renamed(branches(graph)[0].node, trade))


@pytest.mark.slow
def test_two_faults_in_one_graph_are_both_repaired(twice_sick: Path, tmp_path: Path) -> None:
    repaired = re_export(twice_sick, tmp_path / "out")
    assert {finding["name"] for finding in repaired.document["repair"]["before"]["findings"]} >= {"cross-cache-emptied"}
    assert set(repaired.repairs) == {"joined-presents", "pass-through"}
    assert (repaired.proved, repaired.code) == (True, 0)


COUNTED = """news = Squeeze (new)
  counted = If (is_first) <
    then_branch = first_p () => (int64[n] f_p) { f_p = Range (nil, news, step) },
    else_branch = later_p () => (int64[n] l_p) { l_p = Range (nil, news, step) }
  >
  places = Gather (w_positions, counted)"""


def test_every_cached_branch_of_one_switch_is_repaired_and_no_other(tmp_path: Path) -> None:
    """Two branches read each other's keys; positions are counted in another one, whose `If` is not the main one."""
    fixture = load_all()["merged-many-branches-healthy"]
    path = fixture.write(tmp_path / "model") / "model.onnx"
    text = fixture.files["model.onnx"].replace("  int64[batch_size, sequence_length] position_ids,\n", "")
    text = text.replace("places = Gather (w_positions, position_ids)", COUNTED)
    model = compile_text(text.replace("int64[1] nought", "int64 nil = {0}, int64 step = {1}, int64[1] nought"))
    trade = {f"past_key_values.{one}.key": f"past_key_values.{1 - one}.key" for one in (0, 1)}
    for branch in branches(model.graph, "else_branch"):
        renamed(branch.node, trade)
    path.write_bytes(model.SerializeToString())
    repaired = re_export(path, tmp_path / "out")
    assert (set(repaired.repairs), repaired.proved) == ({"slot-order", "offset-positions"}, True)
    copy = onnx.load(tmp_path / "out" / "model.onnx").graph
    assert branches(copy) == branches(model.graph)
    later = zip(branches(copy, "else_branch"), branches(model.graph, "else_branch"), strict=True)
    assert sum(one != other for one, other in later) == 3


def test_axes_are_freed_in_a_graph_that_another_repair_changed_first(tmp_path: Path) -> None:
    """The freed graph is compared with the one that the other repair left: the original returns crossed slots."""
    path = load_all()["past-axis-frozen"].write(tmp_path / "model") / "model.onnx"
    trade = {"present.0.key": "present.0.value", "present.0.value": "present.0.key"}
    repaired = re_export(change(path, lambda graph: renamed(graph.node, trade)), tmp_path / "out")
    assert {"joined-presents", "free-past"} <= set(repaired.repairs)
    assert (repaired.proved, repaired.code) == (True, 0)


@pytest.mark.slow
def test_only_the_named_repairs_are_used(twice_sick: Path, tmp_path: Path) -> None:
    """One of two faults is left: that is no proof, so nothing is written, unless that is asked for."""
    repaired = re_export(twice_sick, tmp_path / "out", "--fix", "pass-through")
    assert not repaired.written
    assert repaired.code == 1
    assert repaired.repairs == ("pass-through",)
    kept = re_export(twice_sick, tmp_path / "kept", "--fix", "pass-through", "--keep-unproved")
    assert kept.written
    assert kept.code == 1
    assert not kept.document["repair"]["proved"]
    assert "NOT PROVED" in " ".join(kept.document["notes"])
    assert "not proved" in (tmp_path / "kept" / "kvdoctor-report.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_repair_that_has_nothing_to_mend_is_said(tmp_path: Path) -> None:
    code, out, _ = call(EXPORTS / "t5", "-o", tmp_path / "out", "--fix", "cache-casts")
    assert code == 1
    assert "none of the repairs asked for applies to the findings" in out
    assert not (tmp_path / "out").exists()


def test_an_unknown_repair_is_wrong_usage(tmp_path: Path) -> None:
    code, _, err = call(EXPORTS / "t5", "-o", tmp_path / "out", "--fix", "passthrough")
    assert code == 2
    assert "did you mean 'pass-through'?" in err
    assert not (tmp_path / "out").exists()


def test_faults_without_a_repair_lead_to_an_export_from_the_checkpoint(tmp_path: Path) -> None:
    load_all()["past-ignored"].write(tmp_path / "model")
    repaired = re_export(tmp_path / "model", tmp_path / "out")
    assert (repaired.code, repaired.written) == (1, False)
    entry = next(e for e in repaired.document["repair"]["not_repaired"] if e["finding"] == "past-ignored")
    assert entry["reason"] == "no repair of the graph is known"
    assert "export again" in entry["instead"]


TAKES = {
    "mask-not-offset": False,
    "mask-not-offset-step": True,
    "non-finite": False,
    "past-without-present-half": False,
    "padding-changes-logits-slice": True,
    "past-without-present-lost": True,
    "positions-not-offset": False,
    "present-does-not-grow-copied": True,
    "present-does-not-grow-static": True,
    "present-rewrites-past": True,
}
"""Text fixtures, and whether the repair that their check leads to can be applied."""


@pytest.mark.parametrize("name", sampled(TAKES, 3))
def test_nobody_is_sent_to_a_repair_that_would_decline(name: str, tmp_path: Path) -> None:
    model = load_all()[name].write(tmp_path / "model")
    (finding,) = (found for found in step_test(str(model)).findings if found.severity != "note")
    assert (finding.repair.command is not None) == TAKES[name]
    assert ("own-decoder.md" in finding.repair.text) == (not TAKES[name])  # no exporter can repeat it
    assert re_export(model, tmp_path / "out").written == TAKES[name]
    for seen in inspect(str(model)).findings:  # what is only read is told the same
        assert seen.repair.command in (None, finding.repair.command)


def test_what_stays_wrong_leads_all_errors_of_a_loop_elsewhere(tmp_path: Path) -> None:
    def spoil_head(graph: onnx.GraphProto) -> None:
        head = next(tensor for tensor in graph.initializer if tensor.name == "w_logits")
        head.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(head) * np.float32(np.nan), "w_logits"))

    model = load_all()["key-value-swapped"].write(tmp_path / "model") / "model.onnx"
    change(model, spoil_head)
    errors = [finding for finding in step_test(str(model)).findings if finding.severity == "error"]
    assert {finding.name for finding in errors} == {"key-value-swapped", "non-finite"}
    assert all(finding.repair.kind == "re-export" and finding.repair.command is None for finding in errors)
    assert not re_export(model, tmp_path / "out").written


def test_what_the_runtime_refuses_for_names_of_nodes_leads_to_the_repair(tmp_path: Path) -> None:
    model = load_all()["decoder-only-healthy"].write(tmp_path / "model") / "model.onnx"
    change(model, lambda graph: [setattr(node, "name", "x") for node in graph.node])
    finding = next(found for found in step_test(str(model)).findings if found.name == "session-refused")
    assert finding.repair.command == f"kvdoctor re-export {model} -o FIXED"
    assert re_export(model, tmp_path / "out").proved


def test_a_warning_that_the_fault_hid_is_no_harm_of_the_repair(tmp_path: Path) -> None:
    """Keys and values come back in each other's place, and padding was never right."""

    def swap(graph: onnx.GraphProto) -> None:
        names = {f"present.{layer}.{part}": f"all_{part}_{layer}" for layer in (0, 1) for part in ("key", "value")}
        renamed(graph.node, names)
        for present, inner in names.items():
            other = present.replace("key", "value") if "key" in present else present.replace("value", "key")
            graph.node.append(helper.make_node("Identity", [inner], [other]))

    path = load_all()["padding-changes-logits"].write(tmp_path / "model") / "model.onnx"
    repaired = re_export(change(path, swap), tmp_path / "out")
    assert repaired.proved, repaired.details
    assert [finding["name"] for finding in repaired.document["findings"]] == ["padding-changes-logits"]


def test_a_warning_of_a_use_that_gave_no_numbers_is_no_harm_of_the_repair(tmp_path: Path) -> None:
    """Rows of -inf are NaN where a row is padded; once they are finite, its positions show to count the padding."""

    def hide(graph: onnx.GraphProto) -> None:
        at = next(index for index, node in enumerate(graph.node) if node.output[0] == "bias")
        constants = {"minus_infinity": -np.inf, "no_bias": 0.0}
        graph.initializer.extend(numpy_helper.from_array(np.float32(v), name) for name, v in constants.items())
        graph.node[at].CopyFrom(helper.make_node("Where", ["is_seen", "no_bias", "minus_infinity"], ["bias"]))
        graph.node.insert(at, helper.make_node("Cast", ["seen"], ["is_seen"], to=TensorProto.BOOL))

    path = load_all()["padding-changes-logits-positions"].write(tmp_path / "model") / "model.onnx"
    repaired = re_export(change(path, hide), tmp_path / "out")
    assert (repaired.repairs, repaired.proved, repaired.code) == (("finite-constants",), True, 0)
    assert [finding["name"] for finding in repaired.document["findings"]] == ["padding-changes-logits"]


@pytest.mark.slow
def test_a_note_is_left_where_worse_is_mended(tmp_path: Path) -> None:
    repaired = re_export(EXPORTS / "marian-4.46.3", tmp_path / "out")
    assert repaired.repairs == ("pass-through",)
    named = re_export(EXPORTS / "whisper", tmp_path / "named", "--fix", "pass-through,sorted-nodes")
    assert set(named.repairs) == {"pass-through", "sorted-nodes"}


@pytest.mark.parametrize("name", ["axis-name-collision-output", "axis-name-collision-stale"])
def test_a_shape_that_is_not_computed_is_no_longer_declared(name: str, tmp_path: Path) -> None:
    repaired = re_export(load_all()[name].write(tmp_path / "model"), tmp_path / "out")
    assert (repaired.repairs, repaired.proved) == (("axis-names",), True)
    assert not inspect(str(tmp_path / "out")).findings


def inline(path: Path, raw: bool) -> onnx.ModelProto:
    """Save a model with its weights inside, as raw bytes or as typed lists, which are another field."""
    model = onnx.load(path)
    if not raw:
        for tensor in model.graph.initializer:
            if tensor.data_type == TensorProto.FLOAT:
                values = numpy_helper.to_array(tensor)
                tensor.ClearField("raw_data")
                tensor.float_data.extend(values.ravel().tolist())
    path.write_bytes(model.SerializeToString())
    return model


@pytest.mark.parametrize("raw", sampled([False, True], 2), ids=["float_data", "raw_data"])
def test_weights_inside_the_file_are_as_they_were(raw: bool, tmp_path: Path) -> None:
    path = copy_merged(tmp_path / "source")
    old = inline(path, raw)
    assert re_export(path.parent, tmp_path / "out").proved
    new = onnx.load(tmp_path / "out" / MERGED)
    graphs = [[m.graph, *(a.g for n in m.graph.node for a in n.attribute if a.HasField("g"))] for m in (old, new)]
    for was, now in zip(*graphs, strict=True):
        assert [t.SerializeToString() for t in was.initializer] == [t.SerializeToString() for t in now.initializer]


@pytest.mark.slow
def test_a_weight_in_a_constant_node_comes_back(tmp_path: Path) -> None:
    """Payloads lie deep in the file: in an attribute of a node in a branch."""
    large = np.arange(4096, dtype=np.float32)
    node = helper.make_node("Constant", [], ["large"], name="large", value=numpy_helper.from_array(large, "large"))
    source = change(copy_merged(tmp_path / "source"), lambda graph: branches(graph)[0].node.insert(0, node))
    assert re_export(source, tmp_path / "out").proved
    made = branches(onnx.load(tmp_path / "out" / MERGED).graph)[0].node[0]
    assert np.array_equal(numpy_helper.to_array(made.attribute[0].t), large)


# --- the fix report ---


@pytest.mark.slow
def test_provenance_names_no_time_and_no_folder(tmp_path: Path) -> None:
    made = []
    for name in ("one", "other"):
        assert re_export(EXPORTS / "t5", tmp_path / name).proved
        made.append((tmp_path / name / MERGED).read_bytes())
    assert made[0] == made[1]
    model = onnx.load_from_string(made[0])
    facts = {entry.key: entry.value for entry in model.metadata_props}
    assert (facts["kvdoctor.source"], facts["kvdoctor.repairs"]) == (MERGED, "pass-through")
    assert str(tmp_path).encode() not in made[0]


@pytest.mark.slow
def test_the_report_says_how_to_undo_it(tmp_path: Path) -> None:
    repaired = re_export(EXPORTS / "t5", tmp_path / "out")
    record: dict[str, Any] = repaired.document["repair"]
    (changed,) = record["files"]
    assert changed["path"] == MERGED
    assert changed["before"] == hashlib.sha256((EXPORTS / "t5" / MERGED).read_bytes()).hexdigest()
    assert changed["after"] == hashlib.sha256((tmp_path / "out" / MERGED).read_bytes()).hexdigest()
    assert any("To undo, delete the folder" in line for line in record["undo"])
    cost = repaired.document["measured"]["cost"]
    assert cost["bytes_after"] > 0
    assert set(cost["step_seconds"]["merged"]) == {"cached:5", "cached:50", "uncached:5", "uncached:50"}


def test_the_page_loads_nothing_and_escapes_names(tmp_path: Path) -> None:
    source = load_all()["present-drops-past"].write(tmp_path / "<script>alert(1)</script>")
    name = "<img src=x onerror=alert(2)>"
    change(
        source / "model.onnx",
        lambda graph: [setattr(node, "name", f"{name}{node.name}{node.output[0]}") for node in graph.node],
    )
    repaired = re_export(source, tmp_path / "out")
    assert repaired.proved, repaired.details
    page = (tmp_path / "out" / "kvdoctor-report.html").read_text(encoding="utf-8")
    assert "Content-Security-Policy" in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<script" not in page
    assert "<img" not in page
    assert not re.search(r"\s(src|on[a-z]+)\s*=\s*[\"']", page)
    assert all(target.startswith("#") for target in re.findall(r"\shref\s*=\s*[\"']([^\"']*)", page))


@pytest.mark.slow
def test_a_corrected_config_is_written_and_nothing_else(tmp_path: Path) -> None:
    source = load_all()["config-disagrees"].write(tmp_path / "model")
    repaired = re_export(source, tmp_path / "out")
    assert repaired.proved, repaired.details
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out"))
    assert old != new
    assert old.keys() == new.keys()
    assert (tmp_path / "out" / "model.onnx").read_bytes() == (source / "model.onnx").read_bytes()


def test_a_config_above_the_onnx_folder_is_corrected_in_out(tmp_path: Path) -> None:
    """A repository keeps its configs beside the folder of its graphs: OUT has one folder, and both in it."""
    source = shutil.copytree(EXPORTS / "gpt2", tmp_path / "repo" / "onnx")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (source / "config.json").unlink()
    (source.parent / "config.json").write_text(json.dumps({**config, "n_layer": 7}), encoding="utf-8")
    report = pipeline.re_export(RepairRequest(str(source), str(tmp_path / "out")), Options())
    assert repair_of(report).proved
    repaired = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert repaired["n_layer"] == config["n_layer"]
    assert json.loads((source.parent / "config.json").read_text(encoding="utf-8"))["n_layer"] == 7


@pytest.mark.slow
def test_force_leaves_what_is_not_kvdoctors(tmp_path: Path) -> None:
    out = tmp_path / "out"
    request = RepairRequest(str(EXPORTS / "marian-4.57.6"), str(out), force=True)
    pipeline.re_export(request, Options())
    pipeline.re_export(request, Options())
    (out / "tokenizer.model").write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match=r"tokenizer\.model"):
        pipeline.re_export(request, Options())
    assert (out / "tokenizer.model").read_text(encoding="utf-8") == "mine"


def test_every_repair_names_checks_and_its_stage() -> None:
    known = {check.name for check in all_checks()}
    assert load()
    for repair in load():
        assert set(repair.checks) <= known, repair.name
        assert repair.stage in STAGES
        assert repair.summary.endswith(".")
        for word in ("Requires:", "Ensures:"):
            assert word in (getattr(repair.apply, "func", repair.apply).__doc__ or ""), repair.name


def test_the_repairs_of_a_check_are_found_without_loading_the_others() -> None:
    for check in {check for repair in load() for check in repair.checks}:
        assert load_for_check(check) == tuple(repair for repair in load() if check in repair.checks), check


@pytest.mark.slow
def test_where_the_numbers_decide_nothing_the_loop_repeats_the_originals(tmp_path: Path) -> None:
    """Weights so large, and rounded to 8 bits, that the logits are chaotic; too large for a float32 copy."""
    pair = shutil.ignore_patterns("decoder_model.onnx", "*_with_past_model.onnx")
    model = shutil.copytree(EXPORTS / "t5", tmp_path / "model", ignore=pair)
    merged = model / "decoder_model_merged.onnx"
    graph = onnx.load(merged)
    bodies = [graph.graph, *(attribute.g for node in graph.graph.node for attribute in node.attribute)]
    weights = [t for body in bodies for t in body.initializer if len(t.dims) == 2]
    for tensor in (t for t in weights if t.data_type == TensorProto.FLOAT):
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(6), tensor.name))
    onnx.save(graph, merged)
    quantize_dynamic(merged, merged, weight_type=QuantType.QInt8, extra_options={"EnableSubgraph": True})
    graph = onnx.load(merged)
    unused = graph.graph.initializer.add(name="unused", data_type=TensorProto.FLOAT, dims=[1 << 28])
    unused.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "w.bin"), ("offset", "0"), ("length", str(1 << 30))):
        unused.external_data.add(key=key, value=value)
    onnx.save(graph, merged)
    with (model / "w.bin").open("wb") as file:
        file.truncate(1 << 30)
    report = pipeline.re_export(RepairRequest(str(model), str(tmp_path / "out")), Options(max_memory=1200))
    assert repair_of(report).proved
    claim = "plain-loop logits equal to those of the original's held loop, bit for bit"
    assert claim in [entry.claim for entry in repair_of(report).proof]
