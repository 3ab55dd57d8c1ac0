"""The real exports: what a user is told of each, by the real commands."""

import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from support.command_line import kvdoctor, report, report_once
from support.famous_error import FIRST_TO_FAIL
from support.isolated import EXPORTS
from support.sampling import sampled

from kvdoctor._version import __version__

MERGED = ["marian-4.46.3", "marian-4.57.6", "t5", "whisper"]
DECODER_ONLY = ["gpt2", "llama-gqa"]


def severe(document: dict[str, Any]) -> list[str]:
    return [finding["name"] for finding in document["findings"] if finding["severity"] != "note"]


def run_of(document: dict[str, Any], stack: str, experiment: str) -> dict[str, Any]:
    found: dict[str, Any] = next(
        run for run in document["runs"] if (run["stack"], run["experiment"]) == (stack, experiment)
    )
    return found


@pytest.mark.parametrize("name", MERGED)
def test_inspect_finds_the_emptied_cache_before_anything_is_run(name: str) -> None:
    code, document = report_once("inspect", f"fixtures/exports/{name}")
    assert (code, document["verdict"]) == (1, "unhealthy")
    suspected = ["mask-not-offset"] if name == "marian-4.46.3" else []
    assert severe(document) == ["cross-cache-emptied", *suspected]
    finding = document["findings"][0]
    assert len(finding["subject"]) == 8 // 2
    assert "constant float[0, 4, 1," in finding["observed"]


def test_inspect_reads_the_contract_of_marian() -> None:
    _, document = report_once("inspect", "fixtures/exports/marian-4.57.6")
    merged, pair = document["stacks"]
    assert (merged["layout"], pair["layout"]) == ("optimum-merged", "optimum-pair")
    contract = merged["contract"]
    assert contract["first_step"] == "no-past-branch"
    assert contract["phases"]["prefill"]["switch"] is False
    assert contract["phases"]["decode"]["switch"] is True
    assert {slot["carry"] for slot in contract["slots"] if slot["kind"] == "cross-attention"} == {"hold"}
    assert {slot["carry"] for slot in contract["slots"] if slot["kind"] == "self-attention"} == {"feed-back"}
    # 2 layers x (key + value) x 4 heads x width 8 x 4 bytes
    sizes = {"bytes_per_token": 512, "bytes_per_encoder_state": 512, "context": 64, "bytes_at_context": 512 * 64}
    assert sizes.items() <= merged["cache"].items()
    assert all(slot["present"] is None for slot in pair["contract"]["slots"] if slot["kind"] == "cross-attention")


UNMASKED = {"marian-4.46.3": ["mask-not-offset"] * 2}
"""Warnings that are true of merged decoder and pair: of several tokens on a cache each sees what stands behind it."""


@pytest.mark.parametrize("name", sampled(FIRST_TO_FAIL, 2))
def test_step_test_names_cause_step_and_node(name: str) -> None:
    code, document = report_once("step-test", f"fixtures/exports/{name}")
    assert code == 1
    assert severe(document) == ["cross-cache-emptied", *UNMASKED.get(name, [])]
    plain, held = (run_of(document, "merged", loop) for loop in ("plain-loop", "held-loop"))
    assert (plain["outcome"], plain["failed_step"]) == ("failed", 2)
    assert (plain["node"]["op"], plain["node"]["name"]) == FIRST_TO_FAIL[name]
    model = onnx.load(str(EXPORTS / name / "decoder_model_merged.onnx"))
    names = {node.name for branch in model.graph.node[0].attribute for node in branch.g.node}
    assert plain["node"]["name"] in names
    assert held["outcome"] == "passed"
    assert len(held["steps"]) == 8
    assert set(plain["steps"][1]["null_pointer"]) == set(document["findings"][0]["subject"])
    assert run_of(document, "pair", "plain-loop")["outcome"] == "passed"


@pytest.mark.parametrize("name", sampled(MERGED, 2))
def test_for_a_loop_that_holds_it_is_a_note(name: str) -> None:
    code, document = report_once("step-test", f"fixtures/exports/{name}", "--consumer", "held")
    assert (code, document["verdict"], severe(document)) == (0, "healthy", UNMASKED.get(name, []))
    assert "cross-cache-emptied" in [finding["name"] for finding in document["findings"]]


@pytest.mark.parametrize("name", DECODER_ONLY)
def test_healthy_decoders_are_left_alone(name: str) -> None:
    code, document = report_once("step-test", f"fixtures/exports/{name}")
    assert (code, document["verdict"], document["findings"]) == (0, "healthy", [])
    assert run_of(document, "decoder", "plain-loop")["outcome"] == "passed"


