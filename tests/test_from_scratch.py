"""Decoders written by hand in PyTorch (fixtures/from_scratch): each mistake is found, in its counterpart none."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from support.isolated import FIXTURES, kvdoctor
from support.sampling import sampled

FOLDER = FIXTURES / "from_scratch"
FROZEN = ["past-axis-frozen", "batch-axis-frozen", "sequence-axis-frozen"]
HEALTHY = (
    *("right", "right-anonymous", "right-dynamo", "right-fixed-buffers", "right-given-mask", "right-layer-stacks"),
    *("right-pairs-dynamo", "right-rotary", "right-rotary-dynamo", "right-stacked", "right-stacked-dynamo"),
    *("right-start-pos", "right-two-stacks", "mask-if-traced-on-three"),
    *("attention", "attention-hidden-states-dynamo", "attention-rotary"),
)
SICK = {
    "mask-top-left": ("right", ["mask-not-offset"]),
    "mask-top-left-dynamo": ("right-dynamo", ["mask-not-offset"]),
    "mask-top-left-stacked": ("right-stacked", ["mask-not-offset"]),
    "mask-is-causal": ("right", ["mask-not-offset"]),
    "mask-square": ("right", ["chunk-fails"]),
    "mask-if-traced-on-one-token": ("mask-if-traced-on-three", ["not-causal"]),
    "positions-restart": ("right", ["positions-not-offset"]),
    "positions-restart-dynamo": ("right-dynamo", ["positions-not-offset"]),
    "positions-restart-rotary": ("right-rotary", ["positions-not-offset"]),
    "positions-restart-stacked": ("right-stacked", ["positions-not-offset"]),
    "new-entries-only": ("right", ["present-drops-past"]),
    "kept-as-attribute-warm": ("right", ["contract-unknown"]),
    "kept-as-buffer": ("right-start-pos", ["contract-unknown"]),
    "kept-as-buffer-dynamo": ("right-start-pos", ["contract-unknown"]),
    "axes-past-only": ("right", FROZEN[1:]),
    "axes-past-only-dynamo": ("right-dynamo", FROZEN[1:]),
    "axes-batch-only": ("right", ["past-axis-frozen", "sequence-axis-frozen"]),
    "axes-first-layer-only": ("right", FROZEN[:2]),
    "axes-none": ("right", FROZEN),
    "axes-none-dynamo": ("right-dynamo", FROZEN),
    "attention-mask-top-left": ("attention", ["mask-not-offset"]),
    "attention-positions-restart-rotary": ("attention-rotary", ["positions-not-offset"]),
}
"""Each faulty file with its healthy counterpart and the findings that are true of it."""
CACHELESS = ("cacheless", "kept-as-attribute")


def report(name: str, command: str = "step-test") -> tuple[int, dict[str, Any]]:
    done = kvdoctor(command, FOLDER / f"{name}.onnx", "--format", "json")
    document: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, document


def severe(document: dict[str, Any]) -> list[str]:
    """Findings but for notes: the masks of two layers are rightly called duplicates."""
    return [finding["name"] for finding in document["findings"] if finding["severity"] != "note"]


@pytest.mark.parametrize("name", sampled(HEALTHY, 4))
def test_a_sound_one_is_healthy(name: str) -> None:
    code, document = report(name)
    assert (code, document["verdict"], severe(document)) == (0, "healthy", [])


@pytest.mark.parametrize("name", sampled(SICK, 5))
def test_the_mistake_is_named(name: str) -> None:
    twin, expected = SICK[name]
    assert twin in HEALTHY
    code, document = report(name)
    assert severe(document) == expected
    assert document["verdict"] != "healthy" or expected in (["chunk-fails"], FROZEN[1:])
    errors = any(finding["severity"] == "error" for finding in document["findings"])
    assert (code == 1) == errors


def test_the_layer_without_dynamic_axes_is_named() -> None:
    _, document = report("axes-first-layer-only", "inspect")
    assert document["findings"][0]["subject"] == ["past_k_1", "past_v_1"]


@pytest.mark.parametrize("name", ["kept-as-attribute-warm", "kept-as-buffer", "kept-as-buffer-dynamo"])
def test_no_state_leaves_a_graph_whose_module_kept_it(name: str) -> None:
    code, document = report(name, "inspect")
    (finding,) = document["findings"]
    assert (code, finding["name"], finding["confidence"]) == (1, "contract-unknown", "suspected")
    assert "neither past inputs nor present outputs" in finding["observed"]
    assert len(finding["subject"]) == 4
    assert "forward()" in finding["repair"]["text"]


@pytest.mark.parametrize("name", CACHELESS)
def test_a_graph_without_any_trace_of_a_cache_is_not_called_healthy(name: str) -> None:
    code, document = report(name)
    assert (code, document["verdict"], document["findings"]) == (3, "not-applicable", [])
    assert "neither past inputs nor present outputs" in document["not_checked"][0]["reason"]


def test_every_file_is_tested_and_is_the_one_that_was_made() -> None:
    files = {path.stem: path for path in FOLDER.glob("*.onnx")}
    assert set(files) == {*HEALTHY, *SICK, *CACHELESS}
    recorded = json.loads(Path(FOLDER / "provenance.json").read_text(encoding="utf-8"))["sha256"]
    assert {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files.values()} == recorded
