"""Graphs from which no contract can be read, or another one than they seem to promise.

Through the real command line: `inspect`, `contract` and `step-test` each answer within seconds, and say that the
contract is not complete, name the fault, or rightly find the model healthy.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from onnx import ModelProto, TensorProto, helper
from support import bad_contracts as bad
from support.bad_contracts import CACHE, TOKENS, changed, decoder, edited, node, value
from support.bad_models import Result, as_json, call, nested, renamed, saved
from support.sampling import sampled
from support.text_fixtures import load_all

from kvdoctor.diagnose.inspection import inspect

TEXTS = {name: fixture for name, fixture in load_all().items() if name.startswith("bad-")}
SECONDS = 30  # of processor time; most calls take less than one
Build = Callable[[], ModelProto | bytes] | list[bad.Change]
"""A model, or changes of the healthy one."""

# --- the contract is not complete: which subject, for which reason ---

NO_TENSOR, NO_SHAPE = "is not a tensor, or declares no element type", "has no declared shape"
UNKNOWN, UNMADE = "has no known role", "no node makes this output"
ZERO, TOO_MANY = "has no elements", "more elements than can be fed"
FUNCTIONS = "too many or nested too deeply"
HUGE = 2**62

INCOMPLETE: dict[str, tuple[Build, str, str]] = {
    "no-nodes": ([bad.emptied("node")], "logits", UNMADE),
    "no-inputs": ([bad.emptied("input")], "model.onnx", "no past input"),
    "no-outputs": ([bad.emptied("output")], "model.onnx", "no output has the role logits"),
    "inputs-without-type": ([bad.without_type("input")], "input_ids", NO_TENSOR),
    "inputs-without-shape": ([bad.without_shape("input")], "input_ids", NO_SHAPE),
    "ids-without-type": ([bad.without_type("input", "input_ids")], "input_ids", NO_TENSOR),
    "ids-without-shape": ([bad.without_shape("input", "input_ids")], "input_ids", NO_SHAPE),
    "mask-without-shape": ([bad.without_shape("input", "attention_mask")], "attention_mask", NO_SHAPE),
    "ids-a-sequence": ([bad.retyped("input_ids", bad.as_sequence)], "input_ids", NO_TENSOR),
    "ids-optional": ([bad.retyped("input_ids", bad.as_optional)], "input_ids", NO_TENSOR),
    "mask-optional": ([bad.retyped("attention_mask", bad.as_optional)], "attention_mask", NO_TENSOR),
    "past-a-sequence": ([bad.retyped("past_key_values.1.key", bad.as_sequence)], "past_key_values.1.key", NO_TENSOR),
    "past-optional": ([bad.retyped("past_key_values.1.key", bad.as_optional)], "past_key_values.1.key", NO_TENSOR),
    "past-a-map": ([bad.retyped("past_key_values.1.key", bad.as_map)], "past_key_values.1.key", NO_TENSOR),
    "another-sequence": (
        [bad.with_inputs(value("more", CACHE)), bad.retyped("more", bad.as_sequence)],
        "more",
        NO_TENSOR,
    ),
    "two-token-ids-by-name": (
        lambda: renamed(edited("readings-two-token-ids-healthy"), {"first": "input_ids", "second": "targets"}),
        "targets",
        "look like token_ids",
    ),
    "two-logits-by-name": (
        lambda: renamed(edited("readings-two-heads-healthy"), {"first": "logits", "second": "output.logits"}),
        "output.logits",
        "look like logits",
    ),
    "3000-more-caches": ([bad.many_inputs(3000, "cache.NUMBER", CACHE)], "cache.2", "looks like a cache"),
    "3000-more-inputs": ([bad.many_inputs(3000, "junk.NUMBER", ["n"])], "junk.2", UNKNOWN),
    "3000-more-inputs-of-rank-4": ([bad.many_inputs(3000, "junk.NUMBER", CACHE)], "junk.2", UNKNOWN),
    "3000-more-ids": ([bad.many_inputs(3000, "junk.NUMBER", TOKENS, TensorProto.INT64)], "junk.2", UNKNOWN),
    "3000-caches-on-one-chain": (
        [bad.one_chain(3000, 4000, "cache_NUMBER")],
        "model.onnx",
        "too many nodes to be followed",
    ),
    "3000-inputs-on-one-chain": (
        [bad.one_chain(3000, 4000, "junk.NUMBER")],
        "model.onnx",
        "too many nodes to be followed",
    ),
    "ids-twice": ([bad.twice("input", "input_ids")], "input_ids", "two inputs have this name"),
    "past-twice": ([bad.twice("input", "past_key_values.1.key")], "past_key_values.1.key", "two inputs have this name"),
    "logits-made-twice": ([bad.made_twice], "logits", "two nodes make this value"),
    "functions-400-deep": (lambda: bad.chained(400), "model.onnx", FUNCTIONS),
    "functions-of-2**30-nodes": (lambda: bad.chained(30, calls=2), "model.onnx", FUNCTIONS),
    "batch-0": ([bad.sized(0, 0)], "past_key_values.0.key", ZERO),
    "heads-0": ([bad.sized(1, 0)], "past_key_values.0.key", ZERO),
    "width-0": ([bad.sized(3, 0)], "past_key_values.0.key", ZERO),
    "no-layers": (
        lambda: changed(bad.sized(0, 0, "past_0", "past_1"), fixture="layout-ort-gpt2-stacked-healthy"),
        "past_0",
        ZERO,
    ),
    "ids-huge": ([bad.sized(1, HUGE, "input_ids")], "input_ids", TOO_MANY),
    "batch-huge": ([bad.sized(0, HUGE)], "past_key_values.0.key", TOO_MANY),
    "past-huge": ([bad.sized(2, HUGE)], "past_key_values.0.key", TOO_MANY),
    "past-of-rank-1": ([bad.ranked("past_key_values.1.key", 1)], "past_key_values.1.key", "is no number"),
    "past-of-rank-9": ([bad.ranked("past_key_values.1.key", 9)], "past_key_values.1.key", "is no number"),
}

# --- the contract is read, and the fault has a name: of the inspection, of the steps ---

Names = set[str]
GAP = {"layers-inconsistent"}

FAULTY: dict[str, tuple[Build, Names, Names]] = {
    "grown-by-nothing": (lambda: decoder(*bad.passed_on(0, 1)), {"present-does-not-grow"}, {"present-does-not-grow"}),
    "one-layer-grown-by-nothing": (
        lambda: decoder(*bad.passed_on(1)),
        {"present-does-not-grow"},
        {"present-does-not-grow"},
    ),
    "attended-as-it-is": (
        lambda: decoder(*bad.attended_as_it_is(1)),
        {"present-does-not-grow"},
        {"present-does-not-grow"},
    ),
    "key-without-present": ([bad.without("present.1.key")], {"past-without-present"}, {"past-without-present"}),
    "present-without-past": (
        [bad.without("past_key_values.1.key", "past_key_values.1.value")],
        {"present-without-past"},
        {"present-without-past", "invalid-graph"},
    ),
    "a-past-that-is-given": ([bad.sparse("past_key_values.1.key")], {"present-without-past"}, {"present-without-past"}),
    "a-present-that-is-the-past": ([bad.returned_directly], {"past-without-present"}, {"past-without-present"}),
    "3000-keys-that-nothing-fills": (
        [bad.many_inputs(3000, "past_key_values.NUMBER.key", CACHE)],
        {"past-without-present", "layers-inconsistent"},
        {"past-without-present", "layers-inconsistent"},
    ),
    "past-of-rank-0": (
        [bad.ranked("past_key_values.1.key", 0)],
        {"cache-shape-mismatch"},
        {"cache-shape-mismatch", "session-refused"},
    ),
}

# --- nothing hinders a loop: what is noted or warned of, and what the slots of the contract must be ---

SELF = {"self-attention"}
HEALTHY: dict[str, tuple[Build, Names, set[str]]] = {
    "conv-names-that-grow": (
        lambda: decoder(*bad.named_layer(1, "past_conv.1.PART", "present_conv.1.PART")),
        {"names-mislead"},
        SELF,
    ),
    "recurrent-names-that-grow": (
        lambda: decoder(*bad.named_layer(1, "past_recurrent.1.PART", "present_recurrent.1.PART")),
        {"names-mislead"},
        SELF,
    ),
    "a-layer-left-out": (lambda: decoder(*bad.numbered(0, 2)), GAP, SELF),
    "no-first-layer": (lambda: decoder(*bad.numbered(1, 2)), GAP, SELF),
    "layer-99999": (lambda: decoder(*bad.numbered(0, 99999)), GAP, SELF),
    "a-convolution-in-the-gap": (lambda: edited("layout-hybrid-conv-healthy"), set(), {"self-attention", "conv-state"}),
    "a-recurrent-state-in-the-gap": (
        lambda: edited("layout-hybrid-recurrent-healthy"),
        set(),
        {"self-attention", "conv-state", "recurrent-state"},
    ),
    "logits-beside-another-head": (
        lambda: renamed(edited("readings-two-heads-healthy"), {"first": "logits", "second": "values"}),
        set(),
        SELF,
    ),
    "a-present-under-two-names": (
        [bad.with_output(value("again", None), node("Identity", ["present.1.key"], ["again"]))],
        set(),
        SELF,
    ),
    "a-present-under-two-unknown-names": (
        lambda: bad.unnamed(
            changed(bad.with_output(value("again", CACHE), node("Identity", ["present.1.key"], ["again"])))
        ),
        {"axis-name-collision"},
        SELF,
    ),
    "presents-first-without-names": (lambda: bad.unnamed(edited("bad-present-first-healthy")), set(), SELF),
    "nodes-in-reverse": ([bad.reversed_nodes], {"graph-unsorted"}, SELF),
    "outputs-without-type": ([bad.without_type("output")], set(), SELF),
    "outputs-without-shape": ([bad.without_shape("output")], set(), SELF),
    "an-output-that-is-an-input": (
        [lambda graph: graph.output.append(value("input_ids", TOKENS, TensorProto.INT64))],
        set(),
        SELF,
    ),
    "a-present-declared-twice": ([bad.twice("output", "present.1.key")], set(), SELF),
    "an-output-that-is-a-sequence": (
        [
            bad.with_output(
                helper.make_value_info("listed", bad.as_sequence(value("", CACHE).type)),
                node("SequenceConstruct", ["present.1.key"], ["listed"]),
            )
        ],
        {"axis-name-collision"},  # its tensors are declared with the past's length, and have the total
        SELF,
    ),
    "functions-40-deep": (lambda: bad.chained(40), set(), SELF),
    "functions-of-1024-nodes": (lambda: bad.chained(10, calls=2), set(), SELF),
    "ifs-20-deep": (lambda: nested(20), set(), SELF),
    "batch-negative": ([bad.sized(0, -1)], set(), SELF),
    "past-negative": ([bad.sized(2, -1)], set(), SELF),
    "ids-negative": ([bad.sized(1, -5, "input_ids")], set(), SELF),
    "logits-huge": ([bad.sized(2, HUGE, "logits")], set(), SELF),
    "sparse-weights": ([bad.sparse("w_positions")], set(), SELF),
    "a-sparse-table-of-words": (lambda: bad.unnamed(changed(bad.sparse("w_tokens"))), set(), SELF),
    "a-sparse-initializer-that-nothing-uses": ([bad.sparse("past_key_values.7.key")], set(), SELF),
    "an-axis-name-of-a-megabyte": ([bad.named_axes("x" * 2**20)], {"axis-name-collision"}, SELF),
    "60-layers": (lambda: bad.many_layers(60), set(), SELF),
}

UNREADABLE: dict[str, tuple[Build, str]] = {
    "no-ports": ([bad.emptied("input", "output")], "no decoder"),
    "nothing-at-all": ([bad.emptied("input", "output", "node", "initializer")], "no decoder"),
    "ifs-500-deep": (lambda: nested(500), "nested deeper"),
}


def built(build: Build, folder: Path) -> Path:
    return saved(build() if callable(build) else changed(*build), folder)


def contracts(folder: Path) -> tuple[Result, dict[str, Any]]:
    """The contract of each stack, as `contract` gives it, which must also have words for it."""
    result = call("contract", folder, "--format", "json", seconds=SECONDS)
    words = call("contract", folder, seconds=SECONDS)
    assert words.code == result.code
    assert len(words.out) < 200_000
    document = json.loads(result.out)
    assert document["schema"] == "kvdoctor/contract/1"
    return result, document["stacks"]


def only_contract(folder: Path) -> dict[str, Any]:
    result, stacks = contracts(folder)
    assert result.code == 0
    (contract,) = stacks.values()
    return contract


def not_crashed(result: Result) -> Result:
    for entry in result.report["not_checked"]:
        assert "crashed" not in entry["reason"]
    return result


@pytest.mark.parametrize("what", sampled(INCOMPLETE, 12))
def test_what_cannot_be_driven_says_why(what: str, tmp_path: Path) -> None:
    build, subject, reason = INCOMPLETE[what]
    folder = built(build, tmp_path / "model")
    missing = only_contract(folder)["missing"]
    assert any(lack["subject"] == subject and reason in lack["reason"] for lack in missing), missing[:5]
    for command in ("inspect", "step-test"):
        result = not_crashed(as_json(command, folder, seconds=SECONDS))
        found = {"contract-unknown", "invalid-graph", "present-without-past"} & set(result.findings)
        errors = any(finding["severity"] == "error" for finding in result.report["findings"])
        assert (result.code, result.report["verdict"]) == ((1, "unhealthy") if errors else (3, "incomplete"))
        assert found or "KV101" in {entry["code"] for entry in result.report["not_checked"]}
        (stack,) = result.report["stacks"]
        assert stack["contract"]["missing"] == missing
        assert not result.report.get("runs")


@pytest.mark.parametrize("what", sampled(FAULTY, 10))
def test_what_can_be_read_and_is_wrong(what: str, tmp_path: Path) -> None:
    build, declared, shown = FAULTY[what]
    folder = built(build, tmp_path / "model")
    assert only_contract(folder)["slots"]
    for command, names in (("inspect", declared), ("step-test", shown)):
        result = not_crashed(as_json(command, folder, seconds=SECONDS))
        assert (result.code, result.report["verdict"]) == (1, "unhealthy")
        assert names <= set(result.findings)


@pytest.mark.parametrize("what", sampled(HEALTHY, 15))
def test_what_only_looks_bad(what: str, tmp_path: Path) -> None:
    build, noted, kinds = HEALTHY[what]
    folder = built(build, tmp_path / "model")
    contract = only_contract(folder)
    assert contract["missing"] == []
    assert {slot["kind"] for slot in contract["slots"]} == kinds
    assert all(slot["present"] is not None for slot in contract["slots"])
    for command, verdict in (("inspect", "nothing-found"), ("step-test", "healthy")):
        result = not_crashed(as_json(command, folder, seconds=SECONDS))
        assert (result.code, result.report["verdict"]) == (0, verdict), result.report["findings"]
        # How long a step takes is the machine's affair, and a note in any case.
        assert set(result.findings) - {"cache-not-faster"} == noted


CUT_SHORT = {
    "a-head-of-one-input": (bad.cut_short("MatMul", inputs=1),),
    "a-join-without-outputs": (bad.kept_inside, bad.cut_short("Concat", outputs=0)),
    "an-attention-without-inputs": (bad.cut_short("Softmax", inputs=0),),
    "a-lookup-without-inputs": (bad.cut_short("Gather", inputs=0),),
}


@pytest.mark.parametrize("what", CUT_SHORT)
def test_a_node_that_is_cut_short_is_invalid(what: str, tmp_path: Path) -> None:
    report = inspect(str(saved(changed(*CUT_SHORT[what]), tmp_path / "model")))
    assert "invalid-graph" in {finding.name for finding in report.findings}
    assert not [entry for entry in report.not_checked if "crashed" in entry.reason]


@pytest.mark.parametrize("what", sampled(UNREADABLE, 10))
def test_what_is_no_decoder(what: str, tmp_path: Path) -> None:
    build, word = UNREADABLE[what]
    folder = built(build, tmp_path / "model")
    result, stacks = contracts(folder)
    assert (result.code, stacks) == (3, {})
    assert word in result.err
    for command in ("inspect", "step-test"):
        result = as_json(command, folder, seconds=SECONDS)
        assert (result.code, result.report["verdict"]) == (3, "incomplete")
        assert word in result.out


@pytest.mark.parametrize("kept", ["key", "value"])
def test_one_slot_for_keys_and_values(kept: str, tmp_path: Path) -> None:
    """The attention takes one cache for both: whoever calls it a key may be right."""
    other = "value" if kept == "key" else "key"
    folder = saved(bad.one_for_both(kept, other), tmp_path / "model")
    slots = {slot["past"]: slot for slot in only_contract(folder)["slots"]}
    assert slots[f"past_key_values.1.{kept}"]["used_as"] == "key-value"
    result = as_json("step-test", folder, seconds=SECONDS)
    assert (result.code, result.report["verdict"]) == (0, "healthy")


@pytest.mark.slow
def test_1500_layers_are_read(tmp_path: Path) -> None:
    folder = saved(bad.many_layers(1500), tmp_path / "model")
    contract = only_contract(folder)
    assert len(contract["slots"]) == 3000
    assert as_json("inspect", folder, seconds=SECONDS).report["verdict"] == "nothing-found"


@pytest.mark.parametrize("name", sampled(TEXTS, 4))
def test_the_command_line_says_what_the_fixtures_expect(name: str, tmp_path: Path) -> None:
    """The fixtures state the findings, which test_text_fixtures.py demands; here they are asked for from outside."""
    fixture = TEXTS[name]
    folder = fixture.write(tmp_path / "model")
    inspected = not_crashed(as_json("inspect", folder, seconds=SECONDS))
    tested = not_crashed(as_json("step-test", folder, seconds=SECONDS))
    missing = only_contract(folder)["missing"]
    assert set(inspected.findings) == {expected.name for expected in fixture.expect_inspect}
    assert set(tested.findings) == {expected.name for expected in fixture.expect}
    assert bool(missing) == bool({"contract-unknown", "invalid-graph"} & set(tested.findings))
    errors = any(expected.severity == "error" for expected in fixture.expect)
    assert tested.code == int(errors)
    assert (tested.report["verdict"] == "healthy") == (not errors)


def test_a_cache_of_batch_times_heads_says_where_their_number_belongs(tmp_path: Path) -> None:
    """Where neither a config nor the graph gives it: no number of heads agrees with this faulty shape."""
    healthy = load_all()["layout-bloom-transposed-healthy"]
    text = healthy.files["model.onnx"].replace("int64[1] heads = {2}", "int64[1] heads = {3}")
    folder = replace(healthy, files={**healthy.files, "model.onnx": text}).write(tmp_path)
    assert not [entry for entry in inspect(str(folder)).not_checked if entry.code == "KV101"]
    (tmp_path / "config.json").unlink()
    (found,) = (entry for entry in inspect(str(folder)).not_checked if entry.code == "KV101")
    assert found.essential
    assert "add num_attention_heads to config.json" in found.reason