@pytest.mark.parametrize("name", sampled(MERGED, 4))
def test_re_export_makes_every_loop_right(name: str, tmp_path: Path) -> None:
    out = tmp_path / "fixed"
    code, document = report("re-export", f"fixtures/exports/{name}", "-o", str(out))
    assert (code, document["verdict"]) == (0, "healthy")
    assert all(proof["holds"] for proof in document["repair"]["proof"])
    assert any("bit for bit" in proof["claim"] for proof in document["repair"]["proof"])
    onnx.checker.check_model(str(out / "decoder_model_merged.onnx"))
    code, again = report("step-test", str(out))
    assert (code, severe(again)) == (0, UNMASKED.get(name, []))
    plain = run_of(again, "merged", "plain-loop")
    assert (plain["outcome"], len(plain["steps"])) == ("passed", 8)
    assert not any(step["empty"] for step in plain["steps"])
    assert kvdoctor("inspect", str(out))[0] == 0


SAID = (
    "## Findings before the repair",
    "cross-cache-emptied",
    "`Identity(past_key_values.1.encoder.value)`",
    "bit for bit",
    "## What the caller must do",
    "Keep the cross-attention outputs",
)
"""In the fix report."""


def test_re_export_changes_nothing_else_and_says_what_was_done_and_what_is_left(tmp_path: Path) -> None:
    source, out = EXPORTS / "marian-4.57.6", tmp_path / "fixed"
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    assert kvdoctor("re-export", str(source), "-o", str(out))[0] == 0
    text = (out / "kvdoctor-report.md").read_text(encoding="utf-8")
    assert all(part in text for part in SAID)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    for name in before.keys() - {"decoder_model_merged.onnx"}:
        assert (out / name).read_bytes() == before[name]
    assert {path.name for path in out.iterdir()} == {
        *before,
        *(f"kvdoctor-report.{kind}" for kind in ("md", "json", "html")),
    }

    old, new = onnx.load(str(source / "decoder_model_merged.onnx")), onnx.load(str(out / "decoder_model_merged.onnx"))
    assert (old.ir_version, old.opset_import, old.producer_name) == (
        new.ir_version,
        new.opset_import,
        new.producer_name,
    )
    added = {entry.key: entry.value for entry in new.metadata_props if entry not in old.metadata_props}
    assert all(entry in new.metadata_props for entry in old.metadata_props)
    assert added == {
        "kvdoctor.version": __version__,
        "kvdoctor.source": "decoder_model_merged.onnx",
        "kvdoctor.repairs": "pass-through",
    }
    assert [value.SerializeToString() for value in old.graph.initializer] == [
        value.SerializeToString() for value in new.graph.initializer
    ]
    for was, now in zip(old.graph.node[0].attribute, new.graph.node[0].attribute, strict=True):
        nodes = [(a, b) for a, b in zip(was.g.node, now.g.node, strict=True) if a != b]
        assert all((a.op_type, b.op_type) == ("Constant", "Identity") for a, b in nodes)
        assert len(nodes) == (4 if was.name == "then_branch" else 0)


@pytest.mark.slow
def test_weights_beside_the_graph_are_copied_whole(tmp_path: Path) -> None:
    source, out = tmp_path / "external", tmp_path / "fixed"
    shutil.copytree(EXPORTS / "marian-4.57.6", source)
    path = source / "decoder_model_merged.onnx"
    onnx.save(onnx.load(str(path)), str(path), save_as_external_data=True, location="weights.bin", size_threshold=0)
    code, document = report("re-export", str(source), "-o", str(out))
    assert (code, document["verdict"]) == (0, "healthy")
    assert (out / "weights.bin").read_bytes() == (source / "weights.bin").read_bytes()
    assert (out / "weights.bin").stat().st_nlink == 1


@pytest.mark.slow
def test_a_look_beforehand_writes_nothing(tmp_path: Path) -> None:
    code, text = kvdoctor("re-export", "fixtures/exports/t5", "-o", str(tmp_path / "fixed"), "--dry-run")
    assert code == 1, "the original stays unhealthy"
    assert "the original stays unhealthy (1 error, " in text
    assert "the repaired copy would be healthy" in text
    assert list(tmp_path.iterdir()) == []
    assert "Identity(past_key_values.0.encoder.key)" in text


def test_nothing_to_repair_writes_no_copy(tmp_path: Path) -> None:
    code, text = kvdoctor("re-export", "fixtures/exports/gpt2", "-o", str(tmp_path / "fixed"))
    assert code == 0
    assert "nothing to repair" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_cost_of_switching_the_cache_off_is_said() -> None:
    _, text = kvdoctor("step-test", "fixtures/exports/marian-4.57.6", "-v")
    assert "cache speed-up: " in text
    _, document = report_once("step-test", "fixtures/exports/marian-4.57.6")
    assert set(document["measured"]["merged"]["step_seconds"]) == {"cached:5", "uncached:5", "cached:50", "uncached:50"}


@pytest.mark.slow
def test_two_runs_are_equal_but_for_what_was_measured() -> None:
    first, second = (report("step-test", "fixtures/exports/whisper")[1] for _ in range(2))
    del first["measured"], second["measured"]
    assert json.dumps(first) == json.dumps(second)
